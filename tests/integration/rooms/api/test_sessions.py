"""Test how people sign in: links that work once, roles, sessions that end."""

import asyncio
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from delivery.maintenance.cleanup import clean_sessions
from rooms.cli.database import create_sign_in_link
from rooms.db.authentication import ApiKeyAuthenticator
from rooms.db.catalog.api_keys import hash_key
from rooms.db.catalog.sessions import delete_ended, extend_session
from rooms.db.connection import transaction
from rooms.db.known_keys import CACHE_S
from rooms.domain.role import SCOPES, Role, scopes_of
from rooms.domain.state_machine import Scope
from rooms.errors import UnauthenticatedError
from rooms.evidence.jose import decode_bytes
from tests.integration.rooms.api.conftest import Api, make_key, room_body
from tests.integration.rooms.api.sign_in import begin, follow, make_session, token_of
from tests.integration.rooms.api.test_keys import Seconds


async def made_link(api: Api, *roles: str, key: str = "admin", **fields: Any) -> dict[str, Any]:
    body = {"name": "Ada <ada@example.com>", "roles": roles or ["viewer"], **fields}
    return await api.made("/sign-in-links", body, key)


async def test_a_link_signs_in_once(api: Api) -> None:
    link = await made_link(api, "operator", session_s=3600)
    assert link["path"].startswith("/console/sign-in?token=rooms_")
    assert (link["name"], link["scopes"]) == ("Ada <ada@example.com>", ["operate", "view"])
    begun = await follow(api, link)
    assert begun is not None
    session, text = begun
    assert session.name == "Ada <ada@example.com>"
    assert sorted(session.scopes) == [Scope.OPERATE, Scope.VIEW]
    lasts = (session.ends_at - session.created_at).total_seconds()
    assert abs(lasts - 3600) < 60
    whoami = (await api.call("GET", "/whoami", text)).json()
    assert (whoami["key_id"], whoami["key_name"]) == (session.id, "Ada <ada@example.com>")
    assert await follow(api, link) is None


async def test_ten_uses_at_once_are_one(api: Api) -> None:
    link = await made_link(api)
    begun = await asyncio.gather(*(follow(api, link) for _ in range(10)))
    assert sum(one is not None for one in begun) == 1


async def test_the_token_of_a_link_is_no_key_and_is_not_stored(api: Api) -> None:
    link = await made_link(api)
    assert (await api.call("GET", "/whoami", token_of(link))).status_code == 401
    rows = await api.sql("SELECT to_jsonb(l)::text, token_hash FROM sign_in_links l")
    assert token_of(link) not in rows[0][0]
    assert rows[0][1] == hash_key(token_of(link).encode())
    assert token_of(link) not in str(await api.sql("SELECT to_jsonb(j)::text FROM journal j"))


async def test_an_expired_link_is_refused(api: Api) -> None:
    link = await made_link(api, expires_s=10)
    await api.sql("UPDATE sign_in_links SET expires_at = now() RETURNING 1")
    assert await follow(api, link) is None
    assert await follow(api, {"path": "/console/sign-in?token=rooms_invented"}) is None


async def test_a_link_of_an_organisation_that_is_being_deleted_is_refused(api: Api) -> None:
    link = await made_link(api, key="stranger")
    await api.sql("UPDATE organisations SET status = 'deleting' WHERE name = 'other' RETURNING 1")
    assert await follow(api, link) is None


@pytest.mark.parametrize("change", ["revoked_at", "expires_at"])
async def test_a_link_ends_with_the_key_that_made_it(api: Api, change: str) -> None:
    """Check a key's own links, and those of a session that it began."""
    made = await api.made("/keys", {"name": "desk", "scopes": ["admin"]})
    _, text = await begin(api, parent=made["id"])
    links = [await made_link(api, key=made["key"]), await made_link(api, key=text)]
    spared = await made_link(api)
    await api.sql(f"UPDATE api_keys SET {change} = now() WHERE id = %s RETURNING 1", made["id"])
    assert [await follow(api, link) for link in links] == [None, None]
    assert await follow(api, spared) is not None


