"""`/v1/cluster`: the processes that share what must be done by one alone."""

from datetime import datetime
from typing import Final

from litestar import get
from msgspec import Struct

from rooms.domain.states import Scope
from rooms.rest.auth import Caller, Given, needs
from rooms.rest.problems import documented

_TAGS: Final = ["cluster"]


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


@get("/cluster", opt=needs(Scope.OPERATE), responses=documented(), tags=_TAGS, summary="Read the cluster")
async def read_cluster(services: Given, principal: Caller) -> ClusterOut:  # noqa: ARG001 - every route names who asks
    """The whole installation, not the organisation alone. 503 while the election's store is away."""
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


ROUTES: Final = [read_cluster]
