"""Replay: what a retry policy would have delivered, over the availability that the log measured.

An attempt in a bin of 15 s succeeds with the share of attempts that did. Bins without any are filled in between their
neighbours. Some deliveries fail whatever the time (a body that the endpoint cannot take): their share is estimated from how
many gave up although the endpoint was there, by expectation-maximisation, since no policy can help them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from delivery.correlation.cells import BIN_S
from delivery.correlation.series import Floats, Ints

_ROUNDS: Final = 30
_PIECE: Final = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Wait `delay_ms * multiplier ^ n` before redelivery n + 1; `attempts` counts redeliveries."""

    delay_ms: float
    multiplier: float
    attempts: int

    def offsets_s(self) -> Floats:
        """Seconds from the first try to each try."""
        waits = self.delay_ms / 1000 * self.multiplier ** np.arange(self.attempts)
        return np.concatenate(([0.0], np.cumsum(waits)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """Deliveries by the bin of their first try: `count` of them, which were `delivered` (or gave up) after so many `tries`."""

    bins: Ints
    tries: Ints
    delivered: Ints
    count: Ints

    def within(self, first: int, last: int) -> "Arrivals":
        """Those whose first try fell into bins from `first` to before `last`."""
        some = (self.bins >= first) & (self.bins < last)
        return Arrivals(
            bins=self.bins[some], tries=self.tries[some], delivered=self.delivered[some], count=self.count[some]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """`delivered`: share of deliveries, 0 to 1; `attempts` a delivery; seconds waited by those delivered."""

    delivered: float
    attempts: float
    mean_wait_s: float
    p95_wait_s: float


class Availability:
    """The share of attempts that succeed, bin by bin, of one subscription."""

    def __init__(self, bins: Ints, attempts: Floats, successes: Floats) -> None:
        self._bins = bins.astype(np.float64)
        self._shares = np.clip(successes / np.maximum(attempts, 1e-9), 0.0, 1.0)

    def at(self, bins: Floats) -> Floats:
        """The share in these bins."""
        return np.interp(bins, self._bins, self._shares)

    def every(self) -> tuple[int, Floats]:
        """The first bin, and the share in it and in each one after it, to the last."""
        first, last = int(self._bins[0]), int(self._bins[-1])
        return first, self.at(np.arange(first, last + 1, dtype=np.float64))


def measured(arrivals: Arrivals, offsets_s: Floats) -> Effect:
    """What the deployed policy did, counted."""
    total = max(int(arrivals.count.sum()), 1)
    got = arrivals.count * arrivals.delivered
    waits = offsets_s[np.minimum(arrivals.tries, len(offsets_s)) - 1]
    return Effect(
        delivered=float(got.sum()) / total,
        attempts=float((arrivals.count * arrivals.tries).sum()) / total,
        mean_wait_s=float((got * waits).sum() / max(got.sum(), 1)),
        p95_wait_s=_percentile(waits, got.astype(np.float64), 0.95),
    )


class Replay:
    """Tries over one subscription's availability, of several sets of deliveries at once.

    `hopeless`: the share of deliveries that no try delivers.
    """

    def __init__(self, sets: Sequence[Arrivals], available: Availability, hopeless: float) -> None:
        self._bins = np.unique(np.concatenate([arrivals.bins for arrivals in sets]))
        self._weights = np.stack([self._weighted(arrivals) for arrivals in sets])
        first, shares = available.every()
        self._shares = shares
        self._rises = np.append(np.diff(shares), 0.0)
        self._places = np.clip(self._bins - first, 0, len(shares) - 1)
        self._hopeless = hopeless

    def effects(self, offsets_s: Floats) -> list[list[Effect]]:
        """For each set: what the first of these tries would have done alone, then the first two, and so on to all of them.

        A policy with fewer attempts makes the first tries of one with more, so one look at the availability tells of both.
        """
        tries: list[Floats] = []
        deliveries: list[Floats] = []
        left: Floats = np.ones(len(self._bins))
        for offset in offsets_s / BIN_S:
            tries.append(self._summed(left))
            delivers = self._at(offset)
            delivers *= left
            deliveries.append(self._summed(delivers))
            left -= delivers
        tried = np.cumsum(tries, axis=0).T
        delivered = np.stack(deliveries, axis=1) * (1 - self._hopeless)
        got, waited = np.cumsum(delivered, axis=1), np.cumsum(delivered * offsets_s, axis=1)
        totals = np.maximum(self._weights.sum(axis=1), 1.0)
        return [
            [
                Effect(
                    delivered=float(got[one, last] / total),
                    attempts=float(tried[one, last] / total * (1 - self._hopeless) + self._hopeless * (last + 1)),
                    mean_wait_s=float(waited[one, last] / max(got[one, last], 1e-9)),
                    p95_wait_s=_reached(offsets_s, got[one, : last + 1], 0.95),
                )
                for last in range(len(offsets_s))
            ]
            for one, total in enumerate(totals)
        ]

    def _summed(self, shares: Floats) -> Floats:
        """What is shared out to each bin, times how many came there, summed up: for each set.

        In pieces for which BLAS starts no threads: these spin on the cores that Spark computes on, longer than they compute.
        """
        pieces = (slice(at, at + _PIECE) for at in range(0, len(shares) or 1, _PIECE))
        summed: Floats = np.sum([self._weights[:, piece] @ shares[piece] for piece in pieces], axis=0)
        return summed

    def _at(self, offset: float) -> Floats:
        """The share so many bins after each. Between two bins it is a line, so two look-ups give what lies in between."""
        whole = int(offset)
        places = self._places + whole
        share: Floats = self._rises.take(places, mode="clip")
        share *= offset - whole
        share += self._shares.take(places, mode="clip")
        return share

    def _weighted(self, arrivals: Arrivals) -> Floats:
        """How many came in each of the bins."""
        places = np.searchsorted(self._bins, arrivals.bins)
        return np.bincount(places, weights=arrivals.count, minlength=len(self._bins)).astype(np.float64)


def replay(arrivals: Arrivals, available: Availability, hopeless: float, offsets_s: Floats) -> Effect:
    """What tries at these offsets would have done. `hopeless`: the share of deliveries that no try delivers."""
    return Replay((arrivals,), available, hopeless).effects(offsets_s)[0][-1]


def hopeless_share(
    arrivals: Arrivals, bins: Ints, attempts: Ints, successes: Ints, offsets_s: Floats
) -> tuple[float, Availability]:
    """The share of deliveries that no try delivers, and the availability without their attempts."""
    given_up = arrivals.delivered == 0
    first, tries, count = arrivals.bins[given_up], arrivals.tries[given_up], arrivals.count[given_up].astype(np.float64)
    total = max(float(arrivals.count.sum()), 1.0)
    tried, went_well = attempts.astype(np.float64), successes.astype(np.float64)
    available = Availability(bins, tried, went_well)
    if not len(first):
        return 0.0, available
    at = first[:, None] + offsets_s[None, :] / BIN_S
    made = np.arange(len(offsets_s))[None, :] < tries[:, None]
    places = np.searchsorted(bins, np.floor(at).astype(np.int64))
    known = made & (places < len(bins))
    known[known] &= bins[places[known]] == np.floor(at).astype(np.int64)[known]
    share = float(count.sum()) / total / 2
    for _ in range(_ROUNDS):
        unlucky = np.prod(np.where(made, 1 - available.at(at), 1.0), axis=1)
        weight = share / np.maximum(share + (1 - share) * unlucky, 1e-12)
        share = float((weight * count).sum()) / total
        weights = np.broadcast_to((weight * count)[:, None], known.shape)[known]
        theirs = np.bincount(places[known], weights=weights, minlength=len(bins))
        available = Availability(bins, np.maximum(tried - theirs, np.maximum(went_well, 1e-9)), went_well)
    return share, available


def _percentile(values: Floats, weights: Floats, share: float) -> float:
    order = np.argsort(values, kind="stable")
    return _reached(values[order], np.cumsum(weights[order]), share)


def _reached(ascending: Floats, summed: Floats, share: float) -> float:
    """The first value at which so large a share is reached of what is summed up along them."""
    if not len(summed) or summed[-1] <= 0:
        return 0.0
    return float(ascending[np.searchsorted(summed, share * summed[-1])])


def front(effects: Sequence[Effect]) -> list[int]:
    """The indexes of those that no other one beats: as much delivered, with as few attempts, as soon."""
    values = np.array([(-effect.delivered, effect.attempts, effect.mean_wait_s) for effect in effects])
    others, own = values[:, None, :], values[None, :, :]
    beaten = ((others <= own).all(axis=2) & (others < own).any(axis=2)).any(axis=0)
    return [int(index) for index in np.flatnonzero(~beaten)]
