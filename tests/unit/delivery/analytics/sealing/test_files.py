"""Test listing a folder of segments while the export writes into it."""

import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from delivery.analytics.sealing.files import LocalFiles
from tests.unit.delivery.analytics.sealing.conftest import NOW_MS, Check

Meanwhile = Callable[[Path], object]


def listed_before(patch: pytest.MonkeyPatch, folder: Path, meanwhile: Meanwhile) -> None:
    """Do something each time this folder has been listed and its files have not been looked at."""
    scandir = os.scandir

    def listing(path: str) -> Iterator[os.DirEntry[str]]:
        found = list(scandir(path))
        if Path(path) == folder:
            meanwhile(folder)
        return iter(found)

    patch.setattr(os, "scandir", listing)


def test_a_file_that_vanishes_while_it_is_listed_is_no_entry(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = [one.path for one in LocalFiles(str(root)).entries()]
    folder = min(root.rglob("a.parquet")).parent
    rest = folder / "_b.parquet.0123abcd"
    rest.write_bytes(b"PAR1")
    listed_before(monkeypatch, folder, lambda _folder: rest.unlink(missing_ok=True))
    assert [one.path for one in LocalFiles(str(root)).entries()] == whole


def test_a_folder_that_changes_on_and_on_ends_too(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = [one.path for one in LocalFiles(str(root)).entries()]
    folder = min(root.rglob("a.parquet")).parent
    rests = [folder / f"_b.parquet.{number:08x}" for number in range(100)]
    rests[0].write_bytes(b"PAR1")

    def replace(_folder: Path) -> None:
        for old, new in pairwise(rests):
            if old.exists():
                old.rename(new)
                return

    listed_before(monkeypatch, folder, replace)
    assert [one.path for one in LocalFiles(str(root)).entries()] == whole


def test_a_segment_that_gets_its_name_meanwhile_is_sound(
    root: Path, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its manifest is there before it, and is not taken for one whose segment is gone."""
    at = min(root.rglob("a.parquet"))
    rest = at.rename(at.with_name("_a.parquet.0123abcd"))
    listed_before(
        monkeypatch, at.parent, lambda _folder: rest.rename(at) if rest.exists() else None
    )
    found = check(now_ms=NOW_MS)
    assert (len(found.sound), found.set_aside) == (3, ())