async def test_no_session_outlives_the_key_that_made_its_link(api: Api) -> None:
    """Check links of a key, and those of a session that the key began."""
    end = datetime.now(UTC) + timedelta(seconds=600)
    body = {"name": "desk", "scopes": ["admin"], "expires_at": end.isoformat()}
    made = await api.made("/keys", body)
    _, text = await begin(api, parent=made["id"])
    for key in (made["key"], text):
        link = await made_link(api, key=key, expires_s=3600)
        assert datetime.fromisoformat(link["expires_at"]) == end
        begun = await follow(api, link)
        assert begun is not None
        assert begun[0].ends_at == end


async def test_a_session_of_a_link_makes_no_key_that_outlives_the_links_maker(api: Api) -> None:
    end = datetime.now(UTC) + timedelta(seconds=600)
    body = {"name": "desk", "scopes": ["admin"], "expires_at": end.isoformat()}
    made = await api.made("/keys", body)
    begun = await follow(api, await made_link(api, "owner", key=made["key"]))
    assert begun is not None
    again = await follow(api, await made_link(api, "owner", key=begun[1]))
    assert again is not None
    for text in (begun[1], again[1]):
        answer = await api.call("POST", "/keys", text, json={"name": "x", "scopes": ["admin"]})
        assert answer.status_code == 403, answer.text
        assert (await api.call("POST", "/keys", text, json=body)).status_code == 201
    assert (await api.call("DELETE", f"/keys/{made['id']}")).status_code == 204
    assert [await refused(api, text) for text in (begun[1], again[1])] == [True, True]


@pytest.mark.parametrize(
    "change", [{"scopes": ["manage"]}, {"application": "x"}, {"networks": ["192.0.2.0/24"]}]
)
async def test_a_link_gives_no_more_than_its_maker_has_by_now(
    api: Api, change: dict[str, Any]
) -> None:
    made = await api.made("/keys", {"name": "desk", "scopes": ["admin"]})
    links = [await made_link(api, "owner", key=made["key"]) for _ in range(2)]
    assert (await api.call("PATCH", f"/keys/{made['id']}", json={"name": "z"})).is_success
    assert await follow(api, links[0]) is not None
    assert (await api.call("PATCH", f"/keys/{made['id']}", json=change)).is_success
    with pytest.raises(UnauthenticatedError):
        await follow(api, links[1])


async def test_a_session_is_of_the_application_that_made_its_link(api: Api) -> None:
    body = {"name": "desk", "scopes": ["admin"], "application": "billing"}
    made = await api.made("/keys", body)
    begun = await follow(api, await made_link(api, key=made["key"]))
    assert begun is not None
    assert (await api.call("GET", "/whoami", begun[1])).json()["application"] == "billing"


async def test_a_role_gives_its_scopes_and_no_other(api: Api) -> None:
    both = await make_key(api.services, "default", Scope.ADMIN, Scope.PLATFORM)
    for role in Role:
        link = await made_link(api, role, key=both)
        assert link["scopes"] == sorted(SCOPES[role])
        begun = await follow(api, link)
        assert begun is not None
        whoami = (await api.call("GET", "/whoami", begun[1])).json()
        assert whoami["scopes"] == sorted(SCOPES[role])
    link = await made_link(api, "platform", "owner", "viewer", key=both)
    assert link["scopes"] == sorted(scopes_of([Role.PLATFORM, Role.OWNER, Role.VIEWER]))


async def test_no_link_gives_more_than_its_maker_has(api: Api) -> None:
    body = {"name": "Ada <ada@example.com>", "roles": ["platform"]}
    refused = await api.call("POST", "/sign-in-links", json=body)
    assert refused.status_code == 403
    assert "platform" in refused.json()["detail"]
    for key in ("manage", "operate", "view", "audit", "platform"):
        body = {"name": "Ada <ada@example.com>", "roles": ["viewer"]}
        assert (await api.call("POST", "/sign-in-links", key, json=body)).status_code == 403
    restricted = {"name": "desk", "scopes": ["admin"], "networks": ["127.0.0.0/8"]}
    made = await api.made("/keys", restricted)
    answer = await api.call("POST", "/sign-in-links", made["key"], json=body)
    assert answer.status_code in {401, 403}


