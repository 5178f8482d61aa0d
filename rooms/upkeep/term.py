"""The term: for how long this process may believe that it is the one that does the upkeep."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import psycopg

from rooms.ports import Clock
from rooms.storage.engine import Connection, connect

LOCK: Final = 0x726F6F6E
"""First key of the session lock that is the term (second: 0)."""
SESSION: Final = "rooms upkeep term"
"""The application name of the connections that hold the lock or wait for it."""
_TRY: Final = "SELECT pg_try_advisory_lock(%s, 0)"
_IDLE: Final = "SELECT set_config('idle_session_timeout', %s, false)"


class TermLostError(Exception):
    """Another process may have the term by now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """`idle_s`: the silence after which the server ends the session; `trust_s`: how long after a ping was sent the term
    is believed in, less than that; `ping_s`: between two pings; `retry_s`: between two tries to take the lock.
    """

    idle_s: float = 5.0
    trust_s: float = 4.0
    ping_s: float = 1.0
    retry_s: float = 0.5


class Term:
    """One connection's way to the lock, and what it is worth."""

    def __init__(self, connection: Connection, clock: Clock, pulse: Pulse) -> None:
        self._connection = connection
        self._clock = clock
        self._pulse = pulse
        self._until = 0.0

    def holds(self) -> bool:
        """Whether nobody else can have the term now. Ask before every action."""
        return self._clock.monotonic() < self._until

    async def begin(self, stop: asyncio.Event) -> bool:
        """Wait until the lock is ours; False where `stop` came first. TermLostError: PostgreSQL went away."""
        while not stop.is_set():
            if await self._ask(_TRY, (LOCK,)):
                return True
            await pause(stop, self._pulse.retry_s)
        return False

    async def keep(self) -> None:
        """Ping, for ever. TermLostError as soon as the term is over."""
        while True:
            await asyncio.sleep(self._pulse.ping_s)
            if not self.holds():
                raise TermLostError("the ping was late; this process or its machine stood still")
            await self._ask("SELECT true", ())

    async def _ask(self, statement: str, parameters: tuple[int, ...]) -> bool:
        # The server counts from its answer, which is later.
        until = self._clock.monotonic() + self._pulse.trust_s
        try:
            async with asyncio.timeout(self._pulse.trust_s):
                row = await (await self._connection.execute(statement.encode(), parameters)).fetchone()
        except psycopg.Error as exc:
            raise TermLostError(f"the session ended: {exc}") from exc
        except TimeoutError as exc:
            raise TermLostError("PostgreSQL does not answer") from exc
        taken = row is not None and bool(row[0])
        if taken:
            self._until = until
        return taken


@asynccontextmanager
async def term_of(url: str, clock: Clock, pulse: Pulse) -> AsyncIterator[Term]:
    """A term to wait for, on a session of its own, given back at the end. TermLostError: PostgreSQL cannot be reached."""
    try:
        connection = await connect(url, name=SESSION)
    except psycopg.Error as exc:
        raise TermLostError(f"PostgreSQL cannot be reached: {exc}") from exc
    try:
        try:
            await connection.execute(_IDLE, (f"{round(pulse.idle_s * 1000)}ms",))
        except psycopg.Error as exc:
            raise TermLostError(f"PostgreSQL went away: {exc}") from exc
        yield Term(connection, clock, pulse)
    finally:
        await connection.close()


async def pause(stop: asyncio.Event, seconds: float) -> None:
    """Wait so long, or until `stop` is set."""
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        return
