"""Lock a data folder for one supervisor, end what an earlier one left, and write private files."""

import fcntl
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rooms.local import process_table
from rooms.local.errors import DataInUseError

MARKER_VARIABLE = "ROOMS_SUPERVISED"
_KILL_GRACE_S = 5.0


@contextmanager
def lock_data_dir(data: Path) -> Iterator[Path]:
    """Lock the data folder, clear its `run` folder, and yield that.

    The kernel releases the lock when the process dies. Raises DataInUseError if another supervisor
    holds it.
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
        kill_leftovers(run, child_marker(data))
        yield run
    finally:
        os.close(descriptor)


def lock_owner(data: Path) -> int | None:
    """Return the id of the process that holds the data folder, or None."""
    try:
        descriptor = os.open(data / "run/supervisor.lock", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        content = os.read(descriptor, 32).strip()
        return int(content) if content.isdigit() else None
    finally:
        os.close(descriptor)
    return None


def child_marker(data: Path) -> str:
    """Return the value of MARKER_VARIABLE in the environment of this folder's children."""
    return str(data.resolve())


def kill_leftovers(run_dir: Path, marker: str) -> None:
    """Kill the children of an earlier supervisor that died, and remove its pid files."""
    left = set(process_table.find_by_environment(MARKER_VARIABLE, marker))
    for path in run_dir.glob("*.pid"):
        # `EmbeddedPostgres.prepare` ends PostgreSQL, by its own rules.
        if (
            path.stem != "postgres"
            and (seen := process_table.read_pid_file(path)) is not None
            and seen.is_running()
        ):
            left.add(seen.pid)
        path.unlink(missing_ok=True)
    for pid in left:
        process_table.terminate(pid, (signal.SIGKILL, _KILL_GRACE_S))


def write_private(path: Path, text: str) -> None:
    """Write a file of mode 600 atomically. Creates its folder with mode 700."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.new")
    unfinished.unlink(missing_ok=True)
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    unfinished.replace(path)
