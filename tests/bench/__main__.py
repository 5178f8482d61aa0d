"""The bench of the whole service: `make bench`, or `python -m tests.bench [scenario…]`.

Scenarios: S1, S2, S3 (as the peers were measured; with PostgreSQL as the broker, and beside it with
Artemis), S5, publish, pull, idle, steady (40 messages a second, from publish to webhook; with
PostgreSQL as the broker, and with Artemis), stomp (our adapter beside plain stomp.py), magazines
(load, fire, delete and sweep, each store by itself), handlers (handler queues by REST and one
process, on each store), and, only when named: pairs (bursts of S1, S2 and S3 at the same time on this
version and on that of --against, for a difference of a few percent), lanes (healthy webhooks beside sick ones, in pairs),
fairness (one organisation beside another that publishes 100,000 messages at once, in pairs),
ordered (order per key beside none, under failures and kills, and what other keys feel of one that
fails), outage (an endpoint that is dead for ten minutes of traffic, then back), polls (5,000 that
wait), creations (10,000 subscriptions of one room by 16 clients), console (every page over 10 million
messages), long (a million deliveries; also
with --long), retries (100,000 that wait in Artemis while it is killed), sideline (a million at rest,
and 10,000 brought back), lateness (a thousand come due each second of a minute), waiting (a million
wait for next week), recover (Artemis loses its records while 50,000 wait), returns (each process
killed, leases that run out), takeovers (standbys that hang), spark (the analysis, 5 and 20 million
events; spark-log, spark-5, spark-heap, spark-20 and spark-engines are its pieces; spark-small: a million on both engines), follow (how far
behind now the analysis is while it follows a service), farm (webhooks that fail in a known pattern,
which the analysis has to name), advice (retry advice against the truth of simulated endpoints),
incidents (how many of the incidents of simulated worlds the analysis finds and explains). The last
two need no service; each other one starts
a service of its own with `python -m rooms dev` on a new data folder. CPU is that of everything
behind the API: its processes, every one of PostgreSQL, and Artemis, not of the load and the sink.
"""

import argparse
import os
import platform
import shutil
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Final

from tests.bench import figures
from tests.bench.advice import advice
from tests.bench.console import console
from tests.bench.creations import creations
from tests.bench.delayed import lateness, waiting
from tests.bench.fairness import fairness
from tests.bench.farm import farm
from tests.bench.figures import Run
from tests.bench.follow import follow
from tests.bench.handlers import handlers
from tests.bench.incidents import incidents
from tests.bench.lanes import lanes
from tests.bench.latencies import LATENCIES
from tests.bench.magazines import magazines
from tests.bench.memory import long
from tests.bench.ordered import ordered
from tests.bench.outage import outage
from tests.bench.pairs import pairs
from tests.bench.plan import Lines, Plan, Scenario
from tests.bench.polls import polls
from tests.bench.recovery import recover
from tests.bench.retries import retries
from tests.bench.returns import returns
from tests.bench.service import BenchError
from tests.bench.sideline import sideline
from tests.bench.spark import SPARK
from tests.bench.stomp import stomp
from tests.bench.takeovers import takeovers
from tests.bench.throughput import THROUGHPUT

