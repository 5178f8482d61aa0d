"""Read the data of the report: history of deliveries, subscriptions, retry statistics.

History counts journeys of any number into time buckets.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from delivery.analytics.findings.cells import DAY_S, LOG_DAYS
from delivery.analytics.report.live import Names
from delivery.analytics.report.outages import Outage, find_outages
from rooms.domain.ids import COUNTER_DIGITS
from rooms.safe_text import terminal_safe

ColumnBatch = Mapping[str, npt.NDArray[Any]]
Batches = Callable[[tuple[str, ...]], Iterable[ColumnBatch]]
"""Reads the given columns of `journeys` in batches."""

FIRST_ATTEMPT: Final = "at the first attempt"
RETRIED: Final = "after retries"
PULLED: Final = "pulled"
SIDELINED: Final = "sidelined"
ENDED: Final = "ended otherwise"
OPEN: Final = "not finished yet"
STUCK: Final = "stuck"
UNKNOWN: Final = "unknown, as segments are set aside"
LOST: Final = "lost"
OUTCOMES: Final = (
    FIRST_ATTEMPT, RETRIED, PULLED, SIDELINED, ENDED, OPEN, STUCK, UNKNOWN, LOST,
)  # fmt: skip
PERCENTILES: Final = {"p50": 0.5, "p95": 0.95, "p99": 0.99}

_MAX_BINS: Final = 150
_STEPS_S: Final = (1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 12 * 3600, 86_400)
_OUTCOME_LABELS: Final = {
    "acked": PULLED,
    "handed_over": PULLED,
    "sidelined": SIDELINED,
    "held": OPEN,
    "waiting": OPEN,
    "in_flight": OPEN,
    "stuck": STUCK,
    "unknown": UNKNOWN,
    "lost": LOST,
}
_BINS_PER_OCTAVE: Final = 16
"""Histogram bins for each doubling of a duration: a percentile is off by at most 2.2 %."""
_OCTAVES: Final = 40
_COLUMNS: Final = ("message_hi", "outcome", "attempts", "finished_us")
_SPAN_COLUMNS: Final = ("message_hi", "last_us")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeBucket:
    """Count messages published in a time bucket: deliveries by outcome, and latency percentiles."""

    at: datetime
    outcomes: Mapping[str, int]
    latency_s: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Hold time buckets in order, `step_s` seconds each."""

    step_s: int
    buckets: tuple[TimeBucket, ...]
    log_end: datetime | None = None
    """Time of the last row of any delivery."""

    def total(self, *outcomes: str) -> int:
        """Return the number of deliveries with these outcomes; without arguments, of all."""
        return sum(bucket.outcomes[one] for bucket in self.buckets for one in outcomes or OUTCOMES)

    def worst_bucket(self, percentile: str) -> TimeBucket | None:
        """Return the bucket with the highest latency, or None without deliveries."""
        known = [bucket for bucket in self.buckets if percentile in bucket.latency_s]
        return max(known, key=lambda bucket: bucket.latency_s[percentile], default=None)


def read_history(batches: Batches, now: datetime | None = None) -> History:
    """Count journeys in two passes; the first finds the span, which decides the bucket length.

    `now` leaves out those whose times are wrong by years: a bucket would be months long.
    """
    if now is not None:
        batches = _searched(batches, "message_hi", _published_s, now)
    ends = [
        (int(born.min()), int(born.max()), int(np.nanmax(batch["last_us"])))
        for batch in batches(_SPAN_COLUMNS)
        if len(born := _published_s(batch))
    ]
    if not ends:
        return History(step_s=_STEPS_S[0], buckets=())
    first, last = min(low for low, *_ in ends), max(high for _, high, _ in ends)
    step = next(
        (step for step in _STEPS_S if (last - first) / step < _MAX_BINS),
        _coarsest_step_s(last - first),
    )
    origin = first // step
    count = last // step - origin + 1
    counts = np.zeros((len(OUTCOMES), count), dtype=np.int64)
    latencies = np.zeros((count, _BINS_PER_OCTAVE * _OCTAVES), dtype=np.int64)
    for batch in batches(_COLUMNS):
        _count(batch, origin, step, counts, latencies)
    buckets = tuple(
        TimeBucket(
            at=datetime.fromtimestamp((origin + place) * step, UTC),
            outcomes=dict(zip(OUTCOMES, counts[:, place].tolist(), strict=True)),
            latency_s=dict(_percentiles(latencies[place])),
        )
        for place in range(count)
    )
    log_end = datetime.fromtimestamp(max(end for *_, end in ends) / 1e6, UTC)
    if now is not None:
        log_end = min(log_end, now)
    return History(step_s=step, buckets=buckets, log_end=log_end)


