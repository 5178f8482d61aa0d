"""Choose a retry policy for a subscription, with the intervals of what it would change.

A policy is recommended only if it is surely no worse than the deployed one: over the whole log,
over its two parts, and in nearly all replicates of its episodes. The back-test chooses on the first
part of the log and measures on the rest.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Final

import numpy as np

from delivery.analytics.findings.availability import (
    AvailabilityPaths,
    GivenUp,
    Timeline,
    sample_availability,
)
from delivery.analytics.findings.policy_simulation import (
    Arrivals,
    Bootstrap,
    EffectRange,
    Policy,
    PolicyEffect,
    Sample,
    Simulation,
    measure_deployed,
    pareto_front,
    range_of,
    sample_of,
    simulate,
)
from delivery.analytics.findings.series import BIN_S, Floats, Ints
from delivery.analytics.findings.success_rates import AttemptSuccessRates

DELIVERY_TOLERANCE: Final = 0.01
ATTEMPTS_TOLERANCE: Final = 0.05
_STANDARD_ERRORS: Final = 2.0
_TRAINING_SHARE: Final = 0.7
"""Share of the log used for the choice that is back-tested."""
_MIN_DELIVERIES: Final = 100
_EQUAL_DELIVERY: Final = 0.001
"""Difference of the delivered share that counts as none when policies are ranked."""
_NO_LOSS: Final = 0.0005
"""Delivered share that a recommended policy may lose in 5 % of the replicates."""
_SAVING: Final = 0.95
"""Cost, as a share of the deployed policy's, from which equal delivery is worth a change."""
_NOT_DEARER: Final = 1.02
_ATTEMPTS_PER_GAIN: Final = 200.0
"""Attempts that one more delivery may cost."""
_SHORT_SPAN_S: Final = 60.0
"""Span of all attempts in which an outage of seconds looks like a refused body."""
_SAME_SPAN: Final = 0.95
"""Span of the deployed policy's attempts that a recommended one must reach."""
_MAX_SPAN_S: Final = 86_400.0
_MAX_TAIL: Final = 0.3
"""Share of the log, at its end, whose deliveries are left out as unfinished."""
_DELAYS_MS: Final = (1_000, 5_000, 15_000, 30_000, 60_000, 300_000)
_MULTIPLIERS: Final = (1.0, 1.5, 2.0, 3.0)
_CAPS_MS: Final = (None, 60_000, 300_000, 1_800_000)
_ATTEMPTS: Final = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 15)
_JITTERS: Final = (0.25, 0.1)
_CANDIDATES: Final = 6
"""Policies of each ranking that are compared by replicates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOption:
    """Hold a policy with its effect over the whole log."""

    policy: Policy
    effect: PolicyEffect


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryAdvice:
    """Advise one subscription, without recommendation unless `reproduced`."""

    key: int
    deliveries: int
    undeliverable_share: float
    deployed: Policy
    measured: PolicyEffect
    simulated: PolicyEffect
    reproduced: bool
    recommended: PolicyOption | None = None
    expected_range: EffectRange | None = None
    """The 90 % intervals of the recommended policy's effect."""
    doubtful_share: float = 0.0
    """Share of deliveries that may be undeliverable, or have met an outage of a few seconds."""
    front: Sequence[PolicyOption] = ()
    backtested: PolicyEffect | None = None
    """Effect, on the later part of the log, of the policy chosen on the earlier part."""
    backtested_deployed: PolicyEffect | None = None
    held_up: bool | None = None
    """True if that policy delivers no less there than the deployed one, and what it promised."""


