"""Estimate when an endpoint was available, and which deliveries no attempt can deliver.

An endpoint is at one of a few levels of success, and changes its level from time to time. Paths of
levels are drawn from their posterior distribution (Gibbs sampling over a hidden Markov model), so
that a lone failed attempt is not taken for an outage as long as the gap around it, nor a lone
success for an available hour. Every path also draws which of the deliveries that were given up
are undeliverable: those whose attempts failed while the endpoint was available. Their attempts say
nothing about the endpoint.

Half of the chains begin with every given-up delivery as undeliverable, and half with none. Where
the log decides, they agree; where it does not, the paths differ, and so does what they promise.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from delivery.analytics.findings.series import Floats, Ints

CHAINS: Final = 8
_SWEEPS: Final = 7
_SELECTIONS: Final = frozenset({2, 4, 5})
"""Sweeps after which chains in unlikely states continue from likelier ones."""
_TEMPER: Final = 5.0
"""Log-likelihood that a chain may lack; more makes it ever less likely to be kept."""
_LEVELS: Final = np.array(
    [0.001, 0.03, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.88, 0.94, 0.97, 0.99, 0.999]
)
_LOG_SUCCESS: Final = np.log(_LEVELS)
_LOG_FAILURE: Final = np.log1p(-_LEVELS)
_MAX_BLOCKS: Final = 1200
_MAX_MERGED: Final = 64
"""Bins in a block at most."""
_BRIDGED_BINS: Final = 40
"""Bins without attempts between two clean ones that count as clean, 10 minutes."""
_MIN_MERGED: Final = 5
"""Attempts in both of two bins with failures that are merged."""
_SAME_RATE: Final = 1.0
"""Log-likelihood ratio up to which two bins have the same success rate."""
_JUMP_PRIOR: Final = {True: (1.0, 2000.0), False: (2.0, 80.0)}
"""Changes and bins, at the usual level and at others: 8 hours and 10 minutes."""
_TARGET_PRIOR: Final = 0.3
_UNDELIVERABLE_PRIORS: Final = ((1.0, 1.0), (0.5, 30.0))
"""Of the two halves of the chains."""
Indexes = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUp:
    """Hold deliveries that were given up after all attempts: first bins, and numbers.

    `offsets`: bins from the first attempt to each one. There is no table of groups and attempts:
    it would be gigabytes for an endpoint that was away for a month.
    """

    first: Ints
    count: Ints
    offsets: Floats

    def attempt_bins(self) -> Iterator[Ints]:
        """Yield the bins of the first attempts, of the second ones, and so on."""
        for offset in self.offsets.tolist():
            yield np.floor(self.first + 0.5 + offset).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Merge bins to blocks of one success rate each; `block_of` counts from the bin `first`."""

    first: int
    block_of: Indexes
    lengths: Floats
    attempts: Floats
    successes: Floats

    @classmethod
    def of_bins(cls, bins: Ints, attempts: Ints, successes: Ints, *, beyond: int) -> "Timeline":
        """Merge the bins from the first to `beyond` bins after the last."""
        first = int(bins.min())
        size = int(bins.max()) - first + 1 + beyond
        tried = _summed(bins - first, attempts, size)
        well = _summed(bins - first, successes, size)
        width = 1
        while True:
            starts = _block_starts(tried, well, max_merged=max(_MAX_MERGED, width))
            if starts.sum() <= _MAX_BLOCKS or width >= size:
                break
            # Noise in every bin of a long log: a coarser timeline has fewer blocks.
            width *= 2
            tried, well = _pairs(tried), _pairs(well)
        block = np.cumsum(starts) - 1
        return cls(
            first=first,
            block_of=np.repeat(block, width)[:size],
            lengths=np.bincount(block).astype(np.float64) * width,
            attempts=_summed(block, tried, 0),
            successes=_summed(block, well, 0),
        )

    def blocks_at(self, bins: npt.NDArray[Any]) -> Indexes:
        """Return the blocks of bins; those outside belong to the first and the last."""
        places = np.clip(np.floor(bins).astype(np.intp) - self.first, 0, len(self.block_of) - 1)
        found: Indexes = self.block_of[places]
        return found


