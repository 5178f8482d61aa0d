"""Elect by ZooKeeper, on the paths of IgnisMQ and one more for holds.

    /{client}-ignis-workers/{client}/
        loadbalancer-leader/member-0000000007   ephemeral, in order of arrival: the first one leads
        members/{member}                        ephemeral: host, pid, since
        communicator/{member}                   {balancerId, epoch, partitions}, by the leader
        partitions                              the epoch of the last hold
        partitions/{partition}                  ephemeral: the hold

The leader writes `communicator` again every 30 s. A member is active while the balancer id is its
own name. Only writes prove a session: a server that was cut off from its leader still answers
reads. The leader of the servers may have seen the session half a tick and a ping earlier than the
member sent it; `TRUST_FRACTION` leaves room for that (a tick is half a session at most).

A hold and its epoch (`epochs.py`) are written in one transaction. The time is that of the member's
last write, by the server's clock.
"""

import asyncio
import json
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Final, Self
from urllib.parse import quote

from delivery.leadership.assignment import assign
from delivery.leadership.epochs import next_epoch
from delivery.leadership.membership import MEMBERSHIP_OUTAGE, MembershipTask
from delivery.leadership.zookeeper_session import (
    CLOSE_S,
    TRUST_FRACTION,
    ChangeKind,
    NodeChange,
    ZooKeeperSession,
)
from rooms.backend_urls import ZooKeeperUrl
from rooms.domain.cluster import ClusterView, Member
from rooms.errors import ElectionUnavailableError
from rooms.outages import OUTAGES
from rooms.ports import Clock

_log = logging.getLogger(__name__)

PING_FRACTION: Final = 0.1
"""Interval of heartbeats, as a fraction of the session timeout."""
_VIEW_S: Final = 2.0
_RETRY_S: Final = 0.5
_SEQUENCE_DIGITS: Final = 10


class ZooKeeperElection:
    """Hold an election for the installation `client`; several may share a ZooKeeper."""

    def __init__(self, url: ZooKeeperUrl, *, client: str, member: str, clock: Clock) -> None:
        self._url = url
        self._base = f"{url.root}/{client}-ignis-workers/{client}"
        self._member = member
        self._clock = clock
        self._view_lock = asyncio.Lock()
        self._session: ZooKeeperSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._session is not None:
            await self._session.close()

    def join(self, partitions: Sequence[str]) -> "ZooKeeperMembership":
        """Take part; outages of ZooKeeper are waited out."""
        return ZooKeeperMembership(
            self._url, self._base, tuple(partitions), member=self._member, clock=self._clock
        )

    async def view(self) -> ClusterView:
        """Return the cluster as the nodes show it."""
        async with self._view_lock:
            if self._session is not None and self._session.is_abandoned():
                session, self._session = self._session, None
                await session.close()
            if self._session is None:
                self._session = ZooKeeperSession(self._url)
                self._session.start()
            await self._session.wait_connected(_VIEW_S)
            return await self._read_view(self._session)

    async def _read_view(self, session: ZooKeeperSession) -> ClusterView:
        contenders, led_ms = await session.children(f"{self._base}/loadbalancer-leader")
        leader, epoch = None, 0
        if contenders:
            first = await session.read(
                f"{self._base}/loadbalancer-leader/{min(contenders, key=_sequence_number)}"
            )
            if first is not None:
                leader, epoch = first[0].decode(), first[1]
        absent_ms = 0 if leader or not led_ms else max(0, self._clock.now_ms() - led_ms)
        names, _ = await session.children(f"{self._base}/members")
        members = [
            member
            for name in names
            if (member := await self._read_member(session, name)) is not None
        ]
        return ClusterView(
            leader=leader,
            epoch=epoch,
            leader_absent_s=absent_ms / 1000,
            members=tuple(sorted(members, key=lambda member: (member.since, member.name))),
        )

    async def _read_member(self, session: ZooKeeperSession, name: str) -> Member | None:
        found = await session.read(f"{self._base}/members/{name}")
        if found is None:
            return None
        record = json.loads(found[0])
        assigned = await session.read(f"{self._base}/communicator/{name}")
        return Member(
            name=name,
            host=record["host"],
            pid=record["pid"],
            since=datetime.fromisoformat(record["since"]),
            partitions=tuple(sorted(json.loads(assigned[0])["partitions"])) if assigned else (),
        )


