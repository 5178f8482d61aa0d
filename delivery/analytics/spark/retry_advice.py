"""Advise on the retry policy of each subscription, from the log and the journeys.

`policy_choice` decides from counts; this module collects them, and writes the tables.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from delivery.analytics.spark import counts
from delivery.analytics.spark.conformance import CODES
from delivery.analytics.spark.counts import Ints
from delivery.analytics.spark.policy_choice import RetryAdvice, advise
from delivery.analytics.spark.replay import Arrivals, EffectRange, Policy, PolicyEffect
from delivery.analytics.spark.results import Row, int_column
from delivery.analytics.spark.segments import text_key
from delivery.analytics.spark.success_rates import AttemptSuccessRates
from rooms.domain.state_machine import LogKind

MAX_ADVISED: Final = 500
"""Subscriptions with advice, most failures first."""
_BY_ATTEMPT: Final = ("attempts", "successes", "latency_us", "retries", "delay_ms")
_MIN_JITTER: Final = 0.02
"""Spread of the waits, as a share of their mean, below which it is not called jitter."""


def attempt_success_rates(counts: DataFrame) -> DataFrame:
    """Return the success rate by attempt number and the mean wait after it, over all partitions.

    `shortest_ms` and `longest_ms` are of bins with one retry, whose wait is known exactly.
    """
    single = F.when(F.col("retries") == 1, F.col("delay_ms"))
    counted = counts.groupBy("room_id", "sub_key", "attempt").agg(
        *(F.sum(name).alias(name) for name in _BY_ATTEMPT),
        F.min(single).alias("shortest_ms"),
        F.max(single).alias("longest_ms"),
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
    return advise(
        key,
        Arrivals(
            bins=arrivals["bin"],
            tries=arrivals["tries"],
            delivered=arrivals["delivered"],
            count=arrivals["count"],
        ),
        AttemptSuccessRates(**dense, jitter=_jitter(by_number)),
        bins=measured["bin"],
        attempts=measured["attempts"],
        successes=measured["successes"],
    )


def _jitter(by_number: Sequence[Mapping[str, int]]) -> float:
    """Return the spread of the first waits, as a share of their middle, 0 to 1."""
    for row in by_number:
        low, high = row.get("shortest_ms"), row.get("longest_ms")
        if row["attempt"] == 0 and low is not None and high is not None and low + high > 0:
            spread = (high - low) / (high + low)
            return round(spread, 2) if spread >= _MIN_JITTER else 0.0
    return 0.0


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
                **_effect_range(one.expected_range),
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
        f"{prefix}_max_delay_ms": policy and policy.max_delay_ms,
        f"{prefix}_jitter": policy and policy.jitter,
    }


def _effect(prefix: str, effect: PolicyEffect | None) -> Row:
    return {
        f"{prefix}_{name}": None if effect is None else getattr(effect, name)
        for name in ("delivered", "attempts", "mean_wait_s", "p95_wait_s")
    }


def _effect_range(found: EffectRange | None) -> Row:
    return {
        f"recommended_{name}_{end}": None if found is None else getattr(found, name)[place]
        for name in ("delivered", "attempts", "mean_wait_s")
        for place, end in enumerate(("low", "high"))
    }
