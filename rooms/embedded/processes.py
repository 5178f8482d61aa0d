"""Processes by number: who they are, whether they still live, and how to end those of an earlier run.

A number alone says little, since the kernel gives it out again: with the time of its start it names one process.
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
class Sighting:
    """One process as it was seen: its number, an opaque text for the moment of its start, and its command."""

    pid: int
    started: str
    argv: tuple[str, ...]

    def lives(self) -> bool:
        """Whether this very process is still there, with the same command."""
        return started(self.pid) == self.started and _same_command(self.argv, command(self.pid))


def started(pid: int) -> str | None:
    """An opaque text that no other process with this number will share; None when there is none, or only a zombie."""
    if not _LINUX:
        return _ps(pid, "lstart=")
    try:
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    return None if fields[0] in "ZX" else f"{boot}:{fields[19]}"


def taken(pid: int) -> bool:
    """Whether the number stands for anything, be it a zombie that nobody has waited for yet."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def command(pid: int) -> tuple[str, ...]:
    """The process's arguments; empty when it is gone. Outside Linux split at spaces, good enough to compare."""
    if not _LINUX:
        return tuple((_ps(pid, "command=") or "").split())
    try:
        return tuple((_PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0"))
    except OSError:
        return ()


def working_in(folder: Path, program: str) -> Iterator[int]:
    """Processes of the named program whose working folder is this one (Linux; elsewhere none)."""
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


def marked(variable: str, value: str) -> Iterator[int]:
    """Processes, other than this one, that were started with this environment variable (Linux; elsewhere none)."""
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
    """Wait until the process has ended; False when it outlived the time. Works for processes that are not our children."""
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
    while started(pid) is not None:
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def end(pid: int, *steps: tuple[signal.Signals, float]) -> bool:
    """Send each step's signal and give it that many seconds; True as soon as the process is gone."""
    for number, grace_s in steps:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return True
        if wait_gone(pid, grace_s):
            return True
    return False


def record(path: Path, pid: int, argv: Sequence[str]) -> None:
    """Leave word of a process of ours, for the run that comes after us. A process that is already gone leaves none."""
    if (since := started(pid)) is not None:
        unfinished = path.with_suffix(".new")
        unfinished.write_text(json.dumps(asdict(Sighting(pid=pid, started=since, argv=tuple(argv)))))
        unfinished.replace(path)


def recorded(path: Path) -> Sighting | None:
    """The process that was recorded there; None when there is no record, or none that can be read."""
    try:
        found = json.loads(path.read_text())
        return Sighting(pid=int(found["pid"]), started=str(found["started"]), argv=tuple(found["argv"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _same_command(expected: Sequence[str], actual: Sequence[str]) -> bool:
    # A script's interpreter stands in front of it, and so does our own launcher for a moment.
    if not _LINUX:
        expected = " ".join(expected).split()
    tail = expected[1:] or expected
    return tuple(actual[-len(tail) :]) == tuple(tail)


def _ps(pid: int, column: str) -> str | None:
    answer = subprocess.run(["ps", "-o", column, "-p", str(pid)], capture_output=True, text=True, check=False)
    return answer.stdout.strip() or None
