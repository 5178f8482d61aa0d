"""Measure resource use of processes.

CPU seconds and memory of everything under one process, read from /proc (Linux only).
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_TICKS_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """Sum CPU time. `cpu_s`: user and system time of the process and of its ended children, so that a tree's sum is complete."""

    pid: int
    parent: int
    argv: tuple[str, ...]
    cpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """MiB of a group: resident, its fair share where pages are shared, and the highest of each process since the last reset."""

    rss: float
    pss: float
    peak: float


def _process(pid: int) -> Process:
    folder = _PROC / str(pid)
    fields = (folder / "stat").read_text().rpartition(")")[2].split()
    argv = (folder / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    return Process(
        pid=pid,
        parent=int(fields[1]),
        argv=tuple(argv),
        cpu_s=sum(map(int, fields[11:15])) / _TICKS_S,
    )


def _all() -> Iterator[Process]:
    for entry in _PROC.iterdir():
        if entry.name.isdecimal():
            with suppress(OSError, IndexError):
                yield _process(int(entry.name))


def under(root: int) -> list[Process]:
    """The process `root` and all that descend from it."""
    processes = {process.pid: process for process in _all()}

    def belongs(process: Process) -> bool:
        seen = 0
        while process.pid != root and process.parent in processes and seen < len(processes):
            process, seen = processes[process.parent], seen + 1
        return process.pid == root

    return [process for process in processes.values() if belongs(process)]


def grouped(root: int, name: Callable[[Process], str]) -> dict[str, list[Process]]:
    """Descendants of `root` under the name that `name` gives to the child of `root` they come from; `root` itself too."""
    tree = {process.pid: process for process in under(root)}
    groups: dict[str, list[Process]] = {}
    for process in tree.values():
        ancestor = process
        while root not in {ancestor.pid, ancestor.parent} and ancestor.parent in tree:
            ancestor = tree[ancestor.parent]
        groups.setdefault(name(ancestor), []).append(process)
    return groups


def cpu_s(pid: int) -> float:
    """User and system seconds of one process and of its children that ended."""
    return _process(pid).cpu_s


def busy_s() -> float:
    """Seconds that all cores together have worked since the machine started."""
    user, nice, system, _idle, _wait, irq, softirq = map(
        int, (_PROC / "stat").read_text().split()[1:8]
    )
    return (user + nice + system + irq + softirq) / _TICKS_S


def memory(processes: list[Process]) -> Memory:
    """The sums over these processes, those that ended meanwhile left out."""
    rss = pss = peak = 0
    for process in processes:
        with suppress(OSError):
            rolled = _kib(_PROC / str(process.pid) / "smaps_rollup")
            rss, pss = rss + rolled["Rss"], pss + rolled["Pss"]
            peak += _kib(_PROC / str(process.pid) / "status")["VmHWM"]
    return Memory(rss=rss / 1024, pss=pss / 1024, peak=peak / 1024)


def reset_peaks(processes: list[Process]) -> None:
    """Let the peaks begin anew."""
    for process in processes:
        with suppress(OSError):
            (_PROC / str(process.pid) / "clear_refs").write_text("5")


def _kib(path: Path) -> Mapping[str, int]:
    found = {}
    for line in path.read_text().splitlines():
        key, _, rest = line.partition(":")
        if rest.endswith("kB"):
            found[key] = int(rest.split()[0])
    return found
