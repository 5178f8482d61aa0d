"""Identify processes, and end those of an earlier run.

The kernel reuses process ids. Together with its start time, an id names one process.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

_PROC = Path("/proc")
_LINUX = sys.platform == "linux"
_POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRef:
    """Identify one process: its id, an opaque token for its start time, and its command."""

    pid: int
    started: str
    argv: tuple[str, ...]

    def is_running(self) -> bool:
        """Return True if this process still runs, with the same command."""
        return start_token(self.pid) == self.started and _same_command(
            self.argv, command_line(self.pid)
        )


def start_token(pid: int) -> str | None:
    """Return a token for the start time of a process, or None if it ended or is a zombie."""
    if not _LINUX:
        return _ps(pid, "lstart=")
    try:
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    return None if fields[0] in "ZX" else f"{boot}:{fields[19]}"


def pid_exists(pid: int) -> bool:
    """Return True if a process has this id, even a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def command_line(pid: int) -> tuple[str, ...]:
    """Return the arguments of a process, or nothing if it ended. Split at spaces outside Linux."""
    if not _LINUX:
        return tuple((_ps(pid, "command=") or "").split())
    try:
        return tuple(
            (_PROC / str(pid) / "cmdline")
            .read_bytes()
            .decode(errors="replace")
            .rstrip("\0")
            .split("\0")
        )
    except OSError:
        return ()


def find_by_working_dir(folder: Path, program: str) -> Iterator[int]:
    """Yield processes of this program with this working folder (Linux; elsewhere none)."""
    if not _LINUX:
        return
    for entry in _PROC.iterdir():
        with suppress(OSError):
            if (
                entry.name.isdecimal()
                and (entry / "comm").read_text().strip() == program
                and (entry / "cwd").readlink() == folder
            ):
                yield int(entry.name)


def find_by_environment(variable: str, value: str) -> Iterator[int]:
    """Yield other processes started with this environment variable (Linux; elsewhere none)."""
    if not _LINUX:
        return
    wanted = f"{variable}={value}".encode()
    for entry in _PROC.iterdir():
        with suppress(OSError):
            if (
                entry.name.isdecimal()
                and int(entry.name) != os.getpid()
                and wanted in (entry / "environ").read_bytes().split(b"\0")
            ):
                yield int(entry.name)


def wait_gone(pid: int, timeout_s: float) -> bool:
    """Wait until the process has ended. Return False on timeout. It need not be a child."""
    deadline = time.monotonic() + timeout_s
    if _LINUX:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return True
        except OSError:
            pass
        else:
            try:
                return bool(select.select([descriptor], [], [], timeout_s)[0])
            finally:
                os.close(descriptor)
    while start_token(pid) is not None:
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def terminate(pid: int, *steps: tuple[signal.Signals, float]) -> bool:
    """Send each signal and wait its seconds. Return True as soon as the process has ended."""
    for number, grace_s in steps:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return True
        if wait_gone(pid, grace_s):
            return True
    return False


def write_pid_file(path: Path, pid: int, argv: Sequence[str]) -> None:
    """Record a process for the next run. Does nothing if it has ended already."""
    if (since := start_token(pid)) is not None:
        unfinished = path.with_suffix(".new")
        unfinished.write_text(
            json.dumps(asdict(ProcessRef(pid=pid, started=since, argv=tuple(argv))))
        )
        unfinished.replace(path)


def read_pid_file(path: Path) -> ProcessRef | None:
    """Return the recorded process, or None if there is no valid record."""
    try:
        found = json.loads(path.read_text())
        return ProcessRef(
            pid=int(found["pid"]), started=str(found["started"]), argv=tuple(found["argv"])
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _same_command(expected: Sequence[str], actual: Sequence[str]) -> bool:
    # An interpreter precedes its script, and the launcher precedes it for a moment.
    if not _LINUX:
        expected = " ".join(expected).split()
    tail = expected[1:] or expected
    return tuple(actual[-len(tail) :]) == tuple(tail)


def _ps(pid: int, column: str) -> str | None:
    answer = subprocess.run(
        ["ps", "-o", column, "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return answer.stdout.strip() or None