SCENARIOS: Final[dict[str, Scenario]] = {
    **THROUGHPUT,
    **LATENCIES,
    "stomp": stomp,
    "pairs": pairs,
    "lanes": lanes,
    "fairness": fairness,
    "ordered": ordered,
    "outage": outage,
    "polls": polls,
    "creations": creations,
    "console": console,
    "magazines": magazines,
    "handlers": handlers,
    "sideline": sideline,
    "lateness": lateness,
    "waiting": waiting,
    "recover": recover,
    "returns": returns,
    "takeovers": takeovers,
    "long": long,
    "retries": retries,
    **SPARK,
    "follow": follow,
    "farm": farm,
    "advice": advice,
    "incidents": incidents,
}
UNASKED: Final = frozenset(
    {
        "pairs",
        "lanes",
        "fairness",
        "ordered",
        "outage",
        "long",
        "polls",
        "creations",
        "console",
        "retries",
        "sideline",
        "lateness",
        "waiting",
        "recover",
        "returns",
        "takeovers",
        *SPARK,
        "follow",
        "farm",
        "advice",
        "incidents",
    }
)
"""Scenarios that only run when they are named."""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("scenarios", nargs="*", metavar="scenario", help=", ".join(SCENARIOS))
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a tenth of everything, once: a smoke test, no figures to quote",
    )
    parser.add_argument(
        "--runs",
        type=int,
        help="runs of each scenario, for the medians (3; with --quick 1)",
    )
    parser.add_argument("--long", action="store_true", help="also the million deliveries")
    parser.add_argument(
        "--postgres", action="store_true", help="leave S1, S2, S3 and steady on Artemis out"
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help="of S5, pairs and fairness, the cases whose names hold this, and what they are compared with",
    )
    parser.add_argument(
        "--against",
        type=Path,
        metavar="FOLDER",
        help="of pairs, a checkout of another version with its .venv",
    )
    parser.add_argument("--pairs", type=int, help="how many pairs: of bursts (30), of fairness (5)")
    parser.add_argument(
        "--profile", action="store_true", help="say where the time goes; the figures suffer from it"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run there")
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FOLDER",
        help="where the services put their data (a temporary folder)",
    )
    given = parser.parse_args()
    if unknown := set(given.scenarios) - set(SCENARIOS):
        parser.error(
            f"no such scenario: {', '.join(sorted(unknown))}; there are {', '.join(SCENARIOS)}"
        )
    return given


def _machine() -> dict[str, str | int | float]:
    sink = "nginx" if shutil.which("nginx") else "httptools"
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "rooms": metadata.version("rooms") if _installed() else "of the working folder",
        "sink": sink,
    }


def _installed() -> bool:
    try:
        metadata.version("rooms")
    except metadata.PackageNotFoundError:
        return False
    return True


def _progress(name: str, number: int, lines: Lines) -> None:
    for line, run in lines.items():
        found = run.values
        if "per_s" in found:
            text = f"{found['per_s']:,.0f} a second"
            text += f", {found['per_cpu_s']:,.0f} a CPU-second" if "per_cpu_s" in found else ""
        elif "p50_ms" not in found:
            text = ", ".join(f"{key} {value:,.1f}" for key, value in found.items())
        else:
            text = f"p50 {found.get('p50_ms', 0):.1f} ms, p99 {found.get('p99_ms', 0):.1f} ms"
        print(
            f"  {name} run {number}: {line}: {text}{'' if not run.faults else f'  WRONG: {run.faults}'}",
            flush=True,
        )


def main() -> int:
    given = _arguments()
    names = given.scenarios or [name for name in SCENARIOS if name not in UNASKED]
    if given.long and "long" not in names:
        names.append("long")
    about = {
        **_machine(),
        "scenarios": " ".join(names),
        "quick": given.quick,
        "profile": given.profile,
    }
    print("Rooms bench: " + ", ".join(f"{key} {value}" for key, value in about.items()))
    runs: dict[str, list[Run]] = {}
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rooms-bench-", dir=given.data) as folder:
        # Workers of nginx are another user where it is started by root.
        Path(folder).chmod(0o755)
        plan = Plan(
            folder=Path(folder),
            runs=given.runs or (1 if given.quick else 3),
            quick=given.quick,
            profile=given.profile,
            artemis=not given.postgres,
            only=given.only,
            against=given.against,
            pairs=given.pairs,
            keep=given.data or Path.cwd(),
        )
        for name in names:
            try:
                for number, lines in enumerate(SCENARIOS[name](plan), 1):
                    _progress(name, number, lines)
                    for line, run in lines.items():
                        runs.setdefault(line, []).append(run)
            except BenchError as exc:
                print(f"  {name}: {exc}", flush=True)
                runs.setdefault(name, []).append(Run(faults=[str(exc)]))
    print(figures.reported(runs))
    if given.json is not None:
        figures.write(given.json, runs, {**about, "took_s": time.monotonic() - began})
    return 1 if figures.faults(runs) else 0


if __name__ == "__main__":
    sys.exit(main())
