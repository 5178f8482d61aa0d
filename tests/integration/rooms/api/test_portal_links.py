"""Test links to portals: which subscriptions they show, for how long, and what they allow."""

import asyncio
import re
from datetime import datetime
from typing import Any, Final

import pytest

from rooms.api.app import ROUTES
from rooms.api.auth import FOR_PORTALS
from rooms.db.catalog.sessions import end_session
from rooms.db.catalog.sign_in_links import LinkKind, use_link
from rooms.db.connection import transaction
from rooms.domain.state_machine import Scope
from rooms.errors import UnauthenticatedError
from tests.integration.rooms.api.conftest import Api, make_key
from tests.integration.rooms.api.members import member, shared_room, subscribe
from tests.integration.rooms.api.sign_in import begin, follow, token_of
from tests.integration.rooms.api.test_sessions import refused


async def two_subscriptions(api: Api) -> tuple[str, str]:
    """Create two subscriptions of the default organisation, in rooms of their own."""
    found = []
    for name in ("shown", "hidden"):
        room = await api.room(name)
        found.append((await api.subscription(room["id"], name))["id"])
    return found[0], found[1]


async def made_link(api: Api, key: str = "admin", **fields: Any) -> dict[str, Any]:
    return await api.made("/portal-links", {"name": "Ada", **fields}, key)


async def test_a_link_shows_its_subscriptions_and_no_other(api: Api) -> None:
    shown, hidden = await two_subscriptions(api)
    link = await made_link(api, subscription_ids=[shown, shown])
    assert (link["subscription_ids"], link["scopes"]) == ([shown], ["view"])
    begun = await follow(api, link)
    assert begun is not None
    _, text = begun
    assert (await api.call("GET", f"/subscriptions/{shown}", text)).status_code == 200
    assert (await api.call("GET", f"/subscriptions/{hidden}", text)).status_code == 404
    listed = (await api.call("GET", "/subscriptions", text)).json()["items"]
    assert hidden not in {one["id"] for one in listed}
    for method, path in (("POST", "pause"), ("POST", "rotate-secret")):
        answer = await api.call(method, f"/subscriptions/{shown}/{path}", text)
        assert answer.status_code == 403


@pytest.mark.parametrize(
    ("access", "scopes", "allowed"),
    [
        ("read", ["view"], set()),
        ("operate", ["operate", "view"], {"pause"}),
        ("manage", ["manage", "operate", "view"], {"pause", "rotate-secret"}),
    ],
)
async def test_access_gives_its_scopes(
    api: Api, access: str, scopes: list[str], allowed: set[str]
) -> None:
    shown, hidden = await two_subscriptions(api)
    link = await made_link(api, subscription_ids=[shown], access=access)
    assert link["scopes"] == scopes
    begun = await follow(api, link)
    assert begun is not None
    for action in ("pause", "rotate-secret"):
        answer = await api.call("POST", f"/subscriptions/{shown}/{action}", begun[1])
        assert answer.status_code == (200 if action in allowed else 403), answer.text
        other = await api.call("POST", f"/subscriptions/{hidden}/{action}", begun[1])
        assert other.status_code == (404 if action in allowed else 403)
    body = {"name": "more", "delivery_delay_ms": 1, "delivery_delay_multiplier": 1}
    created = await api.call("POST", "/rooms", begun[1], json={**body, "delivery_attempts": 1})
    assert created.status_code == 403
    for path in ("/keys", "/sessions", "/journal"):
        assert (await api.call("GET", path, begun[1])).status_code == 403


async def test_a_link_works_for_many_until_it_expires(api: Api) -> None:
    shown, _ = await two_subscriptions(api)
    link = await made_link(api, subscription_ids=[shown], expires_s=600)
    begun = await asyncio.gather(*(follow(api, link) for _ in range(5)))
    expires_at = datetime.fromisoformat(link["expires_at"])
    for one in begun:
        assert one is not None
        assert one[0].ends_at == expires_at, "no session is longer than its link"
    await api.sql("UPDATE sign_in_links SET expires_at = now() RETURNING 1")
    assert await follow(api, link) is None


