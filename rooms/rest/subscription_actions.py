"""What can be done with a subscription: pause, resume, rotate its secret, call its webhook."""

from datetime import datetime
from typing import Annotated, Final

from litestar import post
from litestar.params import JSONBody
from msgspec import Meta, Struct

from rooms.domain.attempt import ErrorClass
from rooms.domain.principal import Principal
from rooms.domain.states import Scope, SubscriptionStatus, SubscriptionType
from rooms.errors import ConflictError
from rooms.rest.auth import Caller, Given, needs
from rooms.rest.bodies import Body
from rooms.rest.native_fields import Login, let_in, new_password
from rooms.rest.paths import IdPath
from rooms.rest.problems import documented
from rooms.rest.services import Services
from rooms.rest.subscription_fields import (
    SubscriptionOut,
)
from rooms.rest.subscriptions import locked, parse_subscription, subscription_out
from rooms.storage import subscriptions as records
from rooms.storage.lane_views import reset_lane
from rooms.storage.signals import Channel
from rooms.storage.transactions import transaction

DEFAULT_OVERLAP_S: Final = 86_400
_TAGS: Final = ["subscriptions"]
_WRITE: Final = needs(Scope.MANAGE)
_RUN: Final = needs(Scope.OPERATE, Scope.MANAGE)


class Rotation(Struct, forbid_unknown_fields=True, kw_only=True):
    """How to rotate a secret."""

    overlap_s: Annotated[
        int, Meta(ge=0, le=30 * 86_400, description="How long the old secret signs as well, in seconds.")
    ] = DEFAULT_OVERLAP_S


class SecretOut(Struct, kw_only=True):
    """The new secret, shown this once, and until when the old one is valid (null: no longer)."""

    secret: str
    previous_secret_until: datetime | None


class PingOut(Struct, kw_only=True):
    """What the webhook answered; `error` null: a success. `body`: the first KiB of it."""

    status: int | None
    error: ErrorClass | None
    detail: str
    latency_ms: float
    body: str


@post(
    "/subscriptions/{subscription_id:str}/pause",
    status_code=200,
    opt=_RUN,
    responses=documented(409),
    tags=_TAGS,
    summary="Pause a subscription",
)
async def pause(services: Given, principal: Caller, subscription_id: IdPath) -> SubscriptionOut:
    """The paused subscription: what is published for it is held until it is resumed. 409: it is disabled."""
    return await _switch(services, principal, subscription_id, SubscriptionStatus.PAUSED)


@post(
    "/subscriptions/{subscription_id:str}/resume",
    status_code=200,
    opt=_RUN,
    responses=documented(409),
    tags=_TAGS,
    summary="Resume a subscription",
)
async def resume(services: Given, principal: Caller, subscription_id: IdPath) -> SubscriptionOut:
    """The active subscription, whether it was paused or disabled, its circuit closed; what was held is on its way again."""
    return await _switch(services, principal, subscription_id, SubscriptionStatus.ACTIVE)


@post(
    "/subscriptions/{subscription_id:str}/rotate-secret",
    status_code=200,
    dto=Body[Rotation | None],
    return_dto=None,
    opt=_WRITE,
    responses=documented(409),
    tags=_TAGS,
    summary="Rotate the signing secret",
)
async def rotate_secret(
    services: Given, principal: Caller, subscription_id: IdPath, data: JSONBody[Rotation | None] = None
) -> SecretOut:
    """A new signing secret; calls carry a signature by each while both are valid. 409: a PULL subscription."""
    identity = parse_subscription(subscription_id)
    rotation = data or Rotation()
    secret = services.new_secret()
    async with transaction(services.engine) as connection:
        now = await locked(connection, principal, identity)
        if now.type is not SubscriptionType.PUSH:
            raise ConflictError("a PULL subscription has no signing secret")
        until = await records.rotate_secret(
            connection, now, services.seal.seal(secret.encode()), overlap_s=rotation.overlap_s
        )
    services.signals.ring(Channel.CONFIG, str(now.room_id))
    return SecretOut(secret=secret, previous_secret_until=until)


@post(
    "/subscriptions/{subscription_id:str}/rotate-password",
    status_code=200,
    opt=_WRITE,
    responses=documented(409),
    tags=_TAGS,
    summary="Rotate the password of a native subscription",
)
async def rotate_password(services: Given, principal: Caller, subscription_id: IdPath) -> Login:
    """A new password of the broker's user, shown this once; connections by the old one end. 409: it is not native."""
    identity = parse_subscription(subscription_id)
    gate, password = services.gate, new_password(services.random)
    async with transaction(services.engine) as connection:
        now = await locked(connection, principal, identity)
        if not now.native:
            raise ConflictError("the subscription is not native: it has no user at the broker")
        if gate is None:
            raise ConflictError("PostgreSQL carries the messages now: there is no broker to have users")
        hashed = gate.hashed(password)
        await records.change_subscription(connection, now, {"native_password": hashed})
    return await let_in(gate, now, password, hashed, addresses=services.settings.native_addresses)


@post(
    "/subscriptions/{subscription_id:str}/test",
    status_code=200,
    opt=_WRITE,
    responses=documented(409),
    tags=_TAGS,
    summary="Call the webhook with a ping",
)
async def ping(services: Given, principal: Caller, subscription_id: IdPath) -> PingOut:
    """What the webhook answered to one signed test call, which is no delivery. 409: a PULL subscription."""
    identity = parse_subscription(subscription_id)
    async with transaction(services.engine) as connection:
        found = await records.find_subscription(connection, principal.organisation_id, identity)
    if found.type is not SubscriptionType.PUSH:
        raise ConflictError("a PULL subscription has no webhook to call")
    answer = await services.ping(found)
    return PingOut(
        status=answer.status,
        error=answer.error,
        detail=answer.detail,
        latency_ms=round(answer.latency_ms, 3),
        body=answer.body_head.decode("utf-8", "replace"),
    )


async def _switch(
    services: Services, principal: Principal, subscription_id: str, status: SubscriptionStatus
) -> SubscriptionOut:
    identity = parse_subscription(subscription_id)
    async with transaction(services.engine) as connection:
        now = await locked(connection, principal, identity)
        if status is SubscriptionStatus.PAUSED and now.native:
            raise ConflictError("a native subscription is not paused: its reader stops reading, and its queue waits")
        if status is SubscriptionStatus.PAUSED and now.status is SubscriptionStatus.DISABLED:
            raise ConflictError(f"it is disabled already ({now.status_reason or 'no reason kept'}); resume ends that")
        begins_anew = status is SubscriptionStatus.ACTIVE and await reset_lane(connection, now)
        if now.status is not status:
            now = await records.set_status(connection, now, status, None)
        elif begins_anew:
            now = await records.change_subscription(connection, now, {})
    services.signals.ring(Channel.CONFIG, str(now.room_id))
    services.signals.ring(*((Channel.PUSH,) if now.type is SubscriptionType.PUSH else (Channel.PULL, now.id)))
    return subscription_out(now, principal)


ROUTES: Final = [pause, resume, rotate_secret, rotate_password, ping]
