"""Serve `/v1/activity` and `/v1/subscriptions/{id}/activity`: the last hour, by the minute."""

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Final

from litestar import get
from msgspec import Meta, Struct
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.api.auth import OF_SUBSCRIPTIONS, Caller, ServicesDep, for_portals, require_scopes
from rooms.api.journal import ALL, OrganisationQuery
from rooms.api.params import IdPath, parse_id
from rooms.api.subscriptions import parse_subscription
from rooms.db.catalog.subscriptions import find_visible_subscription
from rooms.db.connection import transaction
from rooms.db.usage.count import complete_until
from rooms.db.usage.minutes import INSTALLATION, read_minutes
from rooms.domain.principal import Principal
from rooms.domain.state_machine import Scope
from rooms.domain.usage import MinuteCounts, add_latencies, percentile_ms
from rooms.errors import ForbiddenError

Percentile = Annotated[
    float | None,
    Meta(
        description="Of calls of webhooks, estimated: it differs from the exact value by less "
        "than a factor of 1.42. null: there was no call."
    ),
]


class LatencyResponse(Struct, kw_only=True):
    """Estimate how long calls of webhooks took, in ms."""

    p50_ms: Percentile
    p95_ms: Percentile
    p99_ms: Percentile


class MinuteResponse(LatencyResponse, kw_only=True):
    """Count what happened in the minute that begins at `start`.

    `deliveries` were made; `delivered` counts webhooks, acknowledged pulls, and hand-overs to
    native queues; `failed` counts calls that failed and leases that were returned or ran out.
    """

    start: datetime
    deliveries: int
    delivered: int
    failed: int
    sidelined: int
    expired: int


class ActivityResponse(Struct, kw_only=True):
    """Hold the last 60 minutes, oldest first; the last one is the current minute.

    `complete_until`: everything before this time is counted, which is some seconds ago.
    """

    complete_until: datetime | None
    latency: LatencyResponse
    minutes: list[MinuteResponse]


@get(
    "/activity",
    opt=require_scopes(Scope.MANAGE, Scope.OPERATE, Scope.AUDIT, Scope.PLATFORM),
    tags=["usage"],
    summary="Read the last hour",
)
async def read_activity(
    *, services: ServicesDep, principal: Caller, organisation_id: OrganisationQuery = None
) -> ActivityResponse:
    """Count by the minute what the organisation's subscriptions got in the last hour.

    The scope `platform` reads that of others, and of the whole installation.
    """
    subject = _subject(principal, organisation_id)
    async with transaction(services.engine) as connection:
        return await _describe(connection, subject)


@get(
    "/subscriptions/{subscription_id:str}/activity",
    opt=for_portals(
        require_scopes(Scope.MANAGE, Scope.OPERATE, Scope.SUBSCRIBE, allows=OF_SUBSCRIPTIONS)
    ),
    tags=["subscriptions"],
    summary="Read the last hour of a subscription",
)
async def read_subscription_activity(
    services: ServicesDep, principal: Caller, subscription_id: IdPath
) -> ActivityResponse:
    """Count by the minute what a subscription got in the last hour. For both sides."""
    identity = parse_subscription(subscription_id)
    async with transaction(services.engine) as connection:
        found = await find_visible_subscription(connection, principal, identity)
        return await _describe(connection, found.id)


def _subject(principal: Principal, organisation_id: str | None) -> str:
    if organisation_id is None or organisation_id == principal.organisation_id:
        return principal.organisation_id
    if not principal.has_scope(Scope.PLATFORM):
        raise ForbiddenError("the activity of another organisation needs the scope platform")
    return INSTALLATION if organisation_id == ALL else parse_id(organisation_id, "organisation")


async def _describe(connection: AsyncConnection, subject: str) -> ActivityResponse:
    minutes = await read_minutes(connection, subject)
    return ActivityResponse(
        complete_until=await complete_until(connection),
        latency=_latency(add_latencies([one.latencies for one in minutes])),
        minutes=[_to_response(one) for one in minutes],
    )


def _latency(calls: Sequence[int]) -> LatencyResponse:
    p50_ms, p95_ms, p99_ms = (percentile_ms(calls, share) for share in (0.5, 0.95, 0.99))
    return LatencyResponse(p50_ms=p50_ms, p95_ms=p95_ms, p99_ms=p99_ms)


def _to_response(one: MinuteCounts) -> MinuteResponse:
    latency = _latency(one.latencies)
    return MinuteResponse(
        start=one.start,
        **one.counts,
        p50_ms=latency.p50_ms,
        p95_ms=latency.p95_ms,
        p99_ms=latency.p99_ms,
    )


ROUTES: Final = [read_activity, read_subscription_activity]
