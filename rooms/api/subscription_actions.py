"""Serve actions on a subscription: pause, resume, rotate secrets, test call, and its throttling."""

from datetime import datetime
from typing import Annotated, Final

from litestar import get, post
from litestar.params import JSONBody
from msgspec import Meta, Struct

from rooms.api.auth import (
    OF_SUBSCRIPTIONS,
    Caller,
    ServicesDep,
    for_portals,
    require_scopes,
)
from rooms.api.changes import Change, ChangeDep
from rooms.api.codec import Body
from rooms.api.deps import ApiServices
from rooms.api.errors import documented_responses
from rooms.api.native_credentials import BrokerCredentials, create_broker_user, new_password
from rooms.api.params import IdPath
from rooms.api.subscription_bodies import (
    SubscriptionResponse,
)
from rooms.api.subscription_locks import lock_subscription, notify_of
from rooms.api.subscriptions import (
    describe_subscription,
    parse_subscription,
)
from rooms.db.catalog import subscriptions as records
from rooms.db.catalog.subscription_secrets import replace_secret
from rooms.db.catalog.subscription_states import (
    Actor,
    SubscriptionAction,
    apply,
    standing_of,
)
from rooms.db.connection import transaction
from rooms.db.notify import Channel
from rooms.db.operational.outbox import EventAbout, add_events
from rooms.db.queries.throttle import get_lane, reset_lane
from rooms.domain.attempt import ErrorClass
from rooms.domain.operational_event import OperationalEvent
from rooms.domain.principal import Principal
from rooms.domain.state_machine import Scope, SubscriptionStatus, SubscriptionType
from rooms.domain.subscription_status import set_own
from rooms.domain.throttle import CircuitState
from rooms.errors import ConflictError

DEFAULT_OVERLAP_S: Final = 86_400
_TAGS: Final = ["subscriptions"]
_WRITE: Final = for_portals(require_scopes(Scope.MANAGE, allows=OF_SUBSCRIPTIONS))
_OPERATE: Final = for_portals(require_scopes(Scope.OPERATE, Scope.MANAGE, allows=OF_SUBSCRIPTIONS))


class RotateSecret(Struct, forbid_unknown_fields=True, kw_only=True):
    """Set how to rotate a secret."""

    overlap_s: Annotated[
        int,
        Meta(ge=0, le=30 * 86_400, description="How long the old secret signs too, in seconds."),
    ] = DEFAULT_OVERLAP_S


class RotatedSecret(Struct, kw_only=True):
    """Describe the new secret, shown once; the old one is valid until then (null: no longer)."""

    secret: str
    previous_secret_until: datetime | None


class PingResponse(Struct, kw_only=True):
    """Describe the webhook's answer; `error` null: success. `body`: its first KiB."""

    status: int | None
    error: ErrorClass | None
    detail: str
    latency_ms: float
    body: str


@post(
    "/subscriptions/{subscription_id:str}/pause",
    status_code=200,
    opt=_OPERATE,
    responses=documented_responses(409),
    tags=_TAGS,
    summary="Pause a subscription",
)
async def pause(
    services: ServicesDep, principal: Caller, change: ChangeDep, subscription_id: IdPath
) -> SubscriptionResponse:
    """Pause the subscription: its deliveries are held until it is resumed. 409: it is disabled."""
    return await _set_status(
        services, principal, change, subscription_id, SubscriptionStatus.PAUSED
    )


@post(
    "/subscriptions/{subscription_id:str}/resume",
    status_code=200,
    opt=_OPERATE,
    responses=documented_responses(409),
    tags=_TAGS,
    summary="Resume a subscription",
)
async def resume(
    services: ServicesDep, principal: Caller, change: ChangeDep, subscription_id: IdPath
) -> SubscriptionResponse:
    """Activate a paused or disabled subscription.

    Its circuit closes, and held deliveries are released.
    """
    return await _set_status(
        services, principal, change, subscription_id, SubscriptionStatus.ACTIVE
    )


