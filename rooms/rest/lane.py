"""`/v1/subscriptions/{id}/lane`: what holds for a webhook's calls, and how its circuit stands."""

from datetime import datetime
from typing import Annotated, Final

from litestar import get
from msgspec import Meta, Struct

from rooms.domain.lane import Circuit
from rooms.domain.states import Scope, SubscriptionType
from rooms.errors import ConflictError
from rooms.rest.auth import Caller, Given, needs
from rooms.rest.paths import IdPath
from rooms.rest.problems import documented
from rooms.rest.subscriptions import parse_subscription
from rooms.storage import subscriptions as records
from rooms.storage.lane_views import look_at_lane
from rooms.storage.transactions import transaction


class CircuitOut(Struct, kw_only=True):
    """`since`: the last opening or closing; `probes`: how many were sent since it opened. `off`: nothing is set."""

    state: Circuit
    since: datetime | None
    next_probe_at: datetime | None
    probes: int


class LaneOut(Struct, kw_only=True):
    """The settings that hold, the room's and the installation's where the subscription has none (null: no limit); and how
    the lane stands. `concurrency`: what a worker reported last, `concurrency_at`: when; null: nothing ever lowered it.
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
    circuit: CircuitOut
    failing_since: datetime | None
    concurrency: int | None
    concurrency_at: datetime | None
    held: Annotated[dict[str, int], Meta(description="Held deliveries by why, counted up to 100,000.")]


@get(
    "/subscriptions/{subscription_id:str}/lane",
    opt=needs(Scope.MANAGE, Scope.OPERATE, Scope.SUBSCRIBE),
    responses=documented(409),
    tags=["subscriptions"],
    summary="Read how a webhook is called",
)
async def read_lane(services: Given, principal: Caller, subscription_id: IdPath) -> LaneOut:
    """The lane of a PUSH subscription. 409: a PULL subscription."""
    identity = parse_subscription(subscription_id)
    async with transaction(services.engine) as connection:
        found = await records.find_subscription(connection, principal.organisation_id, identity)
        if found.type is not SubscriptionType.PUSH:
            raise ConflictError("a PULL subscription has no webhook to call")
        view = await look_at_lane(connection, found)
    policy = view.policy
    return LaneOut(
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
        circuit=CircuitOut(
            state=view.circuit, since=view.circuit_since, next_probe_at=view.next_probe_at, probes=view.probes
        ),
        failing_since=view.failing_since,
        concurrency=view.concurrency,
        concurrency_at=view.concurrency_at,
        held=dict(view.held),
    )


ROUTES: Final = [read_lane]
