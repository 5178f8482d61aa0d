"""Test that links made with a key's text end with this text: a thief of a key may have made them."""

from datetime import datetime
from typing import Any

import pytest

from rooms.db.catalog.api_keys import hash_key
from tests.integration.rooms.api.conftest import Api
from tests.integration.rooms.api.members import member
from tests.integration.rooms.api.sign_in import begin, follow

SIGN_IN = ("/sign-in-links", {"name": "Ada", "roles": ["viewer"]})
PORTAL = ("/portal-links", {"name": "Ada", "access": "read", "organisation_id": None})
ADMIN = {"name": "desk", "scopes": ["admin"]}


async def link_of(api: Api, kind: tuple[str, dict[str, Any]], key: str) -> dict[str, Any]:
    """Create a link of a kind with a key or with the text of a session."""
    path, body = kind
    if "organisation_id" in body:
        whoami = (await api.call("GET", "/whoami", key)).json()
        body = {**body, "organisation_id": whoami["organisation"]["id"]}
    return await api.made(path, body, key)


async def rotate(api: Api, key: str, overlap_s: int) -> dict[str, Any]:
    answer = await api.call("POST", f"/keys/{key}/rotate", json={"overlap_s": overlap_s})
    assert answer.is_success, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def end_overlap(api: Api, key: str) -> None:
    await api.sql("UPDATE api_keys SET previous_until = now() WHERE id = %s RETURNING 1", key)


@pytest.mark.parametrize("kind", [SIGN_IN, PORTAL], ids=["sign-in", "portal"])
async def test_a_link_ends_with_the_text_that_made_it(
    api: Api, kind: tuple[str, dict[str, Any]]
) -> None:
    """Check a key's own links, and those of sessions that its text and its link began."""
    made = await api.made("/keys", ADMIN)
    _, by_key = await begin(api, parent=made["id"], presented=hash_key(made["key"].encode()))
    owner = ("/sign-in-links", {"name": "Bob", "roles": ["owner"]})
    begun = await follow(api, await link_of(api, owner, made["key"]))
    assert begun is not None
    texts = (made["key"], by_key, begun[1])
    links = [await link_of(api, kind, text) for text in texts]
    spared = await link_of(api, kind, "admin")
    rotated = await rotate(api, made["id"], 0)
    assert [await follow(api, link) for link in links] == [None] * len(links)
    assert await follow(api, spared) is not None
    assert await follow(api, await link_of(api, kind, rotated["key"])) is not None


@pytest.mark.parametrize("kind", [SIGN_IN, PORTAL], ids=["sign-in", "portal"])
async def test_a_link_is_valid_during_the_overlap_of_its_text(
    api: Api, kind: tuple[str, dict[str, Any]]
) -> None:
    made = await api.made("/keys", ADMIN)
    before = [await link_of(api, kind, made["key"]) for _ in range(2)]
    rotated = await rotate(api, made["id"], 600)
    by_old = hash_key(made["key"].encode())
    _, session = await begin(api, parent=made["id"], presented=by_old)
    during = [await link_of(api, kind, text) for text in (made["key"], session)]
    by_new = await link_of(api, kind, rotated["key"])
    begun = await follow(api, before[0])
    assert begun is not None
    until = datetime.fromisoformat(rotated["previous_until"])
    assert begun[0].ends_at <= until, "its session does not outlive the text either"
    await end_overlap(api, made["id"])
    assert [await follow(api, link) for link in (before[1], *during)] == [None] * 3
    assert await follow(api, by_new) is not None


async def test_a_second_rotation_ends_the_links_of_both_texts(api: Api) -> None:
    made = await api.made("/keys", ADMIN)
    first = await link_of(api, SIGN_IN, made["key"])
    rotated = await rotate(api, made["id"], 86_400)
    second = await link_of(api, SIGN_IN, rotated["key"])
    third = (await rotate(api, made["id"], 600))["key"]
    assert await follow(api, first) is None
    assert await follow(api, second) is not None
    assert await follow(api, await link_of(api, SIGN_IN, third)) is not None


async def test_a_former_text_gives_nothing_that_outlasts_it(api: Api) -> None:
    """Else the thief of a text keeps its key by rotating it, until the owner's text has ended."""
    made = await api.made("/keys", ADMIN)
    other = await api.made("/keys", ADMIN)
    rotated = await rotate(api, made["id"], 600)
    by_old = hash_key(made["key"].encode())
    _, session = await begin(api, parent=made["id"], presented=by_old)
    for text in (made["key"], session):
        for key in (made, other):
            answer = await api.call("POST", f"/keys/{key['id']}/rotate", text, json={})
            assert answer.status_code == 403, answer.text
            assert rotated["previous_until"][:19] in answer.json()["detail"]
        answer = await api.call("POST", "/keys", text, json=ADMIN)
        assert answer.status_code == 403, answer.text
        until = {**ADMIN, "expires_at": rotated["previous_until"]}
        await api.made("/keys", until, text)
        answer = await api.call("PATCH", f"/keys/{made['id']}", text, json={"name": "mine"})
        assert answer.status_code == 403, answer.text
    again = await api.call("POST", f"/keys/{made['id']}/rotate", rotated["key"], json={})
    assert again.status_code == 200, again.text
    await api.made("/keys", ADMIN, again.json()["key"])


async def test_a_text_that_was_replaced_gives_nothing(api: Api) -> None:
    """A process may know a text for a second after a rotation without an overlap."""
    made = await api.made("/keys", ADMIN)
    await api.call("GET", "/whoami", made["key"])
    await rotate(api, made["id"], 0)
    for path in ("/keys", f"/keys/{made['id']}/rotate"):
        body = ADMIN if path == "/keys" else {}
        answer = await api.call("POST", path, made["key"], json=body)
        assert answer.status_code in {401, 403}, answer.text


async def test_a_former_text_of_the_platform_gives_others_nothing_that_outlasts_it(
    api: Api,
) -> None:
    """Else its thief goes on as the administrator of another organisation."""
    operator, other = await member(api), await member(api)
    platform = {"name": "operations", "scopes": ["platform", "admin"]}
    made = await api.made(f"/organisations/{operator.id}/keys", platform, "platform")
    rotation, path = f"/keys/{made['id']}/rotate", f"/organisations/{other.id}/keys"
    await api.made(path, ADMIN, made["key"])
    rotated = (await api.call("POST", rotation, made["key"], json={})).json()
    by_old = hash_key(made["key"].encode())
    _, session = await begin(api, operator.id, parent=made["id"], presented=by_old)
    for text in (made["key"], session):
        answer = await api.call("POST", path, text, json=ADMIN)
        assert answer.status_code == 403, answer.text
        assert rotated["previous_until"][:19] in answer.json()["detail"]
        await api.made(path, {**ADMIN, "expires_at": rotated["previous_until"]}, text)
    await api.made(path, ADMIN, rotated["key"])
    await api.call("POST", rotation, rotated["key"], json={"overlap_s": 0})
    answer = await api.call("POST", path, rotated["key"], json=ADMIN)
    assert answer.status_code == 401, "a process may know it for a second"
