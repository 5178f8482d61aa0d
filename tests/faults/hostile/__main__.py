"""Attack for as long as asked: `python -m tests.faults.hostile [SUITE …] --seconds 600 --seed 7`."""

import argparse
import asyncio
import secrets
import sys
import tempfile
from pathlib import Path

from rooms.db.schema import migrate
from tests.conftest import administer, at
from tests.faults.hostile.suite import attack, replay
from tests.faults.hostile.suites import SUITES
from tests.support.local_servers import temporary_postgres


def main() -> int:
    """Run the suites one after the other, each for its share of the time; 1: a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.hostile", description=__doc__)
    parser.add_argument(
        "suites", nargs="*", metavar="SUITE", help=f"which; all by default: {', '.join(SUITES)}"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="in all (default: 60)")
    parser.add_argument(
        "--seed", type=int, default=None, help="default: a new one, which is printed"
    )
    parser.add_argument("--case", type=int, default=None, help="run this case of one suite only")
    given = parser.parse_args()
    if unknown := [name for name in given.suites if name not in SUITES]:
        parser.error(f"no suite {', '.join(unknown)}; there are {', '.join(SUITES)}")
    names = given.suites or list(SUITES)
    if given.case is not None and (len(names) != 1 or given.seed is None):
        parser.error("--case takes one suite and --seed")
    seed = secrets.randbits(32) if given.seed is None else given.seed
    failed = False
    with (
        tempfile.TemporaryDirectory(prefix="rooms-attack-") as folder,
        temporary_postgres(Path(folder)) as url,
    ):
        for number, name in enumerate(names):
            administer(url, "CREATE DATABASE {}", f"attack_{number}")
            database_url = at(url, f"attack_{number}")
            migrate(database_url)
            suite = SUITES[name]
            try:
                if given.case is not None:
                    outcomes = asyncio.run(
                        replay(suite, database_url, seed=seed, number=given.case)
                    )
                else:
                    outcomes = asyncio.run(
                        attack(suite, database_url, seed=seed, seconds=given.seconds / len(names))
                    )
            except AssertionError as broken:
                failed = True
                print(f"{name}: FAILED\n{broken}", file=sys.stderr)
                continue
            kinds = ", ".join(f"{kind} {times:,}" for kind, times in outcomes.most_common())
            print(f"{name}: {outcomes.total():,} cases of seed {seed}: {kinds}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
