"""Elect by PostgreSQL: a session lock for the leader, a row for each member and each hold.

A member's lease is a time in its row, which every heartbeat extends durably, by the server's clock.
A leader evicts a member by deleting the row. An eviction and a heartbeat cannot overlap: the later
one finds no row. A partition is taken where its row has no holder; only the deletion of a member,
or the holder itself, leaves it without one. So neither a restart of the server nor an ended session
lets another member in before the old holder's deadline.

The server closes a session that was silent for a lease (`idle_session_timeout`), and with it frees
the leader lock of a suspended process.
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self

import psycopg

from delivery.leadership.assignment import assign
from delivery.leadership.epochs import EPOCHS_PER_MS
from delivery.leadership.local_process import is_dead, own_process
from delivery.leadership.membership import MEMBERSHIP_OUTAGE, MembershipTask
from rooms.db.connection import (
    CONNECTION_LOST,
    Connection,
    NotificationReader,
    PersistentConnection,
    connect,
)
from rooms.domain.cluster import ClusterView, Member
from rooms.errors import ElectionUnavailableError, StorageUnavailableError
from rooms.outages import OUTAGES, Dependency
from rooms.ports import Clock

_log = logging.getLogger(__name__)

LEADER_LOCK_KEY: Final = 0x726F6F6E
"""First key of the session lock that makes a leader (second: 0)."""
SESSION_NAME: Final = "rooms election"
"""The application name of a member's session."""
_CHANNEL: Final = "rooms_election"
_LEAVE_S: Final = 1.0
_VIEW_S: Final = 1.8
"""Shorter than the API's timeout, so that the error names PostgreSQL."""

_SETTINGS: Final = """
SELECT set_config('idle_session_timeout', %(lease_ms)s, false),
    set_config('statement_timeout', %(trust_ms)s, false),
    set_config('idle_in_transaction_session_timeout', %(lease_ms)s, false),
    set_config('synchronous_commit', 'on', false)
"""
# Earlier holds under this name are of a session that has ended, and are not acted on any more.
_REGISTER: Final = """
WITH me AS (
    INSERT INTO election_members (name, host, pid, process, until)
    VALUES (%(name)s, %(host)s, %(pid)s, %(process)s,
        clock_timestamp() + %(lease_ms)s * interval '1 ms')
    ON CONFLICT (name) DO UPDATE SET until = excluded.until
    RETURNING id
), freed AS (
    UPDATE election_partitions p SET holder = NULL FROM me WHERE p.holder = me.id
)
SELECT id FROM me
"""
_EXTEND: Final = """
WITH me AS (
    UPDATE election_members SET until = clock_timestamp() + %(lease_ms)s * interval '1 ms'
    WHERE id = %(id)s
    RETURNING id
), led AS (
    UPDATE election_terms SET led_at = clock_timestamp() WHERE term = %(term)s
)
SELECT ARRAY(SELECT name FROM election_partitions WHERE member = %(id)s)
"""
_PING: Final = f"{_EXTEND} FROM me"
# The leader's own row is read as it was before.
_PING_AND_SCAN: Final = f"""{_EXTEND},
    ARRAY(
        SELECT jsonb_build_array(id, process, until <= clock_timestamp() AND id <> %(id)s)
        FROM election_members ORDER BY id
    ),
    ARRAY(SELECT jsonb_build_array(name, member) FROM election_partitions ORDER BY name)
FROM me
"""  # noqa: S608 - constants of this module
# As `epochs.next_epoch`, by the server's clock.
_NEXT_EPOCH: Final = f"""greatest(
        epoch + 1, (extract(epoch FROM clock_timestamp()) * 1000)::int8 * {EPOCHS_PER_MS}
    )"""
