"""Profile Python functions by py-spy, and PostgreSQL by its statements and backends.

py-spy counts the thread that holds the interpreter lock. Backends are sampled every 20 ms. Profiling costs some of
the time that it measures.
"""

# ruff: noqa: T201 what a bench measures is printed

import re
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import psycopg

from tests.bench.service import Service

_RATE_PER_S: Final = 100
_EVERY_S: Final = 0.02
_TOP: Final = 18
_LEAST: Final = 20
_PYTHONS: Final = ("api", "worker", "upkeep")
_ACTIVITY: Final = """
    SELECT pid, coalesce(nullif(application_name, ''), backend_type), state = 'active',
        coalesce(wait_event_type || ':' || wait_event, 'on CPU'), query
    FROM pg_stat_activity WHERE pid <> pg_backend_pid()
"""
_COMMITS: Final = """
    SELECT sum(xact_commit), (SELECT wal_bytes FROM pg_stat_wal),
        (SELECT coalesce(sum(fsyncs), 0) FROM pg_stat_io WHERE object = 'wal') FROM pg_stat_database
"""
_LOOP: Final = "Runner.run (asyncio/runners.py)"
_LINE: Final = re.compile(r":\d+\)")


class Statements(threading.Thread):
    """Looks at pg_stat_activity until `stop`: which statements were seen at work, and on what they waited."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._end = threading.Event()
        self.looks = 0
        self.counts: tuple[int, ...] = ()
        self.seen: Counter[tuple[str, str]] = Counter()
        self.names: dict[int, str] = {}
        self.last: dict[int, Counter[str]] = {}

    def run(self) -> None:
        with psycopg.connect(self._url, autocommit=True, application_name="bench") as connection:
            before = connection.execute(_COMMITS).fetchone() or ()
            while not self._end.wait(_EVERY_S):
                self.looks += 1
                for pid, name, active, wait, query in connection.execute(_ACTIVITY, prepare=True):
                    self.names[pid] = name
                    reported = " ".join(str(query).split())
                    if active:
                        self.seen[reported, wait] += 1
                    if reported:
                        self.last.setdefault(pid, Counter())[reported] += 1
            after = connection.execute(_COMMITS).fetchone() or ()
            self.counts = tuple(
                int(late - early) for early, late in zip(before, after, strict=True)
            )

    def stop(self) -> None:
        self._end.set()
        self.join()


def _spies(
    service: Service, folder: Path
) -> dict[tuple[str, int], tuple[subprocess.Popen[bytes], Path]]:
    spy = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")
    if spy is None:
        print("py-spy is not installed: no functions, only processes and statements")
        return {}
    found = {}
    groups = service.groups()
    for part in _PYTHONS:
        for process in groups.get(part, ()):
            out = folder / f"{part}-{process.pid}.stacks"
            command = [
                spy,
                "record",
                "--format",
                "raw",
                "--rate",
                str(_RATE_PER_S),
                "--duration",
                "86400",
            ]
            command += ["--pid", str(process.pid), "--output", str(out), "--gil"]
            spying = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            found[part, process.pid] = (spying, out)
    return found


def _functions(name: str, stacks: Path, used_s: float) -> None:
    own: Counter[str] = Counter()
    within: Counter[str] = Counter()
    for line in stacks.read_text().splitlines():
        frames, _, samples = line.rpartition(" ")
        names = [_LINE.sub(")", frame) for frame in frames.split(";")]
        if _LOOP in names:
            # The frames above are the same in all stacks: from the command line to the loop.
            names = ["the event loop itself", *names[names.index(_LOOP) + 1 :]]
        own[names[-1]] += int(samples)
        for frame in set(names[1:] or names):
            within[frame] += int(samples)
    total = own.total()
    if total < _LEAST:
        return
    print(
        f"\n  {name}: {used_s:.2f} CPU-s. Of {total} looks at Python code: the function itself, and with all it calls"
    )
    for frame, _ in own.most_common(_TOP):
        print(f"    {own[frame] / total:6.1%} {within[frame] / total:6.1%}  {frame}")
    print(f"  {name}: in the order of what they take with all they call")
    for frame, _ in within.most_common(_TOP + 8):
        print(f"    {own[frame] / total:6.1%} {within[frame] / total:6.1%}  {frame}")


def _backends(statements: Statements, postmaster: int, used: dict[int, float]) -> None:
    total = sum(used.values()) or 1.0
    print(
        f"\n  PostgreSQL, {total:.2f} CPU-s by process, with the statement each was seen with most"
    )
    for pid, seconds in sorted(used.items(), key=lambda item: -item[1])[:_TOP]:
        if not seconds:
            break
        seen = statements.last.get(pid, Counter()).most_common(1)
        name = statements.names.get(pid, "ended meanwhile")
        if pid == postmaster:
            name = "postmaster, with all that ended meanwhile: autovacuum"
        print(
            f"    {seconds:6.2f} s {seconds / total:6.1%}  {name:<20} {seen[0][0][:140] if seen else ''}"
        )


def _statements(statements: Statements) -> None:
    total = statements.seen.total() or 1
    print(
        f"  PostgreSQL, statements at work in {statements.looks} looks ({statements.seen.total()} times one was)"
    )
    if statements.counts:
        commits, wal_bytes, syncs = statements.counts
        print(
            f"    about {max(0, commits - statements.looks):,} commits, {wal_bytes / 1e6:,.1f} MB of WAL, {syncs:,} times synced"
        )
    by_statement: Counter[str] = Counter()
    for (statement, _), times in statements.seen.items():
        by_statement[statement] += times
    for statement, times in by_statement.most_common(10):
        waits = Counter(
            {wait: count for (other, wait), count in statements.seen.items() if other == statement}
        )
        shares = ", ".join(f"{wait} {count / times:.0%}" for wait, count in waits.most_common(4))
        print(f"    {times / total:6.1%}  {statement[:160]}\n            {shares}")


def _by_pid(service: Service) -> dict[str, dict[int, float]]:
    return {
        part: {one.pid: one.cpu_s for one in processes}
        for part, processes in service.groups().items()
    }


@contextmanager
def profiling(service: Service, folder: Path, title: str) -> Iterator[None]:
    """Profile the service during the block, and print what was found."""
    statements = Statements(service.database_url)
    statements.start()
    before = _by_pid(service)
    spies = _spies(service, folder)
    try:
        yield
        after = _by_pid(service)
    finally:
        statements.stop()
        for spy, _ in spies.values():
            spy.send_signal(signal.SIGINT)
        for spy, _ in spies.values():
            spy.wait(60)
    print(f"\nProfile of {title}")
    used = {
        part: {pid: s - before[part].get(pid, 0.0) for pid, s in found.items()}
        for part, found in after.items()
    }
    for (part, pid), (_, stacks) in spies.items():
        if stacks.exists():
            _functions(f"{part} {pid}", stacks, used[part][pid])
    _backends(statements, service.usage().pids["postgres"], used["postgres"])
    _statements(statements)