@post(
    "/subscriptions/{subscription_id:str}/rotate-secret",
    status_code=200,
    dto=Body[RotateSecret | None],
    return_dto=None,
    opt=_WRITE,
    responses=documented_responses(409),
    tags=_TAGS,
    summary="Rotate the signing secret",
)
async def rotate_secret(
    services: ServicesDep,
    principal: Caller,
    change: ChangeDep,
    subscription_id: IdPath,
    data: JSONBody[RotateSecret | None] = None,
) -> RotatedSecret:
    """Create a new signing secret; calls are signed with both while both are valid. 409: PULL.

    The old one ends at once if its secret key is lost: `previous_secret_until` is null then.
    """
    identity = parse_subscription(subscription_id)
    rotation = data or RotateSecret()
    secret = services.new_secret()
    async with change.transaction() as connection:
        now = await lock_subscription(services, connection, principal, identity)
        if now.type is not SubscriptionType.PUSH:
            raise ConflictError("a PULL subscription has no signing secret")
        until = await replace_secret(
            connection, now, secret, services.cipher, overlap_s=rotation.overlap_s
        )
    notify_of(services, now)
    return RotatedSecret(secret=secret, previous_secret_until=until)


@post(
    "/subscriptions/{subscription_id:str}/rotate-password",
    status_code=200,
    opt=_WRITE,
    responses=documented_responses(409),
    tags=_TAGS,
    summary="Rotate the password of a native subscription",
)
async def rotate_password(
    services: ServicesDep, principal: Caller, change: ChangeDep, subscription_id: IdPath
) -> BrokerCredentials:
    """Create a new password of the broker's user, only shown once.

    Connections with the old one end. 409: the subscription is not native.
    """
    identity = parse_subscription(subscription_id)
    broker_users, password = services.broker_users, new_password(services.random)
    async with change.transaction() as connection:
        now = await lock_subscription(services, connection, principal, identity)
        if not now.native:
            raise ConflictError("the subscription is not native: it has no user at the broker")
        if broker_users is None:
            raise ConflictError("PostgreSQL carries the messages now: no broker has users")
        hashed = broker_users.hash_password(password)
        await records.update_subscription(connection, now, {"native_password": hashed})
    return await create_broker_user(
        broker_users, now, password, hashed, addresses=services.settings.native_addresses
    )


@post(
    "/subscriptions/{subscription_id:str}/test",
    status_code=200,
    opt=_WRITE,
    responses=documented_responses(409),
    tags=_TAGS,
    summary="Call the webhook with a ping",
)
async def ping(
    services: ServicesDep, principal: Caller, change: ChangeDep, subscription_id: IdPath
) -> PingResponse:
    """Call the webhook once with a signed test message, which is no delivery. 409: PULL."""
    identity = parse_subscription(subscription_id)
    async with change.transaction(is_whole=False) as connection:
        found = await records.find_subscription(connection, principal, identity)
        if found.type is not SubscriptionType.PUSH:
            raise ConflictError("a PULL subscription has no webhook to call")
    answer = await services.ping(found)
    return PingResponse(
        status=answer.status,
        error=answer.error,
        detail=answer.detail,
        latency_ms=round(answer.latency_ms, 3),
        body=answer.body_head.decode("utf-8", "replace"),
    )


