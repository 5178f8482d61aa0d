"""The claim of one supervisor on a data folder, and the clearing of what an earlier one left there."""

import fcntl
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rooms.embedded import processes
from rooms.embedded.errors import DataInUseError

MARK = "ROOMS_SUPERVISED"
_KILL_GRACE_S = 5.0


@contextmanager
def claimed(data: Path) -> Iterator[Path]:
    """Hold the data folder, and give its `run` folder, cleared. The kernel lets go of it when we die.

    Raises DataInUseError when another supervisor holds it.
    """
    run = data / "run"
    run.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(run / "supervisor.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            holder = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
            raise DataInUseError(
                f"{data} is in use by another supervisor (process {holder}): stop that one, "
                "or set ROOMS_DATA to a folder of its own and ROOMS_LISTEN to another port"
            ) from exc
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        clear(run, mark(data))
        yield run
    finally:
        os.close(descriptor)


def holder(data: Path) -> int | None:
    """The process that holds the data folder; None when nobody does."""
    try:
        descriptor = os.open(data / "run/supervisor.lock", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        said = os.read(descriptor, 32).strip()
        return int(said) if said.isdigit() else None
    finally:
        os.close(descriptor)
    return None


def mark(data: Path) -> str:
    """What every child of this folder's supervisor carries in its environment, by the name MARK."""
    return str(data.resolve())


def clear(run: Path, marked: str) -> None:
    """End the children of an earlier supervisor that died without them, and remove its pid files."""
    left = set(processes.marked(MARK, marked))
    for path in run.glob("*.pid"):
        # PostgreSQL is ended by its own rules, when it is prepared.
        if path.stem != "postgres" and (seen := processes.recorded(path)) is not None and seen.lives():
            left.add(seen.pid)
        path.unlink(missing_ok=True)
    for pid in left:
        processes.end(pid, (signal.SIGKILL, _KILL_GRACE_S))
