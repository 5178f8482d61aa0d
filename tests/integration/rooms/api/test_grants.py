"""Test what grants allow: who publishes what, from when, until when, and what an answer names."""

import asyncio
import time
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest

from rooms.api.auth import authenticate
from rooms.api.fast_routes import FastRoutes
from tests.integration.rooms.api.conftest import Api
from tests.integration.rooms.api.members import (
    EVENT_TYPES,
    PAID,
    Member,
    accepted,
    grant,
    member,
    publish,
    revoke,
    shared_room,
    subscribe,
)
from tests.support.installation import until

NOT_THERE = "urn:rooms:problem:not-found"


def at(seconds: float) -> str:
    return (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat()


async def codes(api: Api, key: str, room: int) -> dict[str, int]:
    """Return the status that a publish of each event type is answered with."""
    return {name: (await publish(api, key, room, name)).status_code for name in EVENT_TYPES}


@pytest.mark.parametrize(
    ("patterns", "allowed"),
    [
        (None, set(EVENT_TYPES)),
        (["*"], set(EVENT_TYPES)),
        (["order"], {"order"}),
        (["order.*"], {PAID, "order.sent"}),
        ([PAID, "invoice"], {PAID, "invoice"}),
        (["unknown"], set()),
    ],
)
async def test_a_grant_opens_the_event_types_that_it_names(
    api: Api, patterns: list[str] | None, allowed: set[str]
) -> None:
    owner, other, stranger = [await member(api) for _ in range(3)]
    room = await shared_room(api, owner)
    assert set((await codes(api, other.key, room)).values()) == {404}
    await grant(api, owner, room, other.id, event_types=patterns)
    expected = {name: 202 if name in allowed else 403 for name in EVENT_TYPES}
    assert await codes(api, other.key, room) == expected
    assert set((await codes(api, stranger.key, room)).values()) == {404}
    assert (await publish(api, other.key, room, "not-there")).status_code == (
        422 if patterns in (None, ["*"]) else 403
    ), "an event type beyond the grant is refused before anyone looks whether it exists"


async def test_a_grant_for_all_ends_for_all(api: Api) -> None:
    owner, *others = [await member(api) for _ in range(3)]
    room = await shared_room(api, owner)
    given = await grant(api, owner, room, "*", event_types=["order.*"])
    own = await grant(api, owner, room, others[0].id, event_types=["invoice"])
    for other, invoice in zip(others, (202, 403), strict=True):
        found = await codes(api, other.key, room)
        assert (found[PAID], found["invoice"], found["order"]) == (202, invoice, 403)
    await revoke(api, owner, room, given)
    assert (await codes(api, others[0].key, room))[PAID] == 403
    assert set((await codes(api, others[1].key, room)).values()) == {404}
    await revoke(api, owner, room, own)
    assert set((await codes(api, others[0].key, room)).values()) == {404}
    assert set((await codes(api, owner.key, room)).values()) == {202}


async def test_a_grant_begins_and_ends_by_the_clock(api: Api) -> None:
    owner, other = await member(api), await member(api)
    room = await shared_room(api, owner)
    await grant(api, owner, room, other.id, starts_at=at(3600))
    await grant(api, owner, room, other.id, starts_at=at(-3600), until=at(-60))
    assert set((await codes(api, other.key, room)).values()) == {404}
    await grant(api, owner, room, other.id, starts_at=at(0.5), until=at(1.5))

    async def is_open() -> bool:
        return (await publish(api, other.key, room)).status_code == 202

    async def is_closed() -> bool:
        return not await is_open()

    await until(is_open, "the grant to begin")
    await until(is_closed, "the grant to end")
    assert set((await codes(api, other.key, room)).values()) == {404}


async def test_who_may_know_a_room_is_refused_by_its_grants_and_others_find_no_room(
    api: Api,
) -> None:
    owner, other = await member(api), await member(api)
    room = await shared_room(api, owner)
    at = f"/rooms/{room}"
    one = {"event_type": PAID, "payload": 1}

    async def answers() -> set[tuple[int, str]]:
        """Return status and text of each way to publish, and of one into a room that is not."""
        found = [
            await api.call("POST", f"{at}/messages", other.key, json=one),
            await api.call("POST", f"{at}/messages/batch", other.key, json={"messages": [one]}),
            await api.call("POST", f"{at}/messages/check", other.key, json=one),
        ]
        return {(answer.status_code, answer.json()["detail"]) for answer in found}

    missing = await publish(api, other.key, 1)
    nothing = {(404, missing.json()["detail"])}
    refused = {(403, "the room's owner did not grant publishing to your organisation")}
    assert await answers() == nothing
    assert (await api.call("GET", at, other.key)).status_code == 404
    for listing, expected in (("listed", refused), ("private", nothing)):
        changed = await api.call("PATCH", at, owner.key, json={"visibility": listing})
        assert changed.status_code == 200
        assert await answers() == expected
    subscribing = await grant(api, owner, room, other.id, "subscribe")
    assert await answers() == refused
    assert (await api.call("GET", at, other.key)).json()["publishes"] == []
    subscription = await subscribe(api, other, room)
    await revoke(api, owner, room, subscribing)
    assert await answers() == refused, "its subscription is suspended, and there"
    await api.call("DELETE", f"/subscriptions/{subscription['id']}", other.key)
    assert await answers() == nothing
    await grant(api, owner, room, other.id, event_types=["order.*", "invoice"])
    read = await api.call("GET", at, other.key)
    assert read.json()["publishes"] == ["invoice", "order.*"]
    assert (await api.call("GET", at, owner.key)).json()["publishes"] is None


async def test_a_publish_after_the_revocation_is_refused_in_every_process(
    api: Api, elsewhere: Api
) -> None:
    owner, other = await member(api), await member(api)
    room = await shared_room(api, owner)
    for publishing, revoking in ((api, elsewhere), (elsewhere, api), (api, api)):
        given = await grant(revoking, owner, room, other.id)
        first = await accepted(publishing, other.key, room)
        await revoke(revoking, owner, room, given)
        refused = await publish(publishing, other.key, room)
        assert (refused.status_code, refused.json()["type"]) == (404, NOT_THERE)
        kept = await api.sql("SELECT count(*) FROM messages WHERE id = %s", first)
        assert kept == [(1,)]


async def test_publishes_and_a_revocation_at_once_have_an_order(api: Api, elsewhere: Api) -> None:
    """Check that none that begins after the revocation was answered succeeds, nor half of one."""
    owner, other = await member(api), await member(api)
    room = await shared_room(api, owner)
    for _ in range(3):
        given = await grant(api, owner, room, other.id)
        before = (await api.sql("SELECT count(*) FROM messages"))[0][0]
        outcomes: list[tuple[float, int]] = []
        over = asyncio.Event()

        async def publish_on(through: Api, *, outcomes: list[Any], over: asyncio.Event) -> None:
            while not over.is_set():
                begun = time.monotonic()
                outcomes.append((begun, (await publish(through, other.key, room)).status_code))

        async def enough(after: float = 0.0, *, outcomes: list[Any]) -> bool:
            return len([begun for begun, _ in outcomes if begun > after]) >= 6

        loops = [
            asyncio.create_task(publish_on(through, outcomes=outcomes, over=over))
            for through in (api, elsewhere, elsewhere)
        ]
        await until(partial(enough, outcomes=outcomes), "publishes")
        await revoke(api, owner, room, given)
        answered = time.monotonic()
        await until(partial(enough, answered, outcomes=outcomes), "later publishes")
        over.set()
        await asyncio.gather(*loops)
        assert {code for begun, code in outcomes if begun > answered} == {404}
        assert {code for _, code in outcomes} == {202, 404}
        after = (await api.sql("SELECT count(*) FROM messages"))[0][0]
        assert after - before == sum(code == 202 for _, code in outcomes)


async def test_an_answer_names_the_publishers_own_destinations_and_counts_all(api: Api) -> None:
    owner, publisher, third = [await member(api) for _ in range(3)]
    room = await shared_room(api, owner)
    await grant(api, owner, room, publisher.id)
    for one in (publisher, third):
        await grant(api, owner, room, one.id, "subscribe")
    made = [await subscribe(api, one, room) for one in (owner, publisher, third)]
    everywhere = [one["destination"] for one in made]
    for key, named in ((publisher.key, everywhere[1:2]), (owner.key, everywhere)):
        answer = (await publish(api, key, room)).json()
        assert (answer["destinations"], answer["destination_count"]) == (named, 3)
    path = f"/rooms/{room}/messages/batch"
    batch = {"messages": [{"event_type": PAID, "payload": 1}]}
    (answer,) = (await api.call("POST", path, publisher.key, json=batch)).json()["messages"]
    assert (answer["destinations"], answer["destination_count"]) == (everywhere[1:2], 3)
    await api.call("PATCH", f"/rooms/{room}", owner.key, json={"transparent": True})
    answer = (await publish(api, publisher.key, room)).json()
    assert (answer["destinations"], answer["destination_count"]) == (everywhere, 3)


async def test_destinations_of_others_are_unknown(api: Api) -> None:
    owner, publisher, third = [await member(api) for _ in range(3)]
    room, other_room = await shared_room(api, owner), await shared_room(api, owner)
    await grant(api, owner, room, publisher.id)
    for one in (publisher, third):
        await grant(api, owner, room, one.id, "subscribe")
    own = await subscribe(api, publisher, room)
    hidden = [
        await subscribe(api, owner, room, "owners"),
        await subscribe(api, third, room, "thirds"),
        await subscribe(api, owner, other_room, "elsewhere"),
    ]
    unknown = own["destination"][:-12] + "0" * 12
    texts = [unknown, "", "~operational", own["id"], own["name"]]
    texts += [one[field] for one in hidden for field in ("destination", "id", "name")]
    answers = set()
    for text in texts:
        for chosen, place in ([text], 0), ([own["destination"], text], 1):
            refused = await publish(api, publisher.key, room, destinations=chosen)
            assert refused.status_code == 422
            (problem,) = refused.json()["errors"]
            assert problem["field"] == f"destinations[{place}]"
            answers.add((problem["message"], refused.json()["type"]))
    assert len(answers) == 1
    answer = await publish(api, publisher.key, room, destinations=[own["destination"]])
    assert (answer.json()["destinations"], answer.json()["destination_count"]) == (
        [own["destination"]],
        1,
    )


async def all_publishers(api: Api) -> tuple[int, list[Member]]:
    """Return a room with its owner and two publishers."""
    members = [await member(api) for _ in range(3)]
    room = await shared_room(api, members[0])
    await grant(api, members[0], room, "*")
    return room, members


@pytest.mark.parametrize("text", ["same", "x" * 128])
async def test_equal_ids_of_two_organisations_never_meet(api: Api, text: str) -> None:
    room, members = await all_publishers(api)
    first = [await accepted(api, one.key, room, id=text, payload="same") for one in members]
    assert len(set(first)) == 3
    for one, message in zip(members, first, strict=True):
        again = await publish(api, one.key, room, id=text, payload="same")
        assert again.json()["message_id"] == message
        assert again.headers["idempotent-replayed"] == "true"
        other = await publish(api, one.key, room, id=text, payload="another")
        assert other.status_code == 409
        assert one.id not in other.text, "the refusal names the id as it was given"
    path = f"/rooms/{room}/messages/batch"
    body = {"messages": [{"id": text, "event_type": PAID, "payload": "same"}]}
    for one, message in zip(members, first, strict=True):
        (answer,) = (await api.call("POST", path, one.key, json=body)).json()["messages"]
        assert answer["message_id"] == message


@pytest.mark.parametrize("text", ["same", "x" * 255])
async def test_equal_idempotency_keys_of_two_organisations_never_meet(api: Api, text: str) -> None:
    room, members = await all_publishers(api)
    found = [
        await accepted(api, one.key, room, once=text, payload=n % 2)
        for n, one in enumerate(members)
    ]
    assert len(set(found)) == 3
    for number, (one, message) in enumerate(zip(members, found, strict=True)):
        again = await publish(api, one.key, room, once=text, payload=number % 2)
        assert again.json()["message_id"] == message
        assert (await publish(api, one.key, room, once=text, payload=7)).status_code == 409


async def test_an_owner_cannot_take_the_ids_of_its_publishers(api: Api) -> None:
    """Check that nothing an owner may send is equal to a foreign id as it is stored."""
    room, (owner, other, _) = await all_publishers(api)
    message = await accepted(api, other.key, room, id="a", once="b")
    for taken in ({"id": f"{other.id} a"}, {"once": f"{other.id} b"}):
        refused = await publish(api, owner.key, room, **taken)
        assert refused.status_code == 422
    for given in ({"id": f"{other.id}a"}, {"once": f"{other.id}b"}):
        assert await accepted(api, owner.key, room, **given) != message


async def test_a_first_answer_stays_with_its_publisher(api: Api) -> None:
    """Check that a retry gets the first answer or none, and that no grant opens that of others."""
    room, (owner, other, third) = await all_publishers(api)
    message = await accepted(api, other.key, room, id="a", once="b")
    (given,) = (await api.call("GET", f"/rooms/{room}/grants", owner.key)).json()["items"]
    await revoke(api, owner, room, given["id"])
    retried = await publish(api, other.key, room, id="a", once="b")
    assert retried.status_code == 404 or retried.json()["message_id"] == message
    for one in (other, third):
        assert (await publish(api, one.key, room)).status_code == 404
        assert (await publish(api, one.key, room, id="a", once="b")).status_code == 404
    await grant(api, owner, room, other.id, event_types=["invoice"])
    assert (await publish(api, other.key, room, id="a", once="b")).status_code == 403
    await grant(api, owner, room, other.id)
    assert await accepted(api, other.key, room, id="a", once="b") == message
    assert await api.sql("SELECT count(*) FROM messages") == [(1,)]


async def test_a_key_for_subscriptions_cannot_distinguish_rooms(api: Api) -> None:
    """Check the hot routes too, which answer ahead of Litestar's guards."""
    owner, other = await member(api), await member(api)
    room = await shared_room(api, owner)
    own = await shared_room(api, other)
    subscription = await subscribe(api, other, own)
    body = {"name": "n", "scopes": ["publish"], "subscriptions": [subscription["id"]]}
    narrow = await api.made("/keys", body, other.key)

    async def admitted(headers: Any, scopes: Any, client: Any, certificate: Any) -> Any:
        return await authenticate(api.services, headers, scopes, client, certificate)

    async def unused(*_: Any) -> None:
        raise AssertionError("it is a hot route")

    hot = FastRoutes(
        unused,
        authenticate=admitted,
        publisher=api.services.publisher,
        pull_api=None,
        max_body_bytes=1000,
    )
    answers = set()
    for number in (room, own, 1_000_000_001):
        route = hot.match(f"/v1/rooms/{number}/messages")
        assert route is not None
        status, _, content = await hot.answer(
            *route,
            path="/",
            headers_in={b"authorization": f"Bearer {narrow['key']}".encode()},
            body=b'{"event_type":"order.paid","payload":1}',
            wait_disconnect=unused,
            on_authenticated=lambda _: None,
        )
        answers.add((status, content))
        assert (await publish(api, narrow["key"], number)).status_code == 403
    assert len(answers) == 1
    assert answers.pop()[0] == 403


async def test_the_names_of_grantees_resolve_to_one_organisation(api: Api) -> None:
    owner = await member(api)
    other = await member(api, "other", member_id="SE/GOV/1234")
    room = await shared_room(api, owner)
    for reference in (other.id, other.name, "SE/GOV/1234"):
        made = await api.made(
            f"/rooms/{room}/grants", {"organisation_id": reference, "kind": "publish"}, owner.key
        )
        assert made["organisation_id"] == other.id
        assert (made["organisation"], made["member_id"]) == (other.name, "SE/GOV/1234")
    for reference in (
        owner.id,
        owner.name,
        "unknown",
        "SE/GOV/123",
        other.id[:-1],
        other.id.upper(),
    ):
        body = {"organisation_id": reference, "kind": "publish"}
        refused = await api.call("POST", f"/rooms/{room}/grants", owner.key, json=body)
        assert refused.status_code == 422
        assert refused.json()["errors"][0]["field"] == "organisation_id"


@pytest.mark.parametrize("at", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00"])
async def test_times_beyond_every_calendar_are_refused_by_field(api: Api, at: str) -> None:
    owner, other = await member(api), await member(api)
    room = await shared_room(api, owner)
    given = {"organisation_id": other.id, "kind": "publish"}
    key = {"name": "x", "scopes": ["publish"]}
    made = await api.made("/keys", key, owner.key)
    for method, path, body, field in (
        ("POST", f"/rooms/{room}/grants", given, "starts_at"),
        ("POST", f"/rooms/{room}/grants", given, "until"),
        ("POST", "/keys", key, "expires_at"),
        ("PATCH", f"/keys/{made['id']}", {}, "expires_at"),
    ):
        answer = await api.call(method, path, owner.key, json={**body, field: at})
        assert answer.status_code == 422, (method, path, field)
        assert field in {one["field"] for one in answer.json()["errors"]}


async def test_the_grants_of_all_own_rooms_are_one_list(api: Api) -> None:
    owner, other = await member(api), await member(api)
    older, newer = await shared_room(api, owner), await shared_room(api, owner)
    foreign = await shared_room(api, other)
    revoked = await grant(api, owner, older, other.id)
    await revoke(api, owner, older, revoked)
    expected: list[tuple[int, str]] = []
    for room in sorted((older, newer)):
        for kind in ("publish", "subscribe", "publish"):
            made = await grant(api, owner, room, other.id, kind=kind)
            expected.insert(0, (room, made))
    foreign_grant = await grant(api, other, foreign, owner.id)

    found, cursor = [], None
    while True:
        params = {"limit": 2, **({"cursor": cursor} if cursor else {})}
        page = (await api.call("GET", "/grants", owner.key, params=params)).json()
        found += [(one["room_id"], one["id"]) for one in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert found == expected

    async def ids(key: str, **params: str) -> list[str]:
        answer = await api.call("GET", "/grants", key, params=params)
        return [one["id"] for one in answer.json()["items"]]

    all_ids = [one for _, one in expected]
    assert set(await ids(owner.key, ended="true")) == {*all_ids, revoked}
    assert await ids(owner.key, kind="subscribe") == [expected[1][1], expected[4][1]]
    assert await ids(owner.key, organisation_id=owner.id) == []
    assert await ids(other.key) == [foreign_grant]
    body = {"name": "restricted", "scopes": ["manage"], "rooms": [older]}
    restricted = (await api.made("/keys", body, owner.key))["key"]
    assert await ids(restricted) == [one for room, one in expected if room == older]


async def test_a_grant_that_was_revoked_before_it_began_opens_no_room(api: Api) -> None:
    """One that was valid keeps open what its organisation published or received."""
    owner, early, former = await member(api), await member(api), await member(api)
    room = await shared_room(api, owner)
    path = f"/rooms/{room}/messages"
    for kind in ("publish", "subscribe"):
        given = await grant(api, owner, room, early.id, kind=kind, starts_at=at(3600))
        assert (await api.call("GET", path, early.key)).status_code == 404
        await revoke(api, owner, room, given)
    await revoke(api, owner, room, await grant(api, owner, room, former.id))
    begun = await api.sql(
        "UPDATE grants SET starts_at = now(), revoked_at = now() - interval '1 min'"
        " WHERE starts_at > now() RETURNING 1"
    )
    assert len(begun) == 2
    assert (await api.call("GET", path, early.key)).status_code == 404
    assert (await api.call("GET", path, former.key)).status_code == 200
