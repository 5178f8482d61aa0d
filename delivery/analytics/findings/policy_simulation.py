"""Simulate retry policies over the availability of an endpoint.

The first attempt is made at the same time under every policy, so its outcome is as it was logged.
Only what failed at first is simulated. Its retries succeed with the endpoint's rate at their time,
on each path of `availability`, except for deliveries that are undeliverable on that path.

Deliveries that failed within a quarter of an hour of each other are one episode. Resampling whole
episodes, on a path each and with their length varied, gives the intervals of the effects.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np

from delivery.analytics.findings.availability import AvailabilityPaths
from delivery.analytics.findings.series import BIN_S, Floats, Ints

_EPISODE_BINS: Final = 60
"""Bins without a failed first attempt that end an episode."""
_MAX_GROUPS: Final = 400
"""Bins of failed first attempts that are simulated; of more, a systematic sample."""
_REPLICATES: Final = 200
_STRETCH: Final = 0.45
"""Standard deviation of the logarithm of an episode's length between replicates."""
_INTERVAL: Final = (2.5, 97.5)
"""Percentiles that hold 90 % of later periods: replicates of few episodes vary too little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Wait `delay_ms * multiplier ^ n`, at most `max_delay_ms`, before redelivery n + 1.

    `attempts` counts redeliveries. A wait varies at random by its share `jitter`.
    """

    delay_ms: float
    multiplier: float
    attempts: int
    max_delay_ms: float | None = None
    jitter: float = 0.0

    def waits_s(self) -> Floats:
        """Return the seconds before each redelivery."""
        with np.errstate(over="ignore"):
            waits = self.delay_ms / 1000 * self.multiplier ** np.arange(self.attempts)
        capped: Floats = np.minimum(
            waits, np.inf if self.max_delay_ms is None else self.max_delay_ms / 1000
        )
        return capped

    def offsets_s(self) -> Floats:
        """Return seconds from the first attempt to each attempt."""
        return np.concatenate(([0.0], np.cumsum(self.waits_s())))


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """Hold deliveries by bin of their first attempt: `count` with this `delivered` and `tries`."""

    bins: Ints
    tries: Ints
    delivered: Ints
    count: Ints

    def within(self, first: int, last: int) -> "Arrivals":
        """Return those with a first attempt in the bins from `first` to before `last`."""
        return self.where((self.bins >= first) & (self.bins < last))

    def where(self, some: "np.typing.NDArray[np.bool_]") -> "Arrivals":
        """Return those of a mask."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectRange:
    """Hold the 90 % interval of an effect, as (low, high)."""

    delivered: tuple[float, float]
    attempts: tuple[float, float]
    mean_wait_s: tuple[float, float]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Hold the deliveries of one period, by the outcome of their first attempt.

    `well`: delivered at the first attempt. `terminal`: ended by a status that allows no retry, with
    `terminal_tries` attempts in all. `bins` are those of failed first attempts, ascending, and
    `deliverable` their deliveries by path, `undeliverable` those that no attempt delivers.
    """

    well: int
    terminal: int
    terminal_tries: int
    bins: Floats
    deliverable: Floats
    undeliverable: Floats
    episodes: Ints
    """Place of the first bin of each episode."""

    @property
    def total(self) -> Floats:
        """Return the number of deliveries, by path."""
        simulated: Floats = self.deliverable.sum(axis=1) + self.undeliverable.sum(axis=1)
        return simulated + self.well + self.terminal

    def part(self, first: int, last: int, *, well: int, terminal: Arrivals) -> "Sample":
        """Return the episodes from `first` to before `last`, with what else was delivered."""
        bounds = [*self.episodes.tolist(), len(self.bins)]
        some = slice(bounds[first], bounds[last])
        return replace(
            self,
            well=well,
            terminal=int(terminal.count.sum()),
            terminal_tries=int((terminal.count * terminal.tries).sum()),
            bins=self.bins[some],
            deliverable=self.deliverable[:, some],
            undeliverable=self.undeliverable[:, some],
            episodes=self.episodes[first:last] - bounds[first],
        )


