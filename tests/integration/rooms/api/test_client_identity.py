"""Test principals that a trusted proxy or a certificate names, and the credentials of clients."""

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, cast
from urllib.parse import quote

import httpx
import pytest

from rooms.api.auth import authenticate
from rooms.api.fast_routes import FastRoutes
from tests.integration.rooms.api.conftest import Api, open_api, room_body
from tests.support.client_certificates import (
    DAY,
    ClientCertificateAuthority,
    IssuedCertificate,
)

PROXY, STRANGER = "10.0.0.1", "192.0.2.66"
OURS, THEIRS = "SE/GOV/1", "SE/COM/2"
AUTHORITY = ClientCertificateAuthority()


def govstack(member: str) -> dict[str, str]:
    return {"X-GovStack-Client": member}


def forwarded(certificate: IssuedCertificate) -> dict[str, str]:
    return {"X-Forwarded-Client-Cert": quote(certificate.pem)}


@dataclass(kw_only=True)
class Place:
    """Call the API from an address, through the hot routes as well."""

    api: Api
    front: FastRoutes
    numbers: Iterator[int] = field(default_factory=count)

    async def call(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str] | None = None,
        *,
        address: str = PROXY,
        key: str | None = None,
        **more: Any,
    ) -> httpx.Response:
        given = dict(headers or {})
        if key is not None:
            given["Authorization"] = f"Bearer {self.api.keys.get(key, key)}"
        transport = httpx.ASGITransport(cast(Any, self.front), client=(address, 4711))
        async with httpx.AsyncClient(transport=transport, base_url="http://rooms.test") as http:
            return await http.request(method, f"/v1{path}", headers=given, **more)

    async def client(self, key: str = "admin", **fields: Any) -> dict[str, Any]:
        """Create a credential for clients, which this process knows at once."""
        body = {"name": "client", "kind": "client", "scopes": ["admin"], **fields}
        made = await self.api.made("/keys", body, key)
        self.api.services.keys.forget()
        return made

    async def whose(self, headers: Mapping[str, str], **more: Any) -> tuple[int, str | None]:
        """Return the status of a read, and the application by which the caller is known."""
        name = f"room-{next(self.numbers)}"
        answer = await self.call("POST", "/rooms", headers, json=room_body(name), **more)
        entry = await self.entry()
        return answer.status_code, entry["application"]

    async def entry(self, key: str = "admin") -> dict[str, Any]:
        """Return the newest entry of the journal."""
        for close in self.api.app.on_shutdown:
            await cast(Any, close)()
        found = (await self.api.call("GET", "/journal", key, params={"limit": 1})).json()
        entry: dict[str, Any] = found["items"][0]
        return entry


@pytest.fixture
async def place(database: str) -> AsyncIterator[Place]:
    async with placed(database) as found:
        yield found


@asynccontextmanager
async def placed(database: str, **settings: str) -> AsyncIterator[Place]:
    settings["ROOMS_TRUSTED_PROXIES"] = "10.0.0.0/24"
    async with open_api(database, gate=None, **settings) as api:
        for name, member in (("default", OURS), ("other", THEIRS)):
            await api.sql("UPDATE organisations SET member_id = %s WHERE name = %s", member, name)
        front = FastRoutes(
            cast(Any, api.app),
            authenticate=partial(authenticate, api.services),
            publisher=api.services.publisher,
            pull_api=api.services.pull_service,
            max_body_bytes=100_000,
        )
        yield Place(api=api, front=front)


async def test_a_client_has_no_text_and_is_managed_like_a_key(place: Place) -> None:
    made = await place.client(scopes=["publish"])
    assert (made["kind"], made["key"], made["prefix"]) == ("client", None, None)
    listed = (await place.api.call("GET", "/keys")).json()["items"]
    assert [one["kind"] for one in listed if one["id"] == made["id"]] == ["client"]
    path = f"/keys/{made['id']}"
    assert (await place.api.call("GET", path)).json()["kind"] == "client"
    changed = await place.api.call("PATCH", path, json={"scopes": ["subscribe"]})
    assert changed.json()["scopes"] == ["subscribe"]
    for method, more, body in (("POST", "/rotate", None), ("PATCH", "", {"application": "x"})):
        answer = await place.api.call(method, path + more, json=body)
        assert answer.status_code == 409, answer.text
    assert (await place.api.call("DELETE", path)).status_code == 204
    assert (await place.client())["id"] != made["id"]
    entry = await place.entry()
    assert (entry["action"], entry["after"]["kind"]) == ("create_key", "client")


async def test_an_organisation_and_each_application_have_one_client(place: Place) -> None:
    body = {"name": "another", "kind": "client", "scopes": ["publish"]}
    await place.client()
    await place.client(application="payroll")
    for fields in ({}, {"application": "payroll"}):
        answer = await place.api.call("POST", "/keys", json={**body, **fields})
        assert answer.status_code == 409
        assert "client already" in answer.json()["detail"]
    await place.client("other-admin")


