"""Let one process at a time work in a local folder.

The lock is that of the kernel (flock), so it ends with the process that holds it, also if that was
killed. The file states the holder and stays. A network file system must support flock between its
clients. Object stores have no such lock: there the caller must start one run at a time.
"""

import fcntl
import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from delivery.analytics.sealing.errors import BusyError, SegmentsError

_MAX_OWNER_BYTES: Final = 4096
Now = Callable[[], datetime]


def _system_now() -> datetime:
    return datetime.now(UTC)


@contextmanager
def exclusive(folder: str | None, work: str, *, now: Now = _system_now) -> Iterator[None]:
    """Hold the lock of a local folder for this work; without a folder there is no lock.

    Raise BusyError if another process or thread has it, with its owner and age.
    """
    if folder is None:
        yield
        return
    path = Path(folder, f"_{work}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as exc:
        raise SegmentsError(
            f"the lock cannot be taken: {exc.strerror}",
            where=str(path),
            remedy="make the folder writable for this user",
        ) from exc
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            raise BusyError(
                f"another process works here: {_owner(descriptor, now())}",
                where=str(path),
                remedy="wait until it ends; the lock ends with the process",
            ) from exc
        _write_owner(descriptor, now())
        yield
    finally:
        os.close(descriptor)


def _write_owner(descriptor: int, now: datetime) -> None:
    owner = {"host": socket.gethostname(), "pid": os.getpid(), "since": now.isoformat()}
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(owner).encode(), 0)


def _owner(descriptor: int, now: datetime) -> str:
    """Return the holder for people; it may not have written its name yet."""
    try:
        owner = json.loads(os.pread(descriptor, _MAX_OWNER_BYTES, 0))
        age = now - datetime.fromisoformat(owner["since"])
        return f"process {owner['pid']} on {owner['host']}, for {age.total_seconds():.0f} s"
    except (ValueError, KeyError, TypeError):
        return "its owner is not written yet"
