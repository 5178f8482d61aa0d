"""An election in ZooKeeper, on the paths that IgnisMQ uses (row B7), and one more for holds:

    /{client}-ignis-workers/{client}/
        loadbalancer-leader/member-0000000007   ephemeral, in the order of arrival: the first one leads
        members/{member}                        ephemeral: host, pid, since
        communicator/{member}                   the leader writes {balancerId, epoch, partitions}, anew every 30 s
        partitions/{partition}                  ephemeral: the hold; its epoch grows with its czxid

A member is active while the balancer id is its own name. A session is proven by writes alone: a server that was cut
off from its leader still answers reads. The leader of the servers may have heard of the session half a tick and a ping
earlier than we sent; `keeper.TRUST` leaves room for that (a tick is half a session at most).

A ZooKeeper that lost its data counts transactions from 0 again, while magazines remember epochs. So a hold's epoch begins
where `partitions` was made, by the server's clock, and counts the transactions since (`epoch_of`).
"""

import asyncio
import json
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Final, Self
from urllib.parse import quote

from delivery.elections.address import Address
from delivery.elections.keeper import CLOSE_S, TRUST, Change, Kind, Session
from delivery.elections.participation import MISSED, Participation
from delivery.elections.shares import share
from rooms.domain.cluster import ClusterView, Member
from rooms.errors import ElectionUnavailableError
from rooms.outages import OUTAGES
from rooms.ports import Clock

_log = logging.getLogger(__name__)

PING: Final = 0.1
"""The time between two writes, in sessions."""
_VIEW_S: Final = 2.0
_RETRY_S: Final = 0.5
_SEQUENCE: Final = 10
_EPOCHS_PER_MS: Final = 1 << 20
"""An election among the servers adds 2^32 to their transaction numbers, so one every four seconds is allowed for."""


def epoch_of(hold: int, origin: tuple[int, int]) -> int:
    """Return the epoch of a hold by its czxid. `origin`: the czxid of `partitions`, and when it was made, in milliseconds."""
    czxid, made_ms = origin
    return made_ms * _EPOCHS_PER_MS + hold - czxid


class ZooKeeperElection:
    """An election of the installation `client` among those that share this ZooKeeper."""

    def __init__(self, address: Address, *, client: str, member: str, clock: Clock) -> None:
        self._address = address
        self._base = f"{address.root}/{client}-ignis-workers/{client}"
        self._member = member
        self._clock = clock
        self._turn = asyncio.Lock()
        self._session: Session | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    def join(self, partitions: Sequence[str]) -> "ZooKeeperMembership":
        """Take part; ZooKeeper may come and go meanwhile."""
        return ZooKeeperMembership(self._address, self._base, tuple(partitions), member=self._member, clock=self._clock)

    async def view(self) -> ClusterView:
        """The cluster as the nodes have it."""
        async with self._turn:
            if self._session is not None and self._session.abandoned():
                session, self._session = self._session, None
                await session.close()
            if self._session is None:
                self._session = Session(self._address)
                self._session.start()
            await self._session.connected(_VIEW_S)
            return await self._look(self._session)

    async def _look(self, session: Session) -> ClusterView:
        contenders, led_ms = await session.children(f"{self._base}/loadbalancer-leader")
        leader, epoch = None, 0
        if contenders:
            first = await session.read(f"{self._base}/loadbalancer-leader/{min(contenders, key=_number)}")
            if first is not None:
                leader, epoch = first[0].decode(), first[1]
        absent_ms = 0 if leader or not led_ms else max(0, self._clock.now_ms() - led_ms)
        names, _ = await session.children(f"{self._base}/members")
        members = [member for name in names if (member := await self._member_of(session, name)) is not None]
        return ClusterView(
            leader=leader,
            epoch=epoch,
            leader_absent_s=absent_ms / 1000,
            members=tuple(sorted(members, key=lambda member: (member.since, member.name))),
        )

    async def _member_of(self, session: Session, name: str) -> Member | None:
        found = await session.read(f"{self._base}/members/{name}")
        if found is None:
            return None
        told = json.loads(found[0])
        assigned = await session.read(f"{self._base}/communicator/{name}")
        return Member(
            name=name,
            host=told["host"],
            pid=told["pid"],
            since=datetime.fromisoformat(told["since"]),
            partitions=tuple(sorted(json.loads(assigned[0])["partitions"])) if assigned else (),
        )