async def test_a_client_needs_a_member_id_and_no_more_than_its_maker_has(place: Place) -> None:
    await place.api.sql("UPDATE organisations SET member_id = NULL WHERE name = 'default'")
    body = {"name": "client", "kind": "client", "scopes": ["publish"]}
    answer = await place.api.call("POST", "/keys", json=body)
    assert (answer.status_code, "member id" in answer.json()["detail"]) == (409, True)
    body["scopes"] = ["platform"]
    assert (await place.api.call("POST", "/keys", json=body)).status_code == 403


async def test_a_security_server_names_the_client(place: Place) -> None:
    headers = govstack(f"{OURS}/payroll")
    assert (await place.call("GET", "/rooms", headers)).status_code == 401
    await place.client()
    assert await place.whose(headers) == (201, "payroll")
    entry = await place.entry()
    assert (entry["actor_name"], entry["source"]) == ("client", PROXY)
    assert (await place.call("GET", "/rooms", govstack(OURS))).status_code == 200
    known = (await place.call("GET", "/whoami", headers)).json()
    assert (known["organisation"]["member_id"], known["key_name"]) == (OURS, "client")
    assert known["application"] == "payroll"
    for unknown in ("SE/GOV/9", f"{THEIRS}/payroll"):
        assert (await place.call("GET", "/rooms", govstack(unknown))).status_code == 401
    assert (await place.call("GET", "/rooms", govstack("SE/GOV"))).status_code == 400
    assert (await place.call("GET", "/rooms")).status_code == 401


@pytest.mark.parametrize("headers", [govstack(OURS), forwarded(AUTHORITY.issue(OURS))])
async def test_a_header_from_an_untrusted_address_gives_no_identity(
    place: Place, headers: dict[str, str]
) -> None:
    await place.client()
    assert (await place.call("GET", "/rooms", headers)).status_code == 200
    for method, path in (("GET", "/rooms"), ("POST", "/rooms/1/messages")):
        answer = await place.call(method, path, headers, address=STRANGER)
        assert (answer.status_code, "ROOMS_TRUSTED_PROXIES" in answer.text) == (401, True)
    # With a key the header is a claim, which other routes check.
    both = await place.call("GET", "/rooms", headers, address=STRANGER, key="other-admin")
    assert both.status_code == 200
    counted = place.api.services.metrics.render().decode()
    assert 'rooms_authentication_failures_total{reason="forwarded"} 2.0' in counted


async def test_only_the_headers_that_the_proxy_sets_are_believed(database: str) -> None:
    async with placed(database, ROOMS_TRUSTED_HEADERS="x-forwarded-for") as place:
        await place.client()
        for headers in (govstack(OURS), forwarded(AUTHORITY.issue(OURS))):
            assert (await place.call("GET", "/rooms", headers)).status_code == 401


async def test_hot_routes_know_clients(place: Place) -> None:
    await place.client()
    headers = govstack(f"{OURS}/payroll")
    room = (await place.call("POST", "/rooms", headers, json=room_body())).json()["id"]
    body = {"event_type": "made", "payload": 1}
    await place.api.made(f"/rooms/{room}/event-types", {"name": "made"})
    path = f"/rooms/{room}/messages"
    assert (await place.call("POST", path, headers, json=body)).status_code == 202
    for refused in (govstack(f"{THEIRS}/payroll"), {}):
        assert (await place.call("POST", path, refused, json=body)).status_code == 401
    both = await place.call("POST", path, headers, json=body, key="other-publish")
    assert both.status_code == 404  # the key decides, and does not see the room


async def test_an_application_uses_its_own_credential_and_never_a_wider_one(place: Place) -> None:
    await place.client()
    own = await place.client(application="payroll", scopes=["audit"])
    headers = govstack(f"{OURS}/payroll")
    assert (await place.call("GET", "/rooms", headers)).status_code == 403
    assert (await place.call("GET", "/journal", headers)).status_code == 200
    assert (await place.call("GET", "/rooms", govstack(f"{OURS}/tax"))).status_code == 200
    await place.api.call("DELETE", f"/keys/{own['id']}")
    place.api.services.keys.forget()
    for path in ("/rooms", "/journal"):
        assert (await place.call("GET", path, headers)).status_code == 401
    await place.client(application="payroll", scopes=["manage"])
    assert (await place.call("GET", "/rooms", headers)).status_code == 200


@pytest.mark.parametrize("change", ["revoked_at = now()", "expires_at = now()"])
async def test_a_client_ends_within_a_second(place: Place, change: str) -> None:
    await place.client()
    assert (await place.call("GET", "/rooms", govstack(OURS))).status_code == 200
    await place.api.sql(f"UPDATE api_keys SET {change} WHERE kind = 'client'")
    place.api.services.keys.forget()
    assert (await place.call("GET", "/rooms", govstack(OURS))).status_code == 401