def _summed(places: Indexes | Ints, values: Floats | Ints, size: int) -> Floats:
    """Return the sum of the values at each place, for at least `size` places."""
    found: Floats = np.bincount(places, values, minlength=size).astype(np.float64)
    return found


def _pairs(values: Floats) -> Floats:
    padded = np.append(values, 0.0) if len(values) % 2 else values
    summed: Floats = padded.reshape(-1, 2).sum(axis=1)
    return summed


def _block_starts(tried: Floats, well: Floats, *, max_merged: int) -> npt.NDArray[np.bool_]:
    """Return a mask of the bins that begin a block, by merging aligned pairs as long as they fit.

    Bins merge that have no attempts, or no failures, or the same rate of them.
    """
    size = len(tried)
    failed = tried - well
    clean = _bridge(tried, failed)
    starts = np.ones(size, dtype=bool)
    whole = np.ones(size, dtype=bool)
    step = 1
    while step < max_merged and len(tried) > 1:
        if len(tried) % 2:
            tried, failed = np.append(tried, 0.0), np.append(failed, 0.0)
            clean, whole = np.append(clean, False), np.append(whole, False)
        left, right = slice(0, None, 2), slice(1, None, 2)
        n, f = (tried[left], tried[right]), (failed[left], failed[right])
        empty = (n[0] == 0) & (n[1] == 0) & ~clean[left] & ~clean[right]
        busy = (np.minimum(*n) >= _MIN_MERGED) & (_rate_ratio(n, f) < _SAME_RATE)
        merged = whole[left] & whole[right] & ((clean[left] & clean[right]) | empty | busy)
        places = (np.flatnonzero(merged) * 2 + 1) * step
        starts[places[places < size]] = False
        tried, failed = n[0] + n[1], f[0] + f[1]
        clean, whole, step = clean[left] & clean[right], merged, step * 2
    return starts


def _bridge(tried: Floats, failed: Floats) -> npt.NDArray[np.bool_]:
    """Return a mask of bins without failures, and of short gaps between them."""
    known = np.flatnonzero(tried > 0)
    clean: npt.NDArray[np.bool_] = (tried > 0) & (failed == 0)
    if len(known) > 1:
        short = np.diff(known) <= _BRIDGED_BINS
        both = clean[known[:-1]] & clean[known[1:]] & short
        change = np.zeros(len(tried) + 1)
        change[known[:-1][both]] += 1
        change[known[1:][both]] -= 1
        clean = clean | (np.cumsum(change[:-1]) > 0)
    return clean


