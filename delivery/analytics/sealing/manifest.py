"""Describe a segment by a manifest: what it contains, and the checksum of its bytes."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from delivery.analytics.sealing.errors import ManifestError
from rooms.safe_text import brief_repr

MAX_BYTES: Final = 4 << 20
"""Size from which a file is not read as a manifest."""
MANIFEST_VERSION: Final = 1
_NAME: Final = re.compile(r"_(.+\.parquet)\.manifest")
_PARTIAL: Final = re.compile(r"_(.+\.parquet)\.[0-9a-f]{8}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_MAX_NUMBER: Final = 1 << 62


def manifest_name(segment: str) -> str:
    """Return the name of a segment's manifest. Readers of Parquet folders skip such names."""
    return f"_{segment}.manifest"


def described_segment(name: str) -> str | None:
    """Return the segment that a manifest of this name describes; None: it is no manifest."""
    match = _NAME.fullmatch(name)
    return None if match is None else match.group(1)


def unfinished_segment(name: str) -> str | None:
    """Return the segment that an unfinished file of this name becomes; None: it is none."""
    match = _PARTIAL.fullmatch(name)
    return None if match is None else match.group(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterRange:
    """Hold the rows of one log writer: their number, and the first and last of their numbers."""

    rows: int
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentManifest:
    """Describe what a segment contains. `part`: its hour since 1970; `size`: bytes.

    `layout` is the version of the columns, `log_version` the highest `schema_version` of a row.
    """

    segment: str
    part: int
    rows: int
    size: int
    sha256: str
    layout: int
    log_version: int
    kinds: tuple[str, ...]
    columns: tuple[str, ...]
    writers: Mapping[int, WriterRange]

    def text(self) -> str:
        """Return the manifest as JSON, with a checksum of its own."""
        document = {
            "manifest": MANIFEST_VERSION,
            "segment": self.segment,
            "part": self.part,
            "rows": self.rows,
            "size": self.size,
            "sha256": self.sha256,
            "layout": self.layout,
            "log_version": self.log_version,
            "kinds": list(self.kinds),
            "columns": list(self.columns),
            "writers": {
                str(writer): [one.rows, one.first, one.last]
                for writer, one in sorted(self.writers.items())
            },
        }
        return json.dumps({**document, "checksum": _checksum(document)}, indent=1) + "\n"


def parse_manifest(text: str) -> SegmentManifest:
    """Read a manifest. Raise ManifestError if it is damaged, or of a later version."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise ManifestError("its manifest is not JSON") from exc
    if not isinstance(document, dict):
        raise ManifestError("its manifest is not an object")
    checksum = document.pop("checksum", None)
    try:
        expected = _checksum(document)
    except RecursionError as exc:
        raise ManifestError("its manifest is nested too deeply") from exc
    if checksum != expected:
        raise ManifestError("its manifest does not match its own checksum")
    version = document.get("manifest")
    if isinstance(version, int) and version > MANIFEST_VERSION:
        raise ManifestError(
            f"its manifest has version {version}, and {MANIFEST_VERSION} is known", is_later=True
        )
    try:
        return _from_document(document)
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise ManifestError(f"its manifest is incomplete: {exc}") from exc


def _from_document(document: Mapping[str, Any]) -> SegmentManifest:
    found = SegmentManifest(
        segment=_text(document["segment"]),
        part=_number(document["part"]),
        rows=_number(document["rows"]),
        size=_number(document["size"]),
        sha256=_text(document["sha256"]),
        layout=_number(document["layout"]),
        log_version=_number(document["log_version"]),
        kinds=tuple(map(_text, document["kinds"])),
        columns=tuple(map(_text, document["columns"])),
        writers={int(writer): _range(one) for writer, one in document["writers"].items()},
    )
    if not _SHA256.fullmatch(found.sha256):
        raise ValueError("sha256")
    if sum(one.rows for one in found.writers.values()) != found.rows:
        raise ValueError("rows")
    return found


def _range(found: Any) -> WriterRange:
    rows, first, last = map(_number, found)
    if first > last or not rows:
        raise ValueError("writers")
    return WriterRange(rows=rows, first=first, last=last)


def _number(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MAX_NUMBER:
        raise ValueError(f"{brief_repr(value)} is not a count")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{brief_repr(value)} is not a text")
    return value


def _checksum(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
