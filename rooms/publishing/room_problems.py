"""Name what a room does not accept of a message."""

from collections.abc import Iterator

from rooms.domain.message import MAX_DELAY_MS, DeliverySchedule
from rooms.errors import FieldProblem, InvalidError
from rooms.publishing.event_route import EventRoute
from rooms.publishing.request import MessageRequest
from rooms.publishing.routing import PublishAccess, UnroutableError


def routing_problems(
    error: UnroutableError | InvalidError, prefix: str, advice: str = ""
) -> Iterator[FieldProblem]:
    """Name the fields for which a message has no route; `advice` ends the text of the first."""
    if isinstance(error, UnroutableError):
        yield FieldProblem(prefix + error.field, f"{error}{advice}")
    else:
        yield from (FieldProblem(prefix + one.field, one.message) for one in error.problems)


def delivery_schedule(message: MessageRequest) -> DeliverySchedule:
    """Return when a message is due."""
    return DeliverySchedule.from_request(delay_ms=message.delay_ms, deliver_at=message.deliver_at)


def message_problems(
    route: EventRoute,
    message: MessageRequest,
    prefix: str,
    now_ms: int,
    access: PublishAccess | None,
) -> Iterator[FieldProblem]:
    """Name what a room does not accept beside the payload."""
    if (
        message.deliver_at is not None
        and delivery_schedule(message).delay_from_ms(now_ms) > MAX_DELAY_MS
    ):
        yield FieldProblem(f"{prefix}deliver_at", "is more than ten years ahead")
    for index, text in enumerate(message.destinations or ()):
        recipient = route.by_destination.get(text)
        if recipient is None or (access is not None and not access.may_name(recipient)):
            field = f"{prefix}destinations[{index}]"
            yield FieldProblem(field, "unknown destination for this event type and version")
