"""Streams whose clients read more slowly than their leases last."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import pytest

from rooms.api.streams import StreamTransport
from tests.support.pull_service import PATIENCE_S, Counter, open_counter, until


@pytest.fixture
async def counter(database: str) -> AsyncIterator[Counter]:
    async with open_counter(database) as opened:
        yield opened


async def serve(
    counter: Counter, kind: str, receive: Callable[[], Any], send: Callable[[Any], Any]
) -> None:
    transport = StreamTransport(counter.puller, counter.metrics)
    who, query = counter.house.principal, b"credit=5&lease_ms=1000"
    if kind == "socket":
        await transport.serve_websocket(who, [counter.queue], query, receive, send)
        return
    app = await transport.events_app(who, [counter.queue], query)
    await app({"type": "http", "state": {}}, receive, send)


def message_of(event: dict[str, Any]) -> dict[str, Any] | None:
    """Return the message that an ASGI event sends, if it is one."""
    text = event.get("text") or event.get("body", b"").decode().rpartition("data: ")[2]
    if '"ack_id"' not in text:
        return None
    found: dict[str, Any] = json.loads(text)
    return found


@pytest.mark.parametrize("kind", ["events", "socket"])
async def test_what_a_client_is_too_slow_for_goes_to_others_before_its_lease_ends(
    counter: Counter, kind: str
) -> None:
    """It counts no receive, is not sent after all, and takes no credit of the stream."""
    counter.house.run("UPDATE subscriptions SET max_receives = 1")
    for number in range(5):
        await counter.publish(number)
    sent: list[Any] = []
    is_stuck, reads = asyncio.Event(), asyncio.Event()
    comes = [{"type": "websocket.connect"}] if kind == "socket" else []

    async def receive() -> Any:
        if not comes:
            await asyncio.Event().wait()
        return comes.pop()

    async def send(event: dict[str, Any]) -> None:
        if (message := message_of(event)) is not None:
            sent.append(message["payload"])
            if len(sent) == 2:
                is_stuck.set()
                await reads.wait()

    serving = asyncio.create_task(serve(counter, kind, receive, send))
    try:
        async with asyncio.timeout(PATIENCE_S):
            await is_stuck.wait()
        others = await counter.pull(wait_ms=5_000, max_messages=10)
        assert [(one["payload"], one["attempt"]) for one in others] == [(2, 0), (3, 0), (4, 0)]
        reads.set()
        for number in (5, 6, 7):
            await counter.publish(number)
        await until(lambda: len(sent) == 5)
        assert sent == [0, 1, 5, 6, 7]
    finally:
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving
