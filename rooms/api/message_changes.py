"""Serve changes of `/v1/messages/{id}`: cancel a message, or change its due time."""

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from typing import Annotated, Final

from litestar import delete, patch
from litestar.params import JSONBody
from msgspec import Meta, Struct
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.api.auth import OF_EVENTS, Caller, ServicesDep, require_scopes
from rooms.api.changes import Change, ChangeDep
from rooms.api.codec import Body
from rooms.api.deps import ApiServices
from rooms.api.errors import documented_responses
from rooms.api.params import IdPath, parse_message
from rooms.db.connection import transaction
from rooms.db.queries import messages as records
from rooms.db.queries.message_scope import (
    MessageView,
    find_changeable_message,
    find_others_subscriptions,
)
from rooms.db.queue import withdraw as withdrawals
from rooms.db.queue.withdraw import ChangeOutcome, DeliveryChange
from rooms.db.writer import LogWriter
from rooms.domain.ids import DeliveryId, MessageId, room_of
from rooms.domain.message import MAX_DELAY_MS, DeliverySchedule
from rooms.domain.principal import Principal
from rooms.domain.room import destination_name
from rooms.domain.state_machine import Scope, SubscriptionType
from rooms.errors import ConflictError, FieldProblem, InvalidError

_TAGS: Final = ["messages"]
WRITE: Final = require_scopes(Scope.PUBLISH, Scope.OPERATE, allows=OF_EVENTS)
_CANCELLED: Final = "withdrawn"
_RESCHEDULED: Final = "moved"
PAGE: Final = withdrawals.MAX_CHANGED
"""Deliveries that are changed at a time; an answer lists no more."""


class RescheduleMessage(Struct, forbid_unknown_fields=True, kw_only=True):
    """Set the new due time: exactly one of the two."""

    delay_ms: (
        Annotated[int, Meta(ge=0, le=MAX_DELAY_MS, description="From now on, in ms.")] | None
    ) = None
    deliver_at: (
        Annotated[
            datetime,
            Meta(tz=True, description="At this time, within ten years; at once where it is past."),
        ]
        | None
    ) = None


class DeliveryChangeResult(Struct, kw_only=True):
    """Describe what happened to one delivery.

    `result`: `withdrawn` or `moved`; `in_flight` where a worker or a consumer has it; otherwise the
    state that it keeps.
    """

    delivery_id: str
    subscription_id: str
    destination: str
    result: str


class CancelMessageResponse(Struct, kw_only=True):
    """Describe what happened to each delivery of a cancelled message.

    `results` counts all deliveries by result, `deliveries` lists the first 20,000. A publisher that
    is not the room's owner finds there only its own subscriptions, unless the room is transparent.
    """

    message_id: str
    deliveries: list[DeliveryChangeResult]
    results: dict[str, int]


class RescheduleMessageResponse(Struct, kw_only=True):
    """Describe a message with its new due time; its expiry moves by the same time.

    `deliveries` and `results` are as for a cancelled message.
    """

    message_id: str
    due_at: datetime
    expires_at: datetime | None
    deliveries: list[DeliveryChangeResult]
    results: dict[str, int]


@delete(
    "/messages/{message_id:str}",
    status_code=200,
    opt=WRITE,
    responses=documented_responses(409),
    tags=_TAGS,
    summary="Cancel a message",
)
async def withdraw_message(
    services: ServicesDep, principal: Caller, change: ChangeDep, message_id: IdPath
) -> CancelMessageResponse:
    """Cancel the deliveries of a message. No attempt starts after the answer for those `withdrawn`.

    The room's owner may cancel any message, a publisher its own while it may publish the event
    type. A delivery that a worker or a consumer has is `in_flight`: it may still be delivered.
    Sidelined deliveries stay sidelined. The message itself is kept, and so is its publisher's id.
    409: nothing could be withdrawn.
    """
    return await cancel(services, principal, change, parse_message(message_id))


async def cancel(
    services: ApiServices, principal: Principal, change: Change, identity: MessageId
) -> CancelMessageResponse:
    """Cancel the deliveries of a message. NotFoundError, ConflictError."""
    view = await _find_message(services, principal, identity)
    # Where one is cancelled, the next delivery of its ordering key can start.
    changes = _Changes(_CANCELLED)
    await changes.make(
        services,
        principal,
        change,
        lambda writer, after: withdrawals.cancel_message(writer, identity, after=after, limit=PAGE),
    )
    await change.record()
    async with transaction(services.engine) as connection:
        named = await _named_changes(connection, view, changes.listed)
    return CancelMessageResponse(
        message_id=identity,
        deliveries=_delivery_results(identity, named, _CANCELLED),
        results=changes.results(),
    )


@patch(
    "/messages/{message_id:str}",
    dto=Body[RescheduleMessage],
    return_dto=None,
    opt=WRITE,
    responses=documented_responses(409),
    tags=_TAGS,
    summary="Change the due time of a message",
)
async def move_message(
    data: JSONBody[RescheduleMessage],
    services: ServicesDep,
    principal: Caller,
    change: ChangeDep,
    message_id: IdPath,
) -> RescheduleMessageResponse:
    """Change the due time of the deliveries that wait, both first attempts and retries.

    The room's owner may do so with any message, a publisher with its own.
    Each lives as long after its new due time as it would have after the old one. Deliveries that
    are in flight, held or finished do not move. 409: nothing could be moved.
    """
    return await reschedule(services, principal, change, parse_message(message_id), data)


