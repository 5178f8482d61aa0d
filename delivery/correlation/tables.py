"""The tables that an analysis gives out: their names and columns, which stay, and what each says.

    schema.json                        this, for machines
    latest.json                        which run is whole: {"run": 7, "tables": {"journeys": "runs/7/journeys", …}, …}
    runs/7/journeys/*.parquet

Readers look up `latest.json` first; it is written last, so that the tables it names belong together.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from delivery.correlation.columns import VERSION, Column
from delivery.correlation.journeys import OUTCOMES
from delivery.correlation.rollups import COUNTS, MEASURES, SHARES


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table with its columns in their order."""

    name: str
    says: str
    columns: tuple[Column, ...]


def _table(name: str, says: str, *columns: tuple[str, str, str]) -> Table:
    return Table(
        name=name, says=says, columns=tuple(Column(name=one, type=kind, says=told) for one, kind, told in columns)
    )


_ROOM = ("room_id", "int", "the room")
_SUBSCRIPTION = ("subscription_id", "string", "the subscription")
_KEYS = (
    _ROOM,
    ("subscription_id", "string", "the subscription; null for what is about messages"),
    ("event_type", "string", "event type of the message"),
    ("target_host", "string", "host of the webhook; null for what no attempt wrote"),
)
_COUNTS = tuple((name, "bigint", f"rows of the log: {name.replace('_', ' ')}") for name in COUNTS)
_TELLING = {"latency": "an attempt's duration", "end_to_end": "publish to delivery or ack"}
_PERCENTILES = tuple(
    (f"{name}_{share}_ms", "double", f"{share} of {_TELLING[name]}") for name in MEASURES for share in SHARES
)
_EFFECTS = (
    ("delivered", "share of deliveries, 0 to 1"),
    ("attempts", "attempts a delivery"),
    ("mean_wait_s", "mean wait of those delivered"),
    ("p95_wait_s", "95th percentile of that"),
)


def _effect(prefix: str) -> tuple[tuple[str, str, str], ...]:
    return tuple((f"{prefix}_{name}", "double", says) for name, says in _EFFECTS)


def _policy(prefix: str) -> tuple[tuple[str, str, str], ...]:
    return (
        (f"{prefix}_delay_ms", "double", "first wait"),
        (f"{prefix}_multiplier", "double", "growth of the waits"),
        (f"{prefix}_redeliveries", "int", "redeliveries"),
    )


