"""Wake-ups by NOTIFY when the connection that sends them ends."""

import asyncio
import random
from typing import cast

import psycopg
import pytest

from rooms.db import notify
from rooms.db.connection import Connection, connect
from rooms.db.notify import Channel, Notifier
from rooms.db.wakeup_names import MAX_NAMES, MAX_OF_ROOM
from rooms.domain.ids import IdGenerator, RoomId
from tests.support.installation import until

_END = """
SELECT count(pg_terminate_backend(pid, 10000)) FROM pg_stat_activity
WHERE datname = current_database() AND application_name LIKE %s
"""


async def test_unsent_notifications_go_out_on_the_next_connection(database: str) -> None:
    """Its listeners are connected, so only this notification wakes them before their next poll."""
    heard: list[frozenset[str]] = []
    listens = asyncio.Event()

    def hear(names: frozenset[str]) -> None:
        heard.append(names)
        listens.set()

    async with Notifier(database, listeners={Channel.CONFIG: hear}), Notifier(database) as signals:
        await asyncio.wait_for(listens.wait(), 60)
        signals.notify(Channel.CONFIG, "before")

        async def comes(name: str) -> bool:
            return any(name in names for names in heard)

        await until(lambda: comes("before"), "a wake-up over the first connection")
        connection = await connect(database, name="a test")
        async with connection:
            await connection.execute(_END, ["rooms notify%"])
        signals.notify(Channel.CONFIG, "first")
        signals.notify(Channel.MESSAGES)
        await until(
            lambda: comes("first"), "the wake-up that was under way when its connection ended"
        )


async def test_unsent_names_are_sent_together_with_later_ones(database: str) -> None:
    signals = Notifier(database)
    signals.notify(Channel.PULL, "early")
    signals.notify(Channel.PUSH)
    unsent, signals._pending = signals._pending, {}
    signals._wake.clear()
    signals.notify(Channel.PULL, "late")
    signals._wake.clear()
    signals._requeue(unsent)
    sent = {channel: names.payloads() for channel, names in signals._pending.items()}
    assert sent == {Channel.PULL: ["early,late"], Channel.PUSH: [""]}
    assert signals._wake.is_set()


@pytest.mark.parametrize("count", [151, MAX_OF_ROOM, MAX_OF_ROOM + 1, MAX_NAMES + 1])
async def test_a_large_publish_wakes_only_its_own_room(database: str, count: int) -> None:
    """A payload without names would wake every poll of every room."""
    ids = IdGenerator(random.getrandbits)
    large = [str(ids.generate(RoomId(7), 0)) for _ in range(count)]
    other = str(ids.generate(RoomId(8), 0))
    heard: list[frozenset[str]] = []
    listens = asyncio.Event()

    def hear(names: frozenset[str]) -> None:
        heard.append(names)
        listens.set()

    async with Notifier(database, listeners={Channel.PULL: hear}), Notifier(database) as signals:
        await asyncio.wait_for(listens.wait(), 60)
        heard.clear()
        for name in (*large, other):
            signals.notify(Channel.PULL, name)

        async def all_come() -> bool:
            return other in frozenset[str]().union(*heard)

        await until(all_come, "the wake-ups")
    assert frozenset() not in heard, "nothing wakes all polls"
    names = frozenset[str]().union(*heard)
    assert names == ({*large, other} if count <= MAX_OF_ROOM else {"7", other})


_IN_RECOVERY = psycopg.errors.ReadOnlySqlTransaction("cannot execute it during recovery")
"""The answer of a standby, in a failover, to LISTEN and to NOTIFY. It is no OperationalError."""


def _first_in_recovery(monkeypatch: pytest.MonkeyPatch, session: str) -> list[str]:
    """Let the first session of this name be one with a standby; return the names of all that were opened."""
    opened: list[str] = []

    class InRecovery:
        def __init__(self, connection: Connection) -> None:
            self._connection = connection

        async def execute(self, *_: object) -> None:
            raise _IN_RECOVERY

        async def close(self) -> None:
            await self._connection.close()

    async def connect_to_standby_first(url: str, *, name: str) -> Connection:
        connection = await connect(url, name=name)
        opened.append(name)
        if name == session and opened.count(name) == 1:
            return cast("Connection", InRecovery(connection))
        return connection

    monkeypatch.setattr(notify, "connect", connect_to_standby_first)
    return opened


@pytest.mark.parametrize("session", ["rooms listen", "rooms notify"])
async def test_notifications_outlast_a_session_with_a_server_in_recovery(
    database: str, session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failover may give either connection to the standby before it is promoted."""
    opened = _first_in_recovery(monkeypatch, session)
    heard: set[str] = set()
    async with Notifier(database, listeners={Channel.CONFIG: heard.update}) as signals:
        signals.notify(Channel.CONFIG, "first")

        async def tries_again() -> bool:
            return opened.count(session) > 1

        await until(tries_again, "another session", within_s=10)

        async def comes() -> bool:
            signals.notify(Channel.CONFIG, "later")
            return "later" in heard

        await until(comes, "a wake-up after the promotion", within_s=10)


async def test_a_listener_that_fails_does_not_end_the_others(
    database: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Anyone who may connect can send any text on any channel."""
    heard: set[str] = set()

    def read_numbers(names: frozenset[str]) -> None:
        heard.update(names)
        for name in names:
            int(name)

    async with Notifier(database, listeners={Channel.CONFIG: read_numbers}) as signals:

        async def comes(name: str) -> bool:
            signals.notify(Channel.CONFIG, name)
            return name in heard

        await until(lambda: comes("no number"), "what its listener cannot read", within_s=10)
        await until(lambda: comes("7"), "a wake-up after it", within_s=10)
    assert "no number" in caplog.text