async def test_wrong_links_are_refused_by_field(api: Api) -> None:
    for fields, field in (
        ({"roles": []}, "roles"),
        ({"roles": ["root"]}, "roles[0]"),
        ({"name": ""}, "name"),
        ({"name": "a\u202eb"}, "name"),
        ({"name": "a\nb"}, "name"),
        ({"name": " "}, "name"),
        ({"expires_s": 86_401}, "expires_s"),
        ({"expires_s": 0}, "expires_s"),
        ({"session_s": 59}, "session_s"),
        ({"session_s": 86_401}, "session_s"),
        ({"token": "mine"}, "token"),
    ):
        body = {"name": "Ada <ada@example.com>", "roles": ["viewer"], **fields}
        answer = await api.call("POST", "/sign-in-links", json=body)
        assert answer.status_code == 422, fields
        assert answer.json()["errors"][0]["field"] == field


async def refused(api: Api, text: str) -> bool:
    """Return whether another process, which has cached the key, refuses it after a second."""
    clock = Seconds()
    keys = ApiKeyAuthenticator(api.services.engine, clock)
    clock.now += CACHE_S
    try:
        await keys.authenticate(f"Bearer {text}".encode())
    except UnauthenticatedError:
        return True
    return False


async def test_an_idle_session_ends_and_a_used_one_goes_on(api: Api) -> None:
    session, text = await begin(api, idle_s=60)

    async def end() -> datetime:
        found = await api.sql("SELECT expires_at FROM api_keys WHERE id = %s", session.id)
        moment: datetime = found[0][0]
        return moment

    async def extend() -> None:
        async with transaction(api.services.engine) as connection:
            await extend_session(connection, session.id, idle_s=600)

    first = await end()
    await extend()
    assert await end() > first + timedelta(seconds=300)
    assert not await refused(api, text)
    await api.sql("UPDATE api_keys SET expires_at = now() WHERE id = %s RETURNING 1", session.id)
    ended = await end()
    assert await refused(api, text)
    await extend()
    assert await end() == ended, "what has ended begins no more"


async def test_no_use_keeps_a_session_beyond_its_end(api: Api) -> None:
    session, _ = await begin(api, lasting_s=120, idle_s=600)
    assert session.expires_at == session.ends_at
    async with transaction(api.services.engine) as connection:
        await extend_session(connection, session.id, idle_s=600)
    rows = await api.sql("SELECT expires_at, ends_at FROM api_keys WHERE id = %s", session.id)
    assert rows == [(session.ends_at, session.ends_at)]


async def test_a_session_does_not_extend_a_key(api: Api) -> None:
    end = (datetime.now(UTC) + timedelta(seconds=60)).isoformat()
    made = await api.made("/keys", {"name": "x", "scopes": ["admin"], "expires_at": end})
    async with transaction(api.services.engine) as connection:
        await extend_session(connection, made["id"], idle_s=600)
    read = (await api.call("GET", f"/keys/{made['id']}")).json()
    assert read["expires_at"] == made["expires_at"]


@pytest.mark.parametrize("change", ["revoke", "narrow", "rename", "rotate", "rotate at once"])
async def test_a_session_ends_when_the_key_it_came_from_changes(api: Api, change: str) -> None:
    made = await api.made("/keys", {"name": "desk", "scopes": ["admin", "publish"]})
    _, text = await begin(api, parent=made["id"], presented=hash_key(made["key"].encode()))
    other, other_text = await begin(api)
    assert not await refused(api, text)
    path = f"/keys/{made['id']}"
    answer = await {
        "revoke": lambda: api.call("DELETE", path),
        "narrow": lambda: api.call("PATCH", path, json={"scopes": ["publish"]}),
        "rename": lambda: api.call("PATCH", path, json={"name": "desk-2"}),
        "rotate": lambda: api.call("POST", f"{path}/rotate"),
        "rotate at once": lambda: api.call("POST", f"{path}/rotate", json={"overlap_s": 0}),
    }[change]()
    assert answer.is_success
    assert await refused(api, text)
    assert not await refused(api, other_text), other.id


async def test_a_session_has_what_its_key_has_now(api: Api) -> None:
    """Check that a key which was narrowed after it was looked up begins no wider session."""
    room = await api.room()
    made = await api.made("/keys", {"name": "desk", "scopes": ["admin"]})
    change = {"scopes": ["manage"], "rooms": [room["id"]], "application": "billing"}
    assert (await api.call("PATCH", f"/keys/{made['id']}", json=change)).is_success
    _, text = await begin(api, parent=made["id"], columns={"scopes": ["admin"]})
    whoami = (await api.call("GET", "/whoami", text)).json()
    assert whoami["scopes"] == ["manage"]
    assert (whoami["rooms"], whoami["application"]) == ([room["id"]], "billing")


