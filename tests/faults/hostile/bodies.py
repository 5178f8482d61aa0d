"""Bodies that are almost JSON, or JSON that is almost a request, over the routes that take a body, a query or a frame.

What must hold: no answer is a 5xx, what is refused is a problem, and every answer is JSON in UTF-8.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import Any, NamedTuple, cast

import httpx

from delivery.pull.requests import decode_client_frame, decode_stream_query
from rooms.app.api import make_asgi
from rooms.errors import RoomsError
from tests.faults.hostile.suite import Suite
from tests.faults.hostile.watch import watching
from tests.integration.rooms.api.conftest import open_api

HELD_UP_S = 3.0
NOWHERE = "00000000-0000-7000-8000-000000000001"


class Case(NamedTuple):
    method: str
    path: str
    body: bytes


_ROUTES: tuple[tuple[str, str, Any], ...] = (
    (
        "POST",
        "/rooms",
        {
            "name": "r",
            "delivery_delay_ms": 1000,
            "delivery_delay_multiplier": 2,
            "delivery_attempts": 3,
        },
    ),
    ("PATCH", "/rooms/{room}", {"delivery_delay_ms": 1000}),
    ("POST", "/rooms/{room}/event-types", {"name": "t", "schema": {"maximum": 5}}),
    (
        "POST",
        "/rooms/{room}/event-types/e/versions",
        {"schema": {"properties": {"a": {"type": "integer"}}}},
    ),
    (
        "POST",
        "/rooms/{room}/subscriptions",
        {"name": "s", "type": "PULL", "filter": "payload.a == 1"},
    ),
    (
        "POST",
        "/rooms/{room}/messages",
        {"event_type": "e", "payload": {"a": 1}, "priority": 5, "headers": {"x": "y"}},
    ),
    ("POST", "/rooms/{room}/messages/check", {"event_type": "e", "payload": 1, "delay_ms": 5}),
    (
        "POST",
        "/rooms/{room}/messages/batch",
        {"messages": [{"event_type": "e", "payload": 1, "delay_ms": 5}]},
    ),
    (
        "POST",
        "/subscriptions/{subscription}/pull",
        {"max_messages": 1, "selector": {"payload": {"a.b": "1"}}},
    ),
    ("POST", "/subscriptions/{subscription}/ack", {"ack_ids": ["x"]}),
    ("POST", "/subscriptions/{subscription}/nack", {"ack_ids": ["x"], "delay_ms": 5}),
    ("POST", "/subscriptions/{subscription}/extend", {"ack_ids": ["x"], "lease_ms": 5000}),
    (
        "POST",
        "/subscriptions/{subscription}/filter/test",
        {"payload": {"a": 1}, "filter": "payload.a == 1", "priority": 4},
    ),
    ("PATCH", "/subscriptions/{subscription}", {"filter": "true"}),
    ("POST", "/keys", {"name": "k", "scopes": ["pull"]}),
    ("FRAME", "", {"ack": ["x"]}),
    ("FRAME", "", {"credit": 5}),
)
_VALUES: tuple[bytes, ...] = (
    b"1e400", b"-1e400", b"1e308", b"9" * 400, b"9" * 5000, b"1.0", b"5.0", b"-0.0", b"NaN", b"Infinity", b'"\\ud800"', b'"\\udc00\\ud800"',
    b'"\xff"', b"\xff", b'"a\\u0000b"', b'"a\x00b"', b"[" * 600, b"[" * 600 + b"]" * 600, b"[" * 990 + b"]" * 990, b'{"a":' * 300 + b"1" + b"}" * 300,
    b"null", b"true", b"{}", b"[]", b'""', b"18446744073709551616", b'"' + b"x" * 3000 + b'"', b"01", b"+1", b'"\\x"', b"",
)  # fmt: skip
_QUERIES = (
    "limit=9999999999999999999999",
    "limit=1.0",
    "cursor=%ff%fe",
    "cursor=AAAA",
    "cursor=%00",
    "limit=%D9%A1",
    "x=%00",
    "before=9e99",
)
_STREAMS = (
    "credit=" + "9" * 5000,
    "credit=٣",
    "header=%ff:%00",
    "payload=" + "x" * 600,
    "header=:",
    "priority=1.0",
    "a" * 3000,
    "&" * 3000,
)


def _generate(rng: Random) -> Case:
    kind = rng.random()
    if kind < 0.1:
        path = rng.choice(
            (
                "/rooms",
                "/rooms/{room}/subscriptions",
                "/rooms/{room}/messages",
                "/rooms/{room}/event-types",
            )
        )
        return Case("GET", f"{path}?{rng.choice(_QUERIES)}", b"")
    if kind < 0.15:
        return Case("STREAM", "", rng.choice(_STREAMS).encode())
    method, path, body = rng.choice(_ROUTES)
    return Case(method, path, _spoilt(rng, body))


def _spoilt(rng: Random, body: Any) -> bytes:
    text = json.dumps(body).encode()
    for _ in range(rng.randrange(1, 4)):
        kind = rng.randrange(6)
        place = rng.randrange(len(text) + 1)
        if kind == 0:
            text = text[:place]
        elif kind == 1:
            text = text[:place] + rng.choice(_VALUES) + text[place:]
        elif kind in {2, 3}:
            spots = [at for at, byte in enumerate(text) if byte == ord(":")]
            if spots:
                at = rng.choice(spots) + 1
                end = min(
                    [text.find(mark, at) for mark in (b",", b"}") if text.find(mark, at) > 0],
                    default=len(text),
                )
                text = text[:at] + rng.choice(_VALUES) + text[end:]
        elif kind == 4:
            end = text.rfind(b"}")
            text = text[:end] + b',"extra":' + rng.choice(_VALUES) + text[end:]
        else:
            end = text.rfind(b"}")
            text = (
                text[:end]
                + b',"delivery_delay_ms":1.0,"priority":1.0,"x":'
                + rng.choice(_VALUES)
                + text[end:]
            )
    return text


@asynccontextmanager
async def _target(database_url: str) -> AsyncIterator[Callable[[Case], Awaitable[str]]]:
    async with open_api(database_url) as api, watching() as watch:
        room = await api.room("hostile")
        await api.made(
            f"/rooms/{room['id']}/event-types",
            {"name": "e", "schema": {"items": {"uniqueItems": True}}},
        )
        subscription = await api.subscription(room["id"], type="PULL")
        front = await asyncio.to_thread(make_asgi, api.services)
        transport = httpx.ASGITransport(cast(Any, front), raise_app_exceptions=False)
        headers = {
            "authorization": f"Bearer {api.keys['admin']}",
            "content-type": "application/json",
        }
        async with httpx.AsyncClient(
            transport=transport, base_url="http://rooms.test", headers=headers
        ) as client:

            async def run(case: Case) -> str:
                if case.method in {"FRAME", "STREAM"}:
                    return _read(case)
                path = "/v1" + case.path.format(room=room["id"], subscription=subscription["id"])
                watch.begin()
                answer = await client.request(case.method, path, content=case.body)
                assert answer.status_code < 500, f"{answer.status_code}: {answer.text[:300]}"
                assert (
                    answer.status_code < 400
                    or answer.headers["content-type"] == "application/problem+json"
                ), answer.text
                if answer.content:
                    json.loads(answer.content.decode())
                assert watch.longest_s < HELD_UP_S, (
                    f"the loop was held up for {watch.longest_s:.3f} s"
                )
                return str(answer.status_code)

            yield run


def _read(case: Case) -> str:
    try:
        if case.method == "FRAME":
            decode_client_frame(case.body)
        else:
            decode_stream_query(case.body, several=False)
    except RoomsError as exc:
        str(exc).encode()
        return type(exc).__name__
    return "read"


SUITE = Suite(name="bodies", cases=300, generate=_generate, target=_target)
