"""Simulate logs with planted faults, and return the truth beside them.

Everything is drawn from one seed. The truth is returned, never written, so no job can read it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tests.support.sealed_segments import (
    ATTEMPTED,
    DELIVERED,
    ENQUEUED,
    PUBLISHED,
    RETRIED,
    SIDELINED,
    WORKERS,
    Floats,
    Ints,
    Names,
    Sent,
    table_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """From second `begin_s` to `end_s` of the log, `share` of the attempts at these subscriptions fail."""

    begin_s: float
    end_s: float
    subscriptions: tuple[int, ...]
    share: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Town:
    """Simulation parameters. Subscription n is in room n // per_room and gets all messages of the room."""

    seed: int
    minutes: int
    rooms: int = 4
    per_room: int = 3
    a_minute: float | Sequence[float] = 3.0
    """Messages a minute in each room, or by room."""
    hosts: Mapping[int, int] = field(default_factory=dict)
    """Host of a subscription; its own by default."""
    outages: Sequence[Outage] = ()
    chronic: Mapping[int, float] = field(default_factory=dict)
    noise: float = 0.01
    hopeless: float = 0.0
    delay_s: float = 30.0
    multiplier: float = 2.0
    attempts: int = 4
    skew_s: Sequence[float] = (0.0,) * (WORKERS + 1)
    """Clock skew of each writer; the first is the publisher's."""
    lost: int = 0
    missing: int = 0
    doubled: int = 0
    repeated: int = 0
    skipped: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """The planted faults."""

    lost: frozenset[str]
    missing: Mapping[str, int]
    duplicates: int
    repeated: int
    gaps: frozenset[tuple[int, int]]
    """(writer, number)"""
    subscriptions: Sequence[str]
    outages: Sequence[Outage]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """A shuffled log as one table in the layout of segments, with its truth."""

    rows: pa.Table
    truth: Truth


class _Rows:
    """Collects rows column by column."""

    def __init__(self) -> None:
        self.columns: dict[str, list[npt.NDArray[Any]]] = {}

    def add(self, count: int, **columns: Any) -> None:
        names = (
            "kind",
            "t",
            "message",
            "delivery",
            "attempt",
            "delay_ms",
            "latency_ms",
            "status",
            "writer",
            "generation",
        )
        for name in names:
            value = columns.get(name, np.nan)
            self.columns.setdefault(name, []).append(
                np.broadcast_to(np.asarray(value, dtype=np.float64), (count,))
            )

    def done(self) -> dict[str, Floats]:
        return {name: np.concatenate(parts) for name, parts in self.columns.items()}


def plant(town: Town) -> Planted:
    """Simulate the town and plant its faults in the log."""
    rng = np.random.default_rng(town.seed)
    rates = np.broadcast_to(np.asarray(town.a_minute, dtype=np.float64), (town.rooms,))
    counts = rng.poisson(rates * town.minutes)
    message_room = np.repeat(np.arange(town.rooms), counts)
    message_t = np.floor(rng.uniform(0, town.minutes * 60, counts.sum()) * 1000) / 1000
    order = np.argsort(message_t, kind="stable")
    message_room, message_t = message_room[order], message_t[order]
    message = np.repeat(np.arange(len(message_t)), town.per_room)
    delivery = np.arange(len(message))
    subscription = message_room[message] * town.per_room + np.tile(
        np.arange(town.per_room), len(message_t)
    )
    sent = Sent(room=message_room, t=message_t, message=message, subscription=subscription)
    rows = _Rows()
    rows.add(
        len(message_t), kind=PUBLISHED, t=message_t, message=np.arange(len(message_t)), writer=0
    )
    born = {"attempt": 0, "writer": 0, "generation": 0}
    rows.add(
        len(delivery),
        kind=ENQUEUED,
        t=message_t[message],
        message=message,
        delivery=delivery,
        **born,
    )
    _attempt(town, rng, rows, sent)
    return _reported(town, rng, rows.done(), sent)


def _failing(town: Town, subscription: Ints, t: Floats) -> Floats:
    """Return the failure probability of an attempt at that time."""
    share = np.full(len(t), town.noise)
    for number, chronic in town.chronic.items():
        share[subscription == number] = chronic
    for outage in town.outages:
        hit = (
            np.isin(subscription, outage.subscriptions) & (t >= outage.begin_s) & (t < outage.end_s)
        )
        share[hit] = np.maximum(share[hit], outage.share)
    return share