def advise(
    key: int,
    arrivals: Arrivals,
    success_rates: AttemptSuccessRates,
    *,
    bins: Ints,
    attempts: Ints,
    successes: Ints,
) -> RetryAdvice | None:
    """Return the advice for one subscription, or None if there is too little data.

    `bins`, `attempts` and `successes` count all attempts by bin. The result is the same for the
    same arguments.
    """
    offsets = success_rates.offsets_s()
    deployed = success_rates.deployed_policy()
    first, last = int(bins.min()), int(bins.max()) + 1
    # Of the last deliveries only the quick ones are over.
    tail = min(offsets[-1] / BIN_S + 1, (last - first) * _MAX_TAIL)
    arrivals = arrivals.within(first, math.ceil(last - tail))
    total = int(arrivals.count.sum())
    if total < _MIN_DELIVERIES:
        return None
    # A terminal status ends a delivery under any policy, so it is no evidence on retries.
    at_once = (arrivals.delivered == 0) & (arrivals.tries <= deployed.attempts)
    terminal, retried = arrivals.where(at_once), arrivals.where(~at_once)
    random = np.random.default_rng(abs(key))
    given_up = retried.where(retried.delivered == 0)
    paths = sample_availability(
        Timeline.of_bins(
            bins, attempts, successes, beyond=int(min(_MAX_SPAN_S / BIN_S, last - first))
        ),
        GivenUp(first=given_up.bins, count=given_up.count, offsets=offsets / BIN_S),
        deliveries=int(retried.count.sum()),
        random=random,
    )
    sample = sample_of(retried, terminal, paths)
    if not len(sample.bins):
        return None
    measured = measure_deployed(arrivals, offsets)
    as_deployed = simulate(sample, paths, offsets)
    simulated = as_deployed.effects[deployed.attempts]
    advice = RetryAdvice(
        key=key,
        deliveries=total,
        undeliverable_share=float(
            (sample.undeliverable.sum(axis=1).mean() + sample.terminal) / total
        ),
        deployed=deployed,
        measured=measured,
        simulated=simulated,
        reproduced=_reproduces(simulated, measured, retried),
    )
    if offsets[-1] < _SHORT_SPAN_S and _come_together(retried):
        advice = replace(advice, doubtful_share=advice.undeliverable_share)
    if not advice.reproduced:
        return advice
    grid = _Grid(
        sample=sample,
        paths=paths,
        options=[
            _Option(policy=deployed, simulated=as_deployed, offsets_s=offsets),
            *_options(
                sample,
                paths,
                deployed,
                duration_s=success_rates.retry_duration_s(),
                span_s=(last - first) * BIN_S,
            ),
        ],
    )
    return _with_recommendation(advice, grid, retried, terminal, random)


def _come_together(arrivals: Arrivals) -> bool:
    """Return True if deliveries are given up near others that are, more often than by chance.

    Refused bodies come at random times; outages hit what comes together.
    """
    lost = arrivals.delivered == 0
    first = int(arrivals.bins.min())
    size = int(arrivals.bins.max()) - first + 2
    given_up = np.bincount(arrivals.bins[lost] - first, arrivals.count[lost], minlength=size)
    every = np.bincount(arrivals.bins - first, arrivals.count, minlength=size)
    beside = given_up[:-1] > 0
    share = given_up.sum() / max(every.sum(), 1)
    near = given_up[1:][beside].sum() / max(every[1:][beside].sum(), 1)
    return bool(near > 2 * share)