class ZooKeeperMembership(MembershipTask):
    """Take part as a member: send heartbeats, take and release holds, and lead if elected."""

    def __init__(
        self, url: ZooKeeperUrl, base: str, partitions: Sequence[str], *, member: str, clock: Clock
    ) -> None:
        super().__init__(partitions, member=member, clock=clock, leave_s=2 * CLOSE_S)
        self._url = url
        self._base = base
        record = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": clock.now().isoformat(),
        }
        self._member_record = json.dumps(record).encode()
        self._leader_epoch = 0

    async def _participate(self) -> None:
        while True:
            session = ZooKeeperSession(
                self._url, on_lost=self._local_holds.clear, keep_alive_by_requests=True
            )
            try:
                session.start()
                await session.wait_connected(self._url.session_s)
                leading = await self._register(session)
                OUTAGES.record_success(MEMBERSHIP_OUTAGE)
                await self._run_session(session, leading)
            except ElectionUnavailableError as exc:
                self._local_holds.clear()
                OUTAGES.record_failure(exc, MEMBERSHIP_OUTAGE)
                await session.wait_over()
            finally:
                self._local_holds.clear()
                await session.close()
            await asyncio.sleep(_RETRY_S)

    async def _register(self, session: ZooKeeperSession) -> "_LeaderRole":
        for name in ("loadbalancer-leader", "members", "communicator", "partitions"):
            await session.ensure_node(f"{self._base}/{name}")
        # The transactions of a ZooKeeper that lost its data are counted from 0 again.
        self._leader_epoch = 0
        if await session.create(self._member_path, self._member_record) is None:
            raise ElectionUnavailableError("the last session of this process has not expired yet")
        path = f"{self._base}/loadbalancer-leader/member-"
        created = await session.create(path, self._member.encode(), sequence=True)
        assert created is not None
        own_node, epoch = created
        return _LeaderRole(
            session,
            self._base,
            own_node=own_node,
            epoch=epoch,
            clock=self._clock,
            refresh_s=self._url.refresh_s,
        )

    @property
    def _member_path(self) -> str:
        return f"{self._base}/members/{self._member}"

    async def _run_session(self, session: ZooKeeperSession, role: "_LeaderRole") -> None:
        while True:
            sent = self._clock.monotonic()
            now_ms = await session.write(self._member_path, self._member_record)
            if session.was_lost:
                raise ElectionUnavailableError("the connection to ZooKeeper was lost")
            self._local_holds.renew(sent + TRUST_FRACTION * session.timeout_s)
            assigned = await self._read_assigned(session)
            if gone := self._local_holds.holds.keys() - assigned:
                self._local_holds.remove(gone)
                await session.apply_changes(
                    self._member_path,
                    [
                        NodeChange(path=self._hold_path(name), kind="delete")
                        for name in sorted(gone)
                    ],
                )
            for name in sorted(assigned - self._local_holds.holds.keys()):
                await self._take_hold(session, name, now_ms)
            await role.lead_if_first(self._partitions)
            await session.wait_event(PING_FRACTION * session.timeout_s)

    async def _read_assigned(self, session: ZooKeeperSession) -> frozenset[str]:
        """Return the partitions that the newest known leader assigned to this member."""
        found = await session.read(f"{self._base}/communicator/{self._member}", watch=True)
        plan = json.loads(found[0]) if found else {}
        if plan.get("balancerId") != self._member or plan["epoch"] < self._leader_epoch:
            return frozenset()
        self._leader_epoch = plan["epoch"]
        return frozenset(plan["partitions"])

    async def _take_hold(self, session: ZooKeeperSession, name: str, now_ms: int) -> None:
        epoch = await session.create_numbered(
            self._hold_path(name),
            self._member.encode(),
            counter=f"{self._base}/partitions",
            next_number=partial(next_epoch, now_ms=now_ms),
        )
        if epoch is None:
            # The holder releases it soon, or its session expires: the watch wakes this member.
            await session.watch(self._hold_path(name))
        elif not session.was_lost:
            self._local_holds.add({name: epoch})

    def _hold_path(self, partition: str) -> str:
        return f"{self._base}/partitions/{quote(partition, safe='')}"


class _LeaderRole:
    """Hold a session's contender node, and do the leader's work as the first contender."""

    def __init__(
        self,
        session: ZooKeeperSession,
        base: str,
        *,
        own_node: str,
        epoch: int,
        clock: Clock,
        refresh_s: float,
    ) -> None:
        self._session = session
        self._base = base
        self._own_node = own_node.rpartition("/")[2]
        self._epoch = epoch
        self._clock = clock
        self._refresh_s = refresh_s
        self._is_leader = False
        self._assignments: dict[str, str] = {}
        self._written_members: frozenset[str] = frozenset()
        self._refresh_at = 0.0

    async def lead_if_first(self, partitions: Sequence[str]) -> None:
        """Renew the leadership and write assignments, if this member is the first contender."""
        path = f"{self._base}/loadbalancer-leader"
        if not self._is_leader:
            contenders, _ = await self._session.children(path, watch=True)
            if min(contenders, key=_sequence_number, default="") != self._own_node:
                return
            self._is_leader = True
            await self._load_assignments()
            _log.info("this process leads now, epoch %d", self._epoch)
        await self._session.write(path, self._own_node.encode())
        members, _ = await self._session.children(f"{self._base}/members", watch=True)
        plan = assign(partitions, sorted(members), self._assignments)
        now = self._clock.monotonic()
        if (
            plan != self._assignments
            or self._written_members != frozenset(members)
            or now >= self._refresh_at
        ):
            await self._write_assignments(plan, frozenset(members))
            self._refresh_at = now + self._refresh_s

    async def _load_assignments(self) -> None:
        """Read the last leader's assignments, so that few partitions move."""
        names, _ = await self._session.children(f"{self._base}/communicator")
        for name in names:
            found = await self._session.read(f"{self._base}/communicator/{name}")
            if found is not None:
                self._assignments.update(dict.fromkeys(json.loads(found[0])["partitions"], name))
        self._written_members = frozenset(names)

    async def _write_assignments(
        self, assignments: Mapping[str, str], members: frozenset[str]
    ) -> None:
        changes = []
        for name in sorted(members):
            partitions = [partition for partition, member in assignments.items() if member == name]
            plan = {"balancerId": name, "epoch": self._epoch, "partitions": partitions}
            kind: ChangeKind = "set" if name in self._written_members else "create"
            changes.append(
                NodeChange(
                    path=f"{self._base}/communicator/{name}",
                    kind=kind,
                    value=json.dumps(plan).encode(),
                )
            )
        changes += [
            NodeChange(path=f"{self._base}/communicator/{name}", kind="delete")
            for name in sorted(self._written_members - members)
        ]
        await self._session.apply_changes(
            f"{self._base}/loadbalancer-leader/{self._own_node}", changes
        )
        self._assignments, self._written_members = dict(assignments), members


def _sequence_number(contender: str) -> int:
    return int(contender[-_SEQUENCE_DIGITS:])
