"""Test that a key gives no more than it has, ends when it should, and shows its text nowhere."""

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import httpx
import pytest

from rooms.api.key_bodies import check_may_give
from rooms.domain.ids import KeyId, OrganisationId, RoomId, SubscriptionId
from rooms.domain.principal import Principal
from rooms.domain.state_machine import Scope
from rooms.errors import ForbiddenError
from tests.integration.rooms.api.conftest import Api
from tests.integration.rooms.api.members import Member, member, publish, shared_room, subscribe
from tests.support.installation import until

SUBSCRIPTIONS = [f"00000000-0000-7000-8000-00000000000{room}" for room in (1, 2)]
ADMIN = Principal(
    key_id=KeyId("key"),
    organisation_id=OrganisationId("organisation"),
    scopes=frozenset({Scope.ADMIN}),
)
NARROW: dict[str, dict[str, Any]] = {
    "rooms": {"rooms": frozenset({RoomId(1)})},
    "event_types": {"event_types": ("order.*",)},
    "subscriptions": {"subscriptions": frozenset({SubscriptionId(SUBSCRIPTIONS[0])})},
    "networks": {"networks": ("10.0.0.0/8", "2001:db8::/32")},
    "application": {"application": "a"},
}


def at(seconds: float) -> str:
    return (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat()


@pytest.mark.parametrize(
    ("kind", "given", "allowed"),
    [
        ("rooms", {}, False),
        ("rooms", {"rooms": [1]}, True),
        ("rooms", {"rooms": [1, 2]}, False),
        ("rooms", {"subscriptions": SUBSCRIPTIONS[:1]}, True),
        ("rooms", {"subscriptions": SUBSCRIPTIONS}, False),
        ("rooms", {"event_types": ["a"]}, False),
        ("event_types", {}, False),
        ("event_types", {"event_types": ["*"]}, False),
        ("event_types", {"event_types": ["order"]}, False),
        ("event_types", {"event_types": ["order.*", "order.paid", "order.a.*"]}, True),
        ("subscriptions", {}, False),
        ("subscriptions", {"rooms": [1]}, False),
        ("subscriptions", {"subscriptions": SUBSCRIPTIONS[:1]}, True),
        ("subscriptions", {"subscriptions": SUBSCRIPTIONS}, False),
        ("networks", {}, False),
        ("networks", {"networks": ["10.1.0.0/16", "2001:db8:1::/48"]}, True),
        ("networks", {"networks": ["10.1.0.0/16", "0.0.0.0/0"]}, False),
        ("networks", {"networks": ["::/0"]}, False),
        ("networks", {"networks": ["11.0.0.0/8"]}, False),
        ("application", {}, False),
        ("application", {"application": "b"}, False),
        ("application", {"application": "a"}, True),
    ],
)
def test_a_narrow_key_gives_what_it_has(kind: str, given: dict[str, Any], *, allowed: bool) -> None:
    columns = {"scopes": ["publish"], **given}
    narrow = replace(ADMIN, **NARROW[kind])
    if allowed:
        check_may_give(narrow, columns)
    else:
        with pytest.raises(ForbiddenError):
            check_may_give(narrow, columns)
    check_may_give(ADMIN, columns)


def test_no_key_gives_a_scope_that_it_lacks() -> None:
    for scope in Scope:
        own = replace(ADMIN, scopes=frozenset({scope}))
        for given in Scope:
            may = given is scope or (scope is Scope.ADMIN and given is not Scope.PLATFORM)
            if may:
                check_may_give(own, {"scopes": [given.value]})
            else:
                with pytest.raises(ForbiddenError):
                    check_may_give(own, {"scopes": [given.value]})


@asynccontextmanager
async def calling_from(api: Api, address: str | None) -> AsyncIterator[Api]:
    """Yield the same API, called from another address; None: through a socket of this machine."""
    client = cast("tuple[str, int]", None if address is None else (address, 1000))
    transport = httpx.ASGITransport(cast(Any, api.app), raise_app_exceptions=False, client=client)
    async with httpx.AsyncClient(transport=transport, base_url="http://rooms.test") as http:
        yield replace(api, http=http)


async def make(api: Api, owner: Member, scopes: Sequence[str] = ("admin",), **fields: Any) -> Any:
    return await api.made("/keys", {"name": "made", "scopes": list(scopes), **fields}, owner.key)


async def test_restricted_keys_make_no_others(api: Api) -> None:
    owner = await member(api)
    room = await shared_room(api, owner)
    subscription = (await subscribe(api, owner, room))["id"]
    key = (await api.call("GET", "/keys", owner.key)).json()["items"][0]["id"]
    for fields in (
        {"rooms": [room]},
        {"event_types": ["order.*"]},
        {"subscriptions": [subscription]},
    ):
        narrow = (await make(api, owner, **fields))["key"]
        for method, path, body in (
            ("POST", "/keys", {"name": "x", "scopes": ["publish"], **fields}),
            ("GET", "/keys", None),
            ("PATCH", f"/keys/{key}", {"name": "x"}),
            ("POST", f"/keys/{key}/rotate", None),
            ("DELETE", f"/keys/{key}", None),
        ):
            assert (await api.call(method, path, narrow, json=body)).status_code == 403


async def test_a_key_that_ends_prolongs_none(api: Api) -> None:
    """Check that who got hold of a short-lived key has nothing once it ends."""
    owner = await member(api)
    lasting = await make(api, owner)
    short = await make(api, owner, expires_at=at(600))
    for fields in ({}, {"expires_at": None}, {"expires_at": at(601)}):
        body = {"name": "x", "scopes": ["publish"], **fields}
        assert (await api.call("POST", "/keys", short["key"], json=body)).status_code == 403
        if fields:
            path = f"/keys/{short['id']}"
            assert (await api.call("PATCH", path, short["key"], json=fields)).status_code == 403
    path = f"/keys/{lasting['id']}"
    assert (await api.call("POST", f"{path}/rotate", short["key"])).status_code == 403
    body = {"name": "taken"}
    assert (await api.call("PATCH", path, short["key"], json=body)).status_code == 403
    shorter = await api.made(
        "/keys", {"name": "x", "scopes": ["publish"], "expires_at": at(300)}, short["key"]
    )
    for key in (shorter, short):
        rotated = await api.call("POST", f"/keys/{key['id']}/rotate", short["key"])
        assert rotated.status_code == 200
    # One that lasts prolongs it.
    path = f"/keys/{short['id']}"
    forever = {"expires_at": None}
    assert (await api.call("PATCH", path, owner.key, json=forever)).status_code == 200


async def test_a_platform_key_gives_no_other_organisation_more_of_the_platform(api: Api) -> None:
    """Check that who got hold of a narrow platform key has no wider one by another organisation."""
    other = await member(api)
    body = {"name": "narrow", "scopes": ["platform"], "networks": ["192.0.2.0/24"]}
    body |= {"expires_at": at(600)}
    path = f"/organisations/{other.id}/keys"
    narrow = await api.made(path, body, "platform")
    async with calling_from(api, "192.0.2.7") as inside:
        for fields in (
            {},
            {"expires_at": at(300)},
            {"networks": ["192.0.2.0/25"]},
            {"networks": ["192.0.0.0/16"], "expires_at": at(300)},
            {"networks": ["192.0.2.0/25"], "expires_at": at(700)},
        ):
            third = await member(api)
            body = {"name": "x", "scopes": ["admin", "platform"], **fields}
            path = f"/organisations/{third.id}/keys"
            answer = await inside.call("POST", path, narrow["key"], json=body)
            assert answer.status_code == 403, fields
        within = {"networks": ["192.0.2.0/25"], "expires_at": at(300)}
        await inside.made(
            path, {"name": "x", "scopes": ["admin", "platform"], **within}, narrow["key"]
        )
        first = {"name": "first", "scopes": ["admin"]}
        await inside.made(path, first, narrow["key"])


async def test_a_key_works_until_its_end_and_no_longer(api: Api) -> None:
    owner = await member(api)
    ending = (await make(api, owner, expires_at=at(1)))["key"]
    assert (await api.call("GET", "/rooms", ending)).status_code == 200

    async def is_over() -> bool:
        return (await api.call("GET", "/rooms", ending)).status_code == 401

    await until(is_over, "the key to end")
    (row,) = await api.sql(
        "SELECT now() >= expires_at, now() < expires_at + interval '2 s' FROM api_keys"
        " WHERE expires_at IS NOT NULL"
    )
    assert row == (True, True)
    for past in (at(-1), "2020-01-01T00:00:00Z"):
        body = {"name": "x", "scopes": ["publish"], "expires_at": past}
        refused = await api.call("POST", "/keys", owner.key, json=body)
        assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "expires_at")


