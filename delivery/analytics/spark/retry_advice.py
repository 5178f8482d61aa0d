"""Recommend a retry policy for each subscription, and estimate its effect.

The replay must first reproduce the deployed policy, within a percentage point of delivery and 5 %
of attempts. A policy is chosen on the first part of the log and back-tested on the rest.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any, Final

import numpy as np
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from delivery.analytics.spark import counts
from delivery.analytics.spark.conformance import CODES
from delivery.analytics.spark.counts import BIN_S, Floats, Ints
from delivery.analytics.spark.replay import (
    Arrivals,
    Availability,
    Policy,
    PolicyEffect,
    PolicyReplay,
    estimate_undeliverable,
    measure_deployed,
    pareto_front,
    replay_policy,
)
from delivery.analytics.spark.results import Row, int_column
from delivery.analytics.spark.segments import text_key
from rooms.domain.state_machine import LogKind

DELIVERY_TOLERANCE: Final = 0.01
ATTEMPTS_TOLERANCE: Final = 0.05
_TRAINING_SHARE: Final = 0.7
"""Share of the log used for the choice."""
_MIN_DELIVERIES: Final = 100
"""Deliveries required for advice on a subscription."""
_EQUAL_DELIVERY: Final = 0.001
_MAX_SPAN_S: Final = 86_400.0
_DELAYS_MS: Final = (1_000, 5_000, 15_000, 30_000, 60_000, 300_000)
_MULTIPLIERS: Final = (1.0, 1.5, 2.0, 3.0, 4.0)
_ATTEMPTS: Final = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 15)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptSuccessRates:
    """Attempts, successes, retries and waits by attempt number (0: the first attempt)."""

    attempts: Ints
    successes: Ints
    retries: Ints
    delay_ms: Ints
    latency_us: Ints

    def deployed_policy(self) -> Policy:
        """Return the policy that the measured waits indicate."""
        retried = np.flatnonzero(self.retries > 0)
        if not len(retried):
            return Policy(delay_ms=0.0, multiplier=1.0, attempts=0)
        waits = self.delay_ms[retried] / self.retries[retried]
        growth = waits[1] / waits[0] if len(waits) > 1 and waits[0] else 1.0
        return Policy(
            delay_ms=float(waits[0]),
            multiplier=round(float(growth), 3),
            attempts=int(retried[-1]) + 1,
        )

    def offsets_s(self) -> Floats:
        """Return seconds from the end of the first attempt to the end of each, with durations."""
        policy = self.deployed_policy()
        steps = np.arange(1, policy.attempts + 1)
        known = steps < len(self.attempts)
        waits = (
            self.delay_ms[: policy.attempts] / np.maximum(self.retries[: policy.attempts], 1) / 1e3
        )
        took = np.zeros(policy.attempts)
        took[known] = (
            self.latency_us[steps[known]] / np.maximum(self.attempts[steps[known]], 1) / 1e6
        )
        return np.concatenate(([0.0], np.cumsum(waits + took)))


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOption:
    """A policy of the Pareto front with its effect over the whole log."""

    policy: Policy
    effect: PolicyEffect


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryAdvice:
    """Advice for one subscription, without recommendation unless `reproduced`."""

    key: int
    deliveries: int
    undeliverable_share: float
    deployed: Policy
    measured: PolicyEffect
    replayed: PolicyEffect
    reproduced: bool
    recommended: PolicyOption | None
    front: Sequence[PolicyOption]
    backtested: PolicyEffect | None
    """Effect of the recommended policy on the later part of the log."""
    backtested_deployed: PolicyEffect | None
    held_up: bool | None
    """True if it delivers no less than the deployed policy there, within a percentage point."""


def advise(
    key: int,
    arrivals: Arrivals,
    success_rates: AttemptSuccessRates,
    *,
    bins: Ints,
    attempts: Ints,
    successes: Ints,
) -> RetryAdvice | None:
    """Return the advice for one subscription, or None if there is too little data."""
    total = int(arrivals.count.sum())
    if total < _MIN_DELIVERIES:
        return None
    offsets = success_rates.offsets_s()
    deployed = success_rates.deployed_policy()
    hopeless, available = estimate_undeliverable(arrivals, bins, attempts, successes, offsets)
    measured, replayed = (
        measure_deployed(arrivals, offsets),
        replay_policy(arrivals, available, hopeless, offsets),
    )
    fits = (
        abs(measured.delivered - replayed.delivered) <= DELIVERY_TOLERANCE
        and abs(measured.attempts - replayed.attempts) <= ATTEMPTS_TOLERANCE * measured.attempts
    )
    advice = RetryAdvice(
        key=key, deliveries=total, undeliverable_share=hopeless,
        deployed=deployed, measured=measured,
        replayed=replayed, reproduced=fits,
        recommended=None, front=(), backtested=None, backtested_deployed=None, held_up=None,
    )  # fmt: skip
    return advice if not fits else _with_recommendation(advice, arrivals, available, offsets)


def _evaluate_policies(
    replays: PolicyReplay, deployed: Policy, offsets: Floats, span_s: float
) -> tuple[list[Policy], list[tuple[PolicyEffect, ...]]]:
    """Return the policies that end in time, with their effect on every set of deliveries."""
    # The deployed policy includes durations; of the others only the waits are known.
    policies, effects = [deployed], [tuple(of_set[-1] for of_set in replays.effects(offsets))]
    for delay, multiplier in product(_DELAYS_MS, _MULTIPLIERS):
        waits = Policy(delay_ms=delay, multiplier=multiplier, attempts=max(_ATTEMPTS)).offsets_s()
        in_time = waits[waits <= min(_MAX_SPAN_S, span_s)]
        sets = replays.effects(in_time)
        for attempts in _ATTEMPTS:
            if attempts < len(in_time):
                policies.append(Policy(delay_ms=delay, multiplier=multiplier, attempts=attempts))
                effects.append(tuple(of_set[attempts] for of_set in sets))
    return policies, effects


def _with_recommendation(
    advice: RetryAdvice, arrivals: Arrivals, available: Availability, offsets: Floats
) -> RetryAdvice:
    first, last = int(arrivals.bins.min()), int(arrivals.bins.max()) + 1
    cut = first + round((last - first) * _TRAINING_SHARE)
    early, late = arrivals.within(first, cut), arrivals.within(cut, last)
    replays = PolicyReplay((arrivals, early, late), available, advice.undeliverable_share)
    policies, tried = _evaluate_policies(replays, advice.deployed, offsets, (last - first) * BIN_S)
    effects = [whole for whole, *_ in tried]
    kept = pareto_front(effects)
    chosen = _best_index(effects, kept)
    advice = replace(
        advice,
        recommended=PolicyOption(policy=policies[chosen], effect=effects[chosen]),
        front=[PolicyOption(policy=policies[index], effect=effects[index]) for index in kept],
    )
    if not (len(early.bins) and len(late.bins)):
        return advice
    learnt = [learning for _, learning, _ in tried]
    *_, tested = tried[_best_index(learnt, pareto_front(learnt))]
    was = measure_deployed(late, offsets)
    return replace(
        advice,
        backtested=tested,
        backtested_deployed=was,
        held_up=tested.delivered >= was.delivered - DELIVERY_TOLERANCE,
    )


def _best_index(effects: Sequence[PolicyEffect], front: Sequence[int]) -> int:
    """Return the policy with few attempts and short waits among those that deliver most."""
    most = max(effects[index].delivered for index in front)
    base = effects[0]
    good = [index for index in front if effects[index].delivered >= most - _EQUAL_DELIVERY]
    return min(good, key=lambda index: _cost(effects[index], base))


def _cost(effect: PolicyEffect, base: PolicyEffect) -> float:
    return effect.attempts / base.attempts + effect.mean_wait_s / max(base.mean_wait_s, 1.0)


MAX_ADVISED: Final = 500
"""Subscriptions with advice, most failures first."""
_BY_ATTEMPT: Final = ("attempts", "successes", "latency_us", "retries", "delay_ms")


def attempt_success_rates(counts: DataFrame) -> DataFrame:
    """Return the success rate by attempt number and the mean wait after it, over all partitions."""
    counted = counts.groupBy("room_id", "sub_key", "attempt").agg(
        *(F.sum(name).alias(name) for name in _BY_ATTEMPT)
    )
    return counted.withColumns(
        {
            "hazard": F.try_divide("successes", "attempts"),
            "mean_delay_ms": F.try_divide(F.col("delay_ms").cast("double"), F.col("retries")),
        }
    )


def arrival_counts(journeys: DataFrame) -> DataFrame:
    """Return (sub_key, bin, tries, delivered, count) of finished PUSH deliveries by first attempt.

    A sidelined delivery counts as failed, also after a shovel.
    """
    aside = F.col("kinds").bitwiseAND(1 << CODES[LogKind.SIDELINED]) != 0
    done = (F.col("outcome") == "delivered") | aside
    first = F.floor(F.col("first_attempt_us") / F.lit(counts.BIN_S * 1_000_000)).alias("bin")
    delivered = F.when(aside, 0).otherwise(1).alias("delivered")
    ended = journeys.where(done & F.col("first_attempt_us").isNotNull())
    # There are nearly as many groups as deliveries, and numbers are lighter than texts.
    by_bin = ended.groupBy(
        text_key("subscription_id").alias("sub_key"),
        first,
        F.col("attempts").alias("tries"),
        delivered,
    )
    return by_bin.agg(F.count(F.lit(1)).alias("count"))


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvisedSubscriptions:
    """Subscriptions with advice, and their attempts by number and by bin."""

    by_number: Mapping[int, Sequence[Mapping[str, int]]]
    by_bin: Mapping[int, Mapping[str, Ints]]

    @classmethod
    def from_success_rates(
        cls, success_rates: Iterable[Mapping[str, int]], cells: DataFrame
    ) -> "AdvisedSubscriptions":
        """Build from rows of `attempt_success_rates`, and collect attempts by bin."""
        numbered: dict[int, list[Mapping[str, int]]] = {}
        for row in success_rates:
            numbered.setdefault(row["sub_key"], []).append(row)
        failures = {
            key: sum(row["attempts"] - row["successes"] for row in rows)
            for key, rows in numbered.items()
        }
        most = sorted(
            (key for key, count in failures.items() if count > 0),
            key=lambda key: (-failures[key], key),
        )
        chosen = sorted(most[:MAX_ADVISED])
        if not chosen:
            return cls(by_number={}, by_bin={})
        bins = counts.attempts_by_bin(cells.where(F.col("sub_key").isin(chosen)))
        return cls(
            by_number={key: numbered[key] for key in chosen},
            by_bin=_group_arrays(bins, "sub_key", "bin"),
        )


def advise_all(
    journeys: DataFrame, subscriptions: AdvisedSubscriptions, names: Mapping[int, str]
) -> Iterator[RetryAdvice]:
    """Yield the advice for every subscription with failures and enough deliveries."""
    keys = sorted(subscriptions.by_number)
    if not keys:
        return
    some = journeys.where(F.col("subscription_id").isin([names[one] for one in keys]))
    arrival_rows = _group_arrays(arrival_counts(some), "sub_key", "bin", "tries", "delivered")
    for one in keys:
        came = arrival_rows.get(one)
        if came is None:
            continue
        advised = _advise(one, came, subscriptions.by_bin[one], subscriptions.by_number[one])
        if advised is not None:
            yield advised


def _advise(
    key: int,
    arrivals: Mapping[str, Ints],
    measured: Mapping[str, Ints],
    by_number: Sequence[Mapping[str, int]],
) -> RetryAdvice | None:
    last = max(one["attempt"] for one in by_number)
    dense = {name: np.zeros(last + 1, dtype=np.int64) for name in _BY_ATTEMPT}
    for one in by_number:
        for name, values in dense.items():
            values[one["attempt"]] = one[name]
    found = AttemptSuccessRates(**dense)
    # A terminal status ends a delivery under any policy, so it is no evidence on retries.
    to_the_end = (arrivals["delivered"] == 1) | (
        arrivals["tries"] > found.deployed_policy().attempts
    )
    some = Arrivals(
        bins=arrivals["bin"][to_the_end],
        tries=np.minimum(arrivals["tries"], found.deployed_policy().attempts + 1)[to_the_end],
        delivered=arrivals["delivered"][to_the_end],
        count=arrivals["count"][to_the_end],
    )
    return advise(
        key,
        some,
        found,
        bins=measured["bin"],
        attempts=measured["attempts"],
        successes=measured["successes"],
    )


def _group_arrays(rows: DataFrame, key: str, *order: str) -> dict[Any, dict[str, Ints]]:
    """Return the rows as arrays by the value of one column."""
    table = rows.toArrow()
    keys = table.column(key).combine_chunks().dictionary_encode()
    numbers = keys.indices.to_numpy()
    columns = {name: int_column(table, name) for name in table.column_names if name != key}
    sorted_by = np.lexsort((*(columns[name] for name in reversed(order)), numbers))
    columns = {name: column[sorted_by] for name, column in columns.items()}
    cuts = np.searchsorted(numbers[sorted_by], np.arange(len(keys.dictionary) + 1)).tolist()
    return {
        value: {name: column[begin:end] for name, column in columns.items()}
        for value, (begin, end) in zip(keys.dictionary.to_pylist(), pairwise(cuts), strict=True)
    }


def advice_rows(
    found: Iterable[RetryAdvice], names: Mapping[int, str]
) -> tuple[list[Row], list[Row]]:
    """Return the rows of `advice` and of `advice_front`."""
    rows: list[Row] = []
    fronts: list[Row] = []
    for one in found:
        chosen = one.recommended
        rows.append(
            {
                "subscription_id": names[one.key],
                "deliveries": one.deliveries,
                "hopeless": one.undeliverable_share,
                **_policy("deployed", one.deployed),
                **_effect("measured", one.measured),
                **_effect("replayed", one.replayed),
                "reproduced": one.reproduced,
                **_policy("recommended", None if chosen is None else chosen.policy),
                **_effect("recommended", None if chosen is None else chosen.effect),
                **_effect("tested", one.backtested),
                **_effect("tested_deployed", one.backtested_deployed),
                "held_up": one.held_up,
            }
        )
        fronts += [
            {
                "subscription_id": names[one.key],
                **_policy("policy", choice.policy),
                **_effect("expected", choice.effect),
            }
            for choice in one.front
        ]
    return rows, fronts


def _policy(prefix: str, policy: Policy | None) -> Row:
    return {
        f"{prefix}_delay_ms": policy and policy.delay_ms,
        f"{prefix}_multiplier": policy and policy.multiplier,
        f"{prefix}_redeliveries": policy and policy.attempts,
    }


def _effect(prefix: str, effect: PolicyEffect | None) -> Row:
    return {
        f"{prefix}_{name}": None if effect is None else getattr(effect, name)
        for name in ("delivered", "attempts", "mean_wait_s", "p95_wait_s")
    }
