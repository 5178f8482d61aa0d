"""Serve `/v1/status`: an overview of the installation and of subscriptions with problems."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Annotated, Final

from litestar import get
from litestar.params import QueryParameter
from msgspec import Meta, Struct

from rooms.api.auth import (
    OF_SUBSCRIPTIONS,
    Caller,
    ServicesDep,
    for_portals,
    require_scopes,
)
from rooms.api.deps import ApiServices
from rooms.api.health import ReadyResponse, to_ready_response
from rooms.api.pagination import MAX_LIMIT
from rooms.api.params import MAX_ID_LENGTH, parse_filter_subscriptions
from rooms.db.connection import transaction
from rooms.db.queries.failures import FailingSubscription, list_failing
from rooms.db.queries.stats import QueueStats
from rooms.domain.ids import MAX_ROOM, RoomId
from rooms.domain.push_url import PushUrl
from rooms.domain.state_machine import Scope, SubscriptionStatus, SubscriptionType
from rooms.domain.subscription_health import UNHEALTHY, SubscriptionHealth
from rooms.errors import ElectionUnavailableError, FieldProblem, InvalidError

_READ: Final = for_portals(require_scopes(Scope.OPERATE, Scope.MANAGE, allows=OF_SUBSCRIPTIONS))
_SAME_INCIDENT: Final = timedelta(minutes=1)

StatusLimit = Annotated[
    int, QueryParameter(ge=1, le=MAX_LIMIT, description="The most subscriptions to show.")
]
StatusRoom = Annotated[
    int | None,
    QueryParameter(ge=1, le=MAX_ROOM, description="Only the subscriptions of this room."),
]
StatusSubscriptions = Annotated[
    str | None,
    QueryParameter(
        max_length=MAX_LIMIT * MAX_ID_LENGTH,
        description=f"Only these subscriptions: ids, separated by commas, at most {MAX_LIMIT}.",
    ),
]


class QueueBacklogResponse(Struct, kw_only=True):
    """Count deliveries that are due, and due later; the oldest one's wait in seconds.

    null: it is not known.
    """

    due: int | None
    claimed: Annotated[int | None, Meta(description="Of those, what a worker has taken.")]
    later: int | None
    oldest_seconds: float | None


class BacklogResponse(Struct, kw_only=True):
    """Describe the backlog of the organisation's subscriptions, each count up to 100,000.

    It is 20 seconds old at most.

    With the scope `platform` it is that of the whole installation, with the bounds of `/metrics`.
    Where a count is refused or takes too long, its figures are up to 5 minutes old. null: there are
    none, so it is not known.
    """

    push: QueueBacklogResponse
    pull: QueueBacklogResponse
    leased: int | None
    abandoned: Annotated[
        int | None,
        Meta(description="Webhooks that two workers in a row held at a crash; see `rooms doctor`."),
    ]
    held: Annotated[dict[str, int] | None, Meta(description="Held deliveries by reason.")]
    sidelined: Annotated[dict[str, int] | None, Meta(description="Sidelined deliveries by reason.")]


class SubscriptionStatusResponse(Struct, kw_only=True):
    """Describe a subscription with a problem, since when, and its newest failure.

    It counts deliveries that are sidelined, retried, due or held, up to 100,000 each. `host` is
    null for PULL.
    """

    subscription_id: str
    name: str
    room_id: int
    room: str
    type: SubscriptionType
    status: SubscriptionStatus
    condition: Annotated[
        SubscriptionHealth,
        Meta(
            description="failing: nothing was delivered since it began; unsteady: "
            "some are delivered, some fail; behind: a due delivery has waited for more than a "
            "minute; resting: healthy, but its sideline is not empty."
        ),
    ]
    since: datetime
    last_delivered_at: Annotated[
        datetime | None,
        Meta(
            description="Of its newest 1,000 deliveries, or the minute of the last hour in which "
            "an older one was delivered; null: there is none."
        ),
    ]
    host: str | None
    authority: Annotated[
        str | None,
        Meta(description="`host`, with its port unless that is the scheme's own; null for PULL."),
    ]
    sidelined: int
    oldest_sidelined_at: datetime | None
    retrying: int
    due: int
    waiting: Annotated[
        int,
        Meta(
            description="Due or retried: a retry that is due is in both, and in this number once."
        ),
    ]
    held: Annotated[dict[str, int], Meta(description="Held deliveries by reason.")]
    last_status: int | None
    last_error: str | None
    together_with: Annotated[
        list[str],
        Meta(
            description="Ids of other shown subscriptions with the same host, "
            "or a start within a minute."
        ),
    ]


class StatusResponse(Struct, kw_only=True):
    """Describe the parts (see `/health/ready`), the leader, the backlog, troubled subscriptions.

    The worst come first; `subscriptions_total` counts those beyond the limit too. With more than
    2,000 subscriptions, both are of up to 10,000 with a symptom, those that fail first. `leader` is
    null where there is none, and without the scope `platform`, because it names a host.
    """

    at: datetime
    health: ReadyResponse
    leader: str | None
    backlog: BacklogResponse
    subscriptions: list[SubscriptionStatusResponse]
    subscriptions_total: int


@get("/status", opt=_READ, tags=["sideline"], summary="Read the status of the installation")
async def read_status(
    services: ServicesDep,
    principal: Caller,
    limit: StatusLimit = 50,
    room_id: StatusRoom = None,
    subscription_id: StatusSubscriptions = None,
) -> StatusResponse:
    """Return the state of the parts, the backlog, and the organisation's troubled subscriptions.

    These fail, lag behind, are paused with deliveries held, or have sidelined deliveries. Parts and
    backlog are those of everything, whichever subscriptions are asked for.
    """
    if room_id is not None and subscription_id is not None:
        raise InvalidError(FieldProblem("room_id", "cannot be combined with subscription_id"))
    health = to_ready_response(await services.readiness.report())
    platform = principal.has_scope(Scope.PLATFORM)
    counts = await (services.gauges.counts() if platform else services.backlogs.counts(principal))
    async with transaction(services.engine) as connection:
        found, total = await list_failing(
            connection,
            principal,
            limit=limit,
            room=None if room_id is None else RoomId(room_id),
            chosen=parse_filter_subscriptions("subscription_id", subscription_id),
        )
    return StatusResponse(
        at=services.clock.now(),
        health=health,
        leader=await _leader(services) if platform else None,
        backlog=_backlog(counts),
        subscriptions=_to_subscriptions(found),
        subscriptions_total=total,
    )


async def _leader(services: ApiServices) -> str | None:
    try:
        return (await services.leader_health.view()).leader
    except ElectionUnavailableError:
        return None


def _backlog(counts: QueueStats) -> BacklogResponse:
    def queue(kind: str) -> QueueBacklogResponse:
        depth, later = counts.depth.get(kind), counts.not_due.get(kind)
        return QueueBacklogResponse(
            due=None if depth is None or later is None else depth - later,
            claimed=counts.claimed.get(kind),
            later=later,
            oldest_seconds=counts.oldest_s.get(kind),
        )

    return BacklogResponse(
        push=queue("push"),
        pull=queue("pull"),
        leased=counts.leased,
        abandoned=counts.crash_looping,
        held=None if counts.held is None else dict(counts.held),
        sidelined=None if counts.sidelined is None else dict(counts.sidelined),
    )


def _to_subscriptions(failing: Sequence[FailingSubscription]) -> list[SubscriptionStatusResponse]:
    urls = [None if one.push_url is None else PushUrl.parse(one.push_url) for one in failing]
    hosts = [None if url is None else url.host for url in urls]
    troubled = [
        (one.subscription_id, host, one.since)
        for one, host in zip(failing, hosts, strict=True)
        if one.health in UNHEALTHY
    ]
    return [
        SubscriptionStatusResponse(
            subscription_id=one.subscription_id,
            name=one.name,
            room_id=one.room_id,
            room=one.room,
            type=SubscriptionType(one.type),
            status=SubscriptionStatus(one.status),
            condition=one.health,
            since=one.since,
            last_delivered_at=one.last_delivered_at,
            host=host,
            authority=None if url is None else url.authority,
            sidelined=one.sidelined,
            oldest_sidelined_at=one.oldest_sidelined_at,
            retrying=one.retrying,
            due=one.due,
            waiting=one.waiting,
            held=dict(one.held),
            last_status=one.last_status,
            last_error=one.last_error,
            together_with=[
                other
                for other, its_host, since in troubled
                if one.health in UNHEALTHY
                and other != one.subscription_id
                and (
                    (host is not None and host == its_host)
                    or abs(one.since - since) <= _SAME_INCIDENT
                )
            ],
        )
        for one, host, url in zip(failing, hosts, urls, strict=True)
    ]


ROUTES: Final = [read_status]
