"""Test the folder in which the processes of `rooms dev` count."""

import stat
from pathlib import Path

import pytest

from rooms.cli.dev import (
    children,
    ensure_metrics_dir,
    metrics_dir,
    remove_metrics_dir,
    reset_metrics_dir,
)
from rooms.cli.errors import CliError
from rooms.settings import read_settings


def test_folder_is_in_shared_memory_named_by_the_data_folder(tmp_path: Path) -> None:
    folder = metrics_dir(tmp_path / "one", tmp_path)
    assert folder.parent == tmp_path
    assert folder == metrics_dir(tmp_path / "one", tmp_path)
    assert folder != metrics_dir(tmp_path / "two", tmp_path)


def test_folder_is_in_the_data_folder_without_shared_memory(tmp_path: Path) -> None:
    assert metrics_dir(tmp_path, tmp_path / "none") == tmp_path / "run" / "metrics"


def test_folder_is_recreated_private_and_removed(tmp_path: Path) -> None:
    folder = metrics_dir(tmp_path)
    try:
        for _ in range(2):
            reset_metrics_dir(folder)
            assert list(folder.iterdir()) == []
            assert folder.stat().st_mode & 0o777 == 0o700
            (folder / "counter_1.db").write_bytes(b"x")
    finally:
        remove_metrics_dir(folder)
    assert not folder.exists()
    remove_metrics_dir(folder)


def test_foreign_folder_is_not_used(tmp_path: Path) -> None:
    folder = metrics_dir(tmp_path, tmp_path)
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CliError, match="exists and cannot be replaced"):
        reset_metrics_dir(folder)


def test_each_start_of_a_process_finds_the_folder_of_the_counters(tmp_path: Path) -> None:
    """Something may have emptied shared memory since the last start."""
    folder = tmp_path / "counters"
    for child in children(read_settings({}), lambda: ensure_metrics_dir(folder)):
        assert child.prepare is not None
        child.prepare()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        remove_metrics_dir(folder)
    folder.symlink_to(tmp_path)
    with pytest.raises(CliError, match="another user's"):
        ensure_metrics_dir(folder)
