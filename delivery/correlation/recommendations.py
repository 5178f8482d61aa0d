"""Recommendations: the advice for each subscription, from its cells and journeys."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from delivery.correlation import advice, cells
from delivery.correlation.advice import Advice, Hazards
from delivery.correlation.conformance import CODES
from delivery.correlation.findings import Row, ints
from delivery.correlation.replay import Arrivals, Effect, Policy
from delivery.correlation.segments import key
from delivery.correlation.series import Ints
from rooms.domain.states import LogKind

ADVISED: Final = 500
"""Subscriptions that are advised about, those with most failures first."""
_BY_ATTEMPT: Final = ("attempts", "successes", "latency_us", "retries", "delay_ms")


def by_attempt(cells_of_parts: DataFrame) -> DataFrame:
    """Hazards over all partitions: of each number of attempt the share that succeeded, and the mean wait after it."""
    counted = cells_of_parts.groupBy("room_id", "sub_key", "attempt").agg(
        *(F.sum(name).alias(name) for name in _BY_ATTEMPT)
    )
    return counted.withColumns(
        {
            "hazard": F.try_divide("successes", "attempts"),
            "mean_delay_ms": F.try_divide(F.col("delay_ms").cast("double"), F.col("retries")),
        }
    )


def arrivals(journeys: DataFrame) -> DataFrame:
    """(sub_key, bin, tries, delivered, count): push deliveries that came to an end, by the bin of their first attempt.

    What was put aside gave up there, whatever became of it after a shovel.
    """
    aside = F.col("kinds").bitwiseAND(1 << CODES[LogKind.SIDELINED]) != 0
    done = (F.col("outcome") == "delivered") | aside
    first = F.floor(F.col("first_attempt_us") / F.lit(cells.BIN_S * 1_000_000)).alias("bin")
    delivered = F.when(aside, 0).otherwise(1).alias("delivered")
    ended = journeys.where(done & F.col("first_attempt_us").isNotNull())
    # There are nearly as many groups as deliveries: the subscription's number makes them lighter than its text.
    by_bin = ended.groupBy(key("subscription_id").alias("sub_key"), first, F.col("attempts").alias("tries"), delivered)
    return by_bin.agg(F.count(F.lit(1)).alias("count"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Failing:
    """The subscriptions that are advised about: of each its attempts by number, and its attempts by bin."""

    by_number: Mapping[int, Sequence[Mapping[str, int]]]
    by_bin: Mapping[int, Mapping[str, Ints]]

    @classmethod
    def of(cls, hazards: Iterable[Mapping[str, int]], cells_of_parts: DataFrame) -> "Failing":
        """From the rows of `by_attempt`; those by bin are collected from the cells."""
        numbered: dict[int, list[Mapping[str, int]]] = {}
        for row in hazards:
            numbered.setdefault(row["sub_key"], []).append(row)
        failures = {key: sum(row["attempts"] - row["successes"] for row in rows) for key, rows in numbered.items()}
        most = sorted((key for key, count in failures.items() if count > 0), key=lambda key: (-failures[key], key))
        chosen = sorted(most[:ADVISED])
        if not chosen:
            return cls(by_number={}, by_bin={})
        bins = cells.bins(cells_of_parts.where(F.col("sub_key").isin(chosen)))
        return cls(by_number={key: numbered[key] for key in chosen}, by_bin=_groups(bins, "sub_key", "bin"))


def advices(journeys: DataFrame, failing: Failing, names: Mapping[int, str]) -> Iterator[Advice]:
    """The advice for every subscription that had failures and enough deliveries."""
    keys = sorted(failing.by_number)
    if not keys:
        return
    some = journeys.where(F.col("subscription_id").isin([names[one] for one in keys]))
    arrival_rows = _groups(arrivals(some), "sub_key", "bin", "tries", "delivered")
    for one in keys:
        came = arrival_rows.get(one)
        if came is None:
            continue
        advised = _advise(one, came, failing.by_bin[one], failing.by_number[one])
        if advised is not None:
            yield advised


def _advise(
    key: int, came: Mapping[str, Ints], measured: Mapping[str, Ints], by_number: Sequence[Mapping[str, int]]
) -> Advice | None:
    last = max(one["attempt"] for one in by_number)
    dense = {name: np.zeros(last + 1, dtype=np.int64) for name in _BY_ATTEMPT}
    for one in by_number:
        for name, values in dense.items():
            values[one["attempt"]] = one[name]
    found = Hazards(**dense)
    # A terminal status ends it whatever the policy: only what was delivered, or tried to the end, tells about retries.
    to_the_end = (came["delivered"] == 1) | (came["tries"] > found.deployed().attempts)
    some = Arrivals(
        bins=came["bin"][to_the_end],
        tries=np.minimum(came["tries"], found.deployed().attempts + 1)[to_the_end],
        delivered=came["delivered"][to_the_end],
        count=came["count"][to_the_end],
    )
    return advice.advise(
        key, some, found, bins=measured["bin"], attempts=measured["attempts"], successes=measured["successes"]
    )


def _groups(rows: DataFrame, key: str, *order: str) -> dict[Any, dict[str, Ints]]:
    """The rows as arrays by the value of one column."""
    table = rows.toArrow()
    keys = table.column(key).combine_chunks().dictionary_encode()
    numbers = keys.indices.to_numpy()
    columns = {name: ints(table, name) for name in table.column_names if name != key}
    sorted_by = np.lexsort((*(columns[name] for name in reversed(order)), numbers))
    columns = {name: column[sorted_by] for name, column in columns.items()}
    cuts = np.searchsorted(numbers[sorted_by], np.arange(len(keys.dictionary) + 1)).tolist()
    return {
        value: {name: column[begin:end] for name, column in columns.items()}
        for value, (begin, end) in zip(keys.dictionary.to_pylist(), pairwise(cuts), strict=True)
    }


def advice_rows(found: Iterable[Advice], names: Mapping[int, str]) -> tuple[list[Row], list[Row]]:
    """Rows of `advice` and of `advice_front`."""
    rows: list[Row] = []
    fronts: list[Row] = []
    for one in found:
        chosen = one.recommended
        rows.append(
            {
                "subscription_id": names[one.key],
                "deliveries": one.deliveries,
                "hopeless": one.hopeless,
                **_policy("deployed", one.deployed),
                **_effect("measured", one.measured),
                **_effect("replayed", one.replayed),
                "reproduced": one.reproduced,
                **_policy("recommended", None if chosen is None else chosen.policy),
                **_effect("recommended", None if chosen is None else chosen.effect),
                **_effect("tested", one.tested),
                **_effect("tested_deployed", one.tested_deployed),
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


def _effect(prefix: str, effect: Effect | None) -> Row:
    return {
        f"{prefix}_{name}": None if effect is None else getattr(effect, name)
        for name in ("delivered", "attempts", "mean_wait_s", "p95_wait_s")
    }
