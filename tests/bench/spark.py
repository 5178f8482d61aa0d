"""Measure the analysis from a cold start.

5 and 20 million events by spark-submit's default (local[*]), with DuckDB and Polars beside it.

Each engine runs in a process of its own, start included. DuckDB and Polars run only the core
(journeys, books, hours, pairs), without state, paths, incidents or advice: their seconds are a
lower bound, not a like for like.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import duckdb

from delivery.analytics.sealing.files import LocalFiles
from delivery.analytics.sealing.seal import seal_segments
from tests.bench.figures import Run
from tests.bench.plan import Lines, Plan, Scenario
from tests.support.planted_outages import Outage, Town, plant
from tests.support.sealed_segments import write

_BASE_MINUTES: Final = 240
_SIZES: Final = (5_000_000, 20_000_000)
_SMALL: Final = 950_000
"""Events of a log that the engine in the process still gets."""
_SMALL_HEAP: Final = "1g"
_HEAP: Final = "2g"
_PATIENCE_S: Final = 3600
_KEPT: Final = "spark-logs"
_AIM_S: Final = 90.0
_AIM_MIB: Final = 3072.0
_AIM_GROWTH: Final = 3.0
_AIM_BOOKS_S: Final = 6.0
"""Seconds until the books of the small log are readable."""
TOWN: Final = Town(
    seed=3, minutes=_BASE_MINUTES, rooms=10, per_room=5, a_minute=6.2, noise=0.03, attempts=5,
    outages=[Outage(begin_s=3600, end_s=4800, subscriptions=(0, 7, 12, 33)), Outage(begin_s=9000, end_s=9900, subscriptions=(4, 21))],
)  # fmt: skip

# A copy of the base log, later by whole copies: other times, other ids, the writers' numbers going
# on.
_COPY: Final = """
COPY (
    SELECT * EXCLUDE (message_id, message_hi, delivery_id, delivery_hi, ts, writer_seq, xid, last, dt, hr, c),
        later(message_hi, c) AS message_hi, named(later(message_hi, c), message_id) AS message_id,
        later(delivery_hi, c) AS delivery_hi, named(later(delivery_hi, c), delivery_id) AS delivery_id,
        ts + to_minutes(c * {minutes}) AS ts, writer_seq + c * last AS writer_seq, xid + c * {minutes} * 60000 AS xid,
        strftime(ts + to_minutes(c * {minutes}), '%Y-%m-%d') AS dt, strftime(ts + to_minutes(c * {minutes}), '%H') AS hr
    FROM (SELECT *, max(writer_seq) OVER (PARTITION BY writer_id) AS last
        FROM read_parquet('{base}/*/*/*.parquet', hive_partitioning = true)), range({first}, {until}) r(c)
) TO '{folder}' (FORMAT parquet, PARTITION_BY (dt, hr), COMPRESSION zstd, OVERWRITE_OR_IGNORE, FILENAME_PATTERN 's{first}-{{i}}')
"""
_MACROS: Final = f"""
CREATE MACRO later(hi, c) AS hi + c * {_BASE_MINUTES * 60_000 << 16}::BIGINT;
CREATE MACRO digits(hi) AS lpad(lower(to_hex(hi)), 16, '0');
CREATE MACRO named(hi, id) AS digits(hi)[1:8] || '-' || digits(hi)[9:12] || '-' || digits(hi)[13:16] || id[19:];
SET TimeZone = 'UTC'
"""


class _Logs:
    """The logs, and how long Spark took for each: in a folder that `--data` keeps, or in one that goes with the bench."""

    def __init__(self, plan: Plan) -> None:
        kept = plan.keep / _KEPT
        self._plan = plan
        self._folder = kept if kept.is_dir() else plan.folder

    def segments(self, size: int) -> tuple[Path, int]:
        """The log of about so many events (with --quick a tenth), and how many they are; made where it is not there."""
        size = self._plan.some(size)
        folder, counted = self._folder / f"segments-{size}", self._folder / f"events-{size}"
        if not counted.exists():
            base = self._folder / "base"
            if not base.exists():
                write(plant(TOWN).rows, base)
            events = _grown(base, folder, size)
            sealed = seal_segments(LocalFiles(str(folder)))
            assert sealed.rows == events, sealed.refused
            counted.write_text(str(events))
        return folder, int(counted.read_text())

    def out(self) -> Path:
        """Takes an analysis."""
        return Path(tempfile.mkdtemp(dir=self._plan.folder))

    def keep(self, size: int, took_s: float) -> None:
        """Measure Spark on this log."""
        (self._folder / f"took-{self._plan.some(size)}").write_text(str(took_s))

    def took_s(self, size: int) -> float | None:
        """Return the last measurement; None where there is none."""
        reported = self._folder / f"took-{self._plan.some(size)}"
        return float(reported.read_text()) if reported.exists() else None


def analysis(plan: Plan) -> Iterator[Lines]:
    """5 M and 20 M events (with --quick 0.5 M and 2 M), each engine once."""
    for piece in (_five, _small_heap, _twenty, _engines):
        yield from piece(plan)


def _log(plan: Plan) -> Iterator[Lines]:
    """Write the logs to the folder of --data, for the pieces that are asked for next."""
    (plan.keep / _KEPT).mkdir(exist_ok=True)
    events = [logs.segments(size)[1] for logs in (_Logs(plan),) for size in _SIZES]
    yield {
        "spark logs": Run(
            verified=[
                f"{' and '.join(f'{count:,}' for count in events)} events in {plan.keep / _KEPT}"
            ]
        )
    }


def _five(plan: Plan) -> Iterator[Lines]:
    logs, (size, _) = _Logs(plan), _SIZES
    name, run = _analysed(logs, size, heap=_HEAP)
    run.verified += [
        _aim(run.values["took_s"], _AIM_S, "s"),
        _aim(run.values["mib peak"], _AIM_MIB, "MiB"),
    ]
    logs.keep(size, run.values["took_s"])
    yield {name: run}


def _small_heap(plan: Plan) -> Iterator[Lines]:
    name, run = _analysed(_Logs(plan), _SIZES[0], heap=_SMALL_HEAP)
    yield {f"{name}, 1 GB heap": run}


def _twenty(plan: Plan) -> Iterator[Lines]:
    logs, (small, size) = _Logs(plan), _SIZES
    name, run = _analysed(logs, size, heap=_HEAP)
    logs.keep(size, run.values["took_s"])
    if (before := logs.took_s(small)) is not None:
        grown = run.values["took_s"] / before
        run.verified.append(
            f"four times the events take {grown:.2f} times as long: {_aim(grown, _AIM_GROWTH, 'times')}"
        )
    yield {name: run}


def _engines(plan: Plan) -> Iterator[Lines]:
    logs = _Logs(plan)
    for size in _SIZES:
        segments, events = logs.segments(size)
        lines = {}
        for engine in ("duckdb", "polars"):
            run = _timed(
                [sys.executable, "-m", f"tests.bench.engines.{engine}", str(segments)], events
            )
            if (spark := logs.took_s(size)) is not None:
                run.verified.append(
                    f"Spark takes {spark / run.values['took_s']:.1f} times as long ({spark:.1f} s)"
                )
            lines[f"{engine} {_millions(events)}"] = run
        yield lines


def _small(plan: Plan) -> Iterator[Lines]:
    """Measure both engines of the analysis on one log of just under a million events."""
    logs = _Logs(plan)
    segments, events = logs.segments(_SMALL)
    here = _job("delivery.analytics.local", segments, logs.out(), events)
    spark = _spark(segments, logs.out(), events, heap=_SMALL_HEAP)
    for name, unit in (("took_s", "seconds"), ("mib peak", "memory")):
        ratio = spark.values[name] / here.values[name]
        here.verified.append(f"Spark takes {ratio:.1f} times the {unit}")
    here.verified.append(f"books after {_aim(here.values['books s'], _AIM_BOOKS_S, 's')}")
    spark.verified.append(f"books after {spark.values['books s']:.1f} s")
    millions = _millions(events)
    yield {f"in the process {millions}": here, f"spark {millions}, 1 GB heap": spark}


SPARK: Final[dict[str, Scenario]] = {
    "spark": analysis,
    "spark-log": _log,
    "spark-5": _five,
    "spark-heap": _small_heap,
    "spark-20": _twenty,
    "spark-engines": _engines,
    "spark-small": _small,
}
"""The whole, and its pieces, each short of five minutes on two cores: after spark-log with the same --data they share its logs."""


def _millions(events: int) -> str:
    return f"{events / 1e6:.1f} M events"


def _analysed(logs: _Logs, size: int, *, heap: str) -> tuple[str, Run]:
    segments, events = logs.segments(size)
    run = _spark(segments, logs.out(), events, heap=heap)
    return f"spark {_millions(events)}", run


def _aim(value: float, aim: float, unit: str) -> str:
    return f"{value:.1f} {unit}, aimed at {aim:.0f}: {'met' if value <= aim else 'missed'}"


def _grown(base: Path, segments: Path, size: int) -> int:
    with duckdb.connect() as connection:
        connection.execute(_MACROS)
        (counted,) = connection.execute(f"SELECT count(*) FROM '{base}/*/*/*.parquet'").fetchall()
        copies: int = max(round(size / counted[0]), 1)
        for first in range(0, copies, 4):
            until = min(first + 4, copies)
            connection.execute(
                _COPY.format(
                    base=base, folder=segments, minutes=_BASE_MINUTES, first=first, until=until
                )
            )
        return int(counted[0]) * copies


def _spark(segments: Path, out: Path, events: int, *, heap: str) -> Run:
    submit = f"--driver-memory {heap} pyspark-shell"
    return _job("delivery.analytics.spark", segments, out, events, PYSPARK_SUBMIT_ARGS=submit)


def _job(module: str, segments: Path, out: Path, events: int, **environment: str) -> Run:
    places = ["--segments", str(segments), "--out", str(out), "--full"]
    run = _timed(
        [sys.executable, "-m", module, *places], events, appears=out / "latest.json", **environment
    )
    if "books s" not in run.values:
        run.faults.append("it published nothing")
    return run


def _timed(
    command: Sequence[str], events: int, *, appears: Path | None = None, **environment: str
) -> Run:
    """Seconds and the greatest memory of a command with all its children.

    `books s`: seconds until the file `appears` exists, to a tenth.
    """
    began = time.monotonic()
    process = subprocess.Popen(
        command,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    peak, reported = 0, ""
    first: dict[str, float] = {}
    while True:
        peak = max(peak, _resident(process.pid))
        if appears is not None and not first and appears.exists():
            first["books s"] = time.monotonic() - began
        try:
            reported, _ = process.communicate(timeout=0.1)
            break
        except subprocess.TimeoutExpired:
            if time.monotonic() - began > _PATIENCE_S:
                process.kill()
    took = time.monotonic() - began
    run = Run(
        values={
            "per_s": events / took,
            "took_s": took,
            **first,
            "mib peak": peak / 2**20,
            "cores": float(os.cpu_count() or 1),
        }
    )
    run.verified.append(f"{took:.1f} s, {peak / 2**30:.2f} GiB at most")
    if process.returncode:
        run.faults.append(f"exit code {process.returncode}: {reported[-500:]}")
    return run


def _resident(pid: int) -> int:
    """Bytes of a process and of those it started; 0 where it is gone."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        own = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
    return own + sum(_resident(int(child)) for child in children)
