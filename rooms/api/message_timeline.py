"""Serve the timeline of a message: each step of it and its deliveries."""

from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Annotated, Final

from litestar import get
from litestar.params import QueryParameter
from msgspec import Struct

from rooms.api.auth import Caller, ServicesDep, for_portals
from rooms.api.messages import PUBLISHER_FIELDS, READ, publisher_fields, publishers
from rooms.api.pagination import Cursor, Limit, PageRequest
from rooms.api.params import IdPath, parse_filter_id, parse_message
from rooms.db.catalog.organisations import ListedOrganisation, find_members
from rooms.db.connection import transaction
from rooms.db.queries import messages as records
from rooms.db.queries.message_scope import (
    MessageView,
    find_message_view,
    find_others_subscriptions,
)
from rooms.domain.ids import OrganisationId, room_of
from rooms.domain.state_machine import LogKind, Reason, State

_LIST: Final = "journey"
_STATE_AFTER: Final[Mapping[str, State]] = {
    LogKind.ENQUEUED: State.QUEUED,
    LogKind.COMING_DUE: State.QUEUED,
    LogKind.RETRY_SCHEDULED: State.QUEUED,
    LogKind.HELD: State.HELD,
    LogKind.RELEASED: State.QUEUED,
    LogKind.LEASED: State.LEASED,
    LogKind.LEASE_ENDED: State.QUEUED,
    LogKind.NACKED: State.QUEUED,
    LogKind.PULL_ACKED: State.DELIVERED,
    LogKind.SIDELINED: State.SIDELINED,
    LogKind.SHOVELED: State.QUEUED,
    LogKind.DELIVERED: State.DELIVERED,
    LogKind.EXPIRED: State.EXPIRED,
    LogKind.CANCELLED: State.CANCELLED,
    LogKind.DROPPED: State.DROPPED,
    LogKind.PURGED: State.PURGED,
    LogKind.HANDED_OVER: State.HANDED_OVER,
    LogKind.RESTORED: State.QUEUED,
    LogKind.REPLAYED: State.QUEUED,
}
"""The state after a step; other steps do not change it."""
_SCHEDULED: Final = "scheduled"
"""The end of a step's detail where the new due time is beyond the broker's look-ahead."""
_PLAIN_DETAILS: Final = frozenset({*Reason, *State, "moved", "moved, scheduled"})
"""Details of a step that say nothing of what an endpoint answered."""


class TimelineEntry(Struct, kw_only=True):
    """Describe one step of a message.

    `state`: the delivery's state after it; null: unchanged. `writer`, of `writer_kind` on
    `worker_host`, wrote it; `worker` is the writer that made the attempt. The step `published`
    names key, organisation and application. Only the room's owner sees `writer`. What the endpoint
    of another organisation answered is left out.
    """

    ts: datetime
    kind: str
    state: State | None
    subscription_id: str | None
    delivery_id: str | None
    generation: int | None
    attempt: int | None
    fanout: int | None
    delay_ms: int | None
    latency_ms: float | None
    http_status: int | None
    error_class: str | None
    detail: str | None
    answer: str | None
    target_host: str | None
    worker: int | None
    worker_host: str | None
    writer: str | None
    writer_kind: str | None
    event_type: str | None
    event_version: int | None
    correlation_id: str | None
    publisher_id: str | None
    publisher_organisation_id: str | None
    publisher_organisation: str | None
    application: str | None


class MessageTimeline(Struct, kw_only=True):
    """Describe the log of a message, oldest first."""

    items: list[TimelineEntry]
    next_cursor: str | None


@get(
    "/messages/{message_id:str}/journey",
    opt=for_portals(READ),
    tags=["messages"],
    summary="Read the timeline of a message",
)
async def read_journey(
    *,
    services: ServicesDep,
    principal: Caller,
    message_id: IdPath,
    limit: Limit = 200,
    cursor: Cursor = None,
    delivery: Annotated[
        str | None, QueryParameter(name="delivery_id", description="Only steps of this delivery.")
    ] = None,
) -> MessageTimeline:
    """List every step of the message and its deliveries, oldest first.

    The room's owner sees all. Others see the steps of their own deliveries, from `enqueued` on; the
    publisher sees the step `published` too.
    """
    identity = parse_message(message_id)
    page = PageRequest(services.cipher, _LIST, limit, cursor)
    after = _parse_position(page.after)
    wanted = parse_filter_id("delivery_id", delivery)
    async with transaction(services.engine) as connection:
        view = await find_message_view(connection, principal, identity)
        found = await records.timeline(
            connection,
            room_of(identity),
            identity,
            conditions=view.visible_steps(),
            delivery=wanted,
            after=after,
            limit=page.fetch_limit,
        )
        if not found and after is None and view.message is None:
            raise records.message_not_found(identity)
        named = {step.subscription_id for step in found if step.subscription_id is not None}
        others = await find_others_subscriptions(connection, view.scope, named)
        published = [view.message] if view.message is not None and view.sees_counts else []
        members = await find_members(connection, publishers(view.scope, published))
    return page.respond(
        MessageTimeline,
        found,
        lambda step: _to_timeline_entry(step, view, members, others),
        position=lambda step: f"{step.ts.isoformat()} {step.writer_id} {step.writer_seq}",
    )


def _parse_position(text: str | None) -> tuple[datetime, int, int] | None:
    if text is None:
        return None
    at, writer, count = text.split(" ")
    return datetime.fromisoformat(at), int(writer), int(count)


def _to_timeline_entry(
    step: records.TimelineRow,
    view: MessageView,
    members: Mapping[OrganisationId, ListedOrganisation],
    others: Collection[str],
) -> TimelineEntry:
    same = {
        name: getattr(step, name)
        for name in TimelineEntry.__struct_fields__
        if name not in {"state", "answer", "writer", *PUBLISHER_FIELDS}
    }
    answer = None if step.answer_head is None else step.answer_head.decode("utf-8", "replace")
    if step.subscription_id in others:
        answer = None
        same["detail"] = step.detail if step.detail in _PLAIN_DETAILS else None
    is_publish = step.kind == LogKind.PUBLISHED and view.sees_counts
    return TimelineEntry(
        **same,
        **publisher_fields(view.scope, view.message if is_publish else None, members),
        state=_state_after(step),
        answer=answer,
        # Its numbers count what the process wrote, for others too.
        writer=f"{step.writer_id}:{step.writer_seq}" if view.scope.owns else None,
    )


def _state_after(step: records.TimelineRow) -> State | None:
    if step.detail is not None and step.detail.endswith(_SCHEDULED):
        return State.SCHEDULED
    if step.kind == LogKind.RESTORED and step.detail == State.HELD:
        return State.HELD
    return _STATE_AFTER.get(step.kind)


ROUTES: Final = [read_journey]
