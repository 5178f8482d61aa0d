"""Run chaos for the requested time.

`python -m tests.chaos --minutes 60 --shape full --faults kill,freeze`.
"""

import argparse
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.chaos.faults import KINDS
from tests.chaos.run import run
from tests.chaos.stage import SHAPES


@contextmanager
def folder_of(*, keep: bool) -> Iterator[str]:
    """Create a folder for a run; remove it afterwards unless `keep` is set."""
    folder = tempfile.mkdtemp(prefix="rooms-chaos-")
    try:
        yield folder
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """Run each shape for its share of the time; 1: something was lost, or answered as it should not be, or an event loop stood still."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="in all (default: 10)")
    parser.add_argument("--shape", choices=SHAPES, help="one shape only")
    parser.add_argument(
        "--faults", default=",".join(KINDS), help=f"of {', '.join(KINDS)} (default: all)"
    )
    parser.add_argument("--most", type=int, help="end each shape after so many faults")
    parser.add_argument("--seed", type=int, help="default: a new one, which is printed")
    parser.add_argument(
        "--keep", action="store_true", help="leave data and logs where they are, and print where"
    )
    given = parser.parse_args()
    kinds = [kind.strip() for kind in given.faults.split(",")]
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        parser.error(f"no fault {', '.join(unknown)}; there are {', '.join(KINDS)}")
    shapes = [given.shape] if given.shape else SHAPES
    seed = secrets.randbits(32) if given.seed is None else given.seed
    accounts = []
    for shape in shapes:
        with folder_of(keep=given.keep) as folder:
            Path(folder).chmod(0o755)  # PostgreSQL may run as another user
            if given.keep:
                print(f"data and logs: {folder}")
            accounts.append(
                run(
                    Path(folder),
                    shape=shape,
                    kinds=kinds,
                    seconds=given.minutes * 60 / len(shapes),
                    most=given.most,
                    seed=seed,
                )
            )
    return int(not all(account.holds for account in accounts))


if __name__ == "__main__":
    sys.exit(main())
