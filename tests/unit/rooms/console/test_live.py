"""Test the streams of open pages."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, cast

import anyio
import pytest

from rooms.api.fast_routes import App
from rooms.console import live
from rooms.console.live import (
    MAX_STREAMS,
    MAX_STREAMS_OF_ORGANISATION,
    MAX_STREAMS_OF_SESSION,
    LiveStreams,
)
from rooms.errors import InvalidError, RateLimitedError

SCOPE: dict[str, Any] = {
    "type": "http",
    "asgi": {},
    "http_version": "1.1",
    "scheme": "http",
    "path": "/console/live",
    "headers": [(b"cookie", b"rooms_session=x"), (b"authorization", b"Bearer other")],
}


class FakeConsole:
    """Answer with the next of some (status, content); the last one stays."""

    def __init__(self, *answers: tuple[int, str]) -> None:
        self.answers = list(answers)
        self.scopes: list[dict[str, Any]] = []

    async def __call__(self, scope: Any, _receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        status, content = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": content.encode()})


def streams_over(app: FakeConsole) -> LiveStreams:
    streams = LiveStreams(every_s=0.001)
    streams.app = app
    return streams


async def collect(events: AsyncIterator[bytes]) -> list[str]:
    return [event.decode() async for event in events]


async def test_a_part_is_sent_when_it_changes_until_the_session_ends() -> None:
    app = FakeConsole((200, "a"), (200, "a"), (200, 'b"\n'), (401, "no"))
    events = await collect(streams_over(app).open(SCOPE, "o", "s", "/console/rooms?x=1"))
    assert events == [
        'data: "a"\n\n',
        "event: same\ndata: same\n\n",
        f"data: {json.dumps('b' + chr(34) + chr(10))}\n\n",
        "event: end\ndata: end\n\n",
    ]
    first = app.scopes[0]
    assert (first["path"], first["query_string"]) == ("/console/rooms", b"x=1")
    assert (b"cookie", b"rooms_session=x") in first["headers"]
    assert not any(name == b"authorization" for name, _ in first["headers"])


async def test_a_stream_beats_while_it_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that an open page notices a network that is gone, which reports no error."""
    monkeypatch.setattr(live, "BEAT_S", 0.001)
    app = FakeConsole((200, "a"))
    streams = LiveStreams(every_s=3600)
    streams.app = app
    events = streams.open(SCOPE, "o", "s", "/console")
    found = [(await anext(events)).decode() for _ in range(4)]
    assert found == ['data: "a"\n\n', *3 * ["event: same\ndata: same\n\n"]]
    assert len(app.scopes) == 1
    await events.aclose()


@pytest.mark.parametrize(
    "target",
    [
        "",
        "/v1/rooms",
        "//evil/console",
        "https://evil/console",
        "/consolex",
        "/console/../v1/rooms",
        "/console/portal",
    ],
)
async def test_only_pages_of_the_console_are_streamed(target: str) -> None:
    app = FakeConsole((404, ""))
    streams = streams_over(app)
    try:
        events = await collect(streams.open(SCOPE, "o", "s", target))
    except InvalidError:
        return
    assert target == "/console/../v1/rooms"  # an unknown page, which the console answers itself
    assert events == ["event: end\ndata: end\n\n"]


@pytest.mark.parametrize("target", ["/console", "/console/rooms", "/console/portals"])
async def test_a_portal_streams_its_own_pages_only(target: str) -> None:
    streams = streams_over(FakeConsole((200, "a"), (401, "")))
    scope = {**SCOPE, "path": "/console/portal/live"}
    with pytest.raises(InvalidError):
        streams.open(scope, "o", "s", target)
    events = await collect(streams.open(scope, "o", "s", "/console/portal/jobs/1"))
    assert events == ['data: "a"\n\n', "event: end\ndata: end\n\n"]


async def test_streams_of_an_organisation_take_no_place_of_others() -> None:
    streams = streams_over(FakeConsole((200, "a")))
    held = []
    for number in range(MAX_STREAMS_OF_ORGANISATION):
        events = streams.open(SCOPE, "many", f"s{number}", "/console")
        await anext(events)
        held.append(events)
    with pytest.raises(RateLimitedError):
        streams.open(SCOPE, "many", "another", "/console")
    held.append(streams.open(SCOPE, "few", "s", "/console"))
    assert (await anext(held[-1])).startswith(b"data:")
    for events in held:
        await events.aclose()


async def test_streams_of_a_session_and_of_the_process_are_bounded() -> None:
    streams = streams_over(FakeConsole((200, "a")))

    async def hold(session: str) -> AsyncGenerator[bytes, None]:
        events = streams.open(SCOPE, f"of {session}", session, "/console")
        await anext(events)
        return events

    held = [await hold("one") for _ in range(MAX_STREAMS_OF_SESSION)]
    with pytest.raises(RateLimitedError):
        streams.open(SCOPE, "of one", "one", "/console")
    held += [await hold(f"s{number}") for number in range(MAX_STREAMS - MAX_STREAMS_OF_SESSION)]
    with pytest.raises(RateLimitedError):
        streams.open(SCOPE, "o", "another", "/console")
    await held[0].aclose()
    held[0] = await hold("another")
    for events in held:
        await events.aclose()
    await (await hold("one")).aclose()


async def test_streams_that_are_admitted_at_once_are_bounded() -> None:
    streams = streams_over(FakeConsole((200, "a")))
    many = [streams.open(SCOPE, "o", "one", "/console") for _ in range(2 * MAX_STREAMS_OF_SESSION)]
    first = [await anext(events) for events in many]
    assert sum(event.startswith(b"data:") for event in first) == MAX_STREAMS_OF_SESSION
    for events in many:
        await events.aclose()


async def test_streams_end_when_the_process_stops() -> None:
    streams = LiveStreams(every_s=3600)
    streams.app = FakeConsole((200, "a"))
    events = streams.open(SCOPE, "o", "s", "/console")
    await anext(events)
    rest = asyncio.create_task(collect(events))
    await asyncio.sleep(0)
    streams.end()
    assert (await rest)[-1].startswith("event: end")


async def test_a_stream_ends_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MAX_STREAM_S", 0.05)
    events = await collect(streams_over(FakeConsole((200, "a"))).open(SCOPE, "o", "s", "/console"))
    assert events[-1].startswith("event: end")


async def test_a_reader_that_leaves_cancels_the_page_once() -> None:
    """The cancellations of anyio, which Litestar uses, are repeated until a task has ended."""
    waits, cancelled = asyncio.Event(), 0

    async def console(_scope: Any, _receive: Any, _send: Any) -> None:
        nonlocal cancelled
        waits.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled += 1
            for _ in range(5):  # as long as it takes to end a statement
                try:
                    await asyncio.sleep(0)
                except asyncio.CancelledError:
                    cancelled += 1
            raise

    streams = LiveStreams()
    streams.app = cast(App, console)
    async with anyio.create_task_group() as group:
        group.start_soon(collect, streams.open(SCOPE, "o", "s", "/console"))
        await waits.wait()
        group.cancel_scope.cancel()
    assert cancelled == 1