async def test_a_rotation_leaves_the_old_text_until_its_end(api: Api) -> None:
    owner = await member(api)
    room = await shared_room(api, owner)
    first = await make(api, owner, ["publish"], rooms=[room], networks=["127.0.0.0/8"])
    path = f"/keys/{first['id']}"

    async def works(text: str) -> bool:
        api.services.keys.forget()
        return (await publish(api, text, room)).status_code == 202

    second = (await api.call("POST", f"{path}/rotate", owner.key)).json()
    assert second["prefix"] == second["key"][:14] != first["prefix"]
    kept = ("id", "scopes", "rooms", "networks", "expires_at", "application")
    assert {name: second[name] for name in kept} == {name: first[name] for name in kept}
    assert (await works(first["key"]), await works(second["key"])) == (True, True)
    body = {"overlap_s": 1}
    third = (await api.call("POST", f"{path}/rotate", owner.key, json=body)).json()
    assert (await works(first["key"]), await works(third["key"])) == (False, True)

    async def is_over() -> bool:
        return (await publish(api, second["key"], room)).status_code == 401

    assert await works(second["key"])
    await until(is_over, "the old text to end")
    fourth = (await api.call("POST", f"{path}/rotate", owner.key, json={"overlap_s": 0})).json()
    assert fourth["previous_until"] is None
    assert (await works(third["key"]), await works(fourth["key"])) == (False, True)
    assert (await api.call("DELETE", path, owner.key)).status_code == 204
    for text in (first, second, third, fourth):
        assert not await works(text["key"])
    for call in (("POST", f"{path}/rotate"), ("PATCH", path)):
        assert (await api.call(*call, owner.key, json={})).status_code == 409


