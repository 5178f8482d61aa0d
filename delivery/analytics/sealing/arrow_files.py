"""Open the files below a path or a URI for sealing: s3, gs, abfs, hdfs."""

import posixpath
import secrets
from typing import Any, BinaryIO, Final, cast
from urllib.parse import unquote, urlsplit

import pyarrow as pa
from pyarrow import fs

from delivery.analytics.sealing.errors import SegmentsError
from delivery.analytics.sealing.files import EntryKind, FolderEntry, LocalFiles, hash_stream
from delivery.analytics.sealing.seal import WritableFiles
from rooms.backend_urls import scheme_of

_KINDS: Final = {
    fs.FileType.File: EntryKind.FILE,
    fs.FileType.Directory: EntryKind.FOLDER,
}


class ArrowFiles:
    """Access files below an address of an Arrow file system. These have no links."""

    def __init__(self, system: Any, root: str) -> None:
        self.root = root.rstrip("/")
        self._system = system

    def entries(self) -> list[FolderEntry]:
        """Return what is below the address; empty if there is nothing."""
        selector = fs.FileSelector(self.root, recursive=True, allow_not_found=True)
        found = [
            FolderEntry(
                path=one.path[len(self.root) :].lstrip("/"),
                kind=_KINDS.get(one.type, EntryKind.OTHER),
                size=one.size or 0,
                modified_ms=(one.mtime_ns or 0) // 1_000_000,
            )
            for one in self._system.get_file_info(selector)
        ]
        return sorted(found, key=lambda entry: entry.path)

    def read(self, path: str, limit: int) -> bytes:
        """Return up to `limit` bytes from the start of a file."""
        with self._system.open_input_file(self._at(path)) as file:
            return bytes(file.read(limit))

    def sha256(self, path: str) -> str:
        """Return the SHA-256 of a file as hexadecimal, in bounded memory."""
        with self._system.open_input_stream(self._at(path)) as file:
            return hash_stream(file)

    def open(self, path: str) -> BinaryIO:
        """Open a file for reading at any position."""
        return cast("BinaryIO", self._system.open_input_file(self._at(path)))

    def write(self, path: str, content: bytes) -> None:
        """Write a file that appears, or replaces an existing one, only when complete."""
        final = self._at(path)
        folder, name = posixpath.split(final)
        hidden = posixpath.join(folder, f"_{name}.{secrets.token_hex(4)}")
        with self._system.open_output_stream(hidden) as file:
            file.write(content)
        if self._system.get_file_info(final).type != fs.FileType.NotFound:
            self._system.delete_file(final)
        self._system.move(hidden, final)

    def _at(self, path: str) -> str:
        return posixpath.join(self.root, path)


def local_folder(url: str) -> str | None:
    """Return the folder of a local path or a file URI; None: it is elsewhere."""
    # A password in an address of another store may have brackets, which are not for urlsplit.
    if scheme_of(url) == "file":
        return unquote(urlsplit(url).path)
    return None if "://" in url else url


def open_files(url: str) -> WritableFiles:
    """Open an address. Raise SegmentsError if it cannot be opened, or is no folder."""
    folder = local_folder(url)
    if folder is not None:
        return LocalFiles(folder)
    try:
        system, root = fs.FileSystem.from_uri(url)
    except (pa.ArrowException, OSError, ValueError) as exc:
        raise SegmentsError(
            "the folder of segments cannot be opened",
            where=url.partition("://")[0],
            remedy=str(exc).splitlines()[0],
        ) from exc
    return ArrowFiles(system, root)