async def test_a_link_to_the_whole_organisation(api: Api) -> None:
    shown, hidden = await two_subscriptions(api)
    own = (await api.call("GET", "/whoami")).json()["organisation"]["id"]
    begun = await follow(api, await made_link(api, organisation_id=own))
    assert begun is not None
    for one in (shown, hidden):
        assert (await api.call("GET", f"/subscriptions/{one}", begun[1])).status_code == 200


async def published(api: Api, key: str, room: int) -> str:
    """Publish a message and return its id."""
    body = {"event_type": "order.paid", "payload": {}}
    answer = await api.call("POST", f"/rooms/{room}/messages", key, json=body)
    return str(answer.json()["message_id"])


async def test_a_portal_of_an_organisation_shows_what_it_receives_and_nothing_that_it_owns(
    api: Api,
) -> None:
    """Check an organisation that owns a room with messages for itself and for another one."""
    owner, subscriber = await member(api), await member(api)
    room = await shared_room(api, owner, subscription_policy="automatic", visibility="listed")
    theirs = (await subscribe(api, subscriber, room))["id"]
    empty = await shared_room(api, owner)
    link = await made_link(api, owner.key, organisation_id=owner.id, access="manage")
    begun = await follow(api, link)
    assert begun is not None
    _, text = begun
    foreign = await published(api, owner.key, room)
    paths = (
        f"/subscriptions/{theirs}",
        f"/messages/{foreign}",
        f"/rooms/{empty}",
        f"/rooms/{room}",
    )
    for path in (*paths, f"/rooms/{room}/event-types", f"/messages/{foreign}/journey"):
        assert (await api.call("GET", path, owner.key)).status_code == 200, path
        assert (await api.call("GET", path, text)).status_code == 404, path
    own = (await subscribe(api, owner, room))["id"]
    received = await published(api, owner.key, room)
    for path in (f"/subscriptions/{own}", f"/messages/{received}", f"/rooms/{room}"):
        assert (await api.call("GET", path, text)).status_code == 200, path
    assert (await api.call("GET", f"/messages/{foreign}", text)).status_code == 404
    seen = (await api.call("GET", f"/messages/{received}/deliveries", text)).json()["items"]
    assert [one["subscription_id"] for one in seen] == [own]
    for role in ("subscriber", "owner"):
        listed = (await api.call("GET", f"/subscriptions?role={role}", text)).json()["items"]
        assert {one["id"] for one in listed} <= {own}
    await api.call(
        "POST", f"/rooms/{room}/restore", owner.key, json={"since": "2020-01-01T00:00:00Z"}
    )
    assert (await api.call("GET", "/jobs", owner.key)).json()["items"]
    assert not (await api.call("GET", "/jobs", text)).json()["items"]


PARAMETER: Final = re.compile(r"\{[a-z_]+(?::[a-z]+)?\}")
NEVER: Final = frozenset({"/rooms", "/search", "/directory", "/keys", "/sessions", "/portal-links"})


async def test_a_portal_does_not_see_where_the_owner_gets_its_events(api: Api) -> None:
    owner = await member(api)
    room = await shared_room(api, owner, operational_url="https://ops.example.com/secret")
    own = (await subscribe(api, owner, room))["id"]
    whole = (await api.call("GET", f"/rooms/{room}", owner.key)).json()
    assert whole["operational_url"] == "https://ops.example.com/secret"
    assert "rooms.endpoint.disabled" in whole["operational_events"]
    for shown in ({"organisation_id": owner.id}, {"subscription_ids": [own]}):
        begun = await follow(api, await made_link(api, owner.key, **shown))
        assert begun is not None
        seen = (await api.call("GET", f"/rooms/{room}", begun[1])).json()
        assert (seen["operational_url"], seen["operational_events"]) == (None, None)