async def test_a_key_that_ended_begins_no_session(api: Api) -> None:
    made = await api.made("/keys", {"name": "desk", "scopes": ["admin"]})
    presented = hash_key(made["key"].encode())
    path = f"/keys/{made['id']}"
    rotated = (await api.call("POST", f"{path}/rotate", json={"overlap_s": 600})).json()
    overlap, _ = await begin(api, parent=made["id"], presented=presented)
    until = datetime.fromisoformat(rotated["previous_until"])
    assert overlap.ends_at == until, "the old text opens no session that is longer than its own"
    await begin(api, parent=made["id"], presented=hash_key(rotated["key"].encode()))
    await api.call("POST", f"{path}/rotate", json={"overlap_s": 0})
    with pytest.raises(UnauthenticatedError):
        await begin(api, parent=made["id"], presented=presented)
    await api.call("DELETE", path)
    with pytest.raises(UnauthenticatedError):
        await begin(api, parent=made["id"])
    with pytest.raises(UnauthenticatedError):
        await begin(api, parent=overlap.id)


async def test_a_session_that_begins_during_a_revocation_ends_with_it(api: Api) -> None:
    """Check both orders of sign-in and revocation: in neither a session survives its key."""
    for _ in range(5):
        made = await api.made("/keys", {"name": "desk", "scopes": ["admin"]})
        outcomes = await asyncio.gather(
            api.call("DELETE", f"/keys/{made['id']}"),
            *(begin(api, parent=made["id"]) for _ in range(2)),
            return_exceptions=True,
        )
        for one in outcomes[1:]:
            assert isinstance(one, (tuple, UnauthenticatedError))
        alive = "SELECT 1 FROM api_keys WHERE parent_id = %s AND revoked_at IS NULL"
        assert not await api.sql(alive, made["id"])


async def test_suspension_and_deletion_of_the_organisation_reach_its_sessions(api: Api) -> None:
    both = await make_key(api.services, "installation", Scope.ADMIN, Scope.PLATFORM)
    made = await api.made("/organisations", {"name": "member"}, both)
    _, text = await begin(api, made["id"], roles=[Role.OWNER])
    one = f"/organisations/{made['id']}"
    await api.made("/rooms", room_body("before"), text)
    assert (await api.call("POST", f"{one}/suspend", both)).is_success
    api.services.keys.forget()
    assert (await api.call("GET", "/rooms", text)).status_code == 200
    assert (await api.call("POST", "/rooms", text, json=room_body("after"))).status_code == 403
    assert (await api.call("DELETE", f"{one}?confirm=member", both)).is_success
    assert await refused(api, text)


async def test_keys_and_sessions_are_apart(api: Api) -> None:
    """Check that `/v1/keys` neither lists nor changes sessions, nor `/v1/sessions` keys."""
    session, text = await begin(api, roles=[Role.OWNER])
    key = (await api.call("GET", "/keys")).json()["items"][0]["id"]
    assert session.id not in {one["id"] for one in (await api.call("GET", "/keys")).json()["items"]}
    path = f"/keys/{session.id}"
    missing = f"/keys/{api.services.ids.generate_global(api.services.clock.now_ms())}"
    for method, at, body in (
        ("GET", "", None),
        ("PATCH", "", {"scopes": ["publish"]}),
        ("POST", "/rotate", None),
        ("DELETE", "", None),
    ):
        found = await api.call(method, path + at, json=body)
        unknown = await api.call(method, missing + at, json=body)
        assert found.status_code == unknown.status_code == 404, (method, at)
    assert (await api.call("DELETE", f"/sessions/{key}")).status_code == 404
    assert not await refused(api, text)


