"""Test the answers that the console passes on as they come: bounded, and ended with their reader."""

import asyncio
import json
from typing import Any, cast

import pytest

from rooms.api.fast_routes import App
from rooms.console.api_client import ApiProblemError, InProcessApi, wrong_fields

HELD = 8


class Source:
    """An application that sends numbered chunks, until its client leaves."""

    def __init__(self, *, chunks: int, status: int = 200) -> None:
        self.chunks = chunks
        self.status = status
        self.sent = 0
        self.left = asyncio.Event()
        self.scope: dict[str, Any] = {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scope = scope
        assert (await receive())["type"] == "http.request"
        await send({"type": "http.response.start", "status": self.status, "headers": []})

        async def body() -> None:
            for _ in range(self.chunks):
                await send({"type": "http.response.body", "body": b"x", "more_body": True})
                self.sent += 1
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        async with asyncio.TaskGroup() as group:
            sending = group.create_task(body())
            assert (await receive())["type"] == "http.disconnect"
            self.left.set()
            sending.cancel()


def client(source: Any) -> InProcessApi:
    return InProcessApi(cast(App, source), {"headers": []}, "rooms_key")


async def others_left() -> None:
    """Wait until no other task runs."""
    others = [one for one in asyncio.all_tasks() if one is not asyncio.current_task()]
    if others:
        _, left = await asyncio.wait(others, timeout=10)
        assert not left


async def test_no_more_is_held_than_a_few_chunks() -> None:
    source = Source(chunks=100)
    stream = await client(source).stream("/usage/export", by="room")
    assert await anext(stream) == b"x"
    for _ in range(50):
        await asyncio.sleep(0)
    assert source.sent <= HELD + 1
    assert [chunk async for chunk in stream] == [b"x"] * 99
    assert source.left.is_set()
    await others_left()
    assert source.scope["path"] == "/v1/usage/export"
    assert source.scope["query_string"] == b"by=room"


@pytest.mark.parametrize("read", [0, 1, 20])
async def test_it_ends_when_its_reader_leaves(read: int) -> None:
    source = Source(chunks=1_000_000)
    stream = await client(source).stream("/journal/export")
    for _ in range(read):
        await anext(stream)
    del stream
    await others_left()
    assert source.sent <= read + HELD + 1


async def test_a_refusal_is_raised_before_anything_is_streamed() -> None:
    problem = {"title": "no", "detail": "not this", "errors": []}

    async def refuse(_: Any, __: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 403, "headers": []})
        body = json.dumps(problem).encode()
        await send({"type": "http.response.body", "body": body})

    with pytest.raises(ApiProblemError, match="not this") as refused:
        await client(refuse).stream("/journal/export")
    assert refused.value.status == 403


async def test_a_failure_of_the_application_is_raised() -> None:
    async def fail(*_: Any) -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await client(fail).stream("/journal/export")


def test_problems_of_parts_of_a_field_stand_at_it() -> None:
    errors = [
        {"field": "event_types[1].name", "message": "is unknown"},
        {"field": "event_types[2].name", "message": "is unknown"},
        {"field": "headers.X", "message": "is refused"},
        {"field": "name", "message": "is taken"},
    ]
    found = wrong_fields(ApiProblemError(422, {"errors": errors}))
    assert found == {
        "event_types": "event_types[1].name: is unknown; event_types[2].name: is unknown",
        "headers": "headers.X: is refused",
        "name": "is taken",
    }
    assert wrong_fields(None, {"name": "title"}) == {}


def test_an_input_with_a_name_of_its_own_has_the_message_too() -> None:
    error = ApiProblemError(422, {"errors": [{"field": "expires_s", "message": "is too long"}]})
    shown = {"expires_s": "expires_min", "session_s": "session_h", "confirm": None}
    assert wrong_fields(error, shown) == {"expires_s": "is too long", "expires_min": "is too long"}
