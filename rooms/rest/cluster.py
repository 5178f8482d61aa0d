"""`/v1/cluster`: the processes that share what must be done by one alone."""

from datetime import datetime
from typing import Annotated, Final

from litestar import get, put
from litestar.params import JSONBody
from msgspec import Meta, Struct

from rooms.domain.states import Scope
from rooms.rest.auth import Caller, Given, needs
from rooms.rest.bodies import Body
from rooms.rest.problems import documented
from rooms.storage.horizon import SLOTS, bucket_count, set_bucket_count

_TAGS: Final = ["cluster"]
_PLATFORM: Final = needs(Scope.PLATFORM)


class MemberOut(Struct, kw_only=True):
    """A process that takes part: `partitions` are what it is to do."""

    name: str
    host: str
    pid: int
    since: datetime
    leads: bool
    partitions: list[str]


class ClusterOut(Struct, kw_only=True):
    """Who leads (null: nobody), in which epoch, which grows with every leader, and who does what."""

    leader: str | None
    epoch: int
    leader_absent_seconds: float
    members: list[MemberOut]


@get("/cluster", opt=_PLATFORM, responses=documented(), tags=_TAGS, summary="Read the cluster")
async def read_cluster(services: Given, principal: Caller) -> ClusterOut:  # noqa: ARG001 - every route names who asks
    """Every process of the installation. 503 while the election's store is away."""
    view = await services.leadership.view()
    return ClusterOut(
        leader=view.leader,
        epoch=view.epoch,
        leader_absent_seconds=view.leader_absent_s,
        members=[
            MemberOut(
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


class Buckets(Struct, forbid_unknown_fields=True, kw_only=True):
    """In how many parts the members share what is due later."""

    count: Annotated[int, Meta(ge=1, le=SLOTS, description="More than there are members, so that each has its share.")]


class BucketsOut(Struct, kw_only=True):
    """The number of buckets; `used`: false where PostgreSQL is the broker, whose queue needs none."""

    count: int
    used: bool


@get("/cluster/buckets", opt=_PLATFORM, responses=documented(), tags=_TAGS, summary="Read the due buckets")
async def read_buckets(services: Given, principal: Caller) -> BucketsOut:  # noqa: ARG001 - every route names who asks
    """In how many buckets deliveries lie that are due beyond the broker's horizon; the members share them."""
    return BucketsOut(count=await bucket_count(services.writer), used=services.settings.relayed)


@put(
    "/cluster/buckets",
    dto=Body[Buckets],
    return_dto=None,
    opt=_PLATFORM,
    responses=documented(),
    tags=_TAGS,
    summary="Change the number of due buckets",
)
async def change_buckets(
    data: JSONBody[Buckets],
    services: Given,
    principal: Caller,  # noqa: ARG001 - every route names who asks
) -> BucketsOut:
    """Their number from now on, for the whole installation. No delivery moves; members share them anew within seconds."""
    await set_bucket_count(services.writer, data.count)
    return BucketsOut(count=data.count, used=services.settings.relayed)


ROUTES: Final = [read_cluster, read_buckets, change_buckets]
