"""Test GovStack's interface as its specification has it: by mutual TLS, without an API key."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.integration.rooms.api.govstack.conftest import (
    MADE,
    OWNER,
    PUBLISHER,
    ROOM,
    STRANGER,
    SUBSCRIBER,
    GovStack,
    member_id,
)
from tests.support.tls_api import TlsApi, tls_serving

PREFIX = f"/r1/{member_id(OWNER)}/{ROOM}"


@pytest.fixture
async def place(gov: GovStack, tmp_path: Path) -> AsyncIterator[TlsApi]:
    for role in (PUBLISHER, SUBSCRIBER, STRANGER):
        body = {"name": "client", "kind": "client", "scopes": ["admin"]}
        await gov.api.made("/keys", body, role)
    async with tls_serving(gov.api, tmp_path) as found:
        yield found


def named(role: str, application: str = "app") -> dict[str, str]:
    return {"X-GovStack-Client": f"{member_id(role)}/{application}"}


async def send(
    place: TlsApi, role: str, request: str, headers: dict[str, str], body: object = None
) -> httpx.Response:
    async with place.client(place.members.issue(member_id(role))) as http:
        method, path = request.split(" ")
        return await http.request(method, PREFIX + path, headers=headers, json=body)


async def test_an_event_goes_from_member_to_member(place: TlsApi) -> None:
    subscription = {"eventType": MADE, "delivery": "PULL"}
    subscribed = await send(
        place, SUBSCRIBER, f"POST /api/v1/subs/{MADE}", named(SUBSCRIBER), subscription
    )
    assert subscribed.status_code == 200, subscribed.text
    event = {"eventType": MADE, "event": {"n": 1}}
    published = await send(place, PUBLISHER, f"POST /pub/v1/{MADE}", named(PUBLISHER), event)
    assert published.status_code == 201, published.text
    pulled = await send(place, SUBSCRIBER, f"GET /pull/v1/{MADE}", named(SUBSCRIBER))
    assert pulled.status_code == 200, pulled.text
    assert pulled.json()["publisherId"]["memberCode"] == PUBLISHER
    again = await send(place, SUBSCRIBER, f"GET /pull/v1/{MADE}", named(SUBSCRIBER, "other"))
    assert again.status_code == 404


async def test_a_certificate_that_names_another_member_is_refused_and_noted(
    gov: GovStack, place: TlsApi
) -> None:
    answer = await send(place, STRANGER, "GET /api/v1/subs", named(SUBSCRIBER))
    assert answer.status_code == 403, answer.text
    found: list[str] = []
    while not found:
        page = await gov.api.call("GET", "/journal", STRANGER, params={"outcome": "refused"})
        found = [entry["reason"] for entry in page.json()["items"]]
    assert "X-GovStack-Client" in found[0]