TABLES: Final = (
    _table(
        "journeys",
        "What became of each delivery.",
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
        ("enqueued_us", "bigint", "when it was made; µs since 1970, as are all of these"),
        ("first_us", "bigint", "its first row"),
        ("first_attempt_us", "bigint", "end of its first attempt"),
        ("finished_us", "bigint", "its first end"),
        ("last_us", "bigint", "its last row"),
        ("due_us", "bigint", "when its last step was due"),
        ("enqueued", "bigint", "rows that made it; 1"),
        ("attempts", "bigint", "attempts at its webhook"),
        ("successes", "bigint", "attempts that succeeded; more than 1: it came twice"),
        ("retries", "bigint", "retries scheduled"),
        ("leases", "bigint", "times it was pulled"),
        ("events", "bigint", "rows of the log"),
        ("backoff_ms", "bigint", "waits before retries, in all"),
        ("latency_us", "bigint", "durations of attempts, in all"),
        ("generation", "int", "times it came back (shovel, lease end, restore …)"),
        ("kinds", "int", "bits of the kinds that occurred"),
        ("outcome", "string", f"where it stands: {', '.join(OUTCOMES)}"),
        ("plain", "boolean", "queued, tried and ended, with nothing in between that a path has to be built for"),
    ),
    _table(
        "paths",
        "The way of each delivery that is not plain.",
        ("delivery_hi", "bigint", "first half of the delivery's id"),
        ("delivery_lo", "bigint", "last half"),
        ("events", "bigint", "rows of the log that the path was made from"),
        ("path", "string", "their kinds in order"),
        ("legal", "boolean", "whether the transition table allows it"),
    ),
    _table(
        "anomalies",
        "Deliveries with something that cannot be.",
        ("delivery_id", "string", "the delivery"),
        ("message_id", "string", "its message"),
        _ROOM,
        _SUBSCRIPTION,
        ("outcome", "string", "as in journeys"),
        ("anomaly", "string", "never_enqueued, enqueued_twice, illegal_path or delivered_without_success"),
        ("path", "string", "its kinds in order; null where plain, or where its rows are no longer all there"),
    ),
    _table(
        "reconciliation",
        "The books of each room and hour of publish. Both residuals are 0.",
        ("hour", "timestamp", "hour of publish"),
        _ROOM,
        ("messages", "bigint", "messages published"),
        ("fanout", "bigint", "deliveries that there should be"),
        ("missing", "bigint", "of these not there"),
        ("excess", "bigint", "there, but not announced"),
        ("unanchored", "bigint", "there, of messages whose publish is not in the log"),
        ("enqueued", "bigint", "deliveries made"),
        ("never_enqueued", "bigint", "deliveries with rows, but none that made them"),
        ("enqueued_twice", "bigint", "rows that made a delivery once more"),
        *((outcome, "bigint", f"deliveries that are {outcome.replace('_', ' ')}") for outcome in OUTCOMES),
        ("duplicates", "bigint", "successful attempts beyond a delivery's first"),
        ("residual_fanout", "bigint", "what the first line of the books leaves over"),
        ("residual_outcome", "bigint", "what the second line leaves over"),
    ),
    _table(
        "outcomes",
        "Where the deliveries of each subscription stand.",
        _ROOM,
        _SUBSCRIPTION,
        ("outcome", "string", "as in journeys"),
        ("deliveries", "bigint", "how many"),
        ("attempts", "bigint", "their attempts"),
        ("duplicates", "bigint", "successes beyond a delivery's first"),
    ),
    _table(
        "missing",
        "Messages that lack deliveries they should have.",
        _ROOM,
        ("message_id", "string", "the message"),
        ("fanout", "bigint", "deliveries there should be"),
        ("enqueued", "bigint", "deliveries there are"),
        ("missing", "bigint", "the difference"),
    ),
    _table(
        "gaps",
        "Numbers that a writer of the log gave out and that are not there.",
        ("writer_id", "int", "the writer"),
        ("first_seq", "bigint", "first missing number"),
        ("last_seq", "bigint", "last missing number"),
        ("missing", "bigint", "how many"),
        ("before", "boolean", "the log does not reach back to the writer's first row"),
    ),
    _table("rollups_hourly", "Counts and exact percentiles an hour.", ("hour", "timestamp", "the hour"), *_KEYS, *_COUNTS, *_PERCENTILES),
    _table(
        "rollups_daily",
        "Counts a day, and percentiles from merged sketches (rank error below 1 %).",
        ("day", "date", "the day"), *_KEYS, *_COUNTS, *_PERCENTILES,
    ),
    _table(
        "cofailures",
        "Pairs of subscriptions that share bad minutes (at least 2 failures, at least half of the attempts).",
        ("first_id", "string", "a subscription"),
        ("second_id", "string", "another one"),
        ("bad_first", "bigint", "bad minutes of the first"),
        ("bad_second", "bigint", "bad minutes of the second"),
        ("bad_both", "bigint", "bad minutes of both"),
        ("jaccard", "double", "both by either"),
        ("lift", "double", "both by what independence would give"),
        ("phi", "double", "correlation of the bad minutes"),
        ("pearson", "double", "correlation of the numbers of failures"),
        ("p", "double", "share of circular shifts under which as many meet"),
        ("q", "double", "p after the correction for how many pairs there are, over all pairs"),
        ("significant", "boolean", "q at most 0.05"),
    ),
    _table(
        "incidents",
        "When subscriptions failed together, with what their failures have in common.",
        ("incident", "int", "number within the run, by beginning"),
        ("kind", "string", "shared, single or chronic"),
        ("began", "timestamp", "first minute"),
        ("ended", "timestamp", "end of the last minute"),
        ("subscriptions", "array<string>", "those that failed together, no others"),
        ("failures", "bigint", "failed attempts"),
        ("attempts", "bigint", "all attempts of them meanwhile"),
        (
            "causes",
            "array<struct<attribute:string,value:string,inside:double,outside:double,log_odds:double,z:double>>",
            "what sets the failures apart, the surest first",
        ),
    ),
    _table(
        "advice",
        "How each subscription's retries should be set. Without `reproduced` nothing is recommended.",
        _SUBSCRIPTION,
        ("deliveries", "bigint", "deliveries that it rests on"),
        ("hopeless", "double", "share that no policy would deliver"),
        *_policy("deployed"),
        *_effect("measured"),
        *_effect("replayed"),
        ("reproduced", "boolean", "the replay gives what was measured, within a point and 5 % of attempts"),
        *_policy("recommended"),
        *_effect("recommended"),
        *_effect("tested"),
        *_effect("tested_deployed"),
        ("held_up", "boolean", "on the later part, the choice made on the first delivers no less than the deployed policy"),
    ),
    _table(
        "advice_front",
        "The policies that no other one beats, for each subscription.",
        _SUBSCRIPTION,
        *_policy("policy"),
        *_effect("expected"),
    ),
    _table(
        "hazards",
        "Success by number of the attempt.",
        _ROOM,
        _SUBSCRIPTION,
        ("attempt", "int", "0: the first try"),
        ("attempts", "bigint", "how many there were"),
        ("successes", "bigint", "how many succeeded"),
        ("hazard", "double", "their share"),
        ("mean_delay_ms", "double", "mean wait before the next one"),
    ),
)  # fmt: skip

BY_NAME: Final[Mapping[str, Table]] = {table.name: table for table in TABLES}


def document() -> str:
    """The schema of all tables as JSON."""
    told = {
        "version": VERSION,
        "tables": {
            table.name: {
                "says": table.says,
                "columns": [{"name": one.name, "type": one.type, "says": one.says} for one in table.columns],
            }
            for table in TABLES
        },
    }
    return json.dumps(told, indent=2, ensure_ascii=False) + "\n"
