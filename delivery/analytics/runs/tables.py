"""Define the result tables of the analysis: names, columns and descriptions, which are stable.

    schema.json                        these definitions, for programs
    latest.json                        the complete run: {"run": 7, "tables": {"journeys": …}, …}
    runs/7/journeys/*.parquet

Readers open `latest.json` first. It is written when the tables that it names are complete: once
for the books of a run, and once more for its findings. Until then FINDING_TABLES are those of an
earlier run (`findings`), and are absent if no run has completed any (`"findings": null`).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from delivery.analytics.runs.outcomes import OUTCOMES
from delivery.analytics.sealing.layout import SEGMENT_VERSION, ColumnSpec
from rooms.domain.state_machine import LogKind

# What is counted and measured by hour and day.
KEYS: Final = ("room_id", "subscription_id", "event_type", "target_host")
COUNTED: Final = {
    "published": (LogKind.PUBLISHED,),
    "enqueued": (LogKind.ENQUEUED,),
    "attempts": (LogKind.ATTEMPTED,),
    "retries": (LogKind.RETRY_SCHEDULED,),
    "delivered": (LogKind.DELIVERED,),
    "leased": (LogKind.LEASED,),
    "acked": (LogKind.PULL_ACKED,),
    "came_back": (LogKind.NACKED, LogKind.LEASE_ENDED),
    "held": (LogKind.HELD,),
    "sidelined": (LogKind.SIDELINED,),
    "shoveled": (LogKind.SHOVELED,),
    "expired": (LogKind.EXPIRED,),
    "cancelled": (LogKind.CANCELLED,),
    "dropped": (LogKind.DROPPED,),
    "purged": (LogKind.PURGED,),
}
SERVICE: Final = (LogKind.ATTEMPTED, LogKind.LEASED, LogKind.HANDED_OVER)
COUNTS: Final = (*COUNTED, "failures", "unanswered")
SHARES: Final = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
MEASURES: Final = ("latency", "end_to_end")

# Columns of partial journeys, by how those of one delivery merge.
SUMS: Final = (
    "events", "enqueued", "attempts", "successes", "retries", "retry_steps", "leases", "ends",
    "finals", "backoff_ms", "latency_us",
)  # fmt: skip
MINIMA: Final = ("enqueued_us", "first_us", "first_attempt_us", "finished_us")
MAXIMA: Final = (
    "room_id", "message_hi", "message_lo", "sub_key", "type_key", "host_key", "event_version",
    "last_us", "last_key", "due_us", "generation",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSpec:
    """Define a table with its columns in order."""

    name: str
    description: str
    columns: tuple[ColumnSpec, ...]


def _table(name: str, description: str, *columns: tuple[str, str, str]) -> TableSpec:
    return TableSpec(
        name=name,
        description=description,
        columns=tuple(ColumnSpec(name=one, type=kind, says=says) for one, kind, says in columns),
    )


_ROOM = ("room_id", "int", "the room")
_SUBSCRIPTION = ("subscription_id", "string", "the subscription")
_KEYS = (
    _ROOM,
    ("subscription_id", "string", "the subscription; null for what is about messages"),
    ("event_type", "string", "event type of the message"),
    ("target_host", "string", "host of the webhook; null for rows without an attempt"),
)
_COUNTS = tuple((name, "bigint", f"log rows: {name.replace('_', ' ')}") for name in COUNTS)
_MEASURE_DESCRIPTIONS = {
    "latency": "an attempt's duration",
    "end_to_end": "publish to delivery or ack",
}
_PERCENTILES = tuple(
    (f"{name}_{share}_ms", "double", f"{share} of {_MEASURE_DESCRIPTIONS[name]}")
    for name in MEASURES
    for share in SHARES
)
_EFFECTS = (
    ("delivered", "share of deliveries, 0 to 1"),
    ("attempts", "attempts for each delivery"),
    ("mean_wait_s", "mean wait of delivered ones"),
    ("p95_wait_s", "95th percentile of the wait"),
)


def _effect(prefix: str) -> tuple[tuple[str, str, str], ...]:
    return tuple((f"{prefix}_{name}", "double", says) for name, says in _EFFECTS)


def _policy(prefix: str) -> tuple[tuple[str, str, str], ...]:
    return (
        (f"{prefix}_delay_ms", "double", "first wait"),
        (f"{prefix}_multiplier", "double", "factor between waits"),
        (f"{prefix}_redeliveries", "int", "redeliveries"),
        (f"{prefix}_max_delay_ms", "double", "longest wait; null: no limit"),
        (f"{prefix}_jitter", "double", "share by which a wait varies at random"),
    )


def _range(prefix: str) -> tuple[tuple[str, str, str], ...]:
    """Return the columns of the 90 % intervals of an effect."""
    return tuple(
        (f"{prefix}_{name}_{end}", "double", f"{says}: {end} end of the 90 % interval")
        for name, says in _EFFECTS
        if name != "p95_wait_s"
        for end in ("low", "high")
    )


TABLES: Final = (
    _table(
        "journeys",
        "The journey of each delivery.",
        ("delivery_id", "string", "the delivery"),
        ("message_id", "string", "its message"),
        ("delivery_hi", "bigint", "first half of delivery_id, for joins"),
        ("delivery_lo", "bigint", "last half of delivery_id"),
        ("message_hi", "bigint", "first half of message_id"),
        ("message_lo", "bigint", "last half of message_id"),
        _ROOM,
        _SUBSCRIPTION,
        ("event_type", "string", "event type of the message"),
        ("event_version", "int", "and its version"),
        ("target_host", "string", "host of the webhook; null without an attempt"),
        ("enqueued_us", "bigint", "time of creation, in µs since 1970 like all times here"),
        ("first_us", "bigint", "its first row"),
        ("first_attempt_us", "bigint", "end of its first attempt"),
        ("finished_us", "bigint", "its first final state"),
        ("last_us", "bigint", "its last row"),
        ("due_us", "bigint", "when its last step was due"),
        ("since_us", "bigint", "since when it is as it is; what waits: since it was due"),
        ("enqueued", "bigint", "rows that created it; 1"),
        ("attempts", "bigint", "attempts at its webhook"),
        ("successes", "bigint", "successful attempts; above 1 means duplicates"),
        ("retries", "bigint", "retries scheduled"),
        ("leases", "bigint", "times it was pulled"),
        ("events", "bigint", "rows of the log"),
        ("backoff_ms", "bigint", "sum of waits before retries"),
        ("latency_us", "bigint", "sum of attempt durations"),
        ("generation", "int", "times it was requeued (shovel, lease end, restore …)"),
        ("kinds", "int", "bits of the log kinds that occurred"),
        ("outcome", "string", f"current outcome: {', '.join(OUTCOMES)}"),
        ("plain", "boolean", "queued, attempted and ended; needs no row in paths"),
    ),
    _table(
        "paths",
        "The path of each delivery that is not plain.",
        ("delivery_hi", "bigint", "first half of the delivery's id"),
        ("delivery_lo", "bigint", "last half"),
        ("events", "bigint", "log rows of the path"),
        ("path", "string", "their kinds in order"),
        ("legal", "boolean", "whether the transition table allows it"),
    ),
    _table(
        "anomalies",
        "Inconsistent deliveries.",
        ("delivery_id", "string", "the delivery"),
        ("message_id", "string", "its message"),
        _ROOM,
        _SUBSCRIPTION,
        ("outcome", "string", "as in journeys"),
        (
            "anomaly",
            "string",
            "never_enqueued, enqueued_twice, illegal_path or delivered_without_success",
        ),
        ("path", "string", "its kinds in order; null if plain or if rows are missing"),
    ),
    _table(
        "reconciliation",
        "Reconciliation by room and hour of publish. Both residuals must be 0.",
        ("hour", "timestamp", "hour of publish"),
        _ROOM,
        ("messages", "bigint", "messages published"),
        ("fanout", "bigint", "expected deliveries"),
        ("missing", "bigint", "expected deliveries that do not exist"),
        ("unread", "bigint", "the same, but they may be in segments that were set aside"),
        ("excess", "bigint", "existing deliveries beyond the expected ones"),
        ("unanchored", "bigint", "deliveries of messages without a publish row"),
        ("enqueued", "bigint", "deliveries created"),
        ("never_enqueued", "bigint", "deliveries whose beginning is a hole of the log"),
        ("enqueued_twice", "bigint", "extra rows that create a delivery"),
        *(
            (outcome, "bigint", f"deliveries that are {outcome.replace('_', ' ')}")
            for outcome in OUTCOMES
        ),
        ("duplicates", "bigint", "successful attempts after a delivery's first"),
        ("residual_fanout", "bigint", "residual of the first equation"),
        ("residual_outcome", "bigint", "residual of the second equation"),
    ),
    _table(
        "outcomes",
        "Deliveries of each subscription by outcome.",
        _ROOM,
        _SUBSCRIPTION,
        ("outcome", "string", "as in journeys"),
        ("deliveries", "bigint", "number of deliveries"),
        ("attempts", "bigint", "their attempts"),
        ("duplicates", "bigint", "successes after a delivery's first"),
    ),
    _table(
        "ages",
        "Open deliveries of each subscription by outcome, and the oldest of them.",
        _ROOM,
        _SUBSCRIPTION,
        ("outcome", "string", "waiting, held, in_flight, stuck, unknown, lost or sidelined"),
        ("deliveries", "bigint", "number of deliveries"),
        ("oldest_since", "timestamp", "since when the oldest is so; what waits: since it was due"),
        ("oldest_age_s", "double", "the same in seconds before the end of the log"),
        ("oldest_delivery_id", "string", "the oldest delivery"),
    ),
    _table(
        "missing",
        "Messages with missing deliveries.",
        _ROOM,
        ("message_id", "string", "the message"),
        ("fanout", "bigint", "expected deliveries"),
        ("enqueued", "bigint", "deliveries with the row that creates them"),
        ("found", "bigint", "deliveries that only later rows show"),
        ("missing", "bigint", "the rest"),
    ),
    _table(
        "gaps",
        "Row numbers of a log writer that are missing.",
        ("writer_id", "int", "the writer"),
        ("first_seq", "bigint", "first missing number"),
        ("last_seq", "bigint", "last missing number"),
        ("missing", "bigint", "number of missing rows"),
        ("before", "boolean", "the log does not reach back to the writer's first row"),
    ),
    _table(
        "rollups_hourly",
        "Counts and exact percentiles by hour.",
        ("hour", "timestamp", "the hour"), *_KEYS, *_COUNTS, *_PERCENTILES,
    ),
    _table(
        "rollups_daily",
        "Counts by day, with percentiles from merged sketches (rank error below 1 %).",
        ("day", "date", "the day"), *_KEYS, *_COUNTS, *_PERCENTILES,
    ),
    _table(
        "cofailures",
        "Pairs of subscriptions with common bad minutes: 2 failures and half of all attempts, "
        "or of an incident.",
        ("first_id", "string", "a subscription"),
        ("second_id", "string", "another one"),
        ("bad_first", "bigint", "bad minutes of the first"),
        ("bad_second", "bigint", "bad minutes of the second"),
        ("bad_both", "bigint", "bad minutes of both"),
        ("jaccard", "double", "common minutes as a share of either"),
        ("lift", "double", "common minutes by their expected number"),
        ("phi", "double", "correlation of the bad minutes"),
        ("pearson", "double", "correlation of the numbers of failures"),
        ("p", "double", "chance of as many common minutes at another time shift"),
        ("q", "double", "p corrected over all pairs, apart for a common host or network"),
        ("significant", "boolean", "q at most 0.05"),
    ),
    _table(
        "incidents",
        "Periods in which subscriptions failed together, with common causes.",
        ("incident", "int", "number within the run, by start"),
        ("kind", "string", "shared, single or chronic"),
        ("began", "timestamp", "begin, estimated"),
        ("began_from", "timestamp", "it began after this with 95 % certainty"),
        ("began_to", "timestamp", "and before this with 95 %"),
        ("ended", "timestamp", "end, estimated; of an open one the end of the log"),
        ("ended_from", "timestamp", "it ended after this with 95 % certainty"),
        ("ended_to", "timestamp", "and before this with 95 %; null: it is open"),
        ("open", "boolean", "nothing has succeeded since"),
        ("subscriptions", "array<string>", "subscriptions that failed together"),
        ("failures", "bigint", "failed attempts that it explains"),
        ("attempts", "bigint", "all attempts of these subscriptions in this period"),
        ("late", "bigint", "deliveries whose first attempt failed"),
        ("sidelined", "bigint", "deliveries sidelined in this period"),
        ("earlier", "int", "incidents before it of mostly the same subscriptions and one cause"),
        (
            "causes",
            "array<struct<attribute:string,value:string,inside:double,outside:double,divergence:double,log_odds:double,z:double>>",
            "distinctive attributes, most divergent first",
        ),
        (
            "changes",
            "array<struct<at:timestamp,attribute:string,value:string,subscription_id:string>>",
            "first uses of versions, worker processes and settings right before it",
        ),
    ),
    _table(
        "advice",
        "Retry policies that are surely better than the deployed one, if there are any.",
        _SUBSCRIPTION,
        ("deliveries", "bigint", "deliveries in the sample"),
        ("hopeless", "double", "share that no policy delivers, such as refused bodies"),
        *_policy("deployed"),
        *_effect("measured"),
        *_effect("replayed"),
        ("reproduced", "boolean", "the replay matches the measurement, within a point and 5 %"),
        *_policy("recommended"),
        *_effect("recommended"),
        *_range("recommended"),
        *_effect("tested"),
        *_effect("tested_deployed"),
        (
            "held_up",
            "boolean",
            "chosen on the first part of the log, a policy kept its promise on the rest",
        ),
    ),
    _table(
        "advice_front",
        "The Pareto front of policies of each subscription.",
        _SUBSCRIPTION,
        *_policy("policy"),
        *_effect("expected"),
    ),
    _table(
        "hazards",
        "Success rate by attempt number.",
        _ROOM,
        _SUBSCRIPTION,
        ("attempt", "int", "0: the first attempt"),
        ("attempts", "bigint", "number of attempts"),
        ("successes", "bigint", "number of successes"),
        ("hazard", "double", "success rate"),
        ("mean_delay_ms", "double", "mean wait before the next attempt"),
    ),
)  # fmt: skip

TABLES_BY_NAME: Final[Mapping[str, TableSpec]] = {table.name: table for table in TABLES}

FINDING_TABLES: Final = frozenset({"hazards", "cofailures", "incidents", "advice", "advice_front"})
"""Tables that a run may keep from an earlier one."""
TOTALS: Final = (
    "fanout",
    "enqueued",
    "missing",
    "excess",
    "unread",
    "never_enqueued",
    "stuck",
    "unknown",
    "lost",
    "duplicates",
    "residual_fanout",
    "residual_outcome",
)
"""Columns of `reconciliation` whose sums a run reports."""


def schema_document() -> str:
    """Return the schema of all tables as JSON."""
    document = {
        "version": SEGMENT_VERSION,
        "tables": {
            table.name: {
                "says": table.description,
                "columns": [
                    {"name": one.name, "type": one.type, "says": one.says} for one in table.columns
                ],
            }
            for table in TABLES
        },
    }
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
