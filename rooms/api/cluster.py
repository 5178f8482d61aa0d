"""Serve `/v1/cluster`: the members of the installation and how they share the work."""

from datetime import datetime
from typing import Annotated, Final

from litestar import get, put
from litestar.params import JSONBody
from msgspec import Meta, Struct

from rooms.api.auth import Caller, ServicesDep, require_scopes
from rooms.api.changes import ChangeDep
from rooms.api.codec import Body
from rooms.db.queue.lookahead import HASH_SLOTS, schedule_shard_count, set_schedule_shard_count
from rooms.domain.state_machine import Scope

_TAGS: Final = ["cluster"]
_PLATFORM: Final = require_scopes(Scope.PLATFORM)


class MemberResponse(Struct, kw_only=True):
    """Describe a member; `partitions`: its share of the work."""

    name: str
    host: str
    pid: int
    since: datetime
    leads: bool
    partitions: list[str]


class ClusterResponse(Struct, kw_only=True):
    """Describe the leader (null: none), its epoch, which grows each time, and all members."""

    leader: str | None
    epoch: int
    leader_absent_seconds: float
    members: list[MemberResponse]


@get("/cluster", opt=_PLATFORM, tags=_TAGS, summary="Read the cluster")
async def read_cluster(services: ServicesDep, principal: Caller) -> ClusterResponse:  # noqa: ARG001 - every route takes its caller
    """Return every member of the installation. 503: the election's store does not answer."""
    view = await services.leader_health.view()
    return ClusterResponse(
        leader=view.leader,
        epoch=view.epoch,
        leader_absent_seconds=view.leader_absent_s,
        members=[
            MemberResponse(
                name=member.name,
                host=member.host,
                pid=member.pid,
                since=member.since,
                leads=member.name == view.leader,
                partitions=list(member.partitions),
            )
            for member in view.members
        ],
    )


class UpdateScheduleShards(Struct, forbid_unknown_fields=True, kw_only=True):
    """Set into how many shards the schedule of deferred deliveries is split."""

    count: Annotated[
        int,
        Meta(
            ge=1,
            le=HASH_SLOTS,
            description="More than members, so that each member has a share.",
        ),
    ]


class ScheduleShardsResponse(Struct, kw_only=True):
    """Describe the number of shards; `used` false: PostgreSQL is the broker and needs none."""

    count: int
    used: bool


@get("/cluster/buckets", opt=_PLATFORM, tags=_TAGS, summary="Read the number of schedule shards")
async def read_buckets(services: ServicesDep, principal: Caller) -> ScheduleShardsResponse:
    """Return the number of shards of deliveries that are due beyond the broker's look-ahead.

    The members share these shards.
    """
    async with services.writer_turns.turn(principal.organisation_id) as writer:
        count = await schedule_shard_count(writer)
    return ScheduleShardsResponse(count=count, used=services.settings.uses_relay)


@put(
    "/cluster/buckets",
    dto=Body[UpdateScheduleShards],
    return_dto=None,
    opt=_PLATFORM,
    tags=_TAGS,
    summary="Change the number of schedule shards",
)
async def change_buckets(
    data: JSONBody[UpdateScheduleShards],
    services: ServicesDep,
    principal: Caller,  # noqa: ARG001 - every route takes its caller
    change: ChangeDep,
) -> ScheduleShardsResponse:
    """Set the number for the whole installation.

    No delivery moves; the members share the shards again within seconds.
    """
    async with change.transaction() as connection:
        change.before = {"count": await set_schedule_shard_count(connection, data.count)}
    return ScheduleShardsResponse(count=data.count, used=services.settings.uses_relay)


ROUTES: Final = [read_cluster, read_buckets, change_buckets]