async def test_a_certificate_from_a_proxy(place: Place) -> None:
    await place.client()
    assert (await place.call("GET", "/rooms", forwarded(AUTHORITY.issue(OURS)))).status_code == 200
    uri = AUTHORITY.issue("SE/NO/3", uris=[f"urn:govstack:member:{OURS}/tax"])
    assert await place.whose(forwarded(uri)) == (201, "tax")
    for other, why in (
        (AUTHORITY.issue(THEIRS), "has a credential"),
        (AUTHORITY.issue("SE/Some Agency/3"), "names no member"),
    ):
        answer = await place.call("GET", "/rooms", forwarded(other))
        assert (answer.status_code, why in answer.json()["detail"]) == (401, True), answer.text
    expired = forwarded(AUTHORITY.issue(OURS, starts=-2 * DAY, ends=-DAY))
    for key in (None, "admin"):
        answer = await place.call("GET", "/rooms", expired, key=key)
        assert (answer.status_code, "expired" in answer.json()["detail"]) == (401, True)
    malformed = await place.call("GET", "/rooms", {"X-Forwarded-Client-Cert": "Subject=1"})
    assert malformed.status_code == 400


async def test_certificate_and_named_client_must_agree(place: Place) -> None:
    await place.client()
    await place.client("other-admin")
    certificate = forwarded(AUTHORITY.issue(OURS))
    assert await place.whose(certificate | govstack(f"{OURS}/tax")) == (201, "tax")
    bound = forwarded(AUTHORITY.issue(OURS, uris=[f"urn:govstack:member:{OURS}/tax"]))
    for headers in (certificate | govstack(THEIRS), bound | govstack(f"{OURS}/payroll")):
        assert (await place.call("GET", "/rooms", headers)).status_code == 403
        entry = await place.entry()
        assert (entry["action"], entry["outcome"]) == ("list_rooms", "refused")


async def test_a_key_decides_and_a_certificate_must_not_contradict_it(place: Place) -> None:
    await place.client("other-admin")
    good, other = forwarded(AUTHORITY.issue(OURS)), forwarded(AUTHORITY.issue(THEIRS))
    unnamed = forwarded(AUTHORITY.issue("SE/Some Agency/3"))
    for headers in (good, unnamed, {}):
        assert (await place.call("GET", "/keys", headers, key="admin")).status_code == 200
    body = room_body()
    answer = await place.call("POST", "/rooms", other, key="admin", json=body)
    assert (answer.status_code, "certificate" in answer.json()["detail"]) == (403, True)
    entry = await place.entry()
    assert (entry["action"], entry["outcome"]) == ("create_room", "refused")
    assert (await place.call("GET", "/rooms", other, key="admin")).status_code == 403
    entry = await place.entry()
    assert (entry["action"], entry["outcome"]) == ("list_rooms", "refused")
    assert (await place.entry("other-admin"))["action"] == "create_key"
    for path in ("/rooms/1/messages", "/subscriptions/x/pull"):
        hot = await place.call("POST", path, other, key="admin", json={})
        assert hot.status_code == 403


async def test_the_source_is_what_the_proxy_says(place: Place) -> None:
    key = await place.api.made(
        "/keys", {"name": "near", "scopes": ["manage"], "networks": ["192.0.2.0/24"]}
    )
    through = {"X-Forwarded-For": "6.6.6.6, 192.0.2.7, 10.0.0.9"}
    assert (await place.call("GET", "/rooms", key=key["key"])).status_code == 401
    answer = await place.call("POST", "/rooms", through, key=key["key"], json=room_body())
    assert answer.status_code == 201
    assert (await place.entry())["source"] == "192.0.2.7"
    for headers in ({"X-Forwarded-For": "192.0.2.7, 6.6.6.6"}, {"X-Forwarded-For": "192.0.2.7, x"}):
        for path in ("/rooms", "/rooms/1/messages"):
            method = "GET" if path == "/rooms" else "POST"
            found = await place.call(method, path, headers, key=key["key"])
            assert found.status_code == 401
    forged = await place.call("GET", "/rooms", through, key=key["key"], address="203.0.113.5")
    assert forged.status_code == 401


async def test_networks_of_a_client_are_those_behind_the_proxy(place: Place) -> None:
    await place.client(networks=["192.0.2.0/24"])
    headers = govstack(OURS)
    near = headers | {"X-Forwarded-For": "192.0.2.7"}
    assert (await place.call("GET", "/rooms", near)).status_code == 200
    assert (await place.call("GET", "/rooms", headers)).status_code == 401


async def test_the_last_use_of_a_client_is_known(place: Place) -> None:
    made = await place.client()
    await place.call("GET", "/rooms", govstack(OURS))
    await place.api.services.keys.record_use()
    found = (await place.api.call("GET", f"/keys/{made['id']}")).json()
    assert found["last_used_at"] is not None
