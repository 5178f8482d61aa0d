"""What a native subscription has more on the wire: a user of the broker, who may read its queue and nothing else (row E8)."""

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Final

from msgspec import Meta, Struct

from rooms.domain.names import destination
from rooms.domain.native_address import NativeAddress
from rooms.domain.room import Subscription
from rooms.domain.states import SubscriptionType
from rooms.errors import BrokerUnavailableError, FieldProblem
from rooms.outages import OUTAGES
from rooms.ports import Gate

_PASSWORD_BYTES: Final = 24

Native = Annotated[
    bool,
    Meta(
        description="PULL, with another broker than PostgreSQL: clients of the broker's own (STOMP, AMQP, JMS) read the queue, "
        "with a user that is made for them. It stays so."
    ),
]


class Address(Struct, kw_only=True):
    """Where the broker speaks a protocol: `stomp` (1.2), `amqp` (1.0) or `core` (Artemis' JMS client)."""

    protocol: str
    host: str
    port: int
    tls: bool


class Login(Struct, kw_only=True):
    """Who may read which queue at the broker, and where. `ready` false: the broker was away; the user is made when it is back."""

    user: str
    password: str
    queue: str
    ready: bool
    addresses: list[Address]


def new_password(random: Callable[[int], bytes]) -> str:
    """Text that no protocol has to escape."""
    return base64.urlsafe_b64encode(random(_PASSWORD_BYTES)).decode()


def native_problems(
    fields: Mapping[str, Any], kind: SubscriptionType, now: Subscription | None, gate: Gate | None
) -> Iterator[FieldProblem]:
    """Why a subscription cannot be native, or cannot have what native ones do not have."""
    if fields.get("native"):
        if kind is not SubscriptionType.PULL:
            yield FieldProblem("native", "is for PULL subscriptions; PUSH is sent to its webhook")
        elif gate is None:
            yield FieldProblem(
                "native", "needs BROKER_URL=stomp://…: PostgreSQL as broker has no queue for others to read"
            )
    if (fields.get("native") or (now is not None and now.native)) and fields.get("max_receives") is not None:
        yield FieldProblem("max_receives", "counts leases, and nothing of a native subscription is leased")


async def let_in(
    gate: Gate, subscription: Subscription, password: str, hashed: str, *, addresses: Sequence[NativeAddress]
) -> Login:
    """The user of the subscription, made at once where the broker answers. No `addresses`: those of the broker's URL."""
    ready = True
    try:
        await gate.open(subscription.id, hashed)
    except BrokerUnavailableError as exc:
        OUTAGES.failed(exc, "users of native subscriptions were left to the upkeep")
        ready = False
    return Login(
        user=gate.user(subscription.id),
        password=password,
        queue=destination(subscription.room_id, subscription.id),
        ready=ready,
        addresses=[
            Address(protocol=one.protocol, host=one.host, port=one.port, tls=one.tls)
            for one in addresses or gate.addresses
        ],
    )
