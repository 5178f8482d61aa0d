"""Replay retry policies over the availability that the log measured.

An attempt in a bin of 15 s succeeds with the success rate of that bin. Bins without attempts are
interpolated. Some deliveries fail at any time, such as a body that the endpoint rejects.
Expectation-maximisation estimates their share from deliveries that failed while the endpoint was
available.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from delivery.analytics.spark.counts import BIN_S, Floats, Ints

_EM_ITERATIONS: Final = 30
_CHUNK: Final = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Wait `delay_ms * multiplier ^ n` before redelivery n + 1; `attempts` counts redeliveries."""

    delay_ms: float
    multiplier: float
    attempts: int

    def offsets_s(self) -> Floats:
        """Return seconds from the first attempt to each attempt."""
        waits = self.delay_ms / 1000 * self.multiplier ** np.arange(self.attempts)
        return np.concatenate(([0.0], np.cumsum(waits)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """Deliveries by bin of their first attempt: `count` with this `delivered` and `tries`."""

    bins: Ints
    tries: Ints
    delivered: Ints
    count: Ints

    def within(self, first: int, last: int) -> "Arrivals":
        """Return those with a first attempt in the bins from `first` to before `last`."""
        some = (self.bins >= first) & (self.bins < last)
        return Arrivals(
            bins=self.bins[some],
            tries=self.tries[some],
            delivered=self.delivered[some],
            count=self.count[some],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyEffect:
    """Share delivered (0 to 1), attempts a delivery, and waits of delivered ones in seconds."""

    delivered: float
    attempts: float
    mean_wait_s: float
    p95_wait_s: float


class Availability:
    """Success rate of one subscription's attempts by bin."""

    def __init__(self, bins: Ints, attempts: Floats, successes: Floats) -> None:
        self._bins = bins.astype(np.float64)
        self._shares = np.clip(successes / np.maximum(attempts, 1e-9), 0.0, 1.0)

    def at_bins(self, bins: Floats) -> Floats:
        """Return the success rate in these bins."""
        return np.interp(bins, self._bins, self._shares)

    def all_bins(self) -> tuple[int, Floats]:
        """Return the first bin, and the success rates of all bins from it to the last."""
        first, last = int(self._bins[0]), int(self._bins[-1])
        return first, self.at_bins(np.arange(first, last + 1, dtype=np.float64))


def measure_deployed(arrivals: Arrivals, offsets_s: Floats) -> PolicyEffect:
    """Count the effect of the deployed policy."""
    total = max(int(arrivals.count.sum()), 1)
    got = arrivals.count * arrivals.delivered
    waits = offsets_s[np.minimum(arrivals.tries, len(offsets_s)) - 1]
    return PolicyEffect(
        delivered=float(got.sum()) / total,
        attempts=float((arrivals.count * arrivals.tries).sum()) / total,
        mean_wait_s=float((got * waits).sum() / max(got.sum(), 1)),
        p95_wait_s=_percentile(waits, got.astype(np.float64), 0.95),
    )


class PolicyReplay:
    """Replays policies over one subscription's availability, for several sets of deliveries.

    `undeliverable_share`: the share of deliveries that no attempt delivers.
    """

    def __init__(
        self, sets: Sequence[Arrivals], available: Availability, undeliverable_share: float
    ) -> None:
        self._bins = np.unique(np.concatenate([arrivals.bins for arrivals in sets]))
        self._weights = np.stack([self._weights_by_bin(arrivals) for arrivals in sets])
        first, shares = available.all_bins()
        self._shares = shares
        self._slopes = np.append(np.diff(shares), 0.0)
        self._offsets = np.clip(self._bins - first, 0, len(shares) - 1)
        self._undeliverable_share = undeliverable_share

    def effects(self, offsets_s: Floats) -> list[list[PolicyEffect]]:
        """Return, for each set, the effect of the first attempt, of the first two, and so on.

        A policy with fewer attempts makes the first attempts of one with more, so one pass gives
        both.
        """
        tries: list[Floats] = []
        deliveries: list[Floats] = []
        left: Floats = np.ones(len(self._bins))
        for offset in offsets_s / BIN_S:
            tries.append(self._summed(left))
            delivers = self._success_share(offset)
            delivers *= left
            deliveries.append(self._summed(delivers))
            left -= delivers
        tried = np.cumsum(tries, axis=0).T
        delivered = np.stack(deliveries, axis=1) * (1 - self._undeliverable_share)
        got, waited = np.cumsum(delivered, axis=1), np.cumsum(delivered * offsets_s, axis=1)
        totals = np.maximum(self._weights.sum(axis=1), 1.0)
        return [
            [
                PolicyEffect(
                    delivered=float(got[one, last] / total),
                    attempts=float(
                        tried[one, last] / total * (1 - self._undeliverable_share)
                        + self._undeliverable_share * (last + 1)
                    ),
                    mean_wait_s=float(waited[one, last] / max(got[one, last], 1e-9)),
                    p95_wait_s=_weighted_quantile(offsets_s, got[one, : last + 1], 0.95),
                )
                for last in range(len(offsets_s))
            ]
            for one, total in enumerate(totals)
        ]

    def _summed(self, shares: Floats) -> Floats:
        """Return the sum of rates weighted by arrivals, for each set.

        Computed in blocks small enough that BLAS starts no threads, which would take cores from
        Spark.
        """
        pieces = (slice(at, at + _CHUNK) for at in range(0, len(shares) or 1, _CHUNK))
        summed: Floats = np.sum(
            [self._weights[:, piece] @ shares[piece] for piece in pieces], axis=0
        )
        return summed

    def _success_share(self, offset: float) -> Floats:
        """Return the success rate `offset` after each bin, linear between two bins."""
        whole = int(offset)
        places = self._offsets + whole
        share: Floats = self._slopes.take(places, mode="clip")
        share *= offset - whole
        share += self._shares.take(places, mode="clip")
        return share

    def _weights_by_bin(self, arrivals: Arrivals) -> Floats:
        """Return the number of arrivals in each bin."""
        places = np.searchsorted(self._bins, arrivals.bins)
        return np.bincount(places, weights=arrivals.count, minlength=len(self._bins)).astype(
            np.float64
        )


def replay_policy(
    arrivals: Arrivals, available: Availability, undeliverable_share: float, offsets_s: Floats
) -> PolicyEffect:
    """Return the effect of attempts at these offsets.

    `undeliverable_share`: the share of deliveries that no attempt delivers.
    """
    return PolicyReplay((arrivals,), available, undeliverable_share).effects(offsets_s)[0][-1]


def estimate_undeliverable(
    arrivals: Arrivals, bins: Ints, attempts: Ints, successes: Ints, offsets_s: Floats
) -> tuple[float, Availability]:
    """Return the share of undeliverable deliveries, and the availability without their attempts."""
    given_up = arrivals.delivered == 0
    first, tries, count = (
        arrivals.bins[given_up],
        arrivals.tries[given_up],
        arrivals.count[given_up].astype(np.float64),
    )
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
    for _ in range(_EM_ITERATIONS):
        unlucky = np.prod(np.where(made, 1 - available.at_bins(at), 1.0), axis=1)
        weight = share / np.maximum(share + (1 - share) * unlucky, 1e-12)
        share = float((weight * count).sum()) / total
        weights = np.broadcast_to((weight * count)[:, None], known.shape)[known]
        theirs = np.bincount(places[known], weights=weights, minlength=len(bins))
        available = Availability(
            bins, np.maximum(tried - theirs, np.maximum(went_well, 1e-9)), went_well
        )
    return share, available


def _percentile(values: Floats, weights: Floats, share: float) -> float:
    order = np.argsort(values, kind="stable")
    return _weighted_quantile(values[order], np.cumsum(weights[order]), share)


def _weighted_quantile(ascending: Floats, summed: Floats, share: float) -> float:
    """Return the first value at which the cumulative weight reaches `share`."""
    if not len(summed) or summed[-1] <= 0:
        return 0.0
    return float(ascending[np.searchsorted(summed, share * summed[-1])])


def pareto_front(effects: Sequence[PolicyEffect]) -> list[int]:
    """Return the indexes of policies that no other one beats in delivery, attempts and wait."""
    values = np.array(
        [(-effect.delivered, effect.attempts, effect.mean_wait_s) for effect in effects]
    )
    others, own = values[:, None, :], values[None, :, :]
    beaten = ((others <= own).all(axis=2) & (others < own).any(axis=2)).any(axis=0)
    return [int(index) for index in np.flatnonzero(~beaten)]
