"""Test that nothing but sound segments is read, and that everything else is named with its reason.

Oracle: a segment is sound only if its bytes are those that were sealed, under its own name; every
other file of the folder is in the result, with the reason that its row of the tables below names.
"""

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from errno import EACCES
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from delivery.analytics.sealing.check import CheckedSegments, KnownSegment
from delivery.analytics.sealing.errors import (
    ManifestError,
    SegmentsError,
    SetAside,
    SetAsideReason,
)
from delivery.analytics.sealing.manifest import SegmentManifest, parse_manifest
from tests.support.sealed_segments import write_sealed
from tests.unit.delivery.analytics.sealing.conftest import NOW_MS, Check

FLIPS = 300
SEEDS = (1, 2, 3)


def first(root: Path) -> Path:
    return min(root.rglob("a.parquet"))


def manifest_of(path: Path) -> Path:
    return path.with_name(f"_{path.name}.manifest")


def reseal(path: Path, change: Callable[[SegmentManifest], SegmentManifest]) -> None:
    """Write a manifest that is well-formed, and says something else."""
    at = manifest_of(path)
    at.write_text(change(parse_manifest(at.read_text())).text())


def only(found: CheckedSegments) -> SetAside:
    (one,) = found.set_aside
    return one


def known_of(found: CheckedSegments) -> dict[str, KnownSegment]:
    return {one.path: one.known for one in found.sound}


def test_sealed_segments_are_sound(check: Check) -> None:
    found = check()
    assert len(found.sound) == 3
    assert found.set_aside == ()
    assert all(one.manifest is not None for one in found.sound)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_flipped_bit_is_noticed(root: Path, check: Check, seed: int) -> None:
    """Without checksums 177 of 300 flips went unnoticed."""
    dice = random.Random(seed)
    at = first(root)
    whole = at.read_bytes()
    for _ in range(FLIPS // len(SEEDS)):
        place, bit = dice.randrange(len(whole)), dice.randrange(8)
        damaged = bytearray(whole)
        damaged[place] ^= 1 << bit
        at.write_bytes(damaged)
        one = only(check())
        assert one.reason is SetAsideReason.DAMAGED, (place, bit)
        assert one.part is not None


@pytest.mark.parametrize("seed", SEEDS)
def test_every_flipped_bit_of_a_manifest_is_noticed(root: Path, check: Check, seed: int) -> None:
    dice = random.Random(seed)
    at = manifest_of(first(root))
    whole = at.read_bytes()
    for _ in range(60):
        damaged = bytearray(whole)
        damaged[dice.randrange(len(whole))] ^= 1 << dice.randrange(8)
        at.write_bytes(damaged)
        try:
            same = json.loads(bytes(damaged)) == json.loads(whole)
        except ValueError:
            same = False
        # White space between values has no meaning.
        assert same or len(check().set_aside) == 1


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_truncated_file_is_set_aside(root: Path, check: Check, share: float) -> None:
    at = first(root)
    whole = at.read_bytes()
    at.write_bytes(whole[: int(len(whole) * share)])
    assert only(check()).reason is (SetAsideReason.DAMAGED if share else SetAsideReason.EMPTY)


def _unsealed(path: Path) -> None:
    manifest_of(path).unlink()


def _no_rows(path: Path) -> None:
    write_sealed_rows(path, pq.read_table(path).slice(0, 0))


def write_sealed_rows(path: Path, rows: pa.Table) -> None:
    """Write a file and a manifest that describes its bytes, whatever it contains."""
    pq.write_table(rows, path)
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    reseal(
        path,
        lambda one: replace(
            one,
            rows=rows.num_rows,
            writers=one.writers if rows.num_rows else {},
            size=len(content),
            sha256=digest,
            columns=tuple(rows.schema.names),
        ),
    )


def _lacks_a_column(path: Path) -> None:
    write_sealed_rows(path, pq.read_table(path).drop_columns(["delivery_hi"]))


def _has_another_type(path: Path) -> None:
    rows = pq.read_table(path)
    place = rows.schema.get_field_index("generation")
    text = rows.column("generation").cast(pa.string())
    write_sealed_rows(path, rows.set_column(place, "generation", text))


def _of_a_later_layout(path: Path) -> None:
    reseal(path, lambda one: replace(one, layout=99))


def _of_later_rows(path: Path) -> None:
    reseal(path, lambda one: replace(one, log_version=2))


def _of_a_later_kind(path: Path) -> None:
    reseal(path, lambda one: replace(one, kinds=(*one.kinds, "teleported")))


def _renamed(path: Path) -> None:
    path.rename(path.with_name("b.parquet"))
    manifest_of(path).rename(manifest_of(path.with_name("b.parquet")))


def _lies_about_rows(path: Path) -> None:
    def more(one: SegmentManifest) -> SegmentManifest:
        writer, of = next(iter(one.writers.items()))
        writers = {**one.writers, writer: replace(of, rows=of.rows + 1)}
        return replace(one, rows=one.rows + 1, writers=writers)

    reseal(path, more)


def _claims_much(path: Path) -> None:
    def more(one: SegmentManifest) -> SegmentManifest:
        writer, of = next(iter(one.writers.items()))
        return replace(one, rows=1 << 60, writers={writer: replace(of, rows=1 << 60)})

    reseal(path, more)


def _a_huge_manifest(path: Path) -> None:
    with manifest_of(path).open("r+b") as file:
        file.truncate(1 << 30)


def _a_deep_manifest(path: Path) -> None:
    manifest_of(path).write_text("[" * 100_000)


def _a_huge_footer(path: Path) -> None:
    """Claim two gigabytes of a sparse file, which would be read into memory."""
    manifest_of(path).unlink()
    with path.open("r+b") as file:
        file.truncate(4 << 30)
        file.seek((4 << 30) - 8)
        file.write((2_000_000_000).to_bytes(4, "little") + b"PAR1")


def _a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "x").write_text("y")