@pytest.mark.parametrize(
    ("networks", "inside", "outside"),
    [
        (["192.0.2.0/24"], ["192.0.2.7", "::ffff:192.0.2.7"], ["192.0.3.1", "2001:db8::1", None]),
        (["2001:db8::/32"], ["2001:db8::1", "2001:db8::1%eth0"], ["2001:db9::1", "192.0.2.7"]),
        (["192.0.2.7"], ["192.0.2.7"], ["192.0.2.8", "unix", None]),
        (["0.0.0.0/0", "::/0"], ["203.0.113.5", "::1"], [None, "unix"]),
        (None, ["203.0.113.5", "::1", None, "unix"], []),
    ],
)
async def test_a_key_works_in_its_networks_only(
    api: Api, networks: list[str] | None, inside: list[str | None], outside: list[str | None]
) -> None:
    owner = await member(api)
    key = (await make(api, owner, networks=networks))["key"]
    unknown = None
    for address in (*inside, *outside):
        async with calling_from(api, address) as caller:
            answer = await caller.call("GET", "/rooms", key)
            expected = 200 if address in inside else 401
            assert answer.status_code == expected, address
            if address in outside:
                unknown = (await caller.call("GET", "/rooms", "rooms_" + "a" * 43)).json()
                assert answer.json() == unknown, "it reads like a key that is not there"
    assert (unknown is None) == (not outside)


async def test_wrong_networks_are_refused(api: Api) -> None:
    owner = await member(api)
    for network in ("10.0.0.1/8", "10.0.0.0/33", "localhost", "10", "::/129", "1.2.3.4/255.0.0.0x"):
        body = {"name": "x", "scopes": ["publish"], "networks": ["10.0.0.0/8", network]}
        refused = await api.call("POST", "/keys", owner.key, json=body)
        assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "networks[1]")
    for application in ("a\n", "", "a b", "a" * 65, "ä"):
        body = {"name": "x", "scopes": ["publish"], "application": application}
        refused = await api.call("POST", "/keys", owner.key, json=body)
        assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "application")


async def test_a_prefix_finds_the_own_key(api: Api) -> None:
    owner, other = await member(api), await member(api)
    made = await make(api, owner)
    assert made["prefix"] == made["key"][:14]

    async def found(who: Member, prefix: str) -> list[str]:
        answer = await api.call("GET", "/keys", who.key, params={"prefix": prefix})
        return [one["id"] for one in answer.json()["items"]]

    assert await found(owner, made["prefix"]) == [made["id"]]
    assert await found(owner, made["key"]) == [made["id"]]
    for nothing in ("", "rooms_", made["prefix"][:-1], "%", made["prefix"][:-1] + "%"):
        assert await found(owner, nothing) == []
    assert await found(other, made["prefix"]) == []


async def test_no_text_of_a_key_is_kept_or_logged(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    owner = await member(api)
    room = await shared_room(api, owner)
    made = await make(api, owner, ["publish"])
    rotated = (await api.call("POST", f"/keys/{made['id']}/rotate", owner.key)).json()
    texts = [owner.key, made["key"], rotated["key"]]
    wrong = rotated["key"][:-1]
    for text in (*texts, wrong, rotated["key"].lower()):
        await publish(api, text, room)
        await api.call("POST", "/rooms", text, json={"name": text})
    await api.call("DELETE", f"/keys/{made['id']}", owner.key)
    await publish(api, rotated["key"], room)
    seen = [caplog.text]
    paths = ("/keys?limit=200", "/journal?limit=200", f"/keys/{made['id']}", "/whoami")
    seen += [(await api.call("GET", path, owner.key)).text for path in paths]
    seen.append((await api.http.get("/metrics")).text)
    for table in ("api_keys", "journal", "organisations", "log_entries"):
        seen += [row[0] for row in await api.sql(f"SELECT to_jsonb(t)::text FROM {table} t")]
    for text in texts:
        assert not [one for one in seen if text[6:40] in one]
