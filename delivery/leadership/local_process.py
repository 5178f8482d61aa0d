"""Detect dead processes of this machine by the kernel, sooner than their leases end."""

import os
from functools import cache
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")
_DEAD_STATES: Final = {"Z", "X"}
_PARTS: Final = 3


def own_process() -> str | None:
    """Return a name of this process that is never reused: boot, process namespace, pid and start.

    None where `/proc` does not have these.
    """
    pid = os.getpid()
    namespace, stat = _process_namespace(), _process_stat(pid)
    return None if namespace is None or stat is None else f"{namespace} {pid} {stat[1]}"


def is_dead(process: str | None) -> bool:
    """Return whether a process is certainly dead; False for one that this process cannot see.

    False also for a name in another form, as another version may write it.
    """
    if process is None or (own := own_process()) is None:
        return False
    parts = process.rsplit(" ", 2)
    if len(parts) < _PARTS or parts[0] != own.rsplit(" ", 2)[0] or not parts[1].isdecimal():
        return False
    _, pid, started = parts
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # it exists, under another user
    stat = _process_stat(int(pid))
    return stat is not None and (stat[0] in _DEAD_STATES or stat[1] != started)


@cache
def _process_namespace() -> str | None:
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {(_PROC / 'self/ns/pid').stat().st_ino}"
    except OSError:
        return None


def _process_stat(pid: int) -> tuple[str, str] | None:
    """Return a process's state and start, in ticks since the boot."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name in parentheses may contain anything; after it are the state and 18 fields up to the
    # start.
    fields = text.rpartition(")")[2].split()
    return fields[0], fields[19]
