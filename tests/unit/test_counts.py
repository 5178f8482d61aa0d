"""Where `rooms dev` lets its processes count."""

from pathlib import Path

import pytest

from rooms.cli.counts import clear, counts_folder, lay_out
from rooms.cli.errors import CliError


def test_it_is_in_memory_under_a_name_of_the_data_folders_own(tmp_path: Path) -> None:
    folder = counts_folder(tmp_path / "one", tmp_path)
    assert folder.parent == tmp_path
    assert folder == counts_folder(tmp_path / "one", tmp_path)
    assert folder != counts_folder(tmp_path / "two", tmp_path)


def test_without_such_a_place_it_is_in_the_data_folder(tmp_path: Path) -> None:
    assert counts_folder(tmp_path, tmp_path / "none") == tmp_path / "run" / "metrics"


def test_it_is_made_anew_for_us_alone_and_removed(tmp_path: Path) -> None:
    folder = counts_folder(tmp_path)
    try:
        for _ in range(2):
            lay_out(folder)
            assert list(folder.iterdir()) == []
            assert folder.stat().st_mode & 0o777 == 0o700
            (folder / "counter_1.db").write_bytes(b"x")
    finally:
        clear(folder)
    assert not folder.exists()
    clear(folder)


def test_what_somebody_else_put_there_is_not_used(tmp_path: Path) -> None:
    folder = counts_folder(tmp_path, tmp_path)
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CliError, match="is not ours"):
        lay_out(folder)