class ZooKeeperMembership(Participation):
    """One member: it writes, takes and gives up, and leads when it is its turn."""

    def __init__(self, address: Address, base: str, partitions: Sequence[str], *, member: str, clock: Clock) -> None:
        super().__init__(partitions, member=member, clock=clock, leave_s=2 * CLOSE_S)
        self._address = address
        self._base = base
        about = {"host": socket.gethostname(), "pid": os.getpid(), "since": clock.now().isoformat()}
        self._about = json.dumps(about).encode()
        self._epoch = 0
        self._origin = (0, 0)

    async def _take_part(self) -> None:
        while True:
            session = Session(self._address, on_lost=self._tenure.end, proven_by_loop=True)
            try:
                session.start()
                await session.connected(self._address.session_s)
                leading = await self._register(session)
                OUTAGES.succeeded(MISSED)
                await self._serve(session, leading)
            except ElectionUnavailableError as exc:
                self._tenure.end()
                OUTAGES.failed(exc, MISSED)
                await session.over()
            finally:
                self._tenure.end()
                await session.close()
            await asyncio.sleep(_RETRY_S)

    async def _register(self, session: Session) -> "_Leading":
        for noun in ("loadbalancer-leader", "members", "communicator", "partitions"):
            await session.ensure(f"{self._base}/{noun}")
        # A ZooKeeper that lost its data elects under lower numbers than before.
        self._epoch, self._origin = 0, await session.made(f"{self._base}/partitions")
        if await session.create(self._path, self._about) is None:
            raise ElectionUnavailableError("the last session of this process has not run out yet")
        place = f"{self._base}/loadbalancer-leader/member-"
        made = await session.create(place, self._member.encode(), sequence=True)
        assert made is not None
        own, epoch = made
        return _Leading(
            session,
            self._base,
            own=own,
            epoch=epoch,
            clock=self._clock,
            refresh_s=self._address.refresh_s,
        )

    @property
    def _path(self) -> str:
        return f"{self._base}/members/{self._member}"

    async def _serve(self, session: Session, leading: "_Leading") -> None:
        while True:
            sent = self._clock.monotonic()
            await session.write(self._path, self._about)
            if session.lost:
                raise ElectionUnavailableError("the connection to ZooKeeper was lost")
            self._tenure.prove(sent + TRUST * session.timeout_s)
            assigned = await self._assigned(session)
            if gone := self._tenure.holds.keys() - assigned:
                self._tenure.give_up(gone)
                await session.change(
                    self._path, [Change(path=self._hold(name), kind="delete") for name in sorted(gone)]
                )
            for name in sorted(assigned - self._tenure.holds.keys()):
                await self._take(session, name)
            await leading.go_on(self._partitions)
            await session.news(PING * session.timeout_s)

    async def _assigned(self, session: Session) -> frozenset[str]:
        """What the newest leader that was heard of wants this member to do."""
        found = await session.read(f"{self._base}/communicator/{self._member}", heed=True)
        told = json.loads(found[0]) if found else {}
        if told.get("balancerId") != self._member or told["epoch"] < self._epoch:
            return frozenset()
        self._epoch = told["epoch"]
        return frozenset(told["partitions"])

    async def _take(self, session: Session, name: str) -> None:
        made = await session.create(self._hold(name), self._member.encode())
        if made is None:
            # Its holder gives it up soon, or its session runs out: the watch tells.
            await session.heed(self._hold(name))
        elif not session.lost:
            self._tenure.take({name: epoch_of(made[1], self._origin)})

    def _hold(self, partition: str) -> str:
        return f"{self._base}/partitions/{quote(partition, safe='')}"


class _Leading:
    """A session's place in the line, and what its member does as the first of it."""

    def __init__(
        self,
        session: Session,
        base: str,
        *,
        own: str,
        epoch: int,
        clock: Clock,
        refresh_s: float,
    ) -> None:
        self._session = session
        self._base = base
        self._own = own.rpartition("/")[2]
        self._epoch = epoch
        self._clock = clock
        self._refresh_s = refresh_s
        self._leads = False
        self._plan: dict[str, str] = {}
        self._written: frozenset[str] = frozenset()
        self._refresh_at = 0.0

    async def go_on(self, partitions: Sequence[str]) -> None:
        """Where it is this member's turn: say that there is a leader, and share out what changed or is to be refreshed."""
        place = f"{self._base}/loadbalancer-leader"
        if not self._leads:
            contenders, _ = await self._session.children(place, heed=True)
            if min(contenders, key=_number, default="") != self._own:
                return
            self._leads = True
            await self._inherit()
            _log.info("this process leads now, epoch %d", self._epoch)
        await self._session.write(place, self._own.encode())
        members, _ = await self._session.children(f"{self._base}/members", heed=True)
        plan = share(partitions, sorted(members), self._plan)
        now = self._clock.monotonic()
        if plan != self._plan or self._written != frozenset(members) or now >= self._refresh_at:
            await self._write(plan, frozenset(members))
            self._refresh_at = now + self._refresh_s

    async def _inherit(self) -> None:
        """What the last leader wanted, so that little moves."""
        names, _ = await self._session.children(f"{self._base}/communicator")
        for name in names:
            found = await self._session.read(f"{self._base}/communicator/{name}")
            if found is not None:
                self._plan.update(dict.fromkeys(json.loads(found[0])["partitions"], name))
        self._written = frozenset(names)

    async def _write(self, plan: Mapping[str, str], members: frozenset[str]) -> None:
        changes = []
        for name in sorted(members):
            partitions = [partition for partition, member in plan.items() if member == name]
            told = {"balancerId": name, "epoch": self._epoch, "partitions": partitions}
            kind: Kind = "set" if name in self._written else "create"
            changes.append(Change(path=f"{self._base}/communicator/{name}", kind=kind, value=json.dumps(told).encode()))
        changes += [
            Change(path=f"{self._base}/communicator/{name}", kind="delete") for name in sorted(self._written - members)
        ]
        await self._session.change(f"{self._base}/loadbalancer-leader/{self._own}", changes)
        self._plan, self._written = dict(plan), members


def _number(contender: str) -> int:
    return int(contender[-_SEQUENCE:])