def sample_of(arrivals: Arrivals, terminal: Arrivals, paths: AvailabilityPaths) -> Sample:
    """Return the sample of `arrivals`, whose given-up groups are those of the paths, in order."""
    failed = (arrivals.delivered == 0) | (arrivals.tries > 1)
    bins, place = np.unique(arrivals.bins[failed], return_inverse=True)
    given_up = arrivals.delivered[failed] == 0
    every = len(paths.rates)
    deliverable, undeliverable = np.zeros((2, every, len(bins)))
    counts = arrivals.count[failed]
    for path in range(every):
        lost = np.zeros(len(place))
        lost[given_up] = paths.undeliverable[path]
        undeliverable[path] = np.bincount(place, lost, minlength=len(bins))
        deliverable[path] = np.bincount(place, counts - lost, minlength=len(bins))
    if len(bins) > _MAX_GROUPS:
        step = -(-len(bins) // _MAX_GROUPS)
        chosen = np.arange(0, len(bins), step)
        deliverable, undeliverable = (_thinned(one, chosen) for one in (deliverable, undeliverable))
        bins = bins[chosen]
    return Sample(
        well=int(arrivals.count[~failed].sum()),
        terminal=int(terminal.count.sum()),
        terminal_tries=int((terminal.count * terminal.tries).sum()),
        bins=bins.astype(np.float64),
        deliverable=deliverable,
        undeliverable=undeliverable,
        episodes=_episodes(bins),
    )


def _thinned(counts: Floats, chosen: Ints) -> Floats:
    """Return the sums of the columns from each chosen one to before the next."""
    summed: Floats = np.add.reduceat(counts, chosen, axis=1)
    return summed


def _episodes(bins: Floats | Ints) -> Ints:
    starts: Ints = np.flatnonzero(np.diff(bins, prepend=-np.inf) > _EPISODE_BINS)
    return starts


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """Hold sums of a simulation by path, episode and the number of redeliveries of the policy.

    The redeliveries run from none to as many as offsets were simulated.
    """

    sample: Sample
    offsets_s: Floats
    delivered: Floats
    attempts: Floats
    waited_s: Floats

    @cached_property
    def effects(self) -> list[PolicyEffect]:
        """Return the mean effect over all paths, by number of redeliveries."""
        total = max(float(self.sample.total.sum()), 1.0)
        well = float(self.sample.well * len(self.delivered))
        firsts = float(self._first_attempts().sum())
        got = self.delivered.sum(axis=(0, 1)) + well
        tried = self.attempts.sum(axis=(0, 1)) + firsts
        waited = self.waited_s.sum(axis=(0, 1))
        return [
            PolicyEffect(
                delivered=float(got[number] / total),
                attempts=float(tried[number] / total),
                mean_wait_s=float(waited[number] / max(got[number], 1e-9)),
                p95_wait_s=weighted_quantile(self.offsets_s, got[: number + 1], 0.95),
            )
            for number in range(len(self.offsets_s))
        ]

    def part(self, sample: Sample, first: int, last: int) -> "Simulation":
        """Return that of the episodes from `first` to before `last`, which `sample` has."""
        some = (slice(None), slice(first, last))
        return replace(
            self,
            sample=sample,
            delivered=self.delivered[some],
            attempts=self.attempts[some],
            waited_s=self.waited_s[some],
        )

    def _first_attempts(self) -> Floats:
        """Return attempts that no policy changes, by path: the first ones, and terminal ones."""
        sample = self.sample
        return sample.total - sample.terminal + sample.terminal_tries

    def replicates(self, redeliveries: int, weights: Floats, paths: Ints) -> Floats:
        """Return rows of delivered, attempts and mean wait for each replicate.

        `weights` has a row a replicate and a column an episode; `paths` names each one's path.
        """
        sample = self.sample

        def summed(values: Floats) -> Floats:
            of_episode: Floats = (values[paths] * weights).sum(axis=1)
            return of_episode

        failed = (
            np.add.reduceat(sample.deliverable + sample.undeliverable, sample.episodes, axis=1)
            if len(sample.episodes)
            else np.zeros((len(self.delivered), 0))
        )
        fixed = sample.well + sample.terminal
        total = summed(failed) + fixed
        got = summed(self.delivered[:, :, redeliveries]) + sample.well
        tried = total - sample.terminal + sample.terminal_tries
        tried = tried + summed(self.attempts[:, :, redeliveries])
        waited = summed(self.waited_s[:, :, redeliveries])
        return np.stack(
            (got / np.maximum(total, 1), tried / np.maximum(total, 1), waited / np.maximum(got, 1)),
            axis=1,
        )


def simulate(
    sample: Sample,
    paths: AvailabilityPaths,
    offsets_s: Floats,
    *,
    stretch: Floats | None = None,
    spread: Floats | None = None,
) -> Simulation:
    """Simulate attempts at these offsets on every path.

    `stretch` varies the length of what happens on each path. `spread` moves single retries: by
    path, bin and redelivery, in seconds.
    """
    retries = offsets_s[1:]
    scale = np.ones(len(paths.rates)) if stretch is None else stretch
    later = retries[None, None, :] / scale[:, None, None]
    if spread is not None:
        later = later + spread[:, :, : len(retries)]
    at = sample.bins[None, :, None] + 0.5 + later / BIN_S
    blocks = paths.timeline.blocks_at(at)
    each = np.broadcast_to(blocks, (len(scale), *blocks.shape[1:]))
    rates = np.take_along_axis(paths.rates, each.reshape(len(scale), -1), axis=1)
    rates = rates.reshape(each.shape)
    left = np.concatenate((np.ones((*rates.shape[:2], 1)), np.cumprod(1 - rates, axis=2)), axis=2)
    deliverable = sample.deliverable[:, :, None]
    steps = deliverable * -np.diff(left, axis=2)
    steps = np.concatenate((np.zeros((*steps.shape[:2], 1)), steps), axis=2)
    # An attempt is made by what is left before it; undeliverable ones make all of them.
    tried = deliverable * left[:, :, :-1] + sample.undeliverable[:, :, None]
    tried = np.concatenate((np.zeros((*tried.shape[:2], 1)), tried), axis=2)

    def by_episode(values: Floats) -> Floats:
        if not len(sample.episodes):
            return np.zeros((len(scale), 0, len(offsets_s)))
        summed: Floats = np.add.reduceat(values, sample.episodes, axis=1)
        return np.cumsum(summed, axis=2)

    return Simulation(
        sample=sample,
        offsets_s=offsets_s,
        delivered=by_episode(steps),
        attempts=by_episode(tried),
        waited_s=by_episode(steps * offsets_s),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bootstrap:
    """Hold replicates of one sample: how often each episode occurs, on which path, and how long.

    The same replicates serve all policies, so two policies are compared in pairs.
    """

    weights: Floats
    paths: Ints
    stretch: Floats

    @classmethod
    def of(cls, sample: Sample, random: np.random.Generator) -> "Bootstrap":
        """Draw the replicates."""
        paths = len(sample.deliverable)
        stretch = np.exp(random.normal(0.0, _STRETCH, paths))
        stretch[: paths // 3] = 1.0
        return cls(
            weights=random.poisson(1.0, (_REPLICATES, len(sample.episodes))).astype(np.float64),
            paths=random.integers(0, paths, _REPLICATES),
            stretch=stretch,
        )

    def replicates(self, sample: Sample, paths: AvailabilityPaths, offsets_s: Floats) -> Floats:
        """Return rows of delivered, attempts and mean wait, one a replicate."""
        simulated = simulate(sample, paths, offsets_s, stretch=self.stretch)
        return simulated.replicates(len(offsets_s) - 1, self.weights, self.paths)


def range_of(replicates: Floats) -> EffectRange:
    """Return the 90 % interval of replicates."""
    low, high = np.percentile(replicates, _INTERVAL, axis=0)
    delivered, attempts, wait = zip(low.tolist(), high.tolist(), strict=True)
    return EffectRange(delivered=delivered, attempts=attempts, mean_wait_s=wait)


def _percentile(values: Floats, weights: Floats, share: float) -> float:
    order = np.argsort(values, kind="stable")
    return weighted_quantile(values[order], np.cumsum(weights[order]), share)


def weighted_quantile(ascending: Floats, summed: Floats, share: float) -> float:
    """Return the first value at which the cumulative weight reaches `share`."""
    if not len(summed) or summed[-1] <= 0:
        return 0.0
    return float(ascending[np.searchsorted(summed, share * summed[-1])])


def pareto_front(effects: Sequence[PolicyEffect]) -> list[int]:
    """Return the indexes of policies that no other one beats in delivery, attempts and wait."""
    values = [(-effect.delivered, effect.attempts, effect.mean_wait_s) for effect in effects]
    kept: list[int] = []
    # Of what delivers no less: attempts ascending, waits descending.
    attempts: list[float] = []
    waits: list[float] = []
    for index in sorted(range(len(values)), key=values.__getitem__):
        if kept and values[index] == values[kept[-1]]:
            kept.append(index)
            continue
        _, tried, waited = values[index]
        place = bisect_right(attempts, tried)
        if place and waits[place - 1] <= waited:
            continue
        kept.append(index)
        last = place
        while last < len(attempts) and waits[last] >= waited:
            last += 1
        attempts[place:last], waits[place:last] = [tried], [waited]
    return sorted(kept)
