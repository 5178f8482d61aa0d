"""Make the two logs whose analysis takes longest, with their planted faults."""

from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from tests.support.planted_outages import Outage, Planted, Town, plant
from tests.support.random_walks import Walks, wander

MIXED: Final = Town(
    seed=11, minutes=240, rooms=3, per_room=3, a_minute=[4, 2, 0.3], noise=0.05, lost=9, missing=6, doubled=5,
    repeated=40, skipped=3, outages=[Outage(begin_s=4000, end_s=5200, subscriptions=(0, 4))],
    skew_s=(0.0, 20.0, -15.0, 0.0, 40.0), attempts=3,
)  # fmt: skip
HOSTS: Final = {
    0: 0,
    6: 0,
    12: 0,
    18: 0,
    1: 1,
    7: 1,
    13: 1,
    2: 2,
    8: 2,
    14: 2,
    20: 2,
    3: 3,
    9: 3,
    27: 3,
    28: 3,
}
SHARED: Final = {
    host: tuple(number for number, of in HOSTS.items() if of == host) for host in range(4)
}
CHRONIC: Final = {5: 0.9, 11: 0.7, 17: 0.6}
_MINUTES: Final = 60 * 24


def outages(seed: int) -> list[Outage]:
    """Plan five outages for each shared host, some partial or overlapping, and outages of others."""
    rng = np.random.default_rng(seed)
    found = []
    for slot in range(20):
        host = slot % 4
        begin = (120 + slot * 56 + int(rng.integers(0, 26))) * 60 + int(rng.integers(0, 60))
        share = 1.0 if slot % 3 else 0.75
        length = int(rng.integers(14, 30)) * 60
        found.append(
            Outage(begin_s=begin, end_s=begin + length, subscriptions=SHARED[host], share=share)
        )
    # Two overlap: the second begins in the middle of the first.
    found.append(Outage(begin_s=1265 * 60, end_s=1290 * 60, subscriptions=SHARED[0]))
    found.append(Outage(begin_s=1277 * 60, end_s=1305 * 60, subscriptions=SHARED[1]))
    alone = [4, 10, 15, 16, 19, 21, 22, 23, 24, 25]
    for number in alone:
        begins = rng.integers(60, _MINUTES - 90, 4).tolist()
        found += [
            Outage(begin_s=at * 60, end_s=(at + 12) * 60, subscriptions=(number,)) for at in begins
        ]
    return found


SHARING: Final = Town(
    seed=23, minutes=_MINUTES, rooms=5, per_room=6, a_minute=[1.5, 1.2, 1.5, 1.2, 0.5], hosts=HOSTS, outages=outages(77),
    chronic=CHRONIC, noise=0.02, hopeless=0.004, attempts=4, delay_s=45.0, skew_s=(0.0, 30.0, -30.0, 0.0, 45.0),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed:
    """Four hours of a log with every kind of fault, and random walks through the transition table."""

    planted: Planted
    walks: Walks
    rows: pa.Table

    @classmethod
    def made(cls) -> "Mixed":
        """Make the log, always the same."""
        planted, walks = plant(MIXED), wander(seed=5, legal=150, illegal=20, hours=4)
        return cls(planted=planted, walks=walks, rows=pa.concat_tables([planted.rows, walks.rows]))
