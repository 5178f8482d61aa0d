"""Whether another process of this machine is dead, which its kernel knows at once and a lease only in time."""

import os
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")
_DEAD: Final = {"Z", "X"}


def own_process() -> str | None:
    """This process, named so that no other one ever is: boot of the machine, process namespace, number and start. None
    where the system does not tell.
    """
    pid = os.getpid()
    place, found = _place(), _look(pid)
    return None if place is None or found is None else f"{place} {pid} {found[1]}"


def is_dead(process: str | None) -> bool:
    """Whether that process is certainly dead. False in doubt, and of every process that this one could not see."""
    if process is None or (own := own_process()) is None:
        return False
    place, pid, started = process.rsplit(" ", 2)
    if own.rsplit(" ", 2)[0] != place:
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # it is there, and another user's
    found = _look(int(pid))
    return found is not None and (found[0] in _DEAD or found[1] != started)


def _place() -> str | None:
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {(_PROC / 'self/ns/pid').stat().st_ino}"
    except OSError:
        return None


def _look(pid: int) -> tuple[str, str] | None:
    """Its state and its start, in ticks since the boot."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name in parentheses may hold anything; what follows it are the state and 18 fields up to the start.
    fields = text.rpartition(")")[2].split()
    return fields[0], fields[19]
