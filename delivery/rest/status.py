"""`/v1/status`: at a glance how the installation is, and which subscriptions do not do well."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Annotated, Final

from litestar import get
from litestar.params import QueryParameter
from msgspec import Meta, Struct

from rooms.domain.condition import TROUBLED, Condition
from rooms.domain.states import Scope, SubscriptionStatus, SubscriptionType
from rooms.domain.target import Target
from rooms.errors import ElectionUnavailableError
from rooms.rest.auth import Caller, Given, needs
from rooms.rest.health import Ready, as_ready
from rooms.rest.pages import MAX_LIMIT
from rooms.rest.problems import documented
from rooms.rest.services import Services
from rooms.storage.failures import Failing, failing
from rooms.storage.gauges import Counts
from rooms.storage.transactions import transaction

_READ: Final = needs(Scope.OPERATE, Scope.MANAGE)
_TOGETHER: Final = timedelta(minutes=1)

Most = Annotated[int, QueryParameter(ge=1, le=MAX_LIMIT, description="How many subscriptions are shown at most.")]


class QueueOut(Struct, kw_only=True):
    """Copies that are due, those of them that somebody has taken, those due later, and how long the oldest due one waits."""

    due: int
    claimed: int
    later: int
    oldest_seconds: float


class BacklogOut(Struct, kw_only=True):
    """What waits, a few seconds old at most: the organisation's, each place counted up to 100,000. With the scope `platform` it
    is the whole installation's, as in `/metrics`.
    """

    push: QueueOut
    pull: QueueOut
    leased: int
    abandoned: Annotated[
        int,
        Meta(
            description="Webhooks that two workers running or more had in hand when they died; `rooms doctor` names them."
        ),
    ]
    held: Annotated[dict[str, int], Meta(description="Held deliveries by why.")]
    sidelined: Annotated[dict[str, int], Meta(description="Deliveries put aside by why.")]


class SubscriptionStatusOut(Struct, kw_only=True):
    """A subscription that does not do well, since when that is so, and what its newest failure was. So many of its
    deliveries were put aside, are tried again, are due or held (each counted up to 100,000). `host` is null for PULL.
    """

    subscription_id: str
    name: str
    room_id: int
    room: str
    type: SubscriptionType
    status: SubscriptionStatus
    condition: Annotated[
        Condition,
        Meta(
            description="failing: nothing was delivered since it began; unsteady: some are delivered, some fail; behind: "
            "what is due has waited for more than a minute; resting: well, but something is in its sideline."
        ),
    ]
    since: datetime
    last_delivered_at: Annotated[
        datetime | None, Meta(description="null: none of its newest 1,000 deliveries was delivered.")
    ]
    host: str | None
    sidelined: int
    oldest_sidelined_at: datetime | None
    retrying: int
    due: int
    held: Annotated[dict[str, int], Meta(description="Held deliveries by why.")]
    last_status: int | None
    last_error: str | None
    together_with: Annotated[
        list[str],
        Meta(description="Ids of others shown here whose trouble has the same host, or began within a minute."),
    ]


class StatusOut(Struct, kw_only=True):
    """The parts as in `/health/ready`, the leader, what waits, and the subscriptions that do not do well, the worst first;
    `subscriptions_total` counts those beyond the limit too. `leader` is null where there is none, and for a key without
    the scope `platform`: its name is that of a host.
    """

    at: datetime
    health: Ready
    leader: str | None
    backlog: BacklogOut
    subscriptions: list[SubscriptionStatusOut]
    subscriptions_total: int


@get("/status", opt=_READ, responses=documented(), tags=["sideline"], summary="How is everything?")
async def read_status(services: Given, principal: Caller, limit: Most = 50) -> StatusOut:
    """The state of the parts, what waits, and of the organisation's subscriptions those that fail, lag behind, are paused
    with something to do, or have something in their sideline.
    """
    health = as_ready(await services.readiness.report())
    platform = principal.may(Scope.PLATFORM)
    counts = await (services.gauges.counts() if platform else services.backlogs.counts(principal.organisation_id))
    async with transaction(services.engine) as connection:
        found, total = await failing(connection, principal.organisation_id, limit=limit)
    return StatusOut(
        at=services.clock.now(),
        health=health,
        leader=await _leader(services) if platform else None,
        backlog=_backlog(counts),
        subscriptions=_told(found),
        subscriptions_total=total,
    )


async def _leader(services: Services) -> str | None:
    try:
        return (await services.leadership.view()).leader
    except ElectionUnavailableError:
        return None


def _backlog(counts: Counts) -> BacklogOut:
    def queue(kind: str) -> QueueOut:
        later = counts.later.get(kind, 0)
        return QueueOut(
            due=counts.depth.get(kind, 0) - later,
            claimed=counts.claimed.get(kind, 0),
            later=later,
            oldest_seconds=counts.oldest_s.get(kind, 0.0),
        )

    return BacklogOut(
        push=queue("push"),
        pull=queue("pull"),
        leased=counts.leased,
        abandoned=counts.abandoned,
        held=dict(counts.held),
        sidelined=dict(counts.sidelined),
    )


def _told(found: Sequence[Failing]) -> list[SubscriptionStatusOut]:
    same = set(SubscriptionStatusOut.__struct_fields__) - {"host", "type", "status", "held", "together_with"}
    hosts = [None if one.push_url is None else Target.parse(one.push_url).host for one in found]
    troubled = [
        (one.subscription_id, host, one.since)
        for one, host in zip(found, hosts, strict=True)
        if one.condition in TROUBLED
    ]
    return [
        SubscriptionStatusOut(
            **{name: getattr(one, name) for name in same},
            type=SubscriptionType(one.type),
            status=SubscriptionStatus(one.status),
            host=host,
            held=dict(one.held),
            together_with=[
                other
                for other, its_host, since in troubled
                if one.condition in TROUBLED
                and other != one.subscription_id
                and ((host is not None and host == its_host) or abs(one.since - since) <= _TOGETHER)
            ],
        )
        for one, host in zip(found, hosts, strict=True)
    ]


ROUTES: Final = [read_status]
