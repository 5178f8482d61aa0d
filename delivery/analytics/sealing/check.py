"""Check segments before anything is read: against their manifests, and against what was known.

Checks, in order: name and folder, manifest, versions and kinds, size and SHA-256, schema and number
of rows. A file that was checked before and has the same size and time is not read again, except in
a full run. What fails is set aside with its reason.
"""

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from delivery.analytics.sealing import contents
from delivery.analytics.sealing.errors import (
    ContentError,
    ManifestError,
    SegmentsError,
    SetAside,
    SetAsideReason,
)
from delivery.analytics.sealing.files import EntryKind, FolderEntry, SegmentFiles
from delivery.analytics.sealing.layout import SEGMENT_VERSION, part_of
from delivery.analytics.sealing.manifest import (
    MAX_BYTES,
    SegmentManifest,
    described_segment,
    parse_manifest,
    unfinished_segment,
)

_THREADS: Final = 4
_UNFINISHED_MS: Final = 3_600_000
"""Age up to which an unfinished file shows that its segment is being written."""
_MAGIC: Final = b"PAR1"
_NO_FILE: Final = {
    EntryKind.FOLDER: "a folder",
    EntryKind.LINK: "a symbolic link",
    EntryKind.OTHER: "a FIFO, socket or device",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownSegment:
    """Hold a segment that was read by an earlier run: its size, time and SHA-256."""

    size: int
    modified_ms: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SoundSegment:
    """Hold a segment that may be read. `manifest` is None if it was checked by an earlier run."""

    path: str
    part: int
    size: int
    modified_ms: int
    sha256: str
    manifest: SegmentManifest | None

    @property
    def known(self) -> KnownSegment:
        """Return what a later run must know of it."""
        return KnownSegment(size=self.size, modified_ms=self.modified_ms, sha256=self.sha256)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedSegments:
    """Hold the result of a check, both sorted by path."""

    sound: tuple[SoundSegment, ...]
    set_aside: tuple[SetAside, ...]


def check_segments(
    files: SegmentFiles,
    known: Mapping[str, KnownSegment],
    *,
    now_ms: int,
    trust_known: bool,
) -> CheckedSegments:
    """Check everything below the address. `known`: segments of earlier runs, by path.

    With `trust_known`, known files with the same size and time are not read.
    """
    return _Check(files, known, now_ms=now_ms, trust_known=trust_known).run()


class _Check:
    def __init__(
        self,
        files: SegmentFiles,
        known: Mapping[str, KnownSegment],
        *,
        now_ms: int,
        trust_known: bool,
    ) -> None:
        self._files = files
        self._known = known
        self._trust_known = trust_known
        entries = list_entries(files)
        self._segments: list[FolderEntry] = []
        self._strangers: list[FolderEntry] = []
        self._manifests: dict[str, FolderEntry] = {}
        self._unfinished: set[str] = set()
        self._sort(entries, now_ms)

    def _sort(self, entries: Iterable[FolderEntry], now_ms: int) -> None:
        # A folder with the name of a segment is named once, with all that it contains.
        named: str | None = None
        for entry in entries:
            if named is not None and entry.path.startswith(named):
                continue
            if entry.kind is EntryKind.FOLDER and part_of(entry.path) is not None:
                named = f"{entry.path}/"
            if (segment := described_segment(entry.name)) is not None:
                self._manifests[_beside(entry, segment)] = entry
            elif (segment := unfinished_segment(entry.name)) is not None:
                if now_ms - entry.modified_ms < _UNFINISHED_MS:
                    self._unfinished.add(_beside(entry, segment))
            elif entry.name.startswith(("_", ".")):
                continue
            elif part_of(entry.path) is not None:
                self._segments.append(entry)
            elif entry.kind is not EntryKind.FOLDER:
                self._strangers.append(entry)

    def run(self) -> CheckedSegments:
        present = {entry.path for entry in self._segments}
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="segments") as pool:
            found = [one for one in pool.map(self._judge, self._segments) if one is not None]
            strangers = list(pool.map(self._stranger, self._strangers))
        absent = sorted((self._known.keys() | self._manifests.keys()) - present)
        gone = [one for one in map(self._absent, absent) if one is not None]
        aside = [one for one in found if isinstance(one, SetAside)]
        return CheckedSegments(
            sound=tuple(
                sorted(
                    (one for one in found if isinstance(one, SoundSegment)),
                    key=lambda one: one.path,
                )
            ),
            set_aside=tuple(sorted([*aside, *strangers, *gone], key=lambda one: one.path)),
        )

    def _judge(self, entry: FolderEntry) -> SoundSegment | SetAside | None:
        place = part_of(entry.path)
        assert place is not None, "only segments are judged"
        part, name = place
        try:
            return self._sound(entry, part, name)
        except ContentError as exc:
            if entry.path in self._unfinished:
                return None
            return refusal(entry, part, exc)
        except OSError as exc:
            return refusal(entry, part, exc)

    def _sound(self, entry: FolderEntry, part: int, name: str) -> SoundSegment:
        check_entry(entry)
        known = self._known.get(entry.path)
        if (
            self._trust_known
            and known is not None
            and (known.size, known.modified_ms) == (entry.size, entry.modified_ms)
        ):
            return _sound_segment(entry, part, known.sha256, None)
        manifest = self._manifest(entry)
        check_manifest(manifest, part=part, name=name)
        verify_bytes(self._files, entry, manifest)
        return _sound_segment(entry, part, manifest.sha256, manifest)

    def _manifest(self, entry: FolderEntry) -> SegmentManifest:
        at = self._manifests.get(entry.path)
        if at is None:
            # What is no segment cannot be sealed, which must be said first.
            with self._files.open(entry.path) as file:
                contents.read_footer(file)
            raise ContentError(SetAsideReason.UNSEALED, "it has no manifest")
        return read_manifest(self._files, at)

    def _stranger(self, entry: FolderEntry) -> SetAside:
        has_rows = entry.kind is EntryKind.LINK or entry.name.endswith(".parquet")
        if not has_rows and entry.kind is EntryKind.FILE:
            try:
                has_rows = self._files.read(entry.path, len(_MAGIC)) == _MAGIC
            except OSError:
                has_rows = True
        return SetAside(
            path=entry.path,
            reason=SetAsideReason.FOREIGN,
            detail="segments are dt=YYYY-MM-DD/hr=HH/NAME.parquet, and names have no spaces",
            part=None,
            has_rows=has_rows,
        )

    def _absent(self, path: str) -> SetAside | None:
        place = part_of(path)
        if place is None:
            return None
        if path not in self._known and path in self._unfinished:
            return None
        detail = "it was analysed before" if path in self._known else "only its manifest is left"
        return SetAside(path=path, reason=SetAsideReason.GONE, detail=detail, part=place[0])


