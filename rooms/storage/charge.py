"""Being in charge: one process of an installation at a time, by a session's lock. Others wait for it to end.

It is no fence: who stood still may act beside its successor for a moment, as any two members of a cluster may. What must
not be done twice is decided by the statements, not here.
"""

import asyncio
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

import psycopg

from rooms.errors import StorageUnavailableError
from rooms.storage.engine import Connection, connect

_LOCK: Final = 0x726F6F6F
TAKEOVER_S: Final = 5.0
"""A standby has taken over within so long from one that hangs: this is promised."""
SILENCE_S: Final = 3.0
"""A session that was silent for so long is ended by the server. The rest of TAKEOVER_S is for the start of the next one."""
PING_S: Final = 0.5
_SET: Final = "SELECT set_config('idle_session_timeout', %s, false)"


class Charge:
    """One process's claim to it (an async context manager; leaving gives it up). StorageUnavailableError: PostgreSQL is away."""

    def __init__(self, url: str, *, silence_s: float = SILENCE_S) -> None:
        self._url = url
        self._silence_s = silence_s
        self._connection: Connection | None = None

    async def __aenter__(self) -> Self:
        try:
            self._connection = await connect(self._url, name="rooms charge")
            await self._connection.execute(_SET, [f"{round(self._silence_s * 1000)}ms"])
        except psycopg.OperationalError as exc:
            raise StorageUnavailableError(str(exc)) from exc
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._connection is not None:
            with suppress(psycopg.OperationalError):
                await self._connection.close()

    async def taken(self) -> None:
        """Until this process is in charge: at once where nobody is, else when whoever is has ended."""
        await self._run("SELECT pg_advisory_lock(%s)", _LOCK)

    async def lost(self) -> None:
        """Until it is not any more: the session is over, or PostgreSQL does not answer."""
        with suppress(StorageUnavailableError, TimeoutError):
            while True:
                async with asyncio.timeout(self._silence_s):
                    await self._run("SELECT %s", 1)
                await asyncio.sleep(min(PING_S, self._silence_s / 4))

    async def _run(self, statement: str, value: int) -> None:
        assert self._connection is not None
        try:
            await self._connection.execute(statement, [value])
        except psycopg.OperationalError as exc:
            raise StorageUnavailableError(str(exc)) from exc