async def test_a_portal_does_not_see_the_endpoint_for_the_operational_events_of_a_room(
    api: Api,
) -> None:
    """Check the room's own subscription, with a sidelined delivery and a job."""
    owner = await member(api)
    room = await shared_room(api, owner, operational_url="https://ops.example.com/secret")
    begun = await follow(
        api, await made_link(api, owner.key, organisation_id=owner.id, access="manage")
    )
    assert begun is not None
    _, text = begun
    (endpoint,) = (await api.call("GET", "/subscriptions", owner.key)).json()["items"]
    assert endpoint["name"] == "~operational"
    assert (await api.call("GET", f"/rooms/{room}", owner.key)).status_code == 200
    assert (await api.call("GET", f"/rooms/{room}", text)).status_code == 404
    own = (await subscribe(api, owner, room))["id"]
    received = await published(api, owner.key, room)
    await api.sql(
        f"UPDATE deliveries SET subscription_id = '{endpoint['id']}' WHERE room_id = {room}"
        f" AND subscription_id = '{own}' RETURNING 1"
    )
    ((delivery,),) = await api.sql(f"SELECT id::text FROM deliveries WHERE room_id = {room}")
    await api.sql(
        "INSERT INTO sidelined (room_id, id, subscription_id, generation, reason)"
        f" VALUES ({room}, '{delivery}', '{endpoint['id']}', 1, 'exhausted') RETURNING 1"
    )
    path = f"/subscriptions/{endpoint['id']}"
    shovel = await api.call("POST", f"{path}/sideline/shovel", owner.key, json={})
    assert shovel.status_code == 202, shovel.text
    for there in (path, f"/deliveries/{delivery}", f"/messages/{received}"):
        assert (await api.call("GET", there, owner.key)).status_code == 200, there
        assert (await api.call("GET", there, text)).status_code == 404, there
    for action in ("pause", "resume", "rotate-secret"):
        answer = await api.call("POST", f"{path}/{action}", text)
        assert answer.status_code == 404, action
    for page in ("/subscriptions", "/sidelines", "/jobs"):
        assert endpoint["id"] in (await api.call("GET", page, owner.key)).text, page
        assert endpoint["id"] not in (await api.call("GET", page, text)).text, page
    status = {key: (await api.call("GET", "/status", key)).json() for key in (owner.key, text)}
    assert [one["name"] for one in status[owner.key]["subscriptions"]] == ["~operational"]
    assert status[owner.key]["backlog"]["sidelined"] == {"exhausted": 1}
    assert status[text]["subscriptions"] == []
    assert status[text]["backlog"]["sidelined"] == {}


async def test_no_link_shows_the_endpoint_for_the_operational_events_of_a_room(api: Api) -> None:
    owner = await member(api)
    await shared_room(api, owner, operational_url="https://ops.example.com/secret")
    (endpoint,) = (await api.call("GET", "/subscriptions", owner.key)).json()["items"]
    body = {"name": "Ada", "subscription_ids": [endpoint["id"]]}
    answer = await api.call("POST", "/portal-links", owner.key, json=body)
    assert answer.status_code == 422, answer.text
    assert answer.json()["errors"][0]["field"] == "subscription_ids"


async def test_a_portal_calls_no_other_route(api: Api) -> None:
    """Check every route with a session of a portal that has all scopes of portals."""
    own = (await api.call("GET", "/whoami")).json()["organisation"]["id"]
    begun = await follow(api, await made_link(api, organisation_id=own, access="manage"))
    assert begun is not None
    refused_paths = set()
    for handler in ROUTES:
        path = PARAMETER.sub("01900000-0000-7000-8000-000000000000", min(handler.paths))
        for method in handler.http_methods:
            body: dict[str, Any] = {"json": {}} if method in {"POST", "PATCH", "PUT"} else {}
            answer = await api.call(method, path, begun[1], **body)
            if handler.opt.get(FOR_PORTALS):
                reads = (
                    Scope.MANAGE in handler.opt["scopes"] or Scope.OPERATE in handler.opt["scopes"]
                )
                assert reads
                assert answer.status_code != 403, (method, path)
            else:
                assert answer.status_code == 403, (method, path)
                refused_paths.add(path)
    assert refused_paths >= NEVER


async def test_a_session_says_that_it_is_of_a_portal(api: Api) -> None:
    shown, _ = await two_subscriptions(api)
    begun = await follow(api, await made_link(api, subscription_ids=[shown]))
    assert begun is not None
    assert (await api.call("GET", "/whoami", begun[1])).json()["portal"] is True
    assert (await api.call("GET", "/whoami")).json()["portal"] is False
    (listed,) = (await api.call("GET", "/sessions")).json()["items"]
    assert listed["portal"] is True


