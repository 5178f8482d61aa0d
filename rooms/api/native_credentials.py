"""Create the user of the broker that a native subscription has, which may only read its queue."""

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from rooms.domain.native_address import NativeAddress
from rooms.domain.room import Subscription, destination_name
from rooms.domain.state_machine import SERVED_STATUSES, SubscriptionType
from rooms.errors import BrokerUnavailableError, FieldProblem
from rooms.outages import OUTAGES
from rooms.ports import BrokerUsers

_PASSWORD_BYTES: Final = 24


class BrokerAddress(Struct, kw_only=True):
    """Name a broker protocol: `stomp` (1.2), `amqp` (1.0) or `core` (Artemis' JMS client)."""

    protocol: str
    host: str
    port: int
    tls: bool


class BrokerCredentials(Struct, kw_only=True):
    """Describe a user of the broker, the queue it may read, and the addresses.

    `ready` false: the broker did not answer, or the subscription is not approved, suspended or
    ended. The user is created when the broker is back, or the subscription is served.
    """

    user: str
    password: str
    queue: str
    ready: bool
    addresses: list[BrokerAddress]


def new_password(random: Callable[[int], bytes]) -> str:
    """Return text that no protocol has to escape."""
    return base64.urlsafe_b64encode(random(_PASSWORD_BYTES)).decode()


def native_problems(
    fields: Mapping[str, Any],
    subscription_type: SubscriptionType,
    current: Subscription | None,
    broker_users: BrokerUsers | None,
) -> Iterator[FieldProblem]:
    """Yield why a subscription cannot be native, or has fields that native ones cannot have."""
    if fields.get("native"):
        if subscription_type is not SubscriptionType.PULL:
            yield FieldProblem("native", "is for PULL subscriptions; PUSH is sent to its webhook")
        elif broker_users is None:
            yield FieldProblem(
                "native",
                "needs BROKER_URL=stomp://…: PostgreSQL as broker has no queue for readers",
            )
    if (fields.get("native") or (current is not None and current.native)) and fields.get(
        "max_receives"
    ) is not None:
        yield FieldProblem(
            "max_receives", "counts leases, and nothing of a native subscription is leased"
        )


async def create_broker_user(
    broker_users: BrokerUsers,
    subscription: Subscription,
    password: str,
    hashed: str,
    *,
    addresses: Sequence[NativeAddress],
) -> BrokerCredentials:
    """Create the subscription's user at the broker, if the broker answers.

    One that is not served gets none: its queue may have messages that it must not read. Without
    `addresses`, those of the broker's URL are returned.
    """
    ready = subscription.status in SERVED_STATUSES
    try:
        if ready:
            await broker_users.create(subscription.id, hashed)
    except BrokerUnavailableError as exc:
        OUTAGES.record_failure(exc, "maintenance will create users of native subscriptions")
        ready = False
    return BrokerCredentials(
        user=broker_users.user_name(subscription.id),
        password=password,
        queue=destination_name(subscription.room_id, subscription.id),
        ready=ready,
        addresses=[
            BrokerAddress(protocol=one.protocol, host=one.host, port=one.port, tls=one.tls)
            for one in addresses or broker_users.addresses
        ],
    )
