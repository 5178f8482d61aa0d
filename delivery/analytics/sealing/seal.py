"""Seal segments that come from elsewhere: read them whole, and write their manifests."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from delivery.analytics.sealing.check import (
    check_entry,
    check_manifest,
    list_entries,
    read_manifest,
    refusal,
    verify_bytes,
)
from delivery.analytics.sealing.contents import read_contents
from delivery.analytics.sealing.errors import ContentError, SegmentsError, SetAside, SetAsideReason
from delivery.analytics.sealing.files import FolderEntry, SegmentFiles
from delivery.analytics.sealing.layout import SEGMENT_VERSION, part_of
from delivery.analytics.sealing.manifest import SegmentManifest, described_segment, manifest_name

OnSealed = Callable[[int], None]
"""Called with the number of segments looked at so far."""


class WritableFiles(SegmentFiles, Protocol):
    """Write whole files below one address."""

    def write(self, path: str, content: bytes) -> None:
        """Write a file that appears, or replaces an existing one, only when complete."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SealReport:
    """Hold segments sealed now and before, their rows, and those that cannot be sealed."""

    sealed: int
    rows: int
    already: int
    refused: tuple[SetAside, ...]


def seal_segments(files: WritableFiles, on_progress: OnSealed = lambda _: None) -> SealReport:
    """Write a manifest for every segment without one. Others are verified, and never rewritten.

    A manifest states what the file contains now: damage before is noticed only where it makes
    the file unreadable, or where pages have checksums.
    """
    entries = list_entries(files)
    manifests = {
        f"{entry.folder}/{segment}": entry
        for entry in entries
        if (segment := described_segment(entry.name)) is not None
    }
    sealed = rows = already = 0
    refused: list[SetAside] = []
    segments = [
        (entry, place)
        for entry in entries
        if not entry.name.startswith(("_", ".")) and (place := part_of(entry.path)) is not None
    ]
    for number, (entry, (part, name)) in enumerate(segments, 1):
        made = None
        try:
            check_entry(entry)
            if entry.path in manifests:
                found = read_manifest(files, manifests[entry.path])
                check_manifest(found, part=part, name=name)
                verify_bytes(files, entry, found)
                already += 1
            else:
                made = describe(files, entry, part=part, name=name)
        except (ContentError, OSError) as exc:
            refused.append(refusal(entry, part, exc))
        if made is not None:
            _write(files, f"{entry.folder}/{manifest_name(name)}", made)
            sealed, rows = sealed + 1, rows + made.rows
        on_progress(number)
    return SealReport(sealed=sealed, rows=rows, already=already, refused=tuple(refused))


def _write(files: WritableFiles, path: str, manifest: SegmentManifest) -> None:
    try:
        files.write(path, manifest.text().encode())
    except OSError as exc:
        raise SegmentsError(
            "a manifest cannot be written", where=f"{files.root}/{path}", remedy=str(exc)
        ) from exc


def describe(files: SegmentFiles, entry: FolderEntry, *, part: int, name: str) -> SegmentManifest:
    """Read a whole segment, and return its manifest. Raise ContentError if it is none."""
    before = files.sha256(entry.path)
    with files.open(entry.path) as file:
        footer, found = read_contents(file, part=part)
    if files.sha256(entry.path) != before:
        raise ContentError(SetAsideReason.DAMAGED, "it changed while it was read")
    return SegmentManifest(
        segment=name,
        part=part,
        rows=found.rows,
        size=entry.size,
        sha256=before,
        layout=SEGMENT_VERSION,
        log_version=found.log_version,
        kinds=tuple(sorted(found.kinds)),
        columns=footer.columns,
        writers=found.writers,
    )