async def test_a_link_of_one_kind_is_not_used_up_as_the_other(api: Api) -> None:
    shown, _ = await two_subscriptions(api)
    console = await api.made("/sign-in-links", {"name": "Ada", "roles": ["viewer"]})
    portal = await made_link(api, subscription_ids=[shown])
    async with transaction(api.services.engine) as connection:
        assert await use_link(connection, token_of(console), LinkKind.PORTAL) is None
        assert await use_link(connection, token_of(portal), LinkKind.CONSOLE) is None
    assert None not in [await follow(api, link) for link in (console, portal)]


async def test_only_the_subscriber_makes_links_to_a_subscription(api: Api) -> None:
    """Check the room's owner, a stranger and the platform: for all of them it is not there."""
    owner, subscriber, stranger = await member(api), await member(api), await member(api)
    room = await shared_room(api, owner, subscription_policy="automatic", visibility="listed")
    theirs = (await subscribe(api, subscriber, room))["id"]
    both = await make_key(api.services, "default", Scope.ADMIN, Scope.PLATFORM)
    for key in (owner.key, stranger.key, both):
        for target in ({"subscription_ids": [theirs]}, {"organisation_id": subscriber.id}):
            answer = await api.call("POST", "/portal-links", key, json={"name": "Ada", **target})
            assert answer.status_code == 404, answer.text
    begun = await follow(api, await made_link(api, subscriber.key, subscription_ids=[theirs]))
    assert begun is not None
    assert (await api.call("GET", f"/subscriptions/{theirs}", begun[1])).status_code == 200
    assert not await api.sql("SELECT 1 FROM sign_in_links WHERE kind <> 'portal'")


async def test_no_link_gives_more_than_its_maker_has(api: Api) -> None:
    shown, hidden = await two_subscriptions(api)
    own = (await api.call("GET", "/whoami")).json()["organisation"]["id"]
    assert (await made_link(api, "manage", subscription_ids=[shown]))["scopes"] == ["view"]
    cases: list[tuple[dict[str, Any], dict[str, Any], int]] = [
        ({"scopes": ["manage"]}, {"subscription_ids": [shown], "access": "manage"}, 403),
        ({"scopes": ["operate"]}, {"subscription_ids": [shown]}, 403),
        ({"scopes": ["admin"], "subscriptions": [shown]}, {"subscription_ids": [shown]}, 201),
        ({"scopes": ["admin"], "subscriptions": [shown]}, {"subscription_ids": [hidden]}, 404),
        ({"scopes": ["admin"], "subscriptions": [shown]}, {"organisation_id": own}, 403),
    ]
    for number, (key, target, status) in enumerate(cases):
        made = await api.made("/keys", {"name": f"k-{number}", **key})
        body = {"name": "Ada", **target}
        answer = await api.call("POST", "/portal-links", made["key"], json=body)
        assert answer.status_code == status, (key, target, answer.text)


async def test_a_link_ends_with_the_key_that_made_it(api: Api) -> None:
    shown, _ = await two_subscriptions(api)
    made = await api.made("/keys", {"name": "backend", "scopes": ["manage"]})
    _, person = await begin(api, parent=made["id"])
    links = [await made_link(api, key, subscription_ids=[shown]) for key in (made["key"], person)]
    assert None not in [await follow(api, link) for link in links]
    await api.call("DELETE", f"/keys/{made['id']}")
    assert [await follow(api, link) for link in links] == [None, None]
    assert await refused(api, person)


@pytest.mark.parametrize("way", ["end", "end all", "end all, idle"])
async def test_a_link_ends_with_the_session_that_made_it(api: Api, way: str) -> None:
    """So it does if that was idle for too long, and the person is signed out everywhere then."""
    shown, _ = await two_subscriptions(api)
    session, person = await begin(api, name="Bob", columns={"scopes": ["manage"]})
    link = await made_link(api, person, subscription_ids=[shown])
    begun = await follow(api, link)
    assert begun is not None
    if way == "end":
        answer = await api.call("DELETE", f"/sessions/{session.id}")
        assert answer.status_code == 204, answer.text
    else:
        if way == "end all, idle":
            await api.sql("UPDATE api_keys SET expires_at = now() WHERE id = %s", session.id)
            assert await follow(api, link) is not None
        answer = await api.call("POST", "/people/end-sessions", json={"name": "Bob"})
        assert (answer.status_code, answer.json()) == (200, {"ended": 1})
    assert await follow(api, link) is None
    assert await refused(api, begun[1])