def _attempt(town: Town, rng: np.random.Generator, rows: _Rows, sent: Sent) -> None:
    message, subscription, due = sent.message, sent.subscription, sent.t[sent.message]
    hopeless = rng.random(len(due)) < town.hopeless
    left = np.arange(len(due))
    writer = 1 + rng.integers(0, WORKERS, len(due))
    for attempt in range(town.attempts + 1):
        latency = rng.lognormal(3.5, 0.5, len(left))
        at = due[left] + 0.02 + latency / 1000
        fails = (rng.random(len(left)) < _failing(town, subscription[left], at)) | hopeless[left]
        answered = rng.random(len(left)) < 0.7
        status = np.where(~fails, 200, np.where(answered, 503, np.nan))
        own = {"message": message[left], "delivery": left, "writer": writer[left], "generation": 0}
        rows.add(
            len(left),
            kind=ATTEMPTED,
            t=at,
            attempt=attempt,
            latency_ms=np.round(latency, 2),
            status=status,
            **own,
        )
        well, badly = left[~fails], left[fails]
        settled = {"t": at[~fails], "attempt": attempt, "generation": 0}
        rows.add(
            len(well),
            kind=DELIVERED,
            message=message[well],
            delivery=well,
            writer=writer[well],
            **settled,
        )
        wait = town.delay_s * town.multiplier**attempt
        again = {
            "t": at[fails],
            "message": message[badly],
            "delivery": badly,
            "writer": writer[badly],
            "generation": 0,
        }
        if attempt == town.attempts:
            rows.add(len(badly), kind=SIDELINED, attempt=attempt, **again)
        else:
            rows.add(len(badly), kind=RETRIED, attempt=attempt + 1, delay_ms=wait * 1000, **again)
        due = due.copy()
        due[badly] = at[fails] + wait
        left = badly


def _reported(town: Town, rng: np.random.Generator, made: dict[str, Floats], sent: Sent) -> Planted:
    message, message_t = sent.message, sent.t
    span = town.minutes * 60
    delivery = made["delivery"]
    whole = np.nan_to_num(delivery, nan=-1).astype(np.int64)
    # Far from the end, so that later messages are served, and not hidden by a chronic failure.
    early = np.flatnonzero(message_t[message] < span * 0.5)
    picked = rng.permutation(early)[: town.lost + town.missing]
    lost, absent = picked[: town.lost], picked[town.lost :]
    keep = made["t"] < span
    keep &= ~(np.isin(whole, lost) & (made["kind"] != ENQUEUED))
    keep &= ~np.isin(whole, absent)
    ended = np.flatnonzero(
        keep & (made["kind"] == ATTEMPTED) & (made["status"] == 200) & (made["t"] < span - 60)
    )
    doubled = rng.permutation(ended)[: town.doubled]
    columns = {
        name: np.concatenate((values[keep], values[doubled])) for name, values in made.items()
    }
    columns["t"][-len(doubled) or len(columns["t"]) :] += 5.0
    order = np.argsort(columns["t"] + columns["kind"] * 1e-7, kind="stable")
    columns = {name: values[order] for name, values in columns.items()}
    seq, gaps = _numbered(columns["writer"].astype(np.int64), rng, town.skipped)
    names = Names.of(sent, rooms=town.rooms, per_room=town.per_room)
    table = table_of(
        sent, names, columns, seq, skew_s=town.skew_s, hosts=town.hosts, per_room=town.per_room
    )
    repeated = rng.permutation(table.num_rows)[: town.repeated]
    shuffled = rng.permutation(table.num_rows + len(repeated))
    table = pa.concat_tables([table, table.take(pa.array(repeated))]).take(pa.array(shuffled))
    per_message = dict(zip(*np.unique(message[absent], return_counts=True), strict=True))
    truth = Truth(
        lost=frozenset(names.deliveries[number] for number in lost),
        missing={names.messages[number]: int(count) for number, count in per_message.items()},
        duplicates=len(doubled),
        repeated=len(repeated),
        gaps=gaps,
        subscriptions=names.subscriptions,
        outages=town.outages,
    )
    return Planted(rows=table, truth=truth)


def _numbered(
    writer: Ints, rng: np.random.Generator, skipped: int
) -> tuple[Ints, frozenset[tuple[int, int]]]:
    """Number the rows of each writer, and skip some numbers."""
    seq = np.zeros(len(writer), dtype=np.int64)
    gaps: set[tuple[int, int]] = set()
    for one in np.unique(writer):
        own = np.flatnonzero(writer == one)
        numbers = np.arange(1, len(own) + 1)
        if one and skipped and len(own) > 1000:
            holes = rng.choice(np.arange(100, len(own) - 100), skipped, replace=False)
            numbers = np.setdiff1d(np.arange(1, len(own) + 1 + skipped), holes)
            gaps |= {(int(one) + 1, int(hole)) for hole in holes}
        seq[own] = numbers
    return seq, frozenset(gaps)
