"""Have Linux write the pages by which PostgreSQL's tables grow before it has collected many.

Linux keeps what is written for 30 s, and then writes all of it at once. All commits wait for the
disk meanwhile, a tenth of a second after a burst. PostgreSQL has no setting for the pages by which
it extends its files; for others `backend_flush_after` does the same.
"""

import ctypes
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

_EVERY_S: Final = 0.5
_SCAN_EVERY_S: Final = 10.0
"""Reading the times of all files takes milliseconds, so others are read only so often."""
_SHARE: Final = 20
"""A pass that takes long is followed by a pause of so many times its duration."""
MAX_COLLECTED_BYTES: Final = 32 * 1024 * 1024
"""The machine may have collected so much before a pass begins: there is none on an idle one."""
_CLOCK_STEP_NS: Final = 100_000_000
"""Times of files are behind the clock by a few milliseconds."""
_SYNC_FILE_RANGE_WRITE: Final = 2  # linux/fs.h
_MEMINFO: Final = Path("/proc/meminfo")
_DIRTY: Final = re.compile(r"^Dirty:\s+(\d+) kB$", re.MULTILINE)


class EarlyWriteback:
    """Start the writes of files in a data folder of PostgreSQL. For one thread."""

    def __init__(
        self,
        folder: Path,
        start_write: Callable[[int], None],
        *,
        collected_bytes: Callable[[], int] | None = None,
    ) -> None:
        """Write the tables in `folder`/base.

        `start_write` starts the write of a descriptor's pages (OSError). `collected_bytes` returns
        what Linux has collected of all files; None: by its /proc/meminfo.
        """
        self._base = folder / "base"
        self._start_write = start_write
        self._collected_bytes = collected_bytes or _collected_bytes
        self._passed_ns = self._scanned_ns = time.time_ns() - _CLOCK_STEP_NS
        self._next_scan_s = 0.0
        self._changing: list[str] = []
        """The files that the last scan found to have changed since the one before it."""

    def run_once(self) -> int:
        """Start the writes of files that changed since the last pass; return how many.

        Only every few seconds does a pass find files that had not changed before.
        """
        if self._collected_bytes() < MAX_COLLECTED_BYTES:
            return 0
        since_ns, self._passed_ns = self._passed_ns, time.time_ns() - _CLOCK_STEP_NS
        if time.monotonic() >= self._next_scan_s:
            self._next_scan_s = time.monotonic() + _SCAN_EVERY_S
            since_ns, self._scanned_ns = self._scanned_ns, self._passed_ns
            self._changing = list(self._changed_files(since_ns))
        return sum([self._write_changed(path, since_ns) for path in self._changing])

    def _write_changed(self, path: str, since_ns: int) -> bool:
        # PostgreSQL may have deleted it.
        with suppress(OSError):
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                if os.fstat(file).st_mtime_ns >= since_ns:
                    self._start_write(file)
                    return True
            finally:
                os.close(file)
        return False

    def _changed_files(self, since_ns: int) -> Iterator[str]:
        with suppress(FileNotFoundError):
            for database in list(os.scandir(self._base)):
                yield from _files_since(database.path, since_ns)


def _files_since(folder: str, since_ns: int) -> list[str]:
    found = []
    with suppress(FileNotFoundError, NotADirectoryError):
        for entry in os.scandir(folder):
            with suppress(FileNotFoundError):
                if (
                    entry.is_file(follow_symlinks=False)
                    and entry.stat(follow_symlinks=False).st_mtime_ns >= since_ns
                ):
                    found.append(entry.path)
    return found


def _collected_bytes() -> int:
    found = _DIRTY.search(_MEMINFO.read_text())
    return int(found[1]) * 1024 if found else 0


def linux_start_write() -> Callable[[int], None] | None:
    """Return what starts the write of a descriptor's pages, without waiting for it; None: no Linux.

    Source: sync_file_range(2).
    """
    function = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
    if function is None or not _MEMINFO.exists():
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]

    def start_write(file: int) -> None:
        if function(file, 0, 0, _SYNC_FILE_RANGE_WRITE):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    return start_write


@contextmanager
def writing_early(folder: Path) -> Iterator[None]:
    """Write the tables in a data folder of PostgreSQL, in a thread of its own; on Linux only."""
    start_write = linux_start_write()
    if start_write is None:
        yield
        return
    writeback, over = EarlyWriteback(folder, start_write), threading.Event()

    def run() -> None:
        pause_s = _EVERY_S
        while not over.wait(pause_s):
            began_s = time.monotonic()
            # It is no more than a favour to the commits: without it all is as safe.
            with suppress(OSError):
                writeback.run_once()
            pause_s = max(_EVERY_S, _SHARE * (time.monotonic() - began_s))

    thread = threading.Thread(target=run, name="rooms early writeback", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
