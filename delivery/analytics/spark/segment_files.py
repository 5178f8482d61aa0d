"""Read the files of segments for their check: directly on this machine, else through Hadoop.

Hadoop's file systems are those that Spark reads the Parquet with, so both need one configuration.
Bytes stay in the JVM: it computes the checksums, and only manifests and the ends of files reach
Python.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, Final, cast

from py4j.protocol import Py4JError, Py4JJavaError

from delivery.analytics.sealing.files import Entry, EntryKind, LocalFiles, SegmentFiles
from delivery.analytics.sealing.layout import part_of
from delivery.analytics.spark.segments import HadoopFiles

_BUFFER: Final = 1 << 16


def open_segments(files: HadoopFiles) -> SegmentFiles:
    """Return the files below an address for their check."""
    folder = files.local_folder
    return HadoopSegments(files) if folder is None else LocalFiles(folder)


class HadoopSegments:
    """The files below an address of a Hadoop file system."""

    def __init__(self, files: HadoopFiles) -> None:
        self._files = files
        self.root = files.root

    def entries(self) -> list[Entry]:
        """Return what is below the address; empty if there is nothing."""
        with _as_os_errors():
            found = [
                Entry(
                    path=file.path[len(self.root) :].lstrip("/"),
                    kind=EntryKind.FILE,
                    size=file.size,
                    modified_ms=file.modified_ms,
                )
                for file in self._files.list_files()
            ]
        # Files are listed without their folders, one of which may have the name of a segment.
        folders = {entry.folder for entry in found if part_of(entry.folder) is not None}
        named = [Entry(path=path, kind=EntryKind.FOLDER, size=0, modified_ms=0) for path in folders]
        inside = [entry for entry in found if entry.folder not in folders]
        return sorted([*inside, *named], key=lambda entry: entry.path)

    def read(self, path: str, limit: int) -> bytes:
        """Return up to `limit` bytes from the start of a file."""
        with self.open(path) as file:
            return file.read(limit)

    def sha256(self, path: str) -> str:
        """Return the SHA-256 of a file as hexadecimal, in bounded memory."""
        with _as_os_errors():
            return self._files.sha256(path)

    def open(self, path: str) -> BinaryIO:
        """Open a file for reading at any position."""
        with _as_os_errors():
            raw = _HadoopStream(self._files, path)
        return cast("BinaryIO", io.BufferedReader(raw, _BUFFER))


class _HadoopStream(io.RawIOBase):
    """A file of Hadoop as a raw stream."""

    def __init__(self, files: HadoopFiles, path: str) -> None:
        self._file, self._size = files.open(path)
        self._copy = files.copy_bytes
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, into: Any) -> int:
        count = min(len(into), max(0, self._size - self._at))
        if count:
            with _as_os_errors():
                into[:count] = self._copy(self._file, self._at, count)
        self._at += count
        return count

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


@contextmanager
def _as_os_errors() -> Iterator[None]:
    """Raise the errors of the JVM as OSError, with their first line."""
    try:
        yield
    except Py4JJavaError as exc:
        raise OSError(str(exc.java_exception.toString()).splitlines()[0]) from exc
    except Py4JError as exc:
        raise OSError(str(exc).splitlines()[0]) from exc
