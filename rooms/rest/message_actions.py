"""Taking a message back, or putting it off, before it is delivered."""

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Final

from litestar import delete, patch
from litestar.params import JSONBody
from msgspec import Meta, Struct

from rooms.domain.due import MAX_DELAY_MS, Due
from rooms.domain.ids import MessageId, room_of
from rooms.domain.names import destination
from rooms.domain.principal import Principal
from rooms.domain.states import Scope, SubscriptionType
from rooms.errors import ConflictError, FieldProblem, InvalidError
from rooms.rest.auth import Caller, Given, needs
from rooms.rest.bodies import Body
from rooms.rest.messages import check_room, parse_message
from rooms.rest.paths import IdPath
from rooms.rest.problems import documented
from rooms.rest.services import Services
from rooms.storage import messages as message_records
from rooms.storage import withdrawals as records
from rooms.storage.transactions import transaction
from rooms.storage.withdrawals import Fate, Told

_TAGS: Final = ["messages"]
_WRITE: Final = needs(Scope.PUBLISH, Scope.OPERATE)
_WITHDRAWN: Final = "withdrawn"
_MOVED: Final = "moved"


class MoveRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """When the message is to be due now: one of the two."""

    delay_ms: Annotated[int, Meta(ge=0, le=MAX_DELAY_MS, description="From now on, in ms.")] | None = None
    deliver_at: (
        Annotated[datetime, Meta(tz=True, description="At this time, within ten years; at once where it is past.")]
        | None
    ) = None


class DeliveryFate(Struct, kw_only=True):
    """What came of one delivery. `result`: `withdrawn` or `moved`; `in_flight` where a worker or a consumer has it; otherwise
    the state in which it stays.
    """

    delivery_id: str
    subscription_id: str
    destination: str
    result: str


class Withdrawal(Struct, kw_only=True):
    """A message that was taken back, as far as it could be."""

    message_id: str
    deliveries: list[DeliveryFate]


class Move(Struct, kw_only=True):
    """A message that is due at another time, as far as it could be moved; it expires as much later, or earlier."""

    message_id: str
    due_at: datetime
    expires_at: datetime | None
    deliveries: list[DeliveryFate]


@delete(
    "/messages/{message_id:str}",
    status_code=200,
    opt=_WRITE,
    responses=documented(409),
    tags=_TAGS,
    summary="Withdraw a message",
)
async def withdraw_message(services: Given, principal: Caller, message_id: IdPath) -> Withdrawal:
    """What became of each delivery. From the answer on no attempt is started for those that are `withdrawn`.

    A delivery that a worker or a consumer has is `in_flight`: it may still be delivered. What is sidelined stays so. The
    message itself is kept, and with it its publisher's id. 409: nothing could be withdrawn.
    """
    identity = await _checked(services, principal, message_id)
    told = await records.withdraw(services.writer, identity)
    _check(told, _WITHDRAWN)
    _ring(services, told)  # what stood behind it in its order is next
    return Withdrawal(message_id=identity, deliveries=_fates(identity, told, _WITHDRAWN))


@patch(
    "/messages/{message_id:str}",
    dto=Body[MoveRequest],
    return_dto=None,
    opt=_WRITE,
    responses=documented(409),
    tags=_TAGS,
    summary="Move the due time of a message",
)
async def move_message(data: JSONBody[MoveRequest], services: Given, principal: Caller, message_id: IdPath) -> Move:
    """The message with its new due time, and what became of each delivery.

    What waits is moved, a retry as well as a first try; it lives as long from its new due time on as it would have from
    the old one. What is in flight, held or at rest is not moved. 409: nothing could be moved.
    """
    due = _due(services, data)
    identity = await _checked(services, principal, message_id)
    told = await records.move(services.writer, identity, due)
    _check(told, _MOVED)
    _ring(services, told)
    async with transaction(services.engine) as connection:
        found = await message_records.find_message(connection, room_of(identity), identity)
    return Move(
        message_id=identity,
        due_at=found.due_at,
        expires_at=found.expires_at,
        deliveries=_fates(identity, told, _MOVED),
    )


def _ring(services: Services, told: Sequence[Told]) -> None:
    for queue in {one.subscription_id if one.type is SubscriptionType.PULL else None for one in told}:
        services.signals.ring_queued(queue)


def _due(services: Services, asked: MoveRequest) -> Due:
    if (asked.delay_ms is None) is (asked.deliver_at is None):
        raise InvalidError(
            *(FieldProblem(name, "give delay_ms or deliver_at, one of them") for name in ("delay_ms", "deliver_at"))
        )
    due = Due.of(delay_ms=asked.delay_ms, deliver_at=asked.deliver_at)
    if due.wait_from_ms(services.clock.now_ms()) > MAX_DELAY_MS:
        raise InvalidError(FieldProblem("deliver_at", "is more than ten years off"))
    return due


async def _checked(services: Services, principal: Principal, message_id: str) -> MessageId:
    identity = parse_message(message_id)
    async with transaction(services.engine) as connection:
        await check_room(connection, principal, identity)
        await message_records.find_message(connection, room_of(identity), identity)
    return identity


def _check(told: Sequence[Told], done: str) -> None:
    if not any(one.fate is Fate.DONE for one in told):
        counts = Counter(_result(one, done) for one in told)
        found = ", ".join(f"{count} {result}" for result, count in sorted(counts.items())) or "it has no deliveries"
        raise ConflictError(f"nothing could be {done}: {found}")


def _result(told: Told, done: str) -> str:
    return {Fate.DONE: done, Fate.IN_FLIGHT: "in_flight", Fate.LEFT: told.state.value}[told.fate]


def _fates(message: MessageId, told: Sequence[Told], done: str) -> list[DeliveryFate]:
    return [
        DeliveryFate(
            delivery_id=one.delivery_id,
            subscription_id=one.subscription_id,
            destination=destination(room_of(message), one.subscription_id),
            result=_result(one, done),
        )
        for one in told
    ]


ROUTES: Final = [withdraw_message, move_message]