async def test_a_link_of_an_administrator_outlives_the_session(api: Api) -> None:
    shown, _ = await two_subscriptions(api)
    session, person = await begin(api, columns={"scopes": ["admin"]})
    link = await made_link(api, person, subscription_ids=[shown])
    await api.call("DELETE", f"/sessions/{session.id}")
    assert await follow(api, link) is not None


async def test_no_session_begins_by_a_link_while_its_maker_is_ended(api: Api) -> None:
    shown, _ = await two_subscriptions(api)
    session, person = await begin(api, columns={"scopes": ["manage"]})
    link = await made_link(api, person, subscription_ids=[shown])
    async with transaction(api.services.engine) as connection:
        await end_session(connection, session.organisation_id, session.id)
        following = asyncio.create_task(follow(api, link))
        done, _ = await asyncio.wait([following], timeout=0.3)
        assert not done
    with pytest.raises(UnauthenticatedError):
        await following


async def test_a_deleted_subscription_is_not_shown(api: Api) -> None:
    shown, _ = await two_subscriptions(api)
    begun = await follow(api, await made_link(api, subscription_ids=[shown]))
    assert begun is not None
    await api.call("DELETE", f"/subscriptions/{shown}")
    assert (await api.call("GET", f"/subscriptions/{shown}", begun[1])).status_code == 404
    body = {"name": "Ada", "subscription_ids": [shown]}
    assert (await api.call("POST", "/portal-links", json=body)).status_code == 404


async def test_wrong_links_are_refused_by_field(api: Api) -> None:
    shown, _ = await two_subscriptions(api)
    own = (await api.call("GET", "/whoami")).json()["organisation"]["id"]
    for body, field in (
        ({}, "subscription_ids"),
        ({"subscription_ids": [shown], "organisation_id": own}, "subscription_ids"),
        ({"subscription_ids": []}, "subscription_ids"),
        ({"subscription_ids": [shown] * 101}, "subscription_ids"),
        ({"subscription_ids": [shown], "access": "admin"}, "access"),
        ({"subscription_ids": [shown], "expires_s": 59}, "expires_s"),
        ({"subscription_ids": [shown], "expires_s": 30 * 86_400 + 1}, "expires_s"),
        ({"subscription_ids": [shown], "session_s": 86_401}, "session_s"),
        ({"subscription_ids": [shown], "name": "a\u200bb"}, "name"),
    ):
        answer = await api.call("POST", "/portal-links", json={"name": "Ada", **body})
        assert answer.status_code == 422, body
        assert answer.json()["errors"][0]["field"] == field


async def test_the_token_is_nowhere(api: Api) -> None:
    shown, _ = await two_subscriptions(api)
    token = token_of(await made_link(api, subscription_ids=[shown]))
    for table in ("journal", "sign_in_links"):
        assert token not in str(await api.sql(f"SELECT to_jsonb(t)::text FROM {table} t"))


async def test_a_session_prolongs_its_access_by_no_link(api: Api) -> None:
    shown, _ = await two_subscriptions(api)
    both = await make_key(api.services, "default", Scope.MANAGE, Scope.OPERATE)
    link = await made_link(api, both, subscription_ids=[shown], access="manage", expires_s=600)
    begun = await follow(api, link)
    assert begun is not None
    assert begun[0].ends_at == datetime.fromisoformat(link["expires_at"])
    body = {"name": "Ada", "subscription_ids": [shown], "expires_s": 86_400}
    assert (await api.call("POST", "/portal-links", begun[1], json=body)).status_code == 403
    session, person = await begin(api, columns={"scopes": ["manage"]}, lasting_s=600)
    again = await made_link(api, person, subscription_ids=[shown], expires_s=86_400)
    assert datetime.fromisoformat(again["expires_at"]) <= session.ends_at
