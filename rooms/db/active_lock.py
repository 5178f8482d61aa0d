"""Let one process of an installation be active at a time, by a session lock.

Other processes wait until it ends.

The lock is no fence: a process that was suspended may act beside its successor for a moment, as any
two members of a cluster may. The statements themselves prevent that anything is done twice.
"""

import asyncio
from contextlib import suppress
from typing import Final, Self

from rooms.db.connection import CONNECTION_LOST, Connection, connect
from rooms.errors import StorageUnavailableError

_LOCK_KEY: Final = 0x726F6F6F
SESSION_TIMEOUT_S: Final = 3.0
"""The server ends a session that was silent for so long.

The documentation promises that a standby takes over from a process that hangs within 5 s; the rest
is for the start of the successor.
"""
PING_S: Final = 0.5
TRY_S: Final = 0.25
"""The pause of a standby between two tries for the lock."""
_SET_IDLE_TIMEOUT: Final = "SELECT set_config('idle_session_timeout', %s, false)"


class ActiveLock:
    """Hold one process's claim to the lock; leaving the context releases it.

    StorageUnavailableError: PostgreSQL is away.
    """

    def __init__(self, url: str, *, session_timeout_s: float = SESSION_TIMEOUT_S) -> None:
        self._url = url
        self._session_timeout_s = session_timeout_s
        self._connection: Connection | None = None

    async def __aenter__(self) -> Self:
        try:
            self._connection = await connect(self._url, name="rooms active lock")
            await self._connection.execute(
                _SET_IDLE_TIMEOUT, [f"{round(self._session_timeout_s * 1000)}ms"]
            )
        except CONNECTION_LOST as exc:
            raise StorageUnavailableError(str(exc)) from exc
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._connection is not None:
            with suppress(*CONNECTION_LOST):
                await self._connection.close()

    async def acquire(self) -> None:
        """Wait until this process has the lock: `TRY_S` after its holder ends, at the latest."""
        # pg_advisory_lock would keep its snapshot while it waits, perhaps for months. Vacuum could
        # then remove no row, retention could delete nothing, and usage would never be complete.
        while not await self._run(  # noqa: ASYNC110 - PostgreSQL sends no signal
            "SELECT pg_try_advisory_lock(%s)", _LOCK_KEY
        ):
            await asyncio.sleep(min(TRY_S, self._session_timeout_s / 4))

    async def wait_lost(self) -> None:
        """Wait until the lock is lost: the session ended, or PostgreSQL does not answer."""
        with suppress(StorageUnavailableError, TimeoutError):
            while True:
                async with asyncio.timeout(self._session_timeout_s):
                    await self._run("SELECT %s", 1)
                await asyncio.sleep(min(PING_S, self._session_timeout_s / 4))

    async def _run(self, statement: str, value: int) -> object:
        assert self._connection is not None
        try:
            cursor = await self._connection.execute(statement, [value])
            ((answer,),) = await cursor.fetchall()
        except CONNECTION_LOST as exc:
            raise StorageUnavailableError(str(exc)) from exc
        return answer
