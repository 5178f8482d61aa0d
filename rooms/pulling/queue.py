"""A subscription as an organisation asks for it."""

from dataclasses import dataclass

from rooms.domain.ids import OrganisationId, RoomId, SubscriptionId, room_of
from rooms.domain.principal import Principal
from rooms.errors import ConflictError, NotFoundError, RoomsError
from rooms.pulling.selector import Selector
from rooms.storage.leases import Queue, Standing


@dataclass(frozen=True, slots=True)
class Key:
    """Names a queue and who asks for it; whether they may is found out by the statement that serves them."""

    room: RoomId
    subscription: SubscriptionId
    organisation: OrganisationId

    def packed(self) -> Queue:
        """The same for a statement."""
        return Queue.of(self.room, self.subscription, self.organisation)


@dataclass(frozen=True, slots=True)
class Wish:
    """What somebody wants: a queue, and which of its messages (None: any)."""

    queue: Key
    selector: Selector | None = None


def key_of(principal: Principal, subscription_id: str) -> Key:
    """The key of a path. NotFoundError where the text can be no id."""
    try:
        room = room_of(subscription_id)
    except ValueError as exc:
        raise _missing(subscription_id) from exc
    if subscription_id != subscription_id.lower():
        raise _missing(subscription_id)
    return Key(room, SubscriptionId(subscription_id), principal.organisation_id)


def refusal(standing: Standing, key: Key) -> RoomsError | None:
    """Why a queue of this standing serves nobody; None where it does."""
    if standing is Standing.NONE:
        return _missing(key.subscription)
    if standing is Standing.PUSH:
        return ConflictError("this is a PUSH subscription: its messages are sent to its webhook, not pulled")
    if standing is Standing.NATIVE:
        return ConflictError(
            "this subscription is native: its queue is read at the broker, with the user that its creation told"
        )
    return None


def _missing(subscription_id: str) -> NotFoundError:
    return NotFoundError(f"there is no subscription {subscription_id[:64]}")
