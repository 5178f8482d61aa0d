"""Hold small tables of an analysis, from which the report is drawn in tests."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np

from delivery.analytics.report.data import ColumnBatch

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
Rows = list[dict[str, Any]]
Journey = tuple[int, str, int, float, float]
A, B, C = (f"019b0000-0000-7000-8000-00000000000{letter}" for letter in "abc")


def journey(
    second: float, outcome: str, *, attempts: int = 1, took_s: float | None = None
) -> Journey:
    born_ms = round((NOON.timestamp() + second) * 1000)
    finished = np.nan if took_s is None else (born_ms + took_s * 1000) * 1000
    return born_ms << 16, outcome, attempts, finished, (born_ms + (took_s or 0) * 1000) * 1000


def batch(rows: Sequence[Journey]) -> ColumnBatch:
    columns = list(zip(*rows, strict=True))
    return {
        "message_hi": np.array(columns[0], dtype=np.int64),
        "outcome": np.array(columns[1], dtype=object),
        "attempts": np.array(columns[2], dtype=np.int64),
        "finished_us": np.array(columns[3], dtype=np.float64),
        "last_us": np.array(columns[4], dtype=np.float64),
    }


JOURNEYS = [
    *(journey(second, "delivered", took_s=0.1) for second in range(90)),
    *(journey(30 + n, "delivered", attempts=3, took_s=60.0) for n in range(10)),
    *(
        journey(100, outcome)
        for outcome in ("sidelined", "waiting", "in_flight", "lost", "acked", "expired")
    ),
]


class Tables:
    """Some tables of one run."""

    run = 7
    at = NOON + timedelta(hours=1)
    findings_at: datetime | None = at
    set_aside: Sequence[Mapping[str, Any]] = ()
    set_aside_total = 0

    def __init__(self, tables: Mapping[str, Rows], journeys: Sequence[Journey]) -> None:
        self._tables = tables
        self._journeys = journeys

    def rows(self, table: str) -> Rows:
        return self._tables.get(table, [])

    def each_row(
        self, table: str, columns: Sequence[str] | None = None
    ) -> Iterator[Mapping[str, Any]]:
        for row in self.rows(table):
            yield row if columns is None else {name: row[name] for name in columns}

    def batches(self, table: str, columns: Sequence[str]) -> Iterator[ColumnBatch]:
        if table == "rollups_hourly":
            for row in self._tables.get(table, []):
                hour = np.datetime64(row["hour"].replace(tzinfo=None), "us")
                columns_of = {**row, "hour": hour}
                yield {name: np.array([columns_of[name]]) for name in columns}
            return
        assert table == "journeys"
        for start in range(0, len(self._journeys), 13):
            part = batch(self._journeys[start : start + 13])
            yield {name: part[name] for name in columns}


def rollup(subscription: str, host: str, attempts: int, failures: int) -> dict[str, Any]:
    return {
        "subscription_id": subscription,
        "room_id": 1,
        "target_host": host,
        "attempts": attempts,
        "failures": failures,
    }


def cause(attribute: str, value: str) -> dict[str, Any]:
    return {
        "attribute": attribute,
        "value": value,
        "inside": 1.0,
        "outside": 0.04,
        "log_odds": 5.0,
        "z": 9.0,
    }


POLICY = {"delay_ms": 1000.0, "multiplier": 2.0, "redeliveries": 3}
EFFECT = {"delivered": 0.9, "attempts": 1.4, "mean_wait_s": 2.0, "p95_wait_s": 9.0}


def prefixed(prefix: str, values: Mapping[str, Any], **other: Any) -> dict[str, Any]:
    return {f"{prefix}_{name}": value for name, value in {**values, **other}.items()}


FULL: dict[str, Rows] = {
    "reconciliation": [
        {
            "hour": NOON,
            "room_id": 1,
            "fanout": 106,
            "enqueued": 106,
            "delivered": 100,
            "lost": 1,
            "missing": 0,
            "never_enqueued": 0,
            "unanchored": 0,
        }
    ],
    "rollups_daily": [
        rollup(A, "a.example", 60, 20),
        rollup(B, "a.example", 60, 22),
        rollup(C, "c<&>.example", 60, 0),
    ],
    "rollups_hourly": [
        {"hour": NOON, "subscription_id": A, "attempts": 60, "failures": 20},
        {"hour": NOON + timedelta(hours=2), "subscription_id": B, "attempts": 60, "failures": 22},
        {"hour": NOON, "subscription_id": None, "attempts": 0, "failures": 0},
    ],
    "incidents": [
        {
            "incident": 1,
            "kind": "shared",
            "open": False,
            "began": NOON,
            "ended": NOON + timedelta(minutes=4),
            "subscriptions": [A, B],
            "failures": 42,
            "attempts": 44,
            "causes": [cause("target_host", "a.example"), cause("http_status", "503")],
        }
    ],
    "cofailures": [
        {
            "first_id": A,
            "second_id": B,
            "bad_first": 4,
            "bad_second": 4,
            "bad_both": 4,
            "jaccard": 1.0,
            "lift": 9.0,
            "phi": 1.0,
            "pearson": 1.0,
            "p": 0.01,
            "q": 0.01,
            "significant": True,
        }
    ],
    "hazards": [
        {
            "room_id": 1,
            "subscription_id": A,
            "attempt": n,
            "attempts": count,
            "successes": well,
            "hazard": well / count,
            "mean_delay_ms": 1000.0,
        }
        for n, count, well in ((0, 100, 60), (1, 40, 30), (2, 10, 2))
    ],
    "advice": [
        {
            "subscription_id": A,
            "deliveries": 100,
            "hopeless": 0.0,
            "reproduced": True,
            "held_up": True,
            **prefixed("deployed", POLICY),
            **prefixed("measured", EFFECT),
            **prefixed("replayed", EFFECT),
            **prefixed("recommended", POLICY, redeliveries=6, max_delay_ms=20_000.0),
            **prefixed("recommended", EFFECT, delivered=0.99),
            "recommended_delivered_low": 0.975,
            "recommended_delivered_high": 0.999,
        }
    ],
    "advice_front": [
        {
            "subscription_id": A,
            **prefixed("policy", POLICY, redeliveries=n),
            **prefixed("expected", EFFECT, delivered=0.8 + n / 50, attempts=1 + n / 9),
        }
        for n in range(8)
    ],
}
