"""An election in PostgreSQL: a session lock for the leader, a row with a lease for each member, a row for each hold.

A member's lease is a time in its row, moved on by every ping, durably, by the server's clock. Whoever takes a lease
away deletes the row, which a ping cannot cross: one of the two comes first, and the other finds nothing. A partition
is taken where its row has no holder, and only a deleted member, or the holder itself, leaves it without one. So
neither a restart of the server nor an ended session lets anybody in before the old holder's deadline.

The session itself is closed by the server when it was silent for as long as a lease (`idle_session_timeout`): with it
goes the leader's lock, whoever froze.
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import psycopg

from delivery.elections.participation import MISSED, Participation
from delivery.elections.shares import share
from delivery.elections.vitality import is_dead, own_process
from rooms.domain.cluster import ClusterView, Member
from rooms.errors import ElectionUnavailableError, StorageUnavailableError
from rooms.outages import OUTAGES, Part
from rooms.ports import Clock
from rooms.storage.engine import Connection, KeptConnection, connect

_log = logging.getLogger(__name__)

LOCK: Final = 0x726F6F6E
"""First key of the session lock that makes a leader (second: 0)."""
SESSION: Final = "rooms election"
"""The application name of a member's session."""
_CHANNEL: Final = "rooms_election"
_LEAVE_S: Final = 1.0
_VIEW_S: Final = 1.8
"""Less than the API waits, so that it is PostgreSQL that is named where PostgreSQL does not answer."""