def _searched(
    batches: Batches,
    column: str,
    seconds: Callable[[ColumnBatch], npt.NDArray[np.int64]],
    now: datetime,
) -> Batches:
    """Return batches with the rows that are searched: see `searched_bins`."""
    until = int(now.timestamp()) + DAY_S
    newest = max(
        (int(at[at < until].max(initial=0)) for at in map(seconds, batches((column,)))), default=0
    )

    def read(columns: tuple[str, ...]) -> Iterator[ColumnBatch]:
        for batch in batches(columns):
            at = seconds(batch)
            some = (at < until) & (at > newest - LOG_DAYS * DAY_S)
            yield {name: values[some] for name, values in batch.items()}

    return read


def _coarsest_step_s(span_s: int) -> int:
    days = math.ceil(span_s / _MAX_BINS / _STEPS_S[-1]) + 1
    return days * _STEPS_S[-1]


def _published_s(batch: ColumnBatch) -> npt.NDArray[np.int64]:
    """Return the second of publish, from the millisecond in the first 48 bits of an id."""
    return (batch["message_hi"].astype(np.int64) >> 16) // 1000


def _count(
    batch: ColumnBatch,
    origin: int,
    step: int,
    outcomes: npt.NDArray[np.int64],
    latencies: npt.NDArray[np.int64],
) -> None:
    at = _published_s(batch) // step - origin
    outcome = batch["outcome"]
    delivered = outcome == "delivered"
    first = delivered & (batch["attempts"] <= 1)
    left = ~delivered
    masks = {FIRST_ATTEMPT: first, RETRIED: delivered & ~first}
    for name, label in _OUTCOME_LABELS.items():
        of_name = outcome == name
        masks[label] = masks[label] | of_name if label in masks else of_name
        left &= ~of_name
    masks[ENDED] = left
    for label, mask in masks.items():
        outcomes[OUTCOMES.index(label)] += np.bincount(at[mask], minlength=outcomes.shape[1])
    there = delivered & ~np.isnan(batch["finished_us"])
    ms = np.maximum(
        batch["finished_us"][there] / 1e3 - (batch["message_hi"][there].astype(np.int64) >> 16), 1.0
    )
    bins = np.minimum((np.log2(ms) * _BINS_PER_OCTAVE).astype(np.int64), latencies.shape[1] - 1)
    np.add.at(latencies, (at[there], bins), 1)


def _percentiles(counts: npt.NDArray[np.int64]) -> Iterator[tuple[str, float]]:
    total = int(counts.sum())
    if not total:
        return
    reached = np.cumsum(counts)
    for name, share in PERCENTILES.items():
        place = int(np.searchsorted(reached, math.ceil(share * total)))
        yield name, 2 ** ((place + 0.5) / _BINS_PER_OCTAVE) / 1e3


