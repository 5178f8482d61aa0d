"""Wake-ups by NOTIFY when the connection that sends them ends."""

import asyncio

from rooms.db.connection import connect
from rooms.db.notify import Channel, Notifier
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


async def test_too_many_unsent_names_become_a_notification_of_any(database: str) -> None:
    """Names of before and after fit into one payload together, or are left out, which says that anything may have changed."""
    signals = Notifier(database)
    signals._requeue({Channel.PULL: {f"early-{number}" for number in range(100)}})
    assert len(signals._pending[Channel.PULL] or ()) == 100
    signals.notify(Channel.PULL, "one")
    signals._requeue(
        {Channel.PULL: {f"other-{number}" for number in range(100)}, Channel.PUSH: None}
    )
    assert signals._pending == {Channel.PULL: None, Channel.PUSH: None}
    signals._requeue({Channel.PULL: {"last"}, Channel.PUSH: {"last"}})
    assert signals._pending == {Channel.PULL: None, Channel.PUSH: None}
    assert signals._wake.is_set()