def _a_link(path: Path) -> None:
    moved = path.parent.parent.parent.parent / "elsewhere.parquet"
    path.rename(moved)
    path.symlink_to(moved)


def _a_long_value_in_its_manifest(path: Path) -> None:
    reseal(path, lambda one: replace(one, rows="9" * 100_000))  # type: ignore[arg-type]


def _a_long_kind(path: Path) -> None:
    reseal(path, lambda one: replace(one, kinds=("k" * 100_000,)))


def _a_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _a_fifo_for_a_manifest(path: Path) -> None:
    manifest_of(path).unlink()
    os.mkfifo(manifest_of(path))


def _no_parquet(path: Path) -> None:
    path.write_text("dear diary")
    manifest_of(path).unlink()


def _unreadable(path: Path) -> None:
    path.unlink()


def _moved_to_another_hour(path: Path) -> None:
    other = path.parent.parent / "hr=22"
    other.mkdir()
    for one in (path, manifest_of(path)):
        shutil.move(one, other / one.name)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_unsealed, SetAsideReason.UNSEALED),
        (_no_rows, SetAsideReason.EMPTY),
        (_lacks_a_column, SetAsideReason.FOREIGN),
        (_has_another_type, SetAsideReason.FOREIGN),
        (_of_a_later_layout, SetAsideReason.FUTURE),
        (_of_later_rows, SetAsideReason.FUTURE),
        (_of_a_later_kind, SetAsideReason.FUTURE),
        (_renamed, SetAsideReason.RENAMED),
        (_moved_to_another_hour, SetAsideReason.RENAMED),
        (_lies_about_rows, SetAsideReason.DAMAGED),
        (_claims_much, SetAsideReason.DAMAGED),
        (_a_huge_manifest, SetAsideReason.DAMAGED),
        (_a_deep_manifest, SetAsideReason.DAMAGED),
        (_a_long_value_in_its_manifest, SetAsideReason.DAMAGED),
        (_a_long_kind, SetAsideReason.FUTURE),
        (_a_fifo, SetAsideReason.FOREIGN),
        (_a_fifo_for_a_manifest, SetAsideReason.DAMAGED),
        (_a_huge_footer, SetAsideReason.DAMAGED),
        (_a_folder, SetAsideReason.FOREIGN),
        (_a_link, SetAsideReason.FOREIGN),
        (_no_parquet, SetAsideReason.DAMAGED),
        (_unreadable, SetAsideReason.GONE),
    ],
    ids=lambda one: one.__name__.strip("_") if callable(one) else str(one),
)
def test_what_is_no_sound_segment_is_named(
    root: Path, check: Check, damage: Callable[[Path], None], reason: SetAsideReason
) -> None:
    damage(first(root))
    found = check()
    assert only(found).reason is reason, found.set_aside
    assert only(found).has_rows
    assert len(only(found).detail) < 400
    assert len(found.sound) == 2


