"""Wake-ups by NOTIFY when the connection that sends them ends."""

import asyncio

from rooms.storage.engine import connect
from rooms.storage.signals import Channel, Signals
from tests.installation import until

_END = """
SELECT count(pg_terminate_backend(pid, 10000)) FROM pg_stat_activity
WHERE datname = current_database() AND application_name LIKE %s
"""


async def test_what_could_not_be_sent_goes_out_on_the_next_connection(database: str) -> None:
    """Its listeners still listen, so nothing else tells them to look before their next poll."""
    heard: list[frozenset[str]] = []
    listens = asyncio.Event()

    def hear(names: frozenset[str]) -> None:
        heard.append(names)
        listens.set()

    async with Signals(database, hear={Channel.CONFIG: hear}), Signals(database) as signals:
        await asyncio.wait_for(listens.wait(), 60)
        signals.ring(Channel.CONFIG, "before")

        async def comes(name: str) -> bool:
            return any(name in names for names in heard)

        await until(lambda: comes("before"), "a wake-up over the first connection")
        connection = await connect(database, name="a test")
        async with connection:
            await connection.execute(_END, ["rooms signals out%"])
        signals.ring(Channel.CONFIG, "first")
        signals.ring(Channel.MESSAGES)
        await until(lambda: comes("first"), "the wake-up that was under way when its connection ended")


async def test_a_crowd_of_names_that_could_not_be_sent_stands_for_any(database: str) -> None:
    """Names of before and after fit into one payload together, or are left out, which says that anything may have changed."""
    signals = Signals(database)
    signals._put_back({Channel.PULL: {f"early-{number}" for number in range(100)}})
    assert len(signals._due[Channel.PULL] or ()) == 100
    signals.ring(Channel.PULL, "one")
    signals._put_back({Channel.PULL: {f"other-{number}" for number in range(100)}, Channel.PUSH: None})
    assert signals._due == {Channel.PULL: None, Channel.PUSH: None}
    signals._put_back({Channel.PULL: {"last"}, Channel.PUSH: {"last"}})
    assert signals._due == {Channel.PULL: None, Channel.PUSH: None}
    assert signals._wake.is_set()
