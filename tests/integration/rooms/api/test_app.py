"""Test the whole API behind its own protocol: headers, connections, and bounds of organisations."""

import asyncio
import hashlib
import re
from base64 import b64encode
from collections.abc import AsyncIterator

import httpx
import pytest

from delivery.pull.consumer_limit import ConsumerLimit
from rooms.api.server.responses import SECURITY_HEADERS
from rooms.app.api import make_asgi
from tests.integration.rooms.api.conftest import Api
from tests.support.pull_service import until
from tests.support.stream_clients import Server, serving


@pytest.fixture
async def server(api: Api) -> AsyncIterator[Server]:
    async with serving(api, await asyncio.to_thread(make_asgi, api.services)) as opened:
        yield opened


def key(server: Server) -> dict[str, str]:
    return {"Authorization": f"Bearer {server.api.keys['admin']}"}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/health/live", 200),
        ("GET", "/metrics", 200),
        ("GET", "/schema", 200),
        ("GET", "/schema/openapi.json", 200),
        ("GET", "/nothing", 404),
        ("GET", "//v1//rooms", 404),
        ("GET", "/v1/rooms", 401),
        ("POST", "/v1/rooms/1/messages", 401),
        ("OPTIONS", "/v1/rooms", 204),
        ("HEAD", "/health/live", 405),
        ("TRACE", "/v1/rooms", 405),
    ],
)
async def test_each_answer_has_the_headers_that_bind_browsers(
    server: Server, method: str, path: str, status: int
) -> None:
    answer = await server.http.request(method, str(server.http.base_url).rstrip("/") + path)
    assert answer.status_code == status
    for name, value in SECURITY_HEADERS:
        assert answer.headers.get_list(name) == [value]


async def test_public_keys_may_be_stored_by_browsers_and_proxies(server: Server) -> None:
    answer = await server.http.get("/.well-known/jwks.json")
    assert answer.headers.get_list("cache-control") == ["public, max-age=300"]
    for name, value in SECURITY_HEADERS:
        if name != "cache-control":
            assert answer.headers.get_list(name) == [value]
    private = await server.http.get("/v1/rooms", headers=key(server))
    assert private.headers.get_list("cache-control") == ["no-store"]


async def test_the_page_of_the_document_is_shown_under_its_policy(server: Server) -> None:
    """Check that the policy names its one style sheet, and that it needs nothing else."""
    answer = await server.http.get("/schema")
    (style,) = re.findall(r"<style>(.*?)</style>", answer.text, re.DOTALL)
    policy = answer.headers["content-security-policy"]
    assert (
        f"style-src 'sha256-{b64encode(hashlib.sha256(style.encode()).digest()).decode()}'"
        in policy
    )
    assert not re.search(r"<script|<link|<img|\sstyle=|\son[a-z]+=", answer.text)


async def test_a_key_authenticates_a_connection_on_every_route(server: Server) -> None:
    connections = server.connections
    url = server.http.base_url

    async def places(path: str, method: str = "GET", json: object = None) -> tuple[int, int]:
        async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
            await client.request(method, path, headers=key(server), json=json)
            found = len(connections._authenticated), len(connections._unauthenticated)
        await until(lambda: not len(connections))
        return found

    assert await places("/health/live") == (0, 1)
    assert await places("/v1/rooms") == (1, 0)
    assert await places("/v1/rooms/1/messages", "POST", {}) == (1, 0)
    assert await places("/v1/keys/nothing") == (1, 0)


async def test_an_organisation_has_so_many_streams_and_polls_that_wait(server: Server) -> None:
    """Check the bound: each of them holds memory for as long as its client likes."""
    refused: list[bool] = []
    limit = ConsumerLimit(2, lambda: refused.append(True))
    puller = server.api.services.pull_service
    puller._consumer_limit = puller.streams._consumer_limit = limit
    room = await server.api.room()
    queue = (await server.api.subscription(room["id"], "one", type="PULL"))["id"]

    async def poll(wait_ms: int) -> int:
        path = f"/v1/subscriptions/{queue}/pull"
        return (
            await server.http.post(path, json={"wait_ms": wait_ms}, headers=key(server))
        ).status_code

    async with server.events(f"/subscriptions/{queue}/stream"):
        waiting = asyncio.create_task(poll(30_000))
        await until(lambda: len(limit._waiting) == 1 and max(limit._waiting.values()) == 2)
        answer = await server.http.get(f"/v1/subscriptions/{queue}/stream", headers=key(server))
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "1"
        assert await poll(30_000) == 429
        assert await poll(0) == 200
        await server.api.services.pull_service.end_polls()
        assert await waiting == 200
    await until(lambda: not limit._waiting)
    assert refused == [True, True]
