"""Test that a publish is one statement for every publisher: grants are part of the cached plan."""

from collections.abc import AsyncIterator
from contextvars import ContextVar
from typing import Any

import pytest
from sqlalchemy import event

from rooms.db import known_keys
from rooms.db.writer import PUBLISHER, LogWriter
from tests.integration.rooms.api.conftest import Api, open_api
from tests.integration.rooms.api.members import (
    Member,
    accepted,
    grant,
    member,
    revoke,
    shared_room,
    subscribe,
)

_publishes: ContextVar[bool] = ContextVar("_publishes", default=False)


@pytest.fixture
async def api(database: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Api]:
    # Else a publish on a busy machine may look up its key, because that was not renewed in time.
    monkeypatch.setattr(known_keys, "CACHE_S", 600.0)
    async with open_api(database) as opened:
        yield opened


@pytest.fixture
def statements(api: Api, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of the statements that publishers and the API's own pool run.

    Of the pool only those of a publish: others renew keys in use and count quotas meanwhile.
    """
    seen: list[str] = []
    run, run_packed = LogWriter._run, LogWriter.run_packed

    async def counted(writer: LogWriter, *given: Any) -> Any:
        if writer._kind == PUBLISHER:
            seen.append(PUBLISHER)
        return await run(writer, *given)

    async def counted_packed(writer: LogWriter, *given: Any) -> Any:
        if writer._kind == PUBLISHER:
            seen.append(PUBLISHER)
        return await run_packed(writer, *given)

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if _publishes.get():
            seen.append(statement)

    monkeypatch.setattr(LogWriter, "_run", counted)
    monkeypatch.setattr(LogWriter, "run_packed", counted_packed)
    event.listen(api.services.engine.sync_engine, "before_cursor_execute", note)
    return seen


async def publish(api: Api, who: Member, room: int, statements: list[str]) -> list[str]:
    """Publish; return what was run for that."""
    statements.clear()
    token = _publishes.set(True)
    await accepted(api, who.key, room)
    _publishes.reset(token)
    return list(statements)


async def test_a_publish_is_one_statement_for_the_owner_and_for_a_granted_publisher(
    api: Api, statements: list[str]
) -> None:
    owner, publisher, subscriber = [await member(api) for _ in range(3)]
    room = await shared_room(api, owner)
    await grant(api, owner, room, subscriber.id, "subscribe")
    for who in (owner, subscriber):
        await subscribe(api, who, room)
    await grant(api, owner, room, publisher.id, event_types=["order.*"])
    for who in (owner, publisher):  # the first reads the key and the plan
        await accepted(api, who.key, room)
    for _ in range(3):
        for who in (owner, publisher):
            assert await publish(api, who, room, statements) == [PUBLISHER]

    former = await grant(api, owner, room, publisher.id, event_types=["invoice"])
    await revoke(api, owner, room, former)
    await accepted(api, publisher.key, room)  # reads the plan that the grants changed
    for who in (owner, publisher):
        assert await publish(api, who, room, statements) == [PUBLISHER]