_TAKE: Final = f"""
WITH next AS (
    UPDATE election_terms SET epoch = {_NEXT_EPOCH} RETURNING epoch
)
UPDATE election_partitions p SET holder = %(id)s, epoch = next.epoch FROM next
WHERE p.name = ANY (%(names)s) AND p.member = %(id)s AND p.holder IS NULL
RETURNING p.name, p.epoch
"""  # noqa: S608 - constants of this module
_GIVE_UP: Final = """
WITH freed AS (
    UPDATE election_partitions SET holder = NULL WHERE name = ANY (%(names)s) AND holder = %(id)s
    RETURNING 1
)
SELECT pg_notify(%(channel)s, '') FROM (SELECT count(*) FROM freed) AS done
"""
_TRY_LOCK: Final = "SELECT pg_try_advisory_lock(%(lock)s, 0)"
# Processes of earlier versions lead in the term `epoch + 1`, which must be a later one, too.
_LEAD: Final = f"""
UPDATE election_terms
SET epoch = {_NEXT_EPOCH}, term = term + 1, leader = %(name)s, led_at = clock_timestamp()
RETURNING term
"""  # noqa: S608 - constants of this module
_EVICT: Final = """
DELETE FROM election_members
WHERE id = ANY (%(dead)s) OR (id = ANY (%(late)s) AND until <= clock_timestamp())
"""
_ASSIGN: Final = """
WITH plan AS (
    INSERT INTO election_partitions AS p (name, member, assigned)
    SELECT name, member, %(term)s
    FROM unnest(%(names)s::text[], %(members)s::int4[]) AS plan (name, member)
    WHERE EXISTS (SELECT FROM election_terms WHERE term = %(term)s)
    ON CONFLICT (name) DO UPDATE SET member = excluded.member, assigned = excluded.assigned
        WHERE p.assigned <= excluded.assigned
    RETURNING 1
)
SELECT pg_notify(%(channel)s, '') FROM (SELECT count(*) FROM plan) AS done
"""
# The lock is released first, so that a notified member can lead at once.
_LEAVE: Final = """
WITH gone AS (DELETE FROM election_members WHERE id = %(id)s RETURNING 1)
SELECT pg_advisory_unlock_all(), pg_notify(%(channel)s, '')
FROM (SELECT count(*) FROM gone) AS done
"""
_VIEW: Final = """
SELECT term, leader, extract(epoch FROM clock_timestamp() - led_at)::float8, EXISTS (
    SELECT FROM pg_locks l
    WHERE l.locktype = 'advisory' AND l.classid = %(lock)s AND l.objid = 0 AND l.objsubid = 2
        AND l.granted
        AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
) FROM election_terms
"""
_MEMBERS: Final = """
SELECT m.name, m.host, m.pid, m.since, ARRAY(
    SELECT p.name FROM election_partitions p WHERE p.member = m.id ORDER BY p.name
) FROM election_members m WHERE m.until > clock_timestamp() ORDER BY m.id
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatConfig:
    """Hold times of heartbeats.

    `lease_s`: silence after which others may take over, and the server ends the session; `trust_s`:
    shorter time after sending a heartbeat for which its answer is trusted; `ping_s`: between two
    heartbeats; `retry_s`: between two attempts to join again.

    A member that hangs is replaced after `lease_s + ping_s` at most, so that a standby takes over
    within five seconds.
    """

    lease_s: float = 3.5
    trust_s: float = 2.8
    ping_s: float = 0.5
    retry_s: float = 0.5


_HEARTBEAT: Final = HeartbeatConfig()


class _EvictedError(Exception):
    """Report that the leader has evicted this member."""


class _Membership(NamedTuple):
    """Hold members (id, process, whether the lease is over) and partitions (name, member)."""

    members: Sequence[tuple[int, str | None, bool]]
    partitions: Sequence[tuple[str, int | None]]


class PostgresElection:
    """Hold an election for the installation with this database."""

    def __init__(
        self, url: str, *, member: str, clock: Clock, heartbeat: HeartbeatConfig = _HEARTBEAT
    ) -> None:
        self._url = url
        self._member = member
        self._clock = clock
        self._heartbeat = heartbeat
        self._view_connection = PersistentConnection(url, name="rooms election view")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._view_connection.close()

    def join(self, partitions: Sequence[str]) -> "PostgresMembership":
        """Take part; outages of PostgreSQL are waited out."""
        return PostgresMembership(
            self._url, partitions, member=self._member, clock=self._clock, heartbeat=self._heartbeat
        )

    async def view(self) -> ClusterView:
        """Return the cluster as the tables show it."""
        try:
            async with asyncio.timeout(_VIEW_S):
                return await self._view_connection.run(_read_view)
        except TimeoutError:
            unavailable = StorageUnavailableError("PostgreSQL does not answer")
            raise ElectionUnavailableError(str(unavailable)) from unavailable
        except (StorageUnavailableError, psycopg.errors.UndefinedTable) as exc:
            raise ElectionUnavailableError(_error_text(exc)) from exc


class PostgresMembership(MembershipTask):
    """Take part as a member: send heartbeats, take and release holds, and lead if elected."""

    def __init__(
        self,
        url: str,
        partitions: Sequence[str],
        *,
        member: str,
        clock: Clock,
        heartbeat: HeartbeatConfig,
    ) -> None:
        super().__init__(partitions, member=member, clock=clock, leave_s=2 * _LEAVE_S)
        self._url = url
        self._heartbeat = heartbeat

    async def _participate(self) -> None:
        error_logged = False
        while True:
            try:
                connection = await connect(self._url, name=SESSION_NAME)
                try:
                    session = _MemberSession(connection, self._member, self._clock, self._heartbeat)
                    await session.begin()
                    error_logged = False
                    OUTAGES.record_success(MEMBERSHIP_OUTAGE)
                    await self._run_session(session)
                finally:
                    self._local_holds.clear()
                    await connection.close()
            except (*CONNECTION_LOST, TimeoutError) as exc:
                OUTAGES.record_failure(
                    StorageUnavailableError(_error_text(exc)),
                    MEMBERSHIP_OUTAGE,
                    dependency=Dependency.POSTGRESQL,
                )
            except (psycopg.Error, _EvictedError) as exc:
                if not error_logged:
                    _log.warning("this process left the election, retrying: %s", _error_text(exc))
                    error_logged = True
            await asyncio.sleep(self._heartbeat.retry_s)

    async def _run_session(self, session: "_MemberSession") -> None:
        try:
            while True:
                sent = self._clock.monotonic()
                assigned, scan = await session.ping()
                self._local_holds.renew(sent + self._heartbeat.trust_s)
                if gone := self._local_holds.holds.keys() - assigned:
                    self._local_holds.remove(gone)
                    await session.give_up(gone)
                if wanted := assigned - self._local_holds.holds.keys():
                    self._local_holds.add(await session.take(wanted))
                if scan is not None:
                    await session.assign_partitions(self._partitions, scan)
                elif await session.try_lead():
                    continue
                await session.wait_change()
        except asyncio.CancelledError:
            self._local_holds.clear()
            with contextlib.suppress(psycopg.Error, TimeoutError):
                await session.leave()
            raise


class _MemberSession:
    """Run the statements of one connection, each with a timeout of `trust_s`."""

    def __init__(
        self, connection: Connection, member: str, clock: Clock, heartbeat: HeartbeatConfig
    ) -> None:
        self._connection = connection
        self._clock = clock
        self._heartbeat = heartbeat
        self._changed = False
        """A notification came with the answer of a statement."""
        connection.add_notify_handler(self._on_notify)
        self._parameters: dict[str, Any] = {
            "name": member,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "process": own_process(),
            "lease_ms": str(round(heartbeat.lease_s * 1000)),
            "trust_ms": str(round(heartbeat.trust_s * 1000)),
            "lock": LEADER_LOCK_KEY,
            "channel": _CHANNEL,
            "term": None,
        }

    @property
    def term(self) -> int | None:
        """Return the epoch in which this session leads, or None."""
        term: int | None = self._parameters["term"]
        return term

    async def begin(self) -> None:
        await self._execute(_SETTINGS)
        await self._execute(f"LISTEN {_CHANNEL}")
        self._parameters["lease_ms"] = round(self._heartbeat.lease_s * 1000)
        ((self._parameters["id"],),) = await self._execute(_REGISTER)

    async def ping(self) -> tuple[frozenset[str], _Membership | None]:
        """Extend the lease; return the partitions assigned to this member, and what a leader needs.

        One statement, since an idle process does little else.
        """
        leads = self.term is not None
        rows = await self._execute(_PING_AND_SCAN if leads else _PING)
        if not rows:
            raise _EvictedError("its lease ended, and others have taken over")
        assigned, *scan = rows[0]
        return frozenset(assigned), _Membership(*scan) if leads else None

    async def take(self, names: frozenset[str]) -> Mapping[str, int]:
        try:
            return dict(await self._execute(_TAKE, names=list(names)))
        except psycopg.errors.ForeignKeyViolation as exc:
            raise _EvictedError("its lease ended, and others have taken over") from exc

    async def give_up(self, names: set[str]) -> None:
        await self._execute(_GIVE_UP, names=list(names))

    async def try_lead(self) -> bool:
        """Try to lead in a new term; return whether this session leads."""
        ((locked,),) = await self._execute(_TRY_LOCK)
        if locked:
            ((self._parameters["term"],),) = await self._execute(_LEAD)
            _log.info("this process leads now, epoch %d", self._parameters["term"])
        return bool(locked)

    async def assign_partitions(self, partitions: Sequence[str], scan: _Membership) -> None:
        """Evict dead members and assign the partitions to the others; write only changes."""
        late = [number for number, _, expired in scan.members if expired]
        dead = [number for number, process, _ in scan.members if is_dead(process)]
        if late or dead:
            await self._execute(_EVICT, late=late, dead=dead)
        alive = [number for number, *_ in scan.members if number not in {*late, *dead}]
        before = dict(scan.partitions)
        plan: dict[str, int | None] = {**dict.fromkeys(before), **assign(partitions, alive, before)}
        changes = {
            name: member
            for name, member in plan.items()
            if name not in before or before[name] != member
        }
        if changes:
            # A member that left in the meantime is found by the next scan.
            with contextlib.suppress(psycopg.errors.ForeignKeyViolation):
                await self._execute(_ASSIGN, names=list(changes), members=list(changes.values()))

    async def wait_change(self) -> None:
        """Wait for a change, the next heartbeat, or the end of the connection."""
        if not self._changed:
            with NotificationReader(self._connection) as reader:
                await reader.read(self._heartbeat.ping_s)
        self._changed = False

    def _on_notify(self, _: psycopg.Notify) -> None:
        self._changed = True

    async def leave(self) -> None:
        async with asyncio.timeout(_LEAVE_S):
            await self._connection.execute(_LEAVE.encode(), self._parameters)

    async def _execute(self, statement: str, **values: Any) -> list[tuple[Any, ...]]:
        async with asyncio.timeout(self._heartbeat.trust_s):
            cursor = await self._connection.execute(
                statement.encode(), {**self._parameters, **values}
            )
            return await cursor.fetchall() if cursor.description else []


async def _read_view(connection: Connection) -> ClusterView:
    terms = await (await connection.execute(_VIEW, {"lock": LEADER_LOCK_KEY})).fetchall()
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


def _error_text(exc: BaseException) -> str:
    if isinstance(exc, psycopg.errors.UndefinedTable):
        return "the database lacks this version's schema; run `rooms migrate`"
    return str(exc) or "PostgreSQL does not answer"