_SETTINGS: Final = """
SELECT set_config('idle_session_timeout', %(lease_ms)s, false), set_config('statement_timeout', %(trust_ms)s, false),
    set_config('idle_in_transaction_session_timeout', %(lease_ms)s, false), set_config('synchronous_commit', 'on', false)
"""
# What this name held before belongs to a session that is over: nobody acts on it any more.
_REGISTER: Final = """
WITH me AS (
    INSERT INTO election_members (name, host, pid, process, until)
    VALUES (%(name)s, %(host)s, %(pid)s, %(process)s, clock_timestamp() + %(lease_ms)s * interval '1 ms')
    ON CONFLICT (name) DO UPDATE SET until = excluded.until
    RETURNING id
), freed AS (
    UPDATE election_partitions p SET holder = NULL FROM me WHERE p.holder = me.id
)
SELECT id FROM me
"""
_PING: Final = """
WITH me AS (
    UPDATE election_members SET until = clock_timestamp() + %(lease_ms)s * interval '1 ms' WHERE id = %(id)s
    RETURNING id
), led AS (
    UPDATE election_terms SET led_at = clock_timestamp() WHERE term = %(term)s
)
SELECT ARRAY(SELECT name FROM election_partitions WHERE member = %(id)s) FROM me
"""
_TAKE: Final = """
WITH next AS (
    UPDATE election_terms SET epoch = epoch + 1 RETURNING epoch
)
UPDATE election_partitions p SET holder = %(id)s, epoch = next.epoch FROM next
WHERE p.name = ANY (%(names)s) AND p.member = %(id)s AND p.holder IS NULL
RETURNING p.name, p.epoch
"""
_GIVE_UP: Final = """
WITH freed AS (
    UPDATE election_partitions SET holder = NULL WHERE name = ANY (%(names)s) AND holder = %(id)s RETURNING 1
)
SELECT pg_notify(%(channel)s, '') FROM (SELECT count(*) FROM freed) AS done
"""
_TRY: Final = "SELECT pg_try_advisory_lock(%(lock)s, 0)"
_LEAD: Final = """
UPDATE election_terms SET epoch = epoch + 1, term = epoch + 1, leader = %(name)s, led_at = clock_timestamp()
RETURNING term
"""
_LOOK: Final = """
SELECT ARRAY(SELECT jsonb_build_array(id, process, until <= clock_timestamp()) FROM election_members ORDER BY id),
    ARRAY(SELECT jsonb_build_array(name, member) FROM election_partitions ORDER BY name)
"""
_BURY: Final = """
DELETE FROM election_members WHERE id = ANY (%(dead)s) OR (id = ANY (%(late)s) AND until <= clock_timestamp())
"""
_ASSIGN: Final = """
WITH plan AS (
    INSERT INTO election_partitions AS p (name, member, assigned)
    SELECT name, member, %(term)s FROM unnest(%(names)s::text[], %(members)s::int4[]) AS plan (name, member)
    WHERE EXISTS (SELECT FROM election_terms WHERE term = %(term)s)
    ON CONFLICT (name) DO UPDATE SET member = excluded.member, assigned = excluded.assigned
        WHERE p.assigned <= excluded.assigned
    RETURNING 1
)
SELECT pg_notify(%(channel)s, '') FROM (SELECT count(*) FROM plan) AS done
"""
# The lock goes first, so that whoever hears of it can lead at once.
_LEAVE: Final = """
WITH gone AS (DELETE FROM election_members WHERE id = %(id)s RETURNING 1)
SELECT pg_advisory_unlock_all(), pg_notify(%(channel)s, '') FROM (SELECT count(*) FROM gone) AS done
"""
_VIEW: Final = """
SELECT term, leader, extract(epoch FROM clock_timestamp() - led_at)::float8, EXISTS (
    SELECT FROM pg_locks l WHERE l.locktype = 'advisory' AND l.classid = %(lock)s AND l.objid = 0 AND l.objsubid = 2
        AND l.granted AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
) FROM election_terms
"""
_MEMBERS: Final = """
SELECT m.name, m.host, m.pid, m.since, ARRAY(
    SELECT p.name FROM election_partitions p WHERE p.member = m.id ORDER BY p.name
) FROM election_members m WHERE m.until > clock_timestamp() ORDER BY m.id
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """`lease_s`: the silence after which others may take over, and the server ends the session; `trust_s`: how long
    after a ping was sent its answer is believed in, less than that; `ping_s`: between two pings; `retry_s`: between two
    tries to come back.

    A member that hangs is replaced after `takeover_s` at most, which leaves a standby a second of the five promised.
    """

    lease_s: float = 3.5
    trust_s: float = 2.8
    ping_s: float = 0.5
    retry_s: float = 0.5

    @property
    def takeover_s(self) -> float:
        """The lease, and the longest rest of a member before it tries to lead."""
        return self.lease_s + self.ping_s


_PULSE: Final = Pulse()


class _BuriedError(Exception):
    """Others took this member for dead."""


class PostgresElection:
    """An election of the installation that has this database."""

    def __init__(self, url: str, *, member: str, clock: Clock, pulse: Pulse = _PULSE) -> None:
        self._url = url
        self._member = member
        self._clock = clock
        self._pulse = pulse
        self._views = KeptConnection(url, name="rooms election view")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._views.close()

    def join(self, partitions: Sequence[str]) -> "PostgresMembership":
        """Take part; PostgreSQL may come and go meanwhile."""
        return PostgresMembership(self._url, partitions, member=self._member, clock=self._clock, pulse=self._pulse)

    async def view(self) -> ClusterView:
        """The cluster as the tables have it."""
        try:
            async with asyncio.timeout(_VIEW_S):
                return await self._views.run(_view)
        except TimeoutError:
            away = StorageUnavailableError("PostgreSQL does not answer")
            raise ElectionUnavailableError(str(away)) from away
        except (StorageUnavailableError, psycopg.errors.UndefinedTable) as exc:
            raise ElectionUnavailableError(_told(exc)) from exc


class PostgresMembership(Participation):
    """One member: it pings, takes and gives up, and leads when it is its turn."""

    def __init__(self, url: str, partitions: Sequence[str], *, member: str, clock: Clock, pulse: Pulse) -> None:
        super().__init__(partitions, member=member, clock=clock, leave_s=2 * _LEAVE_S)
        self._url = url
        self._pulse = pulse

    async def _take_part(self) -> None:
        told = False
        while True:
            try:
                connection = await connect(self._url, name=SESSION)
                try:
                    session = _Session(connection, self._member, self._clock, self._pulse)
                    await session.begin()
                    told = False
                    OUTAGES.succeeded(MISSED)
                    await self._serve(session)
                finally:
                    self._tenure.end()
                    await connection.close()
            except (psycopg.OperationalError, TimeoutError) as exc:
                OUTAGES.failed(StorageUnavailableError(_told(exc)), MISSED, part=Part.POSTGRESQL)
            except (psycopg.Error, _BuriedError) as exc:
                if not told:
                    _log.warning("this process takes no part for now: %s", _told(exc))
                    told = True
            await asyncio.sleep(self._pulse.retry_s)

    async def _serve(self, session: "_Session") -> None:
        try:
            while True:
                sent = self._clock.monotonic()
                assigned = await session.ping()
                self._tenure.prove(sent + self._pulse.trust_s)
                if gone := self._tenure.holds.keys() - assigned:
                    self._tenure.give_up(gone)
                    await session.give_up(gone)
                if wanted := assigned - self._tenure.holds.keys():
                    self._tenure.take(await session.take(wanted))
                if session.term or await session.lead():
                    await session.share_out(self._partitions)
                await session.listen()
        except asyncio.CancelledError:
            self._tenure.end()
            with contextlib.suppress(psycopg.Error, TimeoutError):
                await session.leave()
            raise


class _Session:
    """One connection's statements, each given up when its answer would come too late to be believed."""

    def __init__(self, connection: Connection, member: str, clock: Clock, pulse: Pulse) -> None:
        self._connection = connection
        self._clock = clock
        self._pulse = pulse
        self._values: dict[str, Any] = {
            "name": member,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "process": own_process(),
            "lease_ms": str(round(pulse.lease_s * 1000)),
            "trust_ms": str(round(pulse.trust_s * 1000)),
            "lock": LOCK,
            "channel": _CHANNEL,
            "term": None,
        }

    @property
    def term(self) -> int | None:
        """The epoch in which this session leads."""
        term: int | None = self._values["term"]
        return term

    async def begin(self) -> None:
        await self._ask(_SETTINGS)
        await self._ask(f"LISTEN {_CHANNEL}")
        self._values["lease_ms"] = round(self._pulse.lease_s * 1000)
        ((self._values["id"],),) = await self._ask(_REGISTER)

    async def ping(self) -> frozenset[str]:
        """Prove life; what is assigned to this member."""
        rows = await self._ask(_PING)
        if not rows:
            raise _BuriedError("its lease was over, and others have taken over")
        return frozenset(rows[0][0])

    async def take(self, names: frozenset[str]) -> Mapping[str, int]:
        try:
            return dict(await self._ask(_TAKE, names=list(names)))
        except psycopg.errors.ForeignKeyViolation as exc:
            raise _BuriedError("its lease was over, and others have taken over") from exc

    async def give_up(self, names: set[str]) -> None:
        await self._ask(_GIVE_UP, names=list(names))

    async def lead(self) -> bool:
        """Whether this session leads now, in a new term."""
        ((got,),) = await self._ask(_TRY)
        if got:
            ((self._values["term"],),) = await self._ask(_LEAD)
            _log.info("this process leads now, epoch %d", self._values["term"])
        return bool(got)

    async def share_out(self, partitions: Sequence[str]) -> None:
        """Bury the dead, and share what there is over the living; nothing is written where nothing changes."""
        ((members, found),) = await self._ask(_LOOK)
        late = [number for number, _, over in members if over]
        dead = [number for number, process, _ in members if is_dead(process)]
        if late or dead:
            await self._ask(_BURY, late=late, dead=dead)
        alive = [number for number, *_ in members if number not in {*late, *dead}]
        before = dict(found)
        plan: dict[str, int | None] = {**dict.fromkeys(before), **share(partitions, alive, before)}
        changes = {name: member for name, member in plan.items() if name not in before or before[name] != member}
        if changes:
            # Who left in the meantime is found out by the next look.
            with contextlib.suppress(psycopg.errors.ForeignKeyViolation):
                await self._ask(_ASSIGN, names=list(changes), members=list(changes.values()))

    async def listen(self) -> None:
        """Until something changed, or the next ping is due; the end of the connection is heard at once."""
        async for _ in self._connection.notifies(timeout=self._pulse.ping_s, stop_after=1):
            return

    async def leave(self) -> None:
        async with asyncio.timeout(_LEAVE_S):
            await self._connection.execute(_LEAVE.encode(), self._values)

    async def _ask(self, statement: str, **values: Any) -> list[tuple[Any, ...]]:
        async with asyncio.timeout(self._pulse.trust_s):
            cursor = await self._connection.execute(statement.encode(), {**self._values, **values})
            return await cursor.fetchall() if cursor.description else []


async def _view(connection: Connection) -> ClusterView:
    terms = await (await connection.execute(_VIEW, {"lock": LOCK})).fetchall()
    members = await (await connection.execute(_MEMBERS)).fetchall()
    ((term, leader, silent_s, led),) = terms
    return ClusterView(
        leader=leader if led else None,
        epoch=term,
        leader_absent_s=0.0 if led else max(0.0, silent_s),
        members=tuple(
            Member(name=name, host=host, pid=pid, since=since, partitions=tuple(partitions))
            for name, host, pid, since, partitions in members
        ),
    )


def _told(exc: BaseException) -> str:
    if isinstance(exc, psycopg.errors.UndefinedTable):
        return "the database lacks this version's schema; `rooms migrate` brings it"
    return str(exc) or "PostgreSQL does not answer"