@pytest.mark.parametrize(
    ("name", "has_rows"),
    [
        ("notes.txt", False),
        ("a.parquet", True),
        ("dt=2026-02-30/hr=01/a.parquet", True),
        ("dt=2026-01-01/hr=24/a.parquet", True),
        ("dt=2026-01-01/a.parquet", True),
        ("dt=2026-01-01/hr=00/copy of a.parquet", True),
        ("dt=2026-01-01/hr=00/{a}.parquet", True),
        ("dt=2026-01-01/hr=00/a.parquet.bak", True),
    ],
)
def test_files_outside_the_layout_are_named(
    root: Path, check: Check, name: str, *, has_rows: bool
) -> None:
    at = root / name
    at.parent.mkdir(parents=True, exist_ok=True)
    at.write_bytes(b"hello" if name == "notes.txt" else first(root).read_bytes())
    one = only(check())
    assert (one.path, one.reason, one.part) == (name, SetAsideReason.FOREIGN, None)
    assert one.has_rows is has_rows


def test_a_fifo_outside_the_layout_is_named_and_not_read(root: Path, check: Check) -> None:
    os.mkfifo(root / "notes.txt")
    one = only(check())
    assert (one.path, one.reason, one.has_rows) == ("notes.txt", SetAsideReason.FOREIGN, False)


def test_a_deep_manifest_is_damaged_at_every_depth(root: Path) -> None:
    """Check the depths at which a document can be read, and neither written nor shown."""
    whole = json.loads(manifest_of(first(root)).read_text())
    text = json.dumps({**whole, "part": "DEEP"})
    for depth in range(800, 1_000):
        with pytest.raises(ManifestError):
            parse_manifest(text.replace('"DEEP"', "[" * depth + "]" * depth))


def test_a_folder_that_cannot_be_listed_is_named(
    root: Path, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(EACCES, "Permission denied", path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(SegmentsError, match=r"cannot be listed\n.*segments\n.*Permission denied"):
        check()


@pytest.mark.parametrize("name", ["_SUCCESS", ".a.parquet.crc", "dt=2026-01-01/_seal.lock"])
def test_hidden_files_are_no_segments(root: Path, check: Check, name: str) -> None:
    (root / name).write_text("x")
    assert check().set_aside == ()


def test_a_sealed_copy_is_sound_as_its_rows_are_dropped_later(
    root: Path, check: Check, hourly: dict[str, pa.Table]
) -> None:
    folder = first(root).parent.relative_to(root)
    write_sealed(hourly[str(folder)], root, f"{folder}/copy.parquet")
    assert len(check().sound) == 4


def test_a_loop_of_links_ends(root: Path, check: Check) -> None:
    (root / "dt=2026-01-01" / "hr=05").symlink_to(root)
    one = only(check())
    assert (one.path, one.reason) == ("dt=2026-01-01/hr=05", SetAsideReason.FOREIGN)


def test_a_folder_that_does_not_exist_is_empty(root: Path, check: Check) -> None:
    shutil.rmtree(root)
    assert check() == CheckedSegments(sound=(), set_aside=())


def test_what_was_analysed_and_is_gone_is_named(root: Path, check: Check) -> None:
    known = known_of(check())
    at = first(root)
    at.unlink()
    manifest_of(at).unlink()
    one = only(check(known))
    assert (one.path, one.reason) == (str(at.relative_to(root)), SetAsideReason.GONE)
    assert "analysed before" in one.detail


def test_a_known_file_is_read_again_when_it_changes_or_in_a_full_run(
    root: Path, check: Check
) -> None:
    known = known_of(check())
    at = first(root)
    about = at.stat()
    damaged = bytearray(at.read_bytes())
    damaged[50] ^= 1
    at.write_bytes(damaged)
    assert only(check(known)).reason is SetAsideReason.DAMAGED
    os.utime(at, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert check(known).set_aside == ()
    assert only(check(known, trust_known=False)).reason is SetAsideReason.DAMAGED


@pytest.mark.parametrize("change", [_unreadable, _unsealed, _no_rows])
def test_a_segment_that_is_being_written_is_not_named_yet(
    root: Path, check: Check, change: Callable[[Path], None]
) -> None:
    """The export has not committed it, so its rows come again; an old rest excuses nothing."""
    at = first(root)
    change(at)
    rest = at.with_name(f"_{at.name}.0123abcd")
    rest.write_bytes(b"PAR1")
    found = check(now_ms=rest.stat().st_mtime_ns // 1_000_000)
    assert (len(found.sound), found.set_aside) == (2, ())
    assert len(check(now_ms=NOW_MS).set_aside) == 1