def _beside(entry: FolderEntry, name: str) -> str:
    return f"{entry.folder}/{name}" if entry.folder else name


def _sound_segment(
    entry: FolderEntry, part: int, sha256: str, manifest: SegmentManifest | None
) -> SoundSegment:
    return SoundSegment(
        path=entry.path,
        part=part,
        size=entry.size,
        modified_ms=entry.modified_ms,
        sha256=sha256,
        manifest=manifest,
    )


def list_entries(files: SegmentFiles) -> list[FolderEntry]:
    """Return what is below the address. Raise SegmentsError if it cannot be listed."""
    try:
        return files.entries()
    except OSError as exc:
        raise SegmentsError(
            "the folder of segments cannot be listed", where=files.root, remedy=_first_line(exc)
        ) from exc


def check_entry(entry: FolderEntry) -> None:
    """Raise ContentError unless it is a regular file with content."""
    if entry.kind is not EntryKind.FILE:
        raise ContentError(SetAsideReason.FOREIGN, f"it is {_NO_FILE[entry.kind]}, not a file")
    if not entry.size:
        raise ContentError(SetAsideReason.EMPTY, "it has 0 bytes")


def refusal(entry: FolderEntry, part: int, exc: ContentError | OSError) -> SetAside:
    """Return the segment as set aside, because it is none or cannot be read."""
    if isinstance(exc, OSError):
        exc = ContentError(SetAsideReason.DAMAGED, f"it cannot be read: {_first_line(exc)}")
    return SetAside(path=entry.path, reason=SetAsideReason(exc.reason), detail=str(exc), part=part)


def _first_line(exc: OSError) -> str:
    return str(exc).partition("\n")[0]


def read_manifest(files: SegmentFiles, entry: FolderEntry) -> SegmentManifest:
    """Read a manifest. Raise ContentError if it is damaged, or of a later version."""
    if entry.kind is not EntryKind.FILE or entry.size > MAX_BYTES:
        raise ContentError(SetAsideReason.DAMAGED, "its manifest is no file of at most 4 MiB")
    try:
        return parse_manifest(files.read(entry.path, MAX_BYTES).decode())
    except UnicodeDecodeError as exc:
        raise ContentError(SetAsideReason.DAMAGED, "its manifest is no text") from exc
    except ManifestError as exc:
        reason = SetAsideReason.FUTURE if exc.is_later else SetAsideReason.DAMAGED
        raise ContentError(reason, str(exc)) from exc


def check_manifest(manifest: SegmentManifest, *, part: int, name: str) -> None:
    """Raise ContentError unless the manifest is of this segment, and of a known version."""
    if manifest.segment != name:
        raise ContentError(SetAsideReason.RENAMED, f"its manifest names {manifest.segment[:200]}")
    if manifest.part != part:
        raise ContentError(SetAsideReason.RENAMED, "its manifest names another hour")
    if not manifest.rows:
        raise ContentError(SetAsideReason.EMPTY, "it has no rows")
    if manifest.layout > SEGMENT_VERSION:
        raise ContentError(
            SetAsideReason.FUTURE,
            f"it has layout {manifest.layout}, and {SEGMENT_VERSION} is known",
        )
    contents.check_columns(manifest.columns)
    contents.check_versions(manifest.log_version, manifest.kinds)


def verify_bytes(files: SegmentFiles, entry: FolderEntry, manifest: SegmentManifest) -> None:
    """Raise ContentError unless the file has the bytes, columns and rows of its manifest."""
    if entry.size != manifest.size:
        raise ContentError(
            SetAsideReason.DAMAGED, f"it has {entry.size} bytes, and {manifest.size} were sealed"
        )
    if files.sha256(entry.path) != manifest.sha256:
        raise ContentError(SetAsideReason.DAMAGED, "its bytes are not those that were sealed")
    with files.open(entry.path) as file:
        footer = contents.read_footer(file)
    if footer.rows != manifest.rows or footer.columns != manifest.columns:
        raise ContentError(
            SetAsideReason.DAMAGED,
            f"it has {footer.rows} rows, and its manifest states {manifest.rows}",
        )
