"""Test that a few rows whose times are wrong by years change nothing in the findings.

Oracle: the findings of the same log without these rows.
"""

from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pytest

from delivery.analytics.findings.advice import AdvisedSubscriptions, advise_all
from delivery.analytics.findings.policy_choice import RetryAdvice
from delivery.analytics.findings.results import CofailureResult
from tests.support.sealed_segments import START_S
from tests.unit.delivery.analytics.findings.test_incidents import Attempts, cells_of, steady

NOW = datetime.fromtimestamp(START_S + 86_400, UTC)
YEARS_S = 4 * 365 * 86_400


@pytest.mark.parametrize("wrong_s", [YEARS_S, -YEARS_S])
def test_incidents_and_pairs_are_those_of_the_log(wrong_s: int) -> None:
    log = [
        *steady(1, until=7200, every=30, fails=(3000, 4000)),
        *steady(2, until=7200, every=30, fails=(3000, 4000)),
        *[(3, float(at), True) for at in range(0, 7200, 200)],
    ]

    def found(tried: Attempts) -> CofailureResult:
        return CofailureResult.from_cells(cells_of(tried), NOW)

    wanted, wrong = found(log), found([*log, (1, wrong_s, False), (2, wrong_s, True)])
    assert {one.kind for one in wanted.incidents} == {"shared", "chronic"}
    assert [(one.kind, one.begin, one.end, one.keys) for one in wrong.incidents] == [
        (one.kind, one.begin, one.end, one.keys) for one in wanted.incidents
    ]
    assert wrong.pairs == wanted.pairs


@pytest.mark.parametrize("wrong_s", [YEARS_S, -YEARS_S])
def test_advice_is_that_of_the_log(wrong_s: int) -> None:
    first = int(START_S) // 15
    bins = np.arange(first, first + 3000)
    down = (bins - first) % 600 < 60

    def advised(*wrong: int) -> list[RetryAdvice]:
        lost = np.concatenate((down, [True] * len(wrong)))
        of = np.concatenate((bins, np.array(wrong, dtype=np.int64)))
        order = np.argsort(of)
        lost, of = lost[order], of[order]
        arrivals = {
            "sub_key": np.ones(len(of), np.int64),
            "bin": of,
            "tries": np.where(lost, 2, 1),
            "delivered": np.where(lost, 0, 1),
            "count": np.full(len(of), 3),
        }
        counts = {
            "sub_key": arrivals["sub_key"],
            "bin": of,
            "attempts": np.where(lost, 6, 3),
            "successes": np.where(lost, 0, 3),
        }
        numbered = [
            {
                "sub_key": 1, "attempt": 0, "attempts": 9000, "successes": 8100, "latency_us": 0,
                "retries": 900, "delay_ms": 9_000_000,
            },
            {
                "sub_key": 1, "attempt": 1, "attempts": 900, "successes": 0, "latency_us": 0,
                "retries": 0, "delay_ms": 0,
            },
        ]  # fmt: skip
        subscriptions = AdvisedSubscriptions.from_counts(numbered, pa.table(counts))
        return list(advise_all(pa.table(arrivals), subscriptions, NOW))

    (wanted,), (wrong,) = advised(), advised(first + wrong_s // 15)
    assert wanted.deliveries > 8000
    assert repr(wrong) == repr(wanted)