async def test_sessions_are_listed_until_they_end(api: Api) -> None:
    (_, first), (second, _) = await begin(api, roles=[Role.OWNER]), await begin(api)
    await begin(api, idle_s=0)
    theirs = await make_session(
        api, (await api.call("GET", "/whoami", "stranger")).json()["organisation"]["id"]
    )
    listed = (await api.call("GET", "/sessions", first)).json()["items"]
    assert listed[0]["id"] == second.id
    assert [one["is_own"] for one in listed] == [False, True]
    page = (await api.call("GET", "/sessions?limit=1", first)).json()
    more = await api.call("GET", f"/sessions?limit=1&cursor={page['next_cursor']}", first)
    assert [one["is_own"] for one in page["items"] + more.json()["items"]] == [False, True]
    assert (await api.call("DELETE", f"/sessions/{theirs}", first)).status_code == 404
    for _ in range(2):
        assert (await api.call("DELETE", f"/sessions/{second.id}", first)).status_code == 204
    left = (await api.call("GET", "/sessions", first)).json()["items"]
    assert [one["is_own"] for one in left] == [True]


async def test_what_a_person_does_is_in_the_journal_as_such(api: Api) -> None:
    session, text = await begin(api, roles=[Role.DEVELOPER])
    await api.made("/rooms", room_body("person"), text)
    await api.made("/rooms", room_body("key"))
    rows = await api.sql(
        "SELECT actor_kind, actor_name FROM journal WHERE action = 'create_room' ORDER BY at, seq"
    )
    assert rows == [("person", "a person"), ("key", "admin")]
    actors = await api.sql("SELECT actor_id::text FROM journal WHERE actor_kind = 'person'")
    assert actors == [(session.id,)]


async def test_a_payload_that_a_person_reads_is_in_the_journal(api: Api) -> None:
    made = await api.room()
    await api.made(f"/rooms/{made['id']}/event-types", {"name": "made"})
    message = (await api.publish(made["id"], "made", {"n": 1}, id="named"))["message_id"]
    named = f"/rooms/{made['id']}/messages/by-id/named"
    _, text = await begin(api, roles=[Role.OPERATOR])

    async def reads() -> list[tuple[Any, ...]]:
        return await api.sql(
            "SELECT actor_kind, object, outcome FROM journal WHERE action = 'read_payload'"
        )

    for path in (f"/messages/{message}", named):
        assert (await api.call("GET", path)).json()["payload"] == {"n": 1}
        without = (await api.call("GET", f"{path}?payload=false", text)).json()
        assert without.keys().isdisjoint({"payload", "headers"})
    assert await reads() == []
    for path in (f"/messages/{message}", named):
        assert (await api.call("GET", path, text)).json()["payload"] == {"n": 1}
    assert await reads() == [("person", f"/v1/messages/{message}", "succeeded")] * 2


async def test_a_session_takes_no_messages(api: Api) -> None:
    """Check that a person reads no payload without an entry of the journal."""
    made = await api.room()
    queue = await api.made(f"/rooms/{made['id']}/subscriptions", {"name": "queue", "type": "PULL"})
    _, text = await begin(api, roles=[Role.OWNER, Role.DEVELOPER])
    for method, path in (("POST", "pull"), ("POST", "ack"), ("GET", "stream")):
        body: dict[str, object] = {"ack_ids": []} if path == "ack" else {}
        more = {"json": body} if method == "POST" else {}
        answer = await api.call(method, f"/subscriptions/{queue['id']}/{path}", text, **more)
        assert answer.status_code == 403, (path, answer.text)
        assert "API key" in answer.json()["detail"]


async def test_view_shows_no_payload(api: Api) -> None:
    """Check everything that a key with `view` may read about a message with marks in it."""
    made = await api.room()
    await api.made(f"/rooms/{made['id']}/event-types", {"name": "made"})
    pull = await api.subscription(made["id"], "queue", type="PULL", max_receives=1)
    push = await api.subscription(made["id"], "hook", headers={"X-Token": "secret-mark"})
    sent = await api.publish(
        made["id"], "made", {"text": "secret-mark"}, headers={"x": "secret-mark"}, id="named"
    )
    message = sent["message_id"]
    _, person = await begin(api, roles=[Role.VIEWER, Role.AUDITOR])
    deliveries = (await api.call("GET", f"/messages/{message}/deliveries", "view")).json()["items"]
    paths = [
        f"/messages/{message}",
        f"/messages/{message}/deliveries",
        f"/messages/{message}/journey",
        f"/rooms/{made['id']}/messages",
        f"/rooms/{made['id']}/messages/by-id/named",
        *(f"/deliveries/{one['id']}" for one in deliveries),
    ]
    for one in (pull, push):
        at = f"/subscriptions/{one['id']}"
        paths += [at, f"{at}/deliveries", f"{at}/sideline", f"{at}/counts"]
    for path in paths:
        for key in ("view", person):
            answer = await api.call("GET", path, key)
            assert answer.status_code == 200, (path, answer.text)
            assert "secret-mark" not in answer.text, path
            assert "payload" not in answer.json(), path
    for key, shown in (("view", False), (person, False), ("admin", True)):
        receipt = (await api.call("GET", f"/messages/{message}/receipt", key)).json()["receipt"]
        body = json.loads(decode_bytes(receipt.split(".")[1]))
        assert ("sha256" in body, "payload_bytes" in body) == (shown, shown), key
    assert not await api.sql("SELECT 1 FROM journal WHERE action = 'read_payload'")