Row = Mapping[str, Any]
ReadTable = Callable[[str], Sequence[Row]]
"""Reads the rows of a small analysis table."""
EachRow = Callable[[str, Sequence[str]], Iterable[Row]]
"""Reads columns of a table that grows with the log, row after row."""
_HAZARD_COLUMNS: Final = ("attempt", "attempts", "successes", "mean_delay_ms")
_DAILY_COLUMNS: Final = ("subscription_id", "room_id", "target_host", "attempts", "failures")
MAX_SECTIONS: Final = 200
"""Subscriptions with a section of their own, most failures first."""
MAX_SHOWN: Final = 40
"""Subscriptions that fit into a chart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscriber:
    """Hold a subscription with its name in the report, which no other has."""

    id: str
    label: str
    room: int | None
    host: str | None
    organisation: str | None
    attempts: int
    failures: int
    has_section: bool

    @property
    def anchor(self) -> str:
        """Return the anchor of its section."""
        return f"subscription-{self.id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionNames:
    """Hold subscriptions by id, outages by begin, and pairs that share bad minutes."""

    subscribers: Mapping[str, Subscriber]
    outages: Sequence[Outage]
    pairs: Sequence[Row]
    rooms: Mapping[str, str]
    """Names of rooms by their ids as text."""

    def label(self, identity: str) -> str:
        """Return the name of a subscription; of an unknown one its id."""
        found = self.subscribers.get(identity)
        return identity if found is None else found.label

    def in_pairs(self) -> list[Subscriber]:
        """Return the subscriptions of pairs, most bad minutes first, grouped by host."""
        bad: dict[str, int] = {}
        for pair in self.pairs:
            for side in ("first", "second"):
                bad[pair[f"{side}_id"]] = max(bad.get(pair[f"{side}_id"], 0), pair[f"bad_{side}"])
        chosen = sorted(bad, key=lambda one: (-bad[one], one))[:MAX_SHOWN]
        return self._sort_by_host(chosen)

    def in_outages(self) -> list[Subscriber]:
        """Return the subscriptions of outages, most failures first, grouped by host."""
        named = {one for outage in self.outages for one in outage.subscriptions}
        chosen = sorted(named, key=lambda one: (-self.subscribers[one].failures, one))[:MAX_SHOWN]
        return self._sort_by_host(chosen)

    def worst(self, limit: int) -> list[Subscriber]:
        """Return the subscriptions with most failed attempts, the worst first."""
        every = sorted(self.subscribers.values(), key=lambda one: (-one.failures, one.label))
        return every[:limit]

    def _sort_by_host(self, ids: Sequence[str]) -> list[Subscriber]:
        return sorted(
            (self.subscribers[one] for one in ids), key=lambda one: (one.host or "", one.label)
        )


def read_subscription_names(
    read: ReadTable, each_row: EachRow, names: Mapping[str, Names], log_end: datetime | None
) -> SubscriptionNames:
    """Read the tables `rollups_daily`, `incidents` and `cofailures`, and name subscriptions."""
    attempts: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    hosts: dict[str, Counter[str]] = {}
    rooms: dict[str, int] = {}
    for row in each_row("rollups_daily", _DAILY_COLUMNS):
        one = row["subscription_id"]
        if one is None:
            continue
        rooms[one] = row["room_id"]
        attempts[one] += row["attempts"]
        failures[one] += row["failures"]
        if row["target_host"] is not None:
            hosts.setdefault(one, Counter())[row["target_host"]] += row["attempts"]
    outages = find_outages(read("incidents"), log_end)
    pairs = sorted(read("cofailures"), key=lambda row: (row["q"], -(row["phi"] or 0.0)))
    named = set(rooms) | {one for outage in outages for one in outage.subscriptions}
    named |= {row[side] for row in pairs for side in ("first_id", "second_id")}
    usual = {one: hosts[one].most_common(1)[0][0] for one in hosts}
    labels = _labels(named, names, usual)
    worst = sorted(named, key=lambda one: (-failures[one], labels[one]))
    with_section = frozenset(worst[:MAX_SECTIONS])
    subscribers = {
        one: Subscriber(
            id=one,
            label=labels[one],
            room=rooms.get(one),
            host=usual.get(one),
            organisation=names[one].organisation if one in names else None,
            attempts=attempts[one],
            failures=failures[one],
            has_section=one in with_section,
        )
        for one in sorted(named)
    }
    room_names = {
        str(rooms[one]): known.room
        for one, known in names.items()
        if one in rooms and known.room is not None
    }
    return SubscriptionNames(
        subscribers=subscribers, outages=outages, pairs=pairs, rooms=room_names
    )


def _labels(
    ids: Iterable[str], names: Mapping[str, Names], hosts: Mapping[str, str]
) -> dict[str, str]:
    """Return a label for each id that no other id has: as short as it can be."""
    labels: dict[str, str] = {}
    for one in ids:
        known = names.get(one)
        if known is None:
            labels[one] = f"{hosts.get(one, 'subscription')} …{one[COUNTER_DIGITS]}…"
        else:
            labels[one] = known.name if known.room is None else f"{known.room}/{known.name}"
    longer: Sequence[Callable[[str], str | None]] = (
        lambda one: names[one].organisation if one in names else None,
        lambda one: f"…{one[COUNTER_DIGITS]}…",
        lambda one: one,
    )
    for addition in longer:
        often = Counter(labels.values())
        for one, label in list(labels.items()):
            if often[label] > 1 and (added := addition(one)):
                labels[one] = f"{label} {added}"
    return {one: terminal_safe(label) for one, label in labels.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class HourlyFailures:
    """Count attempts and failures of subscriptions in equal parts of the period."""

    began: datetime
    step_s: int
    counts: Mapping[str, npt.NDArray[np.int64]]
    """By subscription: a row of attempts and a row of failures."""


_MAX_PARTS: Final = 96
_HOURLY_COLUMNS: Final = ("hour", "subscription_id", "attempts", "failures")


def read_hourly_failures(
    batches: Batches, ids: Sequence[str], now: datetime | None = None
) -> HourlyFailures | None:
    """Count attempts and failures of some subscriptions, from `rollups_hourly` in two passes.

    `now`: as for `read_history`.
    """
    if now is not None:
        batches = _searched(batches, "hour", lambda batch: _hours(batch["hour"]) * 3600, now)
    ends = [
        (int(hours.min()), int(hours.max()))
        for hours in (_hours(batch["hour"]) for batch in batches(("hour",)))
        if len(hours)
    ]
    if not ends:
        return None
    first, last = min(low for low, _ in ends), max(high for _, high in ends)
    step = -(-(last - first + 1) // _MAX_PARTS)
    parts = (last - first) // step + 1
    counts = {one: np.zeros((2, parts), dtype=np.int64) for one in ids}
    for batch in batches(_HOURLY_COLUMNS):
        places = (_hours(batch["hour"]) - first) // step
        for place, one, tried, failed in zip(
            places.tolist(),
            batch["subscription_id"].tolist(),
            batch["attempts"].tolist(),
            batch["failures"].tolist(),
            strict=True,
        ):
            if one in counts:
                counts[one][:, place] += (tried, failed)
    return HourlyFailures(
        began=datetime.fromtimestamp(first * 3600, UTC), step_s=step * 3600, counts=counts
    )


def _hours(times: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    return times.astype("datetime64[h]").astype(np.int64)


_Z_95: Final = 1.96
MAX_FRONTS: Final = 3
"""Subscriptions whose policies are drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStats:
    """Hold one attempt number (0: the first try) over all subscriptions, with its 95 % interval."""

    attempt: int
    attempts: int
    share: float
    low: float
    high: float
    mean_wait_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """Hold attempts in order, and the advice, with its front, for subscriptions that gain most."""

    attempts: Sequence[AttemptStats]
    advice: Sequence[Row]
    fronts: Mapping[str, Sequence[Row]]

    @property
    def drawn_advice(self) -> list[Row]:
        """Return the recommendations that are drawn."""
        sound = [
            row
            for row in self.advice
            if row["recommended_delivered"] is not None and self.fronts.get(row["subscription_id"])
        ]
        return sorted(sound, key=lambda row: (-_gain(row), str(row["subscription_id"])))[
            :MAX_FRONTS
        ]


