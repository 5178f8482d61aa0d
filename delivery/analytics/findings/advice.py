"""Advise on the retry policy of each subscription from its counts, and make the rows of the tables.

`policy_choice` decides; an engine counts.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any, Final

import numpy as np
import pyarrow as pa

from delivery.analytics.findings.cells import searched_bins
from delivery.analytics.findings.policy_choice import RetryAdvice, advise
from delivery.analytics.findings.policy_simulation import (
    Arrivals,
    EffectRange,
    Policy,
    PolicyEffect,
)
from delivery.analytics.findings.results import Row, int_column
from delivery.analytics.findings.series import BIN_S, Ints
from delivery.analytics.findings.success_rates import AttemptSuccessRates
from delivery.analytics.findings.turns import take_turns

MAX_ADVISED: Final = 500
"""Subscriptions with advice, the rooms in turns, most failures first."""
BY_ATTEMPT: Final = ("attempts", "successes", "latency_us", "retries", "delay_ms")
"""Sum up these by attempt number."""
_MIN_JITTER: Final = 0.02
"""Spread of the waits, as a share of their mean, below which it is not called jitter."""


def advised_keys(success_rates: Iterable[Mapping[str, int]]) -> list[int]:
    """Return the keys of the subscriptions that get advice, ascending."""
    failures: dict[int, int] = {}
    rooms: dict[int, int] = {}
    for row in success_rates:
        failed = row["attempts"] - row["successes"]
        failures[row["sub_key"]] = failures.get(row["sub_key"], 0) + failed
        rooms[row["sub_key"]] = row["room_id"]
    failing = sorted(key for key, count in failures.items() if count > 0)
    turns = take_turns(
        np.array([rooms[key] for key in failing], dtype=np.int64),
        np.array([failures[key] for key in failing], dtype=np.int64),
        MAX_ADVISED,
    )
    return [failing[place] for place in np.sort(turns).tolist()]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvisedSubscriptions:
    """Hold subscriptions with advice, and their attempts by number and by bin."""

    by_number: Mapping[int, Sequence[Mapping[str, int]]]
    by_bin: Mapping[int, Mapping[str, Ints]]

    @classmethod
    def from_counts(
        cls, success_rates: Iterable[Mapping[str, int]], bins: pa.Table | None
    ) -> "AdvisedSubscriptions":
        """Build from rows by attempt number, and (sub_key, bin, attempts, successes).

        `bins`: of the `advised_keys`; None: there are none.
        """
        if bins is None:
            return cls(by_number={}, by_bin={})
        by_bin = _group_arrays(bins, "sub_key", "bin")
        numbered: dict[int, list[Mapping[str, int]]] = {key: [] for key in by_bin}
        for row in success_rates:
            if row["sub_key"] in numbered:
                numbered[row["sub_key"]].append(row)
        return cls(by_number=numbered, by_bin=by_bin)


def advise_all(
    arrivals: pa.Table | None, subscriptions: AdvisedSubscriptions, now: datetime
) -> Iterator[RetryAdvice]:
    """Yield the advice for every subscription with failures and enough deliveries.

    `arrivals`: (sub_key, bin, tries, delivered, count) of finished PUSH deliveries. `now` leaves
    out those whose times are wrong by years.
    """
    if arrivals is None:
        return
    arrival_rows = _group_arrays(arrivals, "sub_key", "bin", "tries", "delivered")
    for one in sorted(subscriptions.by_number):
        came = arrival_rows.get(one)
        if came is None:
            continue
        advised = _advise(
            one,
            _searched(came, now),
            _searched(subscriptions.by_bin[one], now),
            subscriptions.by_number[one],
        )
        if advised is not None:
            yield advised


def _searched(counts: Mapping[str, Ints], now: datetime) -> Mapping[str, Ints]:
    some = searched_bins(counts["bin"], BIN_S, now)
    return {name: values[some] for name, values in counts.items()}


def _advise(
    key: int,
    arrivals: Mapping[str, Ints],
    measured: Mapping[str, Ints],
    by_number: Sequence[Mapping[str, int]],
) -> RetryAdvice | None:
    if not len(measured["bin"]):
        return None
    last = max(one["attempt"] for one in by_number)
    dense = {name: np.zeros(last + 1, dtype=np.int64) for name in BY_ATTEMPT}
    for one in by_number:
        for name, values in dense.items():
            # Null where no attempt has a duration.
            values[one["attempt"]] = one[name] or 0
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


def _group_arrays(table: pa.Table, key: str, *order: str) -> dict[Any, dict[str, Ints]]:
    """Return the rows as arrays by the value of one column."""
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
                **_effect("replayed", one.simulated),
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
