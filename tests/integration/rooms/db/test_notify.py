"""Wake-ups by NOTIFY when the connection that sends them ends."""

import asyncio
import random
import time
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


class _Sent:
    """Stands for the prepared statements: the first `failures` sends break their connection, each while a name comes."""

    def __init__(self, signals: Notifier, failures: int = 0) -> None:
        self._signals = signals
        self._failures = failures
        self.payloads: list[tuple[str, str]] = []

    async def run(self, _statement: str, values: tuple[bytes, bytes]) -> None:
        channel = values[0].decode()
        await asyncio.sleep(0.001)
        if self._failures:
            self._failures -= 1
            self._signals.notify(Channel(channel), f"late{self._failures}")
            raise psycopg.OperationalError("the connection broke")
        self.payloads.append((channel, values[1].decode(errors="replace")))

    async def has(self, name: str) -> bool:
        return any(name in payload for _, payload in self.payloads)


async def test_unsent_names_are_sent_together_with_later_ones(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals = Notifier(database)
    sent = _Sent(signals, failures=2)
    monkeypatch.setattr(notify, "PreparedStatements", lambda _connection: sent)
    monkeypatch.setattr(notify, "_RETRY_S", 0.01)
    async with signals:
        signals.notify(Channel.PULL, "early")
        await until(lambda: sent.has("early"), "the names that were not sent before")
    ((channel, payload),) = sent.payloads
    assert channel == Channel.PULL
    assert sorted(name for name in ("early", "late0", "late1") if name in payload) == [
        "early",
        "late0",
        "late1",
    ]


async def test_names_that_come_while_others_are_sent_are_collected(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each wake-up costs every process that listens; and another channel does not wait for this one's pause."""
    signals = Notifier(database)
    sent = _Sent(signals)
    monkeypatch.setattr(notify, "PreparedStatements", lambda _connection: sent)
    async with signals:
        began = time.monotonic()
        for number in range(1000):
            signals.notify(Channel.PULL, f"n{number:04}", count=1000)
            await asyncio.sleep(0)
        await until(lambda: sent.has("n0999"), "the last name")
        took_s = time.monotonic() - began
        signals.notify(Channel.CONFIG, "room")
        await until(lambda: sent.has("room"), "a wake-up of another channel")
    pulls = [payload for channel, payload in sent.payloads if channel == Channel.PULL]
    assert len(pulls) <= 2 + took_s / notify.LINGER_S * 2, "names that come meanwhile go together"
    whole = "".join(pulls)
    assert all(whole.count(f"n{number:04}") == 1 for number in range(1000))


async def test_a_wake_up_does_not_wait_for_the_pause_after_bulk_work(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another organisation's burst would delay each single message."""
    monkeypatch.setattr(notify, "LINGER_S", 3600.0)
    signals = Notifier(database)
    sent = _Sent(signals)
    monkeypatch.setattr(notify, "PreparedStatements", lambda _connection: sent)
    async with signals:
        signals.notify(Channel.PULL, "bulk", count=10**12, is_bulk=True)
        await until(lambda: sent.has("bulk"), "the first wake-up of bulk work")
        signals.notify(Channel.PULL, "more", is_bulk=True)
        signals.notify(Channel.PULL, "single")
        await until(lambda: sent.has("single"), "the wake-up of a single message")
        assert not await sent.has("more")


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

        @property
        def pgconn(self) -> object:
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
