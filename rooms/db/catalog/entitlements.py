"""Find out what another organisation's subscription was entitled to at past times, for replays.

It is read from grants, which are never deleted, and from the history of subscriptions. Where the
owner asks for no approval of changed event types or filters, the subscription could have had any
since then; `rooms.reapproval_ended` says since when.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.db.catalog.grants import grants_since
from rooms.db.catalog.rooms import find_any_room, room_not_found
from rooms.db.catalog.subscriptions import interests_to_json
from rooms.domain.room import Room, Subscription
from rooms.domain.sharing import GrantKind, ReapprovalField

MAX_PERIODS: Final = 1000
"""The most changes that are read, the newest; nothing is known of the time before them."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
# Workers change neither event types nor filter; their older entries name none. While it was
# pending, nothing was approved.
_APPROVED: Final = text(f"""
SELECT at, snapshot -> 'event_types', snapshot ->> 'filter' FROM (
    SELECT at, id, snapshot, lag(snapshot) OVER (ORDER BY at, id) AS former
    FROM subscription_history
    WHERE room_id = :room AND subscription_id = CAST(:subscription AS uuid)
        AND status <> 'pending' AND jsonb_exists(snapshot, 'event_types')
) h WHERE former IS NULL OR snapshot -> 'event_types' <> former -> 'event_types'
    OR snapshot ->> 'filter' IS DISTINCT FROM former ->> 'filter'
ORDER BY at DESC, id DESC LIMIT {MAX_PERIODS + 1}
""")  # noqa: S608 - constants of this module


async def entitlements(
    connection: AsyncConnection, subscription: Subscription, since: datetime
) -> list[dict[str, Any]] | None:
    """Return periods with event types after a time, as a replay job takes them; None: no limit.

    The owner's own subscription has no limit. An approved one is entitled from its request on, and
    to event types, versions and filters that were approved later from that approval on; one by
    grant while there was a grant. ConflictError: there were too many grants since then.
    """
    room = await find_any_room(connection, subscription.room_id)
    if room is None:
        raise room_not_found(subscription.room_id)
    if room.organisation_id == subscription.organisation_id:
        return None
    periods: list[dict[str, Any]] = []
    if subscription.approved_at is not None:
        periods += _merged(await _approved_spans(connection, room, subscription))
    for grant in await grants_since(
        connection, room.id, subscription.organisation_id, GrantKind.SUBSCRIBE, since
    ):
        ends = [end for end in (grant.until, grant.revoked_at) if end is not None]
        what = {"event_types": None if grant.event_types is None else list(grant.event_types)}
        periods.append(_period(what, grant.starts_at, min(ends, default=None)))
    return periods


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """Hold what a subscription had from `start` to `end` (None: now); `known`: by its history."""

    start: datetime
    end: datetime | None
    types: Sequence[Mapping[str, Any]] | None
    filter: str | None
    known: bool = True

    def parts(self, free: Mapping[ReapprovalField, datetime]) -> Iterator[dict[str, Any]]:
        """Yield its periods, which begin anew where fields needed no approval any more."""
        starts = {self.start, *(at for at in free.values() if self._contains(at))}
        ordered: list[datetime | None] = [*sorted(starts), self.end]
        for start, end in itertools.pairwise(ordered):
            if start is None:
                continue
            is_free = {field for field, at in free.items() if at <= start}
            if not self.known and len(is_free) < len(_BOUNDING):
                continue
            what = _types_of(None if ReapprovalField.EVENT_TYPES in is_free else self.types)
            if ReapprovalField.FILTER not in is_free and self.filter is not None:
                what["filter"] = self.filter
            yield _period(what, start, end)

    def _contains(self, at: datetime) -> bool:
        return self.start < at and (self.end is None or at < self.end)


_BOUNDING: Final = (ReapprovalField.EVENT_TYPES, ReapprovalField.FILTER)
"""Fields whose approval bounds what a subscription could have received."""


async def _approved_spans(
    connection: AsyncConnection, room: Room, subscription: Subscription
) -> list[dict[str, Any]]:
    """Return the periods of an approved subscription, oldest first."""
    parameters = {"room": subscription.room_id, "subscription": subscription.id}
    rows = (await connection.execute(_APPROVED, parameters)).all()
    begin = subscription.created_at
    spans: list[_Span] = []
    if not rows:  # it is being created, with what the owner approved
        types = interests_to_json(subscription.event_types)
        spans.append(_Span(start=begin, end=None, types=types, filter=subscription.filter))
    end = None
    for number, (at, types, expression) in enumerate(rows[:MAX_PERIODS], 1):
        # What it asked for at first was approved for all the time since then.
        start = begin if number == len(rows) else at
        spans.append(_Span(start=start, end=end, types=types, filter=expression))
        end = at
    if len(rows) > MAX_PERIODS:
        spans.append(_Span(start=begin, end=end, types=(), filter=None, known=False))
    free = {
        field: max(begin, room.reapproval_ended.get(field, begin))
        for field in _BOUNDING
        if field not in room.reapprove_on
    }
    return [part for span in reversed(spans) for part in span.parts(free)]


def _types_of(types: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
    """Return names, and the versions of those that are not wanted in each."""
    if types is None:
        return {"event_types": None}
    every = {one["name"] for one in types if "versions" not in one}
    versions: dict[str, set[int]] = {}
    for one in types:
        if one["name"] not in every:
            versions.setdefault(one["name"], set()).update(one["versions"])
    found: dict[str, Any] = {"event_types": sorted(every | versions.keys())}
    if versions:
        found["versions"] = {name: sorted(known) for name, known in versions.items()}
    return found


def _merged(periods: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join neighbours that are equal but for their times."""
    merged: list[dict[str, Any]] = []
    for period in periods:
        last = merged[-1] if merged else None
        if last is not None and last["until_us"] == period["from_us"]:
            longer = {**last, "until_us": period["until_us"]}
            if longer == {**period, "from_us": last["from_us"]}:
                merged[-1] = longer
                continue
        merged.append(period)
    return merged


def _period(what: dict[str, Any], start: datetime, end: datetime | None) -> dict[str, Any]:
    return {**what, "from_us": _us(start), "until_us": None if end is None else _us(end)}


def _us(at: datetime) -> int:
    """Return microseconds since 1970, as exactly as PostgreSQL stores times."""
    return (at - _EPOCH) // timedelta(microseconds=1)
