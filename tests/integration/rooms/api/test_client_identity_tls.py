"""Test the whole API with TLS and client certificates: hot routes, streams, and their ends."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import InvalidStatus

from tests.integration.rooms.api.conftest import Api
from tests.support.client_certificates import ClientCertificateAuthority
from tests.support.tls_api import TlsApi, tls_serving

OURS = "SE/GOV/1"
BOUND_S = 5.0


@pytest.fixture
async def place(api: Api, tmp_path: Path) -> AsyncIterator[TlsApi]:
    for name, member in (("default", OURS), ("other", "SE/COM/2")):
        await api.sql("UPDATE organisations SET member_id = %s WHERE name = %s", member, name)
    async with tls_serving(api, tmp_path) as found:
        yield found


async def pull_subscription(api: Api) -> tuple[int, str]:
    """Return a room with an event type, and a subscription to it."""
    room = (await api.room())["id"]
    await api.made(f"/rooms/{room}/event-types", {"name": "made"})
    return room, (await api.subscription(room, type="PULL"))["id"]


async def client(api: Api, key: str = "admin", *scopes: str) -> None:
    body = {"name": "client", "kind": "client", "scopes": scopes or ("admin",)}
    await api.made("/keys", body, key)


async def test_a_certificate_publishes_and_pulls(place: TlsApi) -> None:
    room, subscription = await pull_subscription(place.api)
    await client(place.api)
    body = {"event_type": "made", "payload": 1}
    async with place.client(place.members.issue(OURS)) as http:
        for _ in range(2):
            answer = await http.post(f"/v1/rooms/{room}/messages", json=body)
            assert answer.status_code == 202, answer.text
        pulled = await http.post(f"/v1/subscriptions/{subscription}/pull", json={})
        assert pulled.status_code == 200, pulled.text
        assert (await http.get("/v1/rooms")).json()["items"][0]["id"] == room
        # A header that claims another member changes nothing here.
        claimed = await http.get("/v1/rooms", headers={"X-GovStack-Client": "SE/COM/2/x"})
        assert claimed.json()["items"][0]["id"] == room


async def test_who_may_come_in(place: TlsApi) -> None:
    await client(place.api)
    statuses = {}
    for name, certificate in (
        ("none", None),
        ("ours", place.members.issue(OURS)),
        ("another member's", place.members.issue("SE/COM/2")),
        ("an unknown member's", place.members.issue("SE/GOV/9")),
        ("unnamed", place.members.issue("SE/Some Agency/9")),
    ):
        async with place.client(certificate) as http:
            without = (await http.get("/v1/keys")).status_code
            headers = {"Authorization": f"Bearer {place.api.keys['admin']}"}
            with_key = (await http.get("/v1/keys", headers=headers)).status_code
            hot = (await http.post("/v1/rooms/1/messages", headers=headers, json={})).status_code
            statuses[name] = (without, with_key, hot == 403)
    assert statuses == {
        "none": (401, 200, False),
        "ours": (200, 200, False),
        "another member's": (401, 403, True),
        "an unknown member's": (401, 403, True),
        "unnamed": (401, 200, False),
    }
    async with place.client(ClientCertificateAuthority().issue(OURS)) as http:
        with pytest.raises(OSError) as refused:
            await _get(http)
        assert refused.value is not None


async def _get(http: Any) -> None:
    import httpx

    try:
        await http.get("/v1/rooms")
    except httpx.TransportError as exc:
        raise ConnectionResetError from exc


async def test_streams_of_a_client_end_with_its_credential(place: TlsApi) -> None:
    room, subscription = await pull_subscription(place.api)
    await client(place.api)
    certificate = place.members.issue(OURS)
    path = f"/subscriptions/{subscription}/stream"
    async with (
        place.client(certificate) as http,
        http.stream("GET", f"/v1{path}") as events,
        place.socket(path, certificate) as socket,
    ):
        assert events.status_code == 200
        lines = events.aiter_lines()
        await socket.send(json.dumps({"credit": 1}))
        await place.api.publish(room, "made", 1)
        await place.api.publish(room, "made", 2)
        async with asyncio.timeout(BOUND_S):
            while not (await anext(lines)).startswith("event: message"):
                pass
        await place.api.sql("UPDATE api_keys SET revoked_at = now() WHERE kind = 'client'")
        async with asyncio.timeout(BOUND_S + 1):
            text = "".join([line async for line in lines])
            assert '"revoked"' in text
            frame: dict[str, str] = {}
            while frame.get("type") != "end":
                frame = json.loads(await socket.recv())
            assert frame["reason"] == "revoked"
        place.api.services.keys.forget()
        with pytest.raises(InvalidStatus) as refused:
            await place.socket(path, certificate)
        assert refused.value.response.status_code == 401


async def test_a_stream_ends_when_another_organisation_gets_the_member_id(place: TlsApi) -> None:
    _, subscription = await pull_subscription(place.api)
    await client(place.api)
    path = f"/v1/subscriptions/{subscription}/stream"
    async with (
        place.client(place.members.issue(OURS)) as http,
        http.stream("GET", path) as events,
    ):
        assert events.status_code == 200
        await place.api.sql("UPDATE organisations SET member_id = NULL WHERE name = 'default'")
        async with asyncio.timeout(BOUND_S + 1):
            assert '"revoked"' in "".join([line async for line in events.aiter_lines()])
