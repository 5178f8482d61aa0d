"""Count usage from the view of the log, as a test's own independent oracle."""

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from math import ceil, log2
from typing import Any, Final

from rooms.domain.usage import COUNTERS, MINUTE_COUNTERS

Rows = Callable[[str], Awaitable[Sequence[Sequence[Any]]]]
"""Runs a statement and returns its rows."""
Key = tuple[Any, ...]
"""Hour, room, owner, organisation, event type, application, and the name of the count."""

_KINDS: Final = {
    "enqueued": ("deliveries",),
    "replayed": ("deliveries",),
    "delivered": ("delivered",),
    "pull_acked": ("delivered",),
    "handed_over": ("delivered",),
    "sidelined": ("sidelined",),
    "expired": ("expired",),
    "cancelled": ("cancelled",),
    "dropped": ("dropped",),
    "purged": ("purged",),
    "attempted": ("attempts",),
    "published": ("messages",),
}
_LOG: Final = """
SELECT date_trunc('hour', l.ts, 'UTC'), l.room_id, r.organisation_id::text, coalesce(l.event_type, ''), l.kind, l.payload_bytes,
    l.error_class, coalesce(m.publisher_organisation_id, r.organisation_id)::text, s.organisation_id::text,
    coalesce(CASE l.kind WHEN 'published' THEN m.application ELSE s.application END, '')
FROM delivery_log l JOIN rooms r ON r.id = l.room_id
    LEFT JOIN messages m ON m.room_id = l.room_id AND m.id = l.message_id
    LEFT JOIN subscriptions s ON s.room_id = l.room_id AND s.id = l.subscription_id
"""
_COUNTED: Final = f"""
SELECT hour, room_id, owner_id::text, organisation_id::text, event_type, application, {", ".join(COUNTERS)} FROM usage_hours
"""


async def counts_of_log(rows: Rows) -> Counter[Key]:
    """Count every step of the log in Python."""
    found: Counter[Key] = Counter()
    for row in await rows(_LOG):
        hour, room, owner, event_type, kind, size, error, publisher, subscriber, application = row
        organisation = publisher if kind == "published" else subscriber
        key = (hour, room, owner, organisation, event_type, application)
        for name in _KINDS.get(kind, ()):
            found[*key, name] += 1
        if kind == "published":
            found[*key, "bytes"] += size
        if kind == "attempted" and error is not None:
            found[*key, "failed_attempts"] += 1
    return +found


async def counts_of_table(rows: Rows) -> Counter[Key]:
    """Return what was counted, in the same form."""
    return +Counter(
        {
            (*row[:6], name): value
            for row in await rows(_COUNTED)
            for name, value in zip(COUNTERS, row[6:], strict=True)
        }
    )


_MINUTE_KINDS: Final = {
    "enqueued": "deliveries",
    "replayed": "deliveries",
    "delivered": "delivered",
    "pull_acked": "delivered",
    "handed_over": "delivered",
    "nacked": "failed",
    "lease_ended": "failed",
    "sidelined": "sidelined",
    "expired": "expired",
}
_RECENT_LOG: Final = """
SELECT date_trunc('minute', l.ts, 'UTC'), l.kind, l.error_class, coalesce(l.latency_ms, x.latency_ms), s.id::text, s.organisation_id::text
FROM delivery_log l JOIN subscriptions s ON s.room_id = l.room_id AND s.id = l.subscription_id
    LEFT JOIN log_entries x ON x.kind = 'delivered' AND l.kind = 'delivered' AND x.http_status IS NULL
        AND (x.room_id, x.message_id, x.writer_id, x.writer_seq) = (l.room_id, l.message_id, l.writer_id, l.writer_seq)
WHERE l.ts >= now() - interval '90 minutes'
"""
_ALL: Final = "00000000-0000-0000-0000-000000000000"


async def minutes_of_log(rows: Rows) -> Counter[Key]:
    """Count the steps of the last 90 minutes: by subject, minute, and count or bucket."""
    found: Counter[Key] = Counter()
    for minute, kind, error, latency_ms, *subjects in await rows(_RECENT_LOG):
        names: list[object] = [_MINUTE_KINDS[kind]] if kind in _MINUTE_KINDS else []
        if kind == "attempted" and error is not None:
            names.append("failed")
        if latency_ms is not None:
            names.append(0 if latency_ms <= 1 else min(33, ceil(2 * log2(latency_ms))))
        found.update((subject, minute, name) for subject in (*subjects, _ALL) for name in names)
    return found


async def minutes_of_table(rows: Rows) -> Counter[Key]:
    """Return what was counted by the minute, in the same form."""
    columns = ", ".join(MINUTE_COUNTERS)
    found: Counter[Key] = Counter()
    for subject, minute, latencies, *counts in await rows(
        f"SELECT subject::text, minute, latencies, {columns} FROM activity_minutes"
    ):
        for name, value in (*zip(MINUTE_COUNTERS, counts, strict=True), *enumerate(latencies)):
            found[subject, minute, name] += value
    return +found