async def _set_status(
    services: ApiServices,
    principal: Principal,
    change: Change,
    subscription_id: str,
    status: SubscriptionStatus,
) -> SubscriptionResponse:
    identity = parse_subscription(subscription_id)
    async with change.transaction() as connection:
        now = await lock_subscription(services, connection, principal, identity)
        if status is SubscriptionStatus.PAUSED and now.native:
            raise ConflictError(
                "a native subscription cannot be paused: stop its reader, and its queue waits"
            )
        if status is SubscriptionStatus.PAUSED and now.status is SubscriptionStatus.DISABLED:
            raise ConflictError(
                f"it is disabled already ({now.status_reason or 'no reason stored'}); resume it"
            )
        try:
            standing = set_own(standing_of(now), status)
        except ValueError as exc:
            raise ConflictError(f"{exc}: it can be neither paused nor resumed") from exc
        restarts = status is SubscriptionStatus.ACTIVE and await reset_lane(connection, now)
        if standing != standing_of(now):
            is_pause = status is SubscriptionStatus.PAUSED
            action = SubscriptionAction.PAUSED if is_pause else SubscriptionAction.RESUMED
            change.before = {"status": now.status}
            was_disabled = SubscriptionStatus.DISABLED in {now.status, now.own_status}
            now = await apply(connection, now, standing, Actor.of(principal), action)
            if was_disabled and not is_pause:
                about = EventAbout(
                    room_id=now.room_id, subscription_id=now.id, data={"cause": "resumed"}
                )
                await add_events(connection, OperationalEvent.ENDPOINT_RECOVERED, [about])
        elif restarts:
            now = await records.update_subscription(connection, now, {})
    services.notifier.notify(Channel.CONFIG, str(now.room_id))
    services.notifier.notify(
        *((Channel.PUSH,) if now.type is SubscriptionType.PUSH else (Channel.PULL, now.id))
    )
    return await describe_subscription(services, now, principal)


class CircuitResponse(Struct, kw_only=True):
    """Describe the circuit.

    `since`: the last change; `probes`: how many were sent since it opened. `off`: it is not
    configured.
    """

    state: CircuitState
    since: datetime | None
    next_probe_at: datetime | None
    probes: int


class ThrottleResponse(Struct, kw_only=True):
    """Describe the effective throttling (null: no limit), and the state of the queue.

    Settings come from the subscription, else from its room, else from the installation.
    `concurrency`: the last report of a worker, at `concurrency_at`; null: it was never lowered.
    """

    max_concurrency: int
    rate_per_s: float | None
    rate_burst: int | None
    timeout_ms: int
    circuit_failures: int | None
    circuit_window_ms: int
    circuit_open_ms: int
    drain_per_s: float | None
    disable_after_ms: int | None
    ordered: bool
    circuit: CircuitResponse
    failing_since: datetime | None
    concurrency: int | None
    concurrency_at: datetime | None
    held: Annotated[
        dict[str, int], Meta(description="Held deliveries by reason, counted up to 100,000.")
    ]


@get(
    "/subscriptions/{subscription_id:str}/lane",
    opt=for_portals(
        require_scopes(Scope.MANAGE, Scope.OPERATE, Scope.SUBSCRIBE, allows=OF_SUBSCRIPTIONS)
    ),
    responses=documented_responses(409),
    tags=["subscriptions"],
    summary="Read the throttling of a webhook",
)
async def read_lane(
    services: ServicesDep, principal: Caller, subscription_id: IdPath
) -> ThrottleResponse:
    """Return the throttling of a PUSH subscription. 409: it is PULL."""
    identity = parse_subscription(subscription_id)
    async with transaction(services.engine) as connection:
        found = await records.find_subscription(connection, principal, identity)
        if found.type is not SubscriptionType.PUSH:
            raise ConflictError("a PULL subscription has no webhook to call")
        view = await get_lane(connection, found)
    policy = view.policy
    return ThrottleResponse(
        max_concurrency=policy.max_concurrency or services.settings.lane_concurrency,
        rate_per_s=policy.rate_per_s,
        rate_burst=None if policy.rate_per_s is None else policy.rate_burst,
        timeout_ms=policy.timeout_ms,
        circuit_failures=policy.circuit_failures or None,
        circuit_window_ms=policy.circuit_window_ms,
        circuit_open_ms=policy.circuit_open_ms,
        drain_per_s=policy.drain_per_s,
        disable_after_ms=policy.disable_after_ms,
        ordered=view.ordered,
        circuit=CircuitResponse(
            state=view.circuit,
            since=view.circuit_since,
            next_probe_at=view.next_probe_at,
            probes=view.probes,
        ),
        failing_since=view.failing_since,
        concurrency=view.concurrency,
        concurrency_at=view.concurrency_at,
        held=dict(view.held),
    )


ROUTES: Final = [
    pause,
    resume,
    rotate_secret,
    rotate_password,
    ping,
    read_lane,
]