def _rate_ratio(n: Sequence[Floats], f: Sequence[Floats]) -> Floats:
    """Return the log-likelihood ratio of two rates against one."""

    def fit(tries: Floats, failures: Floats) -> Floats:
        share = np.clip(failures / np.maximum(tries, 1), 1e-9, 1 - 1e-9)
        found: Floats = failures * np.log(share) + (tries - failures) * np.log1p(-share)
        return found

    return fit(n[0], f[0]) + fit(n[1], f[1]) - fit(n[0] + n[1], f[0] + f[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class AvailabilityPaths:
    """Hold paths of one endpoint's success rate by block, and undeliverable deliveries by group."""

    timeline: Timeline
    rates: Floats
    """A row a path, a column a block."""
    undeliverable: Ints
    """A row a path, a column a group of given-up deliveries."""


def sample_availability(
    timeline: Timeline,
    given_up: GivenUp,
    *,
    deliveries: int,
    random: np.random.Generator,
) -> AvailabilityPaths:
    """Draw paths of the availability. `deliveries`: those made, whatever became of them."""
    chains = _Chains(timeline, given_up, deliveries, random)
    for number in range(1, _SWEEPS + 1):
        chains.sweep()
        if number in _SELECTIONS:
            chains.select()
    return AvailabilityPaths(
        timeline=timeline, rates=_LEVELS[chains.levels].T, undeliverable=chains.undeliverable
    )


def _log_factorial(numbers: Ints) -> Floats:
    logs = np.concatenate(([0.0], np.cumsum(np.log(np.arange(1, numbers.max(initial=0) + 1)))))
    found: Floats = logs[numbers]
    return found


class _Chains:
    """Hold the state of all chains: levels by block, undeliverable deliveries, and parameters."""

    def __init__(
        self, timeline: Timeline, given_up: GivenUp, deliveries: int, random: np.random.Generator
    ) -> None:
        self._time = timeline
        self._given_up = given_up
        self._deliveries = deliveries
        self._random = random
        self._gaps = np.maximum((timeline.lengths[:-1] + timeline.lengths[1:]) / 2, 1.0)
        first_half = np.arange(CHAINS) < CHAINS // 2
        priors = np.array(_UNDELIVERABLE_PRIORS)[np.where(first_half, 0, 1)]
        self._prior = priors
        total = max(int(given_up.count.sum()), 0)
        self._share = np.where(first_half, np.clip(total / max(deliveries, 1), 1e-4, 0.98), 1e-4)
        self.undeliverable: Ints = np.where(first_half[:, None], given_up.count, 0).astype(np.int64)
        usual = int(np.argmin(np.abs(_LEVELS - self._overall_rate())))
        self._leave = np.full((CHAINS, len(_LEVELS)), 1 / 40.0)
        self._leave[:, usual] = 1 / 2000
        self._target = np.full((CHAINS, len(_LEVELS)), 1 / len(_LEVELS))
        self.levels: Indexes = np.full((len(timeline.lengths), CHAINS), usual, dtype=np.intp)
        self._fresh_start = True
        self._fit: Floats = np.zeros(CHAINS)

    def _attempt_blocks(self) -> Iterator[Indexes]:
        """Yield the blocks of each attempt of the given-up deliveries."""
        return map(self._time.blocks_at, self._given_up.attempt_bins())

    def _overall_rate(self) -> float:
        theirs = float(self._given_up.count.sum()) * len(self._given_up.offsets)
        tried = max(float(self._time.attempts.sum()) - theirs, 1.0)
        well = float(self._time.successes.sum())
        return float(well / tried)

    def sweep(self) -> None:
        """Draw every unknown in turn, given the others."""
        fixed = self._undeliverable_log_likelihood()
        self.levels, fit = self._draw_levels(self._evidence())
        self._fit = fit + fixed
        self._draw_undeliverable()
        self._draw_rates_of_change()

    def select(self) -> None:
        """Continue from chains in likely states, as a chain rarely leaves an unlikely one."""
        weights = np.exp((self._fit - self._fit.max()) / _TEMPER)
        spots = (np.arange(CHAINS) + self._random.random()) / CHAINS
        kept = np.searchsorted(np.cumsum(weights) / weights.sum(), spots)
        self.levels = self.levels[:, kept]
        self.undeliverable = self.undeliverable[kept]
        self._share, self._prior = self._share[kept], self._prior[kept]
        self._leave, self._target = self._leave[kept], self._target[kept]

    def _undeliverable_log_likelihood(self) -> Floats:
        """Return, by chain, the log-probability of its number of undeliverable deliveries."""
        found = self.undeliverable.sum(axis=1)
        counts = self._given_up.count
        ways = (
            _log_factorial(counts)
            - _log_factorial(self.undeliverable)
            - _log_factorial(counts - self.undeliverable)
        ).sum(axis=1)
        deliverable = max(self._deliveries, 1) - found
        own: Floats = ways + found * np.log(self._share) + deliverable * np.log1p(-self._share)
        return own

    def _evidence(self) -> Floats:
        """Return the log-likelihood of each level by block and chain."""
        count = len(self._time.lengths)
        failed = self._time.attempts - self._time.successes
        theirs = np.zeros((count, CHAINS))
        for blocks in self._attempt_blocks():
            for chain in range(CHAINS):
                theirs[:, chain] += np.bincount(blocks, self.undeliverable[chain], minlength=count)
        left = np.maximum(failed[:, None] - theirs, 0.0)
        if self._fresh_start:
            left = self._first_evidence(left)
            self._fresh_start = False
        well = self._time.successes[:, None, None]
        found: Floats = well * _LOG_SUCCESS + left[:, :, None] * _LOG_FAILURE
        return found

    def _first_evidence(self, left: Floats) -> Floats:
        """Add the failed first attempts that undeliverable deliveries do not explain.

        Otherwise the chains that begin with every given-up delivery as undeliverable would never
        see an outage that outlasts all attempts.
        """
        half = CHAINS // 2
        failed = self._time.attempts - self._time.successes
        firsts = np.bincount(
            self._time.blocks_at(self._given_up.first),
            self._given_up.count,
            minlength=len(failed),
        )
        well = self._time.successes + 1.0
        expected = well * (self._share[0] / (1 - self._share[0]))
        surplus = np.maximum(firsts - expected - 2 * np.sqrt(expected), 0.0)
        left[:, :half] += surplus[:, None]
        return left

    def _draw_levels(self, evidence: Floats) -> tuple[Indexes, Floats]:
        """Draw paths by forward filtering and backward sampling.

        Return them with the log-likelihood of the attempts, by chain.
        """
        blocks = len(evidence)
        best = evidence.max(axis=2, keepdims=True)
        likelihood = np.exp(evidence - best)
        gaps, which = np.unique(self._gaps, return_inverse=True)
        changes = [self._transitions(gap) for gap in gaps.tolist()]
        steps = which.tolist()
        filtered = np.empty_like(likelihood)
        norms = np.empty((blocks, CHAINS, 1))
        now = self._target * likelihood[0]
        norms[0] = now.sum(axis=1, keepdims=True)
        now /= norms[0]
        filtered[0] = now
        for block in range(1, blocks):
            now = np.matmul(now[:, None, :], changes[steps[block - 1]])[:, 0]
            now *= likelihood[block]
            norm = np.add.reduce(now, axis=1, keepdims=True)
            now /= norm
            norms[block], filtered[block] = norm, now
        every = np.arange(CHAINS)
        draws = self._random.random((blocks, CHAINS, 1))
        drawn = np.empty((blocks, CHAINS), dtype=np.intp)
        after = np.minimum((now.cumsum(axis=1) < draws[-1]).sum(axis=1), len(_LEVELS) - 1)
        drawn[-1] = after
        for block in range(blocks - 2, -1, -1):
            weights = filtered[block] * changes[steps[block]][every, :, after]
            summed = np.add.accumulate(weights, axis=1)
            after = np.add.reduce(summed < draws[block] * summed[:, -1:], axis=1)
            drawn[block] = after
        return drawn, (np.log(norms) + best).sum(axis=(0, 2))

    def _transitions(self, gap: float) -> Floats:
        """Return the probabilities of each level after so many bins, by chain and level.

        A change leads to another level, never to the same.
        """
        stays = np.exp(gap * np.log1p(-self._leave))
        leaves = (1 - stays) / np.maximum(1 - self._target, 1e-9)
        found: Floats = leaves[:, :, None] * self._target[:, None, :]
        same = np.arange(len(_LEVELS))
        found[:, same, same] = stays
        return found

    def _draw_undeliverable(self) -> None:
        """Draw how many deliveries of each group no attempt would deliver."""
        groups = self._given_up
        if len(groups.count):
            unlucky = np.zeros((len(groups.count), CHAINS))
            for blocks in self._attempt_blocks():
                unlucky += _LOG_FAILURE[self.levels[blocks]]
            odds = np.log(self._share / (1 - self._share))[:, None] - unlucky.T
            chance = 1 / (1 + np.exp(-np.clip(odds, -50, 50)))
            self.undeliverable = self._random.binomial(groups.count, chance)
        found = self.undeliverable.sum(axis=1)
        share = self._random.beta(
            self._prior[:, 0] + found, self._prior[:, 1] + max(self._deliveries, 1) - found
        )
        self._share = np.clip(share, 1e-6, 1 - 1e-6)

    def _draw_rates_of_change(self) -> None:
        """Draw how long levels last, and which follow."""
        lengths, levels = self._time.lengths, self.levels
        count = len(_LEVELS)
        for chain in range(CHAINS):
            own = levels[:, chain]
            occupied = np.bincount(own, lengths, minlength=count)
            usual = int(occupied.argmax())
            changed = own[1:] != own[:-1]
            left = np.bincount(own[:-1][changed], minlength=count)
            reached = np.bincount(own[1:][changed], minlength=count)
            for of_usual in (True, False):
                mask = (np.arange(count) == usual) == of_usual
                changes, bins = _JUMP_PRIOR[of_usual]
                rate = self._random.gamma(
                    changes + left[mask].sum(), 1 / (bins + occupied[mask].sum())
                )
                self._leave[chain, mask] = np.clip(rate, 1e-6, 0.5)
            self._target[chain] = self._random.dirichlet(_TARGET_PRIOR + reached)
