"""Test that manifests are made for segments from elsewhere, and never for what is no segment."""

import hashlib
import os
from errno import EACCES, ENOSPC
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from delivery.analytics.sealing.arrow_files import ArrowFiles, open_files
from delivery.analytics.sealing.errors import BusyError, SegmentsError, SetAsideReason
from delivery.analytics.sealing.files import LocalFiles
from delivery.analytics.sealing.lock import exclusive
from delivery.analytics.sealing.manifest import parse_manifest
from delivery.analytics.sealing.seal import WritableFiles, seal_segments
from tests.unit.delivery.analytics.sealing.conftest import Check


@pytest.fixture(params=["local", "arrow"])
def files(request: pytest.FixtureRequest, root: Path) -> WritableFiles:
    if request.param == "local":
        return LocalFiles(str(root))
    return ArrowFiles(pa.fs.LocalFileSystem(), str(root))


def unseal(root: Path) -> None:
    for at in root.rglob("*.manifest"):
        at.unlink()


def test_seals_what_has_no_manifest(root: Path, files: WritableFiles, check: Check) -> None:
    unseal(root)
    assert {one.reason for one in check().set_aside} == {SetAsideReason.UNSEALED}
    report = seal_segments(files)
    assert (report.sealed, report.already, report.refused) == (3, 0, ())
    found = check()
    assert (len(found.sound), found.set_aside) == (3, ())
    assert report.rows == sum(one.manifest.rows for one in found.sound if one.manifest)
    again = seal_segments(files)
    assert (again.sealed, again.already) == (0, 3)
    assert not [one for one in root.rglob("_*") if not one.name.endswith(".manifest")]


def test_a_manifest_states_rows_writers_kinds_versions_and_checksum(root: Path) -> None:
    at = min(root.rglob("a.parquet"))
    found = parse_manifest(at.with_name("_a.parquet.manifest").read_text())
    rows = pq.read_table(at)
    assert (found.segment, found.rows, found.size) == (
        "a.parquet",
        rows.num_rows,
        at.stat().st_size,
    )
    assert found.sha256 == hashlib.sha256(at.read_bytes()).hexdigest()
    assert (found.layout, found.log_version) == (1, 1)
    assert set(found.kinds) == set(rows.column("kind").to_pylist())
    for writer, one in found.writers.items():
        seqs = rows.filter(pa.compute.field("writer_id") == writer).column("writer_seq")
        numbers = seqs.to_pylist()
        assert (one.rows, one.first, one.last) == (len(numbers), min(numbers), max(numbers))
    assert parse_manifest(found.text()) == found


def test_what_is_no_segment_is_refused_and_stays_unsealed(root: Path, files: WritableFiles) -> None:
    unseal(root)
    damaged, later, empty = sorted(root.rglob("a.parquet"))
    content = bytearray(damaged.read_bytes())
    content[200] ^= 4
    damaged.write_bytes(content)
    rows = pq.read_table(later)
    kinds = pa.array(["teleported"] * rows.num_rows)
    pq.write_table(rows.set_column(rows.schema.get_field_index("kind"), "kind", kinds), later)
    empty.write_bytes(b"")
    report = seal_segments(files)
    assert [one.reason for one in report.refused] == [
        SetAsideReason.DAMAGED,
        SetAsideReason.FUTURE,
        SetAsideReason.EMPTY,
    ]
    assert report.sealed == 0
    assert not list(root.rglob("*.manifest"))


def test_a_damaged_segment_is_not_sealed_again(root: Path, files: WritableFiles) -> None:
    """Its manifest stays, as a new one would declare the damage sound."""
    at = min(root.rglob("a.parquet"))
    content = bytearray(at.read_bytes())
    content[200] ^= 4
    at.write_bytes(content)
    (refused,) = seal_segments(files).refused
    assert refused.reason is SetAsideReason.DAMAGED


class RefusingFiles(LocalFiles):
    """Refuse to open segments, or to write manifests."""

    refused = "open"

    def open(self, path: str) -> BinaryIO:
        if self.refused == "open" and path.endswith(".parquet"):
            raise PermissionError(EACCES, "Permission denied", path)
        return super().open(path)

    def write(self, path: str, content: bytes) -> None:
        raise OSError(ENOSPC, "No space left on device", path)


def test_segments_that_cannot_be_read_are_refused_and_others_go_on(root: Path) -> None:
    unseal(root)
    report = seal_segments(RefusingFiles(str(root)))
    assert [one.reason for one in report.refused] == [SetAsideReason.DAMAGED] * 3
    assert all("cannot be read: [Errno 13]" in one.detail for one in report.refused)


def test_a_manifest_that_cannot_be_written_ends_the_run(root: Path) -> None:
    unseal(root)
    files = RefusingFiles(str(root))
    files.refused = "write"
    with pytest.raises(SegmentsError, match=r"cannot be written\n.*manifest\n.*No space left"):
        seal_segments(files)


@pytest.mark.parametrize("sealed", [False, True])
def test_a_fifo_is_not_sealed(root: Path, *, sealed: bool) -> None:
    if not sealed:
        unseal(root)
    at = min(root.rglob("a.parquet"))
    at.unlink()
    os.mkfifo(at)
    (refused,) = seal_segments(LocalFiles(str(root))).refused
    assert refused.reason is SetAsideReason.FOREIGN
    assert "FIFO" in refused.detail


def test_rows_of_another_hour_are_refused(root: Path, files: WritableFiles) -> None:
    unseal(root)
    at = min(root.rglob("a.parquet"))
    other = at.parent.parent / "hr=23"
    other.mkdir()
    at.rename(other / at.name)
    (refused,) = seal_segments(files).refused
    assert refused.reason is SetAsideReason.RENAMED


def test_two_seals_exclude_each_other(root: Path) -> None:
    with exclusive(str(root), "seal"):
        owner = r"process \d+ on .*, for \d+ s\n.*_seal.lock\n"
        with pytest.raises(BusyError, match=owner), exclusive(str(root), "seal"):
            pytest.fail("both have the lock")
        with exclusive(str(root), "analysis"):
            pass
    with exclusive(str(root), "seal"):
        pass


def test_an_unknown_scheme_is_an_error_of_three_lines() -> None:
    with pytest.raises(SegmentsError) as caught:
        open_files("gopher://here/segments")
    assert len(str(caught.value).splitlines()) == 3