async def test_ended_sessions_and_expired_links_are_deleted_after_a_day(api: Api) -> None:
    gone, kept, alive = [(await begin(api))[0] for _ in range(3)]
    for session, age in ((gone, "25 hours"), (kept, "23 hours")):
        await api.sql(
            f"UPDATE api_keys SET expires_at = now() - interval '{age}' WHERE id = %s RETURNING 1",
            session.id,
        )
    end = datetime.now(UTC) + timedelta(seconds=60)
    key = await api.made("/keys", {"name": "x", "scopes": ["view"], "expires_at": end.isoformat()})
    await api.sql(
        "UPDATE api_keys SET expires_at = now() - interval '9 days' WHERE id = %s RETURNING 1",
        key["id"],
    )
    for age in ("25 hours", "23 hours"):
        await made_link(api)
        await api.sql(
            f"UPDATE sign_in_links SET expires_at = now() - interval '{age}'"
            " WHERE expires_at > now() RETURNING 1"
        )
    await clean_sessions(api.services.engine, lambda: True)
    async with transaction(api.services.engine) as connection:
        assert await delete_ended(connection) == 0
    left = await api.sql("SELECT id::text FROM api_keys WHERE kind = 'session' OR name = 'x'")
    assert {row[0] for row in left} == {kept.id, alive.id, key["id"]}
    assert len(await api.sql("SELECT 1 FROM sign_in_links")) == 1


async def test_only_the_platform_ends_sessions_of_the_platform(api: Api) -> None:
    session, text = await begin(api, roles=[Role.PLATFORM])
    answer = await api.call("DELETE", f"/sessions/{session.id}")
    assert answer.status_code == 403
    assert not await refused(api, text)
    both = await make_key(api.services, "default", Scope.ADMIN, Scope.PLATFORM)
    assert (await api.call("DELETE", f"/sessions/{session.id}", both)).status_code == 204
    assert await refused(api, text)


async def test_a_session_is_no_key_in_the_search(api: Api) -> None:
    session, _ = await begin(api)
    found = await api.call("GET", "/search", params={"q": session.id})
    assert found.json() == {"items": []}


async def test_the_link_that_a_start_prints_has_the_roles_of_its_key(api: Api) -> None:
    both = await make_key(api.services, "default", Scope.ADMIN, Scope.PLATFORM)
    for key, scopes in ((api.keys["admin"], ["admin"]), (both, ["admin", "platform"])):
        roles = [Role.PLATFORM, Role.OWNER]
        path = await asyncio.to_thread(create_sign_in_link, api.url, key, roles)
        begun = await follow(api, {"path": path})
        assert begun is not None
        assert sorted(begun[0].scopes) == scopes


async def test_nothing_was_used_before_it_was_made(api: Api) -> None:
    """A use is stored to the hour, in which the key or session may have begun."""
    await make_session(api)
    created = (await api.made("/keys", {"name": "fresh", "scopes": ["view"]}, "admin"))["id"]
    await api.sql("UPDATE api_keys SET last_used_at = created_at - interval '50 minutes'")
    key = (await api.call("GET", f"/keys/{created}", "admin")).json()
    (session, *_) = (await api.call("GET", "/sessions", "admin")).json()["items"]
    for one in (key, session):
        assert one["last_used_at"] == one["created_at"]
    later = "2099-01-01T10:00:00Z"
    await api.sql("UPDATE api_keys SET last_used_at = %s", later)
    assert (await api.call("GET", f"/keys/{created}", "admin")).json()["last_used_at"] == later
