"""Damage sealed segments, and their manifests."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from delivery.analytics.sealing.manifest import SegmentManifest, WriterRange, parse_manifest
from tests.support.analysis_run import Analysed


def segments_of(analysed: Analysed) -> list[Path]:
    return sorted(analysed.segments.rglob("*.parquet"))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 8
    path.write_bytes(content)


def lie(path: Path, change: Callable[[SegmentManifest], SegmentManifest]) -> None:
    """Replace the manifest by one that is well-formed, and false."""
    at = path.with_name(f"_{path.name}.manifest")
    at.write_text(change(parse_manifest(at.read_text())).text())


def other_writers(one: SegmentManifest) -> SegmentManifest:
    first, last = (
        min(of.first for of in one.writers.values()),
        max(of.last for of in one.writers.values()),
    )
    return replace(one, writers={77: WriterRange(rows=one.rows, first=first, last=last)})