async def reschedule(
    services: ApiServices,
    principal: Principal,
    change: Change,
    identity: MessageId,
    request: RescheduleMessage,
) -> RescheduleMessageResponse:
    """Change the due time of a message. InvalidError, NotFoundError, ConflictError."""
    due = _to_schedule(services, request)
    view = await _find_message(services, principal, identity)
    changes = _Changes(_RESCHEDULED)

    async def move(writer: LogWriter, after: DeliveryId | None) -> list[DeliveryChange]:
        nonlocal due
        if due.at_us is None and changes.count_done():
            # A delay counts from the first statement on: the message has got its time by it.
            async with transaction(services.engine) as connection:
                found = await records.find_message(connection, room_of(identity), identity)
            due = DeliverySchedule.from_request(delay_ms=None, deliver_at=found.due_at)
        return await withdrawals.reschedule_message(writer, identity, due, after=after, limit=PAGE)

    await changes.make(services, principal, change, move)
    await change.record()
    async with transaction(services.engine) as connection:
        found = await records.find_message(connection, room_of(identity), identity)
        named = await _named_changes(connection, view, changes.listed)
    return RescheduleMessageResponse(
        message_id=identity,
        due_at=found.due_at,
        expires_at=found.expires_at,
        deliveries=_delivery_results(identity, named, _RESCHEDULED),
        results=changes.results(),
    )


class _Changes:
    """Make the changes of a message's deliveries page by page, and keep their results."""

    def __init__(self, done_label: str) -> None:
        self._done_label = done_label
        self._counts: Counter[str] = Counter()
        self.listed: list[DeliveryChange] = []
        """The first of them, as many as the answer lists."""

    async def make(
        self,
        services: ApiServices,
        principal: Principal,
        change: Change,
        change_page: Callable[[LogWriter, DeliveryId | None], Awaitable[list[DeliveryChange]]],
    ) -> None:
        """Change a page after the other; each waits for its turn.

        A request that ends in between can be repeated, and the journal has what it has changed.
        ConflictError: nothing could be changed.
        """
        after: DeliveryId | None = None
        while True:
            try:
                async with services.writer_turns.turn(principal.organisation_id) as writer:
                    page = await change_page(writer, after)
            except BaseException as exc:
                if self.count_done():
                    change.after = {"results": self.results()}
                    await change.record(exc)
                raise
            _notify_queued(services, page)
            self._counts.update(_result_label(one, self._done_label) for one in page)
            if after is None:
                self.listed = page
            if len(page) < PAGE:
                break
            after = page[-1].delivery_id
        if not self.count_done():
            found = (
                ", ".join(f"{count} {result}" for result, count in self.results().items())
                or "it has no deliveries"
            )
            raise ConflictError(f"nothing could be {self._done_label}: {found}")

    def count_done(self) -> int:
        """Return how many deliveries were changed."""
        return self._counts[self._done_label]

    def results(self) -> dict[str, int]:
        """Return the number of deliveries by result."""
        return dict(sorted((+self._counts).items()))


def _notify_queued(services: ApiServices, changes: Sequence[DeliveryChange]) -> None:
    for queue in {
        one.subscription_id if one.type is SubscriptionType.PULL else None for one in changes
    }:
        services.notifier.notify_queued(queue)


def _to_schedule(services: ApiServices, request: RescheduleMessage) -> DeliverySchedule:
    if (request.delay_ms is None) is (request.deliver_at is None):
        raise InvalidError(
            *(
                FieldProblem(name, "give delay_ms or deliver_at, one of them")
                for name in ("delay_ms", "deliver_at")
            )
        )
    due = DeliverySchedule.from_request(delay_ms=request.delay_ms, deliver_at=request.deliver_at)
    if due.delay_from_ms(services.clock.now_ms()) > MAX_DELAY_MS:
        raise InvalidError(FieldProblem("deliver_at", "is more than ten years away"))
    return due


async def _find_message(
    services: ApiServices, principal: Principal, identity: MessageId
) -> MessageView:
    async with transaction(services.engine) as connection:
        return await find_changeable_message(connection, principal, identity)


async def _named_changes(
    connection: AsyncConnection, view: MessageView, changes: Sequence[DeliveryChange]
) -> list[DeliveryChange]:
    """Return the changes of deliveries whose subscription the caller may know."""
    if view.sees_names:
        return list(changes)
    others = await find_others_subscriptions(
        connection, view.scope, {one.subscription_id for one in changes}
    )
    return [one for one in changes if one.subscription_id not in others]


def _result_label(change: DeliveryChange, done_label: str) -> str:
    return {
        ChangeOutcome.DONE: done_label,
        ChangeOutcome.IN_FLIGHT: "in_flight",
        ChangeOutcome.UNCHANGED: change.state.value,
    }[change.outcome]


def _delivery_results(
    message: MessageId, changes: Sequence[DeliveryChange], done_label: str
) -> list[DeliveryChangeResult]:
    return [
        DeliveryChangeResult(
            delivery_id=one.delivery_id,
            subscription_id=one.subscription_id,
            destination=destination_name(room_of(message), one.subscription_id),
            result=_result_label(one, done_label),
        )
        for one in changes
    ]


ROUTES: Final = [withdraw_message, move_message]