def _reproduces(simulated: PolicyEffect, measured: PolicyEffect, arrivals: Arrivals) -> bool:
    """Return True if a simulation of the deployed policy gives what was measured.

    It may differ by the tolerances, or by two standard errors where few deliveries were retried.
    """
    total = max(int(arrivals.count.sum()), 1)
    retried = (arrivals.tries > 1) | (arrivals.delivered == 0)
    count, tries = arrivals.count[retried], arrivals.tries[retried]
    failed = max(int(count.sum()), 1)
    lost = float((count * (1 - arrivals.delivered[retried])).sum()) / failed
    mean = float((count * tries).sum()) / failed
    spread = math.sqrt(float((count * (tries - mean) ** 2).sum()) / failed)
    chance = _STANDARD_ERRORS * math.sqrt(failed) / total
    return abs(measured.delivered - simulated.delivered) <= max(
        DELIVERY_TOLERANCE, chance * math.sqrt(lost * (1 - lost))
    ) and abs(measured.attempts - simulated.attempts) <= max(
        ATTEMPTS_TOLERANCE * measured.attempts, chance * spread
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Option:
    """Hold a policy, and the simulation of its shape with at least as many attempts."""

    policy: Policy
    simulated: Simulation
    offsets_s: Floats

    def effect(self) -> PolicyEffect:
        return self.simulated.effects[self.policy.attempts]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Grid:
    """Hold simulated policies over one sample; the first is the deployed one."""

    sample: Sample
    paths: AvailabilityPaths
    options: Sequence[_Option]

    def part(self, sample: Sample, first: int, last: int) -> "_Grid":
        """Return the grid over some episodes."""
        parts = {
            id(simulation): simulation.part(sample, first, last)
            for simulation in (one.simulated for one in self.options)
        }
        options = [replace(one, simulated=parts[id(one.simulated)]) for one in self.options]
        return replace(self, sample=sample, options=options)


def _shapes(deployed: Policy) -> Iterator[Policy]:
    """Yield the waits to try, with the most redeliveries: the deployed ones, and a grid."""
    most = max(_ATTEMPTS)
    if deployed.attempts and deployed.delay_ms >= 1:
        yield replace(
            deployed,
            delay_ms=round(deployed.delay_ms),
            multiplier=max(round(deployed.multiplier, 2), 1.0),
            max_delay_ms=deployed.max_delay_ms and round(deployed.max_delay_ms),
            attempts=most,
        )
    for delay, multiplier, cap in product(_DELAYS_MS, _MULTIPLIERS, _CAPS_MS):
        # A cap changes nothing without growth, or below the first wait.
        if cap is None or (multiplier > 1 and delay < cap):
            yield Policy(
                delay_ms=delay,
                multiplier=multiplier,
                attempts=most,
                max_delay_ms=cap,
                jitter=deployed.jitter,
            )


def _options(
    sample: Sample, paths: AvailabilityPaths, deployed: Policy, *, duration_s: float, span_s: float
) -> Iterator[_Option]:
    for shape in _shapes(deployed):
        offsets = shape.offsets_s() + duration_s * np.arange(shape.attempts + 1)
        offsets = offsets[offsets <= min(_MAX_SPAN_S, span_s)]
        simulated = simulate(sample, paths, offsets)
        for attempts in sorted({*_ATTEMPTS, deployed.attempts}):
            if attempts < len(offsets):
                yield _Option(
                    policy=replace(shape, attempts=attempts),
                    simulated=simulated,
                    offsets_s=offsets[: attempts + 1],
                )


def _with_recommendation(
    advice: RetryAdvice,
    grid: _Grid,
    retried: Arrivals,
    terminal: Arrivals,
    random: np.random.Generator,
) -> RetryAdvice:
    effects = [one.effect() for one in grid.options]
    kept = pareto_front(effects)
    advice = replace(
        advice,
        front=[
            PolicyOption(policy=_explicit(grid.options[index].policy), effect=effects[index])
            for index in kept
        ],
    )
    early, late = _halves(grid, retried, terminal)
    bootstrap = Bootstrap.of(grid.sample, random)
    chosen = _choose(
        effects, kept, _Comparison(grid, bootstrap), parts=[part for part in (early, late) if part]
    )
    if early is not None and late is not None:
        advice = _backtest(advice, early, late, random)
    if chosen is None:
        return advice
    option, effect, replicates = _with_jitter(grid, bootstrap, grid.options[chosen], random)
    return replace(
        advice,
        recommended=PolicyOption(policy=_explicit(option.policy), effect=effect),
        expected_range=_containing(range_of(replicates), effect, advice.doubtful_share),
    )


def _explicit(policy: Policy) -> Policy:
    """Return the policy with a cap, so that it waits the same in a room that has one."""
    if policy.max_delay_ms is not None:
        return policy
    longest = max((policy.waits_s() * 1000).tolist(), default=policy.delay_ms)
    return replace(policy, max_delay_ms=float(math.ceil(longest * (1 + policy.jitter))))


def _containing(found: EffectRange, effect: PolicyEffect, doubtful: float) -> EffectRange:
    """Return the range, widened to the effect itself, and to doubtful deliveries as delivered."""

    def widened(interval: tuple[float, float], value: float) -> tuple[float, float]:
        return min(interval[0], value), max(interval[1], value)

    return EffectRange(
        delivered=widened(
            (found.delivered[0], min(found.delivered[1] + doubtful, 1.0)), effect.delivered
        ),
        attempts=widened(found.attempts, effect.attempts),
        mean_wait_s=widened(found.mean_wait_s, effect.mean_wait_s),
    )


def _halves(
    grid: _Grid, retried: Arrivals, terminal: Arrivals
) -> tuple[_Grid | None, _Grid | None]:
    """Return the grid of the first part of the log and that of the rest; None without episodes."""
    first, last = int(retried.bins.min()), int(retried.bins.max()) + 1
    cut = first + round((last - first) * _TRAINING_SHARE)
    starts = grid.sample.bins[grid.sample.episodes]
    place, every = int(np.searchsorted(starts, cut)), len(starts)
    parts: list[_Grid | None] = []
    for low, high, begin, end in ((0, place, first, cut), (place, every, cut, last)):
        if low == high:
            parts.append(None)
            continue
        some = retried.within(begin, end)
        well = (some.delivered == 1) & (some.tries == 1)
        sample = grid.sample.part(
            low, high, well=int(some.count[well].sum()), terminal=terminal.within(begin, end)
        )
        parts.append(grid.part(sample, low, high))
    return parts[0], parts[1]


def _backtest(
    advice: RetryAdvice, early: _Grid, late: _Grid, random: np.random.Generator
) -> RetryAdvice:
    """Choose on the early part, and compare with the deployed policy on the late one."""
    learnt = [one.effect() for one in early.options]
    bootstrap = Bootstrap.of(early.sample, random)
    comparison = _Comparison(early, bootstrap)
    chosen = _choose(learnt, pareto_front(learnt), comparison, parts=())
    number = 0 if chosen is None else chosen
    promised = range_of(comparison.replicates(number)).delivered
    tested, was = late.options[number].effect(), late.options[0].effect()
    return replace(
        advice,
        backtested=tested,
        backtested_deployed=was,
        held_up=tested.delivered >= was.delivered - _EQUAL_DELIVERY
        and tested.delivered >= min(promised[0], learnt[number].delivered) - _EQUAL_DELIVERY,
    )


class _Comparison:
    """Hold replicates of the policies of a grid, computed when they are asked for."""

    def __init__(self, grid: _Grid, bootstrap: Bootstrap) -> None:
        self._grid = grid
        self._bootstrap = bootstrap
        self._known: dict[int, Floats] = {}

    def replicates(self, number: int) -> Floats:
        """Return rows of delivered, attempts and mean wait, one a replicate."""
        if number not in self._known:
            grid = self._grid
            self._known[number] = self._bootstrap.replicates(
                grid.sample, grid.paths, grid.options[number].offsets_s
            )
        return self._known[number]

    def gives_up_earlier(self, number: int) -> bool:
        """Return True if its last attempt is before the deployed policy's.

        A log without long outages does not show that there will be none.
        """
        last, deployed = (self._grid.options[one].offsets_s[-1] for one in (number, 0))
        return bool(last < deployed * _SAME_SPAN)

    def never_loses(self, number: int) -> bool:
        """Return True if the policy delivers no less in 95 % of the pairs with the deployed one."""
        difference = self.replicates(number)[:, 0] - self.replicates(0)[:, 0]
        return float(np.percentile(difference, 5)) >= -_NO_LOSS


def _choose(
    effects: Sequence[PolicyEffect],
    front: Sequence[int],
    comparison: _Comparison,
    *,
    parts: Sequence[_Grid],
) -> int | None:
    """Return the policy to recommend; None if no other is surely better than the deployed one."""
    base = effects[0]
    for number in _ranked(effects, front):
        if not _is_worthwhile(effects[number], base) or comparison.gives_up_earlier(number):
            continue
        if not comparison.never_loses(number):
            continue
        if all(
            part.options[number].effect().delivered >= part.options[0].effect().delivered - _NO_LOSS
            for part in parts
        ):
            return number
    return None


def _ranked(effects: Sequence[PolicyEffect], front: Sequence[int]) -> Iterator[int]:
    """Yield the policies to consider, best first.

    First those that deliver as much as any, the cheapest first, then those that deliver less, and
    at last those that cost least and deliver no less than the deployed one.
    """
    base = effects[0]
    most = max(effects[index].delivered for index in front)

    def by_cost(some: list[int]) -> list[int]:
        return sorted(some, key=lambda index: _cost(effects[index], base))

    best = [index for index in front if effects[index].delivered >= most - _EQUAL_DELIVERY]
    less = [index for index in front if effects[index].delivered < most - _EQUAL_DELIVERY]
    cheap = [index for index in less if effects[index].delivered >= base.delivered - _NO_LOSS]
    yield from dict.fromkeys(
        [
            *by_cost(best)[:_CANDIDATES],
            *sorted(less, key=lambda index: -effects[index].delivered)[:_CANDIDATES],
            *by_cost(cheap)[:_CANDIDATES],
        ]
    )


def _cost(effect: PolicyEffect, base: PolicyEffect) -> float:
    return effect.attempts / base.attempts + effect.mean_wait_s / max(base.mean_wait_s, 1.0)


def _is_worthwhile(effect: PolicyEffect, base: PolicyEffect) -> bool:
    gain = effect.delivered - base.delivered
    if gain >= _EQUAL_DELIVERY:
        return effect.attempts - base.attempts <= gain * _ATTEMPTS_PER_GAIN
    return (
        gain >= -_NO_LOSS / 2
        and effect.attempts <= base.attempts * _NOT_DEARER
        and effect.mean_wait_s <= base.mean_wait_s * _NOT_DEARER
        and _cost(effect, base) <= _SAVING * _cost(base, base)
    )


def _with_jitter(
    grid: _Grid, bootstrap: Bootstrap, option: _Option, random: np.random.Generator
) -> tuple[_Option, PolicyEffect, Floats]:
    """Return the policy with as much jitter as costs nothing, its effect and its replicates.

    Deliveries that failed together are then not all retried together.
    """
    sample, paths = grid.sample, grid.paths
    effect = option.effect()
    attempts = option.policy.attempts
    waits = option.policy.waits_s()
    cap = np.inf if option.policy.max_delay_ms is None else option.policy.max_delay_ms / 1000
    draws = random.uniform(-1, 1, (len(paths.rates), len(sample.bins), attempts))
    for jitter in _JITTERS:
        if jitter <= option.policy.jitter or not attempts:
            continue
        spread = np.cumsum(np.minimum(waits * (1 + jitter * draws), cap) - waits, axis=2)
        moved = simulate(sample, paths, option.offsets_s, spread=spread).effects[attempts]
        if moved.delivered >= effect.delivered - _NO_LOSS / 2:
            option = replace(option, policy=replace(option.policy, jitter=jitter))
            effect = moved
            break
    return option, effect, bootstrap.replicates(sample, paths, option.offsets_s)
