"""Test `rooms segments seal`: what it writes, says and exits with."""

from pathlib import Path

import pyarrow as pa
import pytest

from delivery.analytics.sealing.lock import exclusive
from tests.support.cli_runner import Terminal
from tests.support.planted_outages import Town, plant
from tests.support.sealed_segments import hours, write_sealed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with two segments without manifests."""
    rows: dict[str, pa.Table] = hours(
        plant(Town(seed=4, minutes=110, rooms=1, per_room=1, a_minute=0.5)).rows
    )
    for name, some in rows.items():
        write_sealed(some, tmp_path / "elsewhere", f"{name}/a.parquet")
    for at in (tmp_path / "elsewhere").rglob("*.manifest"):
        at.unlink()
    return tmp_path / "elsewhere"


def test_seals_a_folder_once(terminal: Terminal, folder: Path) -> None:
    found = terminal.json("segments", "seal", str(folder))
    assert (found["sealed"], found["already"], found["refused"]) == (2, 0, [])
    assert found["rows"] > 0
    assert "0 segments sealed, with 0 rows; 2 were sealed before" in terminal.done(
        "segments", "seal", folder.as_uri()
    )


def test_the_default_is_the_folder_of_the_export(terminal: Terminal, folder: Path) -> None:
    at = terminal.data / "analysis" / "segments"
    at.parent.mkdir(parents=True)
    folder.rename(at)
    assert terminal.json("segments", "seal")["sealed"] == 2


def test_what_cannot_be_sealed_is_named_and_exits_with_3(terminal: Terminal, folder: Path) -> None:
    at = min(folder.rglob("*.parquet"))
    at.write_bytes(b"")
    result = terminal.run("segments", "seal", str(folder))
    assert result.exit_code == 3
    assert f"set aside: {at.relative_to(folder)}: empty: it has 0 bytes" in result.stderr
    assert not at.with_name("_a.parquet.manifest").exists()


def test_a_second_seal_names_the_first_in_three_lines(terminal: Terminal, folder: Path) -> None:
    with exclusive(str(folder), "seal"):
        result = terminal.run("segments", "seal", str(folder))
    assert result.exit_code == 1
    assert len(result.stderr.splitlines()) == 3
    assert "another process works here: process" in result.stderr


def test_a_folder_that_does_not_exist_is_named_and_not_made(
    terminal: Terminal, tmp_path: Path
) -> None:
    result = terminal.run("segments", "seal", str(tmp_path / "typo"))
    assert result.exit_code == 1
    assert f"there is no folder {tmp_path / 'typo'}" in result.stderr
    assert not (tmp_path / "typo").exists()