def _gain(row: Row) -> float:
    return float(row["recommended_delivered"]) - float(row["measured_delivered"])


def read_retries(read: ReadTable, each_row: EachRow) -> Retries:
    """Read the tables `hazards`, `advice` and `advice_front`."""
    sums: dict[int, list[float]] = {}
    for row in each_row("hazards", _HAZARD_COLUMNS):
        known = sums.setdefault(row["attempt"], [0, 0, 0.0, 0])
        known[0] += row["attempts"]
        known[1] += row["successes"]
        if row["mean_delay_ms"] is not None:
            known[2] += row["mean_delay_ms"] * row["attempts"]
            known[3] += row["attempts"]
    fronts: dict[str, list[Row]] = {}
    for row in read("advice_front"):
        fronts.setdefault(row["subscription_id"], []).append(row)
    steps = [
        _to_attempt_stats(number, *known) for number, known in sorted(sums.items()) if known[0]
    ]
    return Retries(attempts=steps, advice=read("advice"), fronts=fronts)


def _to_attempt_stats(
    number: int, attempts: float, successes: float, waited_ms: float, waits: float
) -> AttemptStats:
    low, high = wilson(int(successes), int(attempts))
    return AttemptStats(
        attempt=number,
        attempts=int(attempts),
        share=successes / attempts,
        low=low,
        high=high,
        mean_wait_s=waited_ms / waits / 1e3 if waits else None,
    )


def wilson(successes: int, attempts: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of a share (Wilson's interval)."""
    share, square = successes / attempts, _Z_95**2
    middle = share + square / (2 * attempts)
    off = _Z_95 * math.sqrt(share * (1 - share) / attempts + square / (4 * attempts**2))
    whole = 1 + square / attempts
    return max((middle - off) / whole, 0.0), min((middle + off) / whole, 1.0)
