"""Retry advice: how a subscription's retries should be set, and what that would have changed.

Before anything is advised, the replay must reproduce what the deployed policy did: within a point of delivery and 5 % of
attempts. A choice is made on the first part of the log and back-tested on the rest.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Final

import numpy as np

from delivery.correlation.cells import BIN_S
from delivery.correlation.replay import (
    Arrivals,
    Availability,
    Effect,
    Policy,
    Replay,
    front,
    hopeless_share,
    measured,
    replay,
)
from delivery.correlation.series import Floats, Ints

POINT: Final = 0.01
ATTEMPTS_OFF: Final = 0.05
_LEARNT: Final = 0.7
"""Share of the log from which the choice is made."""
_LEAST: Final = 100
"""Deliveries from which a subscription is advised about."""
_AS_GOOD: Final = 0.001
_LONGEST_S: Final = 86_400.0
_DELAYS_MS: Final = (1_000, 5_000, 15_000, 30_000, 60_000, 300_000)
_MULTIPLIERS: Final = (1.0, 1.5, 2.0, 3.0, 4.0)
_ATTEMPTS: Final = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 15)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hazards:
    """By number of the attempt (0: the first try): how many there were, how many succeeded or were retried, and the waits."""

    attempts: Ints
    successes: Ints
    retries: Ints
    delay_ms: Ints
    latency_us: Ints

    def deployed(self) -> Policy:
        """The policy that the waits tell of."""
        retried = np.flatnonzero(self.retries > 0)
        if not len(retried):
            return Policy(delay_ms=0.0, multiplier=1.0, attempts=0)
        waits = self.delay_ms[retried] / self.retries[retried]
        growth = waits[1] / waits[0] if len(waits) > 1 and waits[0] else 1.0
        return Policy(delay_ms=float(waits[0]), multiplier=round(float(growth), 3), attempts=int(retried[-1]) + 1)

    def offsets_s(self) -> Floats:
        """Seconds from the end of the first try to the end of each, as they were: waits and durations."""
        policy = self.deployed()
        steps = np.arange(1, policy.attempts + 1)
        known = steps < len(self.attempts)
        waits = self.delay_ms[: policy.attempts] / np.maximum(self.retries[: policy.attempts], 1) / 1e3
        took = np.zeros(policy.attempts)
        took[known] = self.latency_us[steps[known]] / np.maximum(self.attempts[steps[known]], 1) / 1e6
        return np.concatenate(([0.0], np.cumsum(waits + took)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A policy of the front with its effect over the whole log."""

    policy: Policy
    effect: Effect


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What was found about one subscription. Without `reproduced` nothing is recommended: the replay does not fit it."""

    key: int
    deliveries: int
    hopeless: float
    deployed: Policy
    measured: Effect
    replayed: Effect
    reproduced: bool
    recommended: Choice | None
    front: Sequence[Choice]
    tested: Effect | None
    """The recommended policy on the later part, chosen without it."""
    tested_deployed: Effect | None
    held_up: bool | None
    """Whether, on the later part, it delivered no less than the deployed one, a point apart."""


def advise(
    key: int, arrivals: Arrivals, hazards: Hazards, *, bins: Ints, attempts: Ints, successes: Ints
) -> Advice | None:
    """The advice for one subscription; None where too little happened."""
    total = int(arrivals.count.sum())
    if total < _LEAST:
        return None
    offsets = hazards.offsets_s()
    deployed = hazards.deployed()
    hopeless, available = hopeless_share(arrivals, bins, attempts, successes, offsets)
    fact, told = measured(arrivals, offsets), replay(arrivals, available, hopeless, offsets)
    fits = (
        abs(fact.delivered - told.delivered) <= POINT
        and abs(fact.attempts - told.attempts) <= ATTEMPTS_OFF * fact.attempts
    )
    advice = Advice(
        key=key, deliveries=total, hopeless=hopeless, deployed=deployed, measured=fact, replayed=told, reproduced=fits,
        recommended=None, front=(), tested=None, tested_deployed=None, held_up=None,
    )  # fmt: skip
    return advice if not fits else _recommended(advice, arrivals, available, offsets)


def _tried(
    replays: Replay, deployed: Policy, offsets: Floats, span_s: float
) -> tuple[list[Policy], list[tuple[Effect, ...]]]:
    """The deployed policy and all others that end in time, and of each its effect on every set of deliveries."""
    # The deployed one is taken as it was, durations and all; of the others only the waits are known.
    policies, effects = [deployed], [tuple(of_set[-1] for of_set in replays.effects(offsets))]
    for delay, multiplier in product(_DELAYS_MS, _MULTIPLIERS):
        waits = Policy(delay_ms=delay, multiplier=multiplier, attempts=max(_ATTEMPTS)).offsets_s()
        in_time = waits[waits <= min(_LONGEST_S, span_s)]
        sets = replays.effects(in_time)
        for attempts in _ATTEMPTS:
            if attempts < len(in_time):
                policies.append(Policy(delay_ms=delay, multiplier=multiplier, attempts=attempts))
                effects.append(tuple(of_set[attempts] for of_set in sets))
    return policies, effects


def _recommended(advice: Advice, arrivals: Arrivals, available: Availability, offsets: Floats) -> Advice:
    first, last = int(arrivals.bins.min()), int(arrivals.bins.max()) + 1
    cut = first + round((last - first) * _LEARNT)
    early, late = arrivals.within(first, cut), arrivals.within(cut, last)
    replays = Replay((arrivals, early, late), available, advice.hopeless)
    policies, tried = _tried(replays, advice.deployed, offsets, (last - first) * BIN_S)
    effects = [whole for whole, *_ in tried]
    kept = front(effects)
    chosen = _choose(effects, kept)
    advice = replace(
        advice,
        recommended=Choice(policy=policies[chosen], effect=effects[chosen]),
        front=[Choice(policy=policies[index], effect=effects[index]) for index in kept],
    )
    if not (len(early.bins) and len(late.bins)):
        return advice
    learnt = [learning for _, learning, _ in tried]
    *_, tested = tried[_choose(learnt, front(learnt))]
    was = measured(late, offsets)
    return replace(advice, tested=tested, tested_deployed=was, held_up=tested.delivered >= was.delivered - POINT)


def _choose(effects: Sequence[Effect], kept: Sequence[int]) -> int:
    """Of those that deliver as much as any (a tenth of a point apart): few attempts and short waits, against the deployed."""
    most = max(effects[index].delivered for index in kept)
    base = effects[0]
    good = [index for index in kept if effects[index].delivered >= most - _AS_GOOD]
    return min(good, key=lambda index: _price(effects[index], base))


def _price(effect: Effect, base: Effect) -> float:
    return effect.attempts / base.attempts + effect.mean_wait_s / max(base.mean_wait_s, 1.0)
