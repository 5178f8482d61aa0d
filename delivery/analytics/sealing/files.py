"""List and read the files of segments below one address.

`LocalFiles` sees links and folders as what they are. `ArrowFiles` reads any Arrow file system; the
analysis has another implementation for those of Hadoop.
"""

import hashlib
import os
import posixpath
import secrets
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol

_CHUNK: Final = 1 << 20
_TRIES: Final = 3
"""Listings of a folder that changes during each."""


class EntryKind(StrEnum):
    """Name what is at a path."""

    FILE = "file"
    FOLDER = "folder"
    LINK = "link"
    OTHER = "other"
    """A FIFO, socket or device, which is never opened: it may block, or have no end."""


_KINDS: Final = {
    stat.S_IFREG: EntryKind.FILE,
    stat.S_IFDIR: EntryKind.FOLDER,
    stat.S_IFLNK: EntryKind.LINK,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderEntry:
    """Describe what is at a path below the address; size in bytes, time in ms since 1970."""

    path: str
    kind: EntryKind
    size: int
    modified_ms: int

    @property
    def folder(self) -> str:
        """Return the folder."""
        return posixpath.dirname(self.path)

    @property
    def name(self) -> str:
        """Return the name in its folder."""
        return posixpath.basename(self.path)


class SegmentFiles(Protocol):
    """Access files below one address. Paths are relative to it, with /. Errors are OSErrors."""

    @property
    def root(self) -> str:
        """Return the address."""
        ...

    def entries(self) -> list[FolderEntry]:
        """Return what is below the address, links not followed; empty if there is nothing."""
        ...

    def read(self, path: str, limit: int) -> bytes:
        """Return up to `limit` bytes from the start of a file."""
        ...

    def sha256(self, path: str) -> str:
        """Return the SHA-256 of a file as hexadecimal, in bounded memory."""
        ...

    def open(self, path: str) -> BinaryIO:
        """Open a file for reading at any position."""
        ...


class LocalFiles:
    """Access files below a folder of this machine."""

    def __init__(self, root: str) -> None:
        self.root = root

    def entries(self) -> list[FolderEntry]:
        """Return what is below the folder, links not followed; empty if there is nothing."""
        return sorted(self._walk(""), key=lambda entry: entry.path)

    def _walk(self, below: str) -> Iterator[FolderEntry]:
        for entry in self._list(below):
            yield entry
            if entry.kind is EntryKind.FOLDER:
                yield from self._walk(entry.path)

    def _list(self, below: str) -> list[FolderEntry]:
        """Return what is in a folder, without what vanishes meanwhile.

        The export renames a finished file, so the folder is listed again for its final name.
        """
        found: list[FolderEntry] = []
        for _ in range(_TRIES):
            try:
                listed = list(os.scandir(os.path.join(self.root, below)))  # noqa: PTH118 - many files
            except FileNotFoundError:
                return []
            found = [entry for one in listed if (entry := _entry(below, one)) is not None]
            if len(found) == len(listed):
                break
        return found

    def read(self, path: str, limit: int) -> bytes:
        """Return up to `limit` bytes from the start of a file."""
        with self.open(path) as file:
            return file.read(limit)

    def sha256(self, path: str) -> str:
        """Return the SHA-256 of a file as hexadecimal, in bounded memory."""
        with self.open(path) as file:
            return hash_stream(file)

    def open(self, path: str) -> BinaryIO:
        """Open a file for reading at any position."""
        return Path(self.root, path).open("rb")

    def write(self, path: str, content: bytes) -> None:
        """Write a file that appears, or replaces an existing one, only when complete."""
        replace_file(Path(self.root, path), content)


def _entry(below: str, one: os.DirEntry[str]) -> FolderEntry | None:
    """Describe what a listing names, not following links; None: it is gone."""
    try:
        about = one.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    kind = _KINDS.get(stat.S_IFMT(about.st_mode), EntryKind.OTHER)
    return FolderEntry(
        path=f"{below}/{one.name}" if below else one.name,
        kind=kind,
        size=about.st_size,
        modified_ms=about.st_mtime_ns // 1_000_000,
    )


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file that replaces an existing one when it is complete, also if this process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    hidden = path.with_name(f"_{path.name}.{secrets.token_hex(4)}")
    with hidden.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    hidden.replace(path)


def hash_stream(file: Any) -> str:
    """Return the SHA-256 of the rest of a stream, in bounded memory."""
    seen = hashlib.sha256()
    while chunk := file.read(_CHUNK):
        seen.update(chunk)
    return seen.hexdigest()
