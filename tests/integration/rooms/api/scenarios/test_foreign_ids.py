"""Test ids of others wherever an id can stand: they are like ids of nothing, and open nothing."""

import re
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import httpx
import pytest

from rooms.api.app import route_handlers
from rooms.api.params import QUERY
from rooms.db.connection import transaction
from rooms.db.journal import append
from rooms.db.queries.analytics import replace_findings
from rooms.domain.ids import OrganisationId
from rooms.domain.journal import ActorKind, JournalEntry, Outcome
from rooms.domain.magazine import Entry
from rooms.evidence.jose import generate_key
from tests.integration.rooms.api.conftest import Api
from tests.integration.rooms.api.members import (
    Member,
    accepted,
    act,
    change,
    grant,
    member,
    pulled,
    shared_room,
    subscribe,
)
from tests.integration.rooms.api.sign_in import make_session
from tests.integration.rooms.api.test_analytics import NOON, findings_of_every_kind
from tests.integration.rooms.api.test_handler_queues import stored

UNKNOWN_ROOM = 1_000_000_001


@dataclass
class Two:
    """Hold two organisations with one of everything each, in private rooms."""

    one: Member
    other: Member
    own: dict[str, str]
    theirs: dict[str, str]

    @property
    def unknown(self) -> dict[str, str]:
        """Return ids of nothing: those with a room in them are of the other's room."""
        found = {}
        for name, identity in self.theirs.items():
            within = name in {"message_id", "delivery_id", "subscription_id", "grant_id"}
            made = str(uuid4())
            found[name] = made[:28] + identity[28:] if within else made
        return found | {"room_id": str(UNKNOWN_ROOM), "queue": "unknown"}


async def one_of_everything(api: Api, who: Member) -> dict[str, str]:
    room = await shared_room(api, who)
    made = await subscribe(api, who, room, max_receives=1)
    message = await accepted(api, who.key, room, id="caller", business_key="business")
    listed = await api.call("GET", f"/messages/{message}/deliveries", who.key)
    given = await grant(api, who, room, "*", event_types=["nothing"])
    await api.call("DELETE", f"/rooms/{room}/grants/{given}", who.key)
    job = await api.call("POST", f"/rooms/{room}/restore", who.key)
    queue = await api.made("/queues", {"name": f"queue-{room}", "shards": 1}, who.key)
    key = (await api.call("GET", "/keys", who.key)).json()["items"][0]
    return {
        "room_id": str(room),
        "subscription_id": made["id"],
        "message_id": message,
        "delivery_id": listed.json()["items"][0]["id"],
        "grant_id": given,
        "job_id": job.json()["job_id"],
        "key_id": key["id"],
        "organisation_id": who.id,
        "queue": queue["name"],
    }


async def make_two(api: Api) -> Two:
    one, other = await member(api), await member(api)
    return Two(one, other, await one_of_everything(api, one), await one_of_everything(api, other))


@pytest.fixture
async def two(api: Api) -> Two:
    return await make_two(api)


def plain(answer: httpx.Response, *ids: dict[str, str]) -> tuple[int, str]:
    """Return an answer without the ids of the request."""
    text = answer.text
    given = {identity for each in ids for identity in each.values()}
    for identity in sorted(given, key=len, reverse=True):
        text = re.sub(rf"\b{re.escape(identity)}\b", "…", text)
    text = PASSING.sub("…", text)
    return answer.status_code, text


PASSING = re.compile(r'"(?:at|until)":"[^"]*"|"(?:oldest|leader_absent)_seconds":[\d.e-]+')
"""Values that differ from one answer to the next, as time passes."""
SAMPLES = {"id": "caller", "business_key": "business", "event_type": "order.paid"}


async def test_ids_in_queries_reveal_nothing(api: Api, two: Two) -> None:
    """Check every query parameter of every list that takes an id of something."""
    tried, different = set(), []
    for handler, path in route_handlers(api.app):
        names = set(handler.opt.get(QUERY, {}).values())
        for name in sorted(names & {*two.own, "subscription", "id", "business_key", "owner"}):
            if "GET" not in handler.http_methods or not path.startswith("/v1"):
                continue
            field = "subscription_id" if name == "subscription" else name
            place = path.removeprefix("/v1").format(**two.own, name="order.paid")
            answers = [
                plain(
                    await api.call(
                        "GET", place, two.one.key, params={name: ids.get(field, SAMPLES.get(name))}
                    ),
                    ids,
                )
                for ids in (two.theirs, two.unknown)
            ]
            tried.add((path, name))
            if answers[0] != answers[1] or answers[0][0] >= 500:
                different.append((path, name, answers))
    assert not different
    assert {("/v1/jobs", "room_id"), ("/v1/rooms/{room_id}/grants", "organisation_id")} <= tried


async def test_ids_in_bodies_reveal_nothing(api: Api, two: Two) -> None:
    own = f"/subscriptions/{two.own['subscription_id']}"
    pull = {"max_messages": 10, "wait_ms": 0, "lease_ms": 60_000}
    path = f"/subscriptions/{two.theirs['subscription_id']}/pull"
    leased = (await api.call("POST", path, two.other.key, json=pull)).json()["messages"]
    their_ack, no_ack = leased[0]["ack_id"], leased[0]["ack_id"][:-4] + "AAAA"

    unknown = two.unknown

    def bodies(ids: dict[str, str], ack: str) -> list[tuple[str, Any]]:
        return [
            (f"{own}/replay", {"from_message_id": ids["message_id"]}),
            (f"{own}/sideline/shovel", {"delivery_ids": [ids["delivery_id"]], "dry_run": True}),
            (
                f"{own}/sideline/purge?confirm=sub",
                {"delivery_ids": [ids["delivery_id"]], "dry_run": True},
            ),
            (f"{own}/ack", {"ack_ids": [ack]}),
            (f"{own}/nack", {"ack_ids": [ack]}),
            (f"{own}/extend", {"ack_ids": [ack], "lease_ms": 1000}),
            (f"/rooms/{ids['room_id']}/messages", {"event_type": "order.paid", "payload": 1}),
            (f"/queues/{ids['queue']}/messages", {"payload": 1}),
            (f"/rooms/{two.own['room_id']}/grants/{ids['grant_id']}", None),
            ("/keys", {"name": "n", "scopes": ["publish"], "rooms": [int(ids["room_id"])]}),
            (
                "/keys",
                {"name": "n", "scopes": ["subscribe"], "subscriptions": [ids["subscription_id"]]},
            ),
        ]

    for (place, body), (unknown_place, unknown_body) in zip(
        bodies(two.theirs, their_ack), bodies(unknown, no_ack), strict=True
    ):
        method = "POST" if body is not None else "DELETE"
        answers = []
        for at, sent in ((place, body), (unknown_place, unknown_body)):
            answer = await api.call(method, at, two.one.key, json=sent)
            text = plain(answer, two.theirs, unknown)[1]
            text = text.replace(their_ack, "…").replace(no_ack, "…")
            if answer.status_code == 201:  # a new key: all that is its own differs
                text = str(sorted(answer.json()))
            answers.append((answer.status_code, text))
        assert answers[0] == answers[1], place
    await assert_untouched(api, two, leased)


async def assert_untouched(api: Api, two: Two, leased: list[dict[str, Any]]) -> None:
    """Check that the other's lease is still its own."""
    path = f"/subscriptions/{two.theirs['subscription_id']}/ack"
    body = {"ack_ids": [leased[0]["ack_id"]]}
    answer = await api.call("POST", path, two.other.key, json=body)
    assert answer.json()["results"][0]["status"] == "acked"


async def test_a_key_for_things_of_others_opens_none_of_them(api: Api, two: Two) -> None:
    for restriction in (
        {"rooms": [int(two.theirs["room_id"])]},
        {"subscriptions": [two.theirs["subscription_id"]]},
    ):
        body = {"name": "narrow", "scopes": ["admin"], **restriction}
        narrow = (await api.made("/keys", body, two.one.key))["key"]
        for ids in (two.own, two.theirs):
            for path in (
                f"/rooms/{ids['room_id']}",
                f"/subscriptions/{ids['subscription_id']}",
                f"/subscriptions/{ids['subscription_id']}/deliveries",
            ):
                assert (await api.call("GET", path, narrow)).status_code in {403, 404}
        for path in ("/rooms", "/rooms?shared=true", "/subscriptions", "/directory"):
            answer = await api.call("GET", path, narrow)
            assert answer.status_code == 403 or answer.json()["items"] == []


async def test_lists_by_ids_leave_out_what_is_of_others(api: Api, two: Two) -> None:
    room, subscription = (
        f"{two.own[name]},{two.theirs[name]}" for name in ("room_id", "subscription_id")
    )
    for path, key, names in (
        (f"/rooms?id={room}", two.one.key, {two.own["room_id"]}),
        (f"/rooms?id={room}", two.other.key, {two.theirs["room_id"]}),
        (f"/rooms?id={room}&shared=true", two.one.key, set()),
        (f"/subscriptions?id={subscription}", two.one.key, {two.own["subscription_id"]}),
        (f"/subscriptions?id={two.theirs['subscription_id']}&role=owner", two.one.key, set()),
    ):
        answer = await api.call("GET", path, key)
        assert {str(one["id"]) for one in answer.json()["items"]} == names, path


FOR_THE_PLATFORM = {"/v1/analysis/runs", "/v1/doctor", "/v1/organisations", "/v1/retention-preview"}
"""Lists that a key of an organisation may not read."""
SIDELINED = """
WITH d AS (
    UPDATE deliveries SET state = 'sidelined' WHERE message_id = %s RETURNING room_id, id, subscription_id, generation
), o AS (DELETE FROM outbox WHERE message_id = %s)
INSERT INTO sidelined (room_id, id, subscription_id, generation, reason)
SELECT room_id, id, subscription_id, generation, 'attempts_exhausted' FROM d
"""


async def fill_lists(api: Api, who: Member, ids: dict[str, str]) -> None:
    """Make what every list needs for two pages; `ids` then names a message of two deliveries."""
    room, first = int(ids["room_id"]), ids["subscription_id"]
    queue = ids["queue"]
    assert (await change(api, who, first, ordered=True)).status_code == 200
    await subscribe(api, who, room, "second")
    await api.made(f"/rooms/{room}/event-types/order.paid/versions", {"schema": {}}, who.key)
    for number in range(2):
        failed = await accepted(api, who.key, room)
        await api.sql(SIDELINED, failed, failed)
        for key in ("a", "b"):
            ids["message_id"] = await accepted(api, who.key, room, ordering_key=f"{key}{number}")
        listed = await shared_room(api, who, visibility="listed")
        await act(api, who, first, "pause")
        await act(api, who, first, "resume")
        await grant(api, who, room, "*", event_types=["nothing"])
        await api.call("POST", f"/rooms/{listed}/restore", who.key)
        await api.made("/queues", {"name": f"queue-{listed}", "shards": 1}, who.key)
        await api.made("/keys", {"name": "x", "scopes": ["publish"]}, who.key)
        jwk = generate_key("EdDSA").public.to_jwk()
        await api.made("/signing-keys", {"name": f"n{number}", "jwk": jwk}, who.key)
        await make_session(api, who.id)
        await api.sql(
            "INSERT INTO usage_hours (room_id, hour, owner_id, organisation_id, event_type, messages)"
            " VALUES (%s, now(), %s, %s, %s, 1)",
            *(room, who.id, who.id, f"type-{number}"),
        )
    await record_sign_ins(api, who)
    sideline = await api.services.magazines.open(await stored(api, queue, who.key, sideline=True))
    await sideline.load([Entry(id=f"m-{n}", body=b"1", shovels=1) for n in range(2)])


async def record_sign_ins(api: Api, who: Member) -> None:
    """Write that two people signed in, as the console does."""
    now_ms = api.services.clock.now_ms()
    entries = [
        JournalEntry(
            id=api.services.ids.generate_global(now_ms),
            organisation_id=OrganisationId(who.id),
            at=api.services.clock.now(),
            actor_kind=ActorKind.PERSON,
            actor_id=None,
            actor_name=f"{who.name} {number}",
            actor_organisation_id=OrganisationId(who.id),
            application=None,
            source=None,
            request_id=None,
            action="sign_in",
            object="/console/sign-in",
            before=None,
            after={},
            outcome=Outcome.SUCCEEDED,
            reason=None,
        )
        for number in range(2)
    ]
    async with transaction(api.services.engine) as connection:
        await append(connection, *entries)


def lists(api: Api) -> set[str]:
    """Return the paths of all lists that have pages."""
    return {
        path
        for handler, path in route_handlers(api.app)
        if "cursor" in handler.opt.get(QUERY, {}) and "GET" in handler.http_methods
    }


async def test_a_cursor_of_another_shows_only_what_is_ones_own(api: Api, two: Two) -> None:
    """Check every list with a cursor of the other organisation."""
    findings = []
    for number, (who, ids) in enumerate(((two.one, two.own), (two.other, two.theirs))):
        await fill_lists(api, who, ids)
        for n in range(2):
            findings += findings_of_every_kind(
                OrganisationId(who.id),
                2 * number + n,
                int(ids["room_id"]),
                ids["subscription_id"],
            )
    assert replace_findings(api.url, run=1, analysed_at=NOON, findings=findings)
    paths = sorted(lists(api) - FOR_THE_PLATFORM)
    assert lists(api) > FOR_THE_PLATFORM
    cursors = {}
    for path in paths:
        place = path.removeprefix("/v1")
        names = {"name": "order.paid"}
        theirs = await api.call(
            "GET", place.format(**two.theirs, **names), two.other.key, params={"limit": 1}
        )
        assert theirs.status_code == 200, (path, theirs.text)
        if not (cursor := theirs.json()["next_cursor"]):
            continue
        cursors[path] = cursor
        query = {"limit": 200, "cursor": cursor}
        mine = await api.call("GET", place.format(**two.own, **names), two.one.key, params=query)
        assert mine.status_code == 200, (path, mine.text)
        for secret in two.theirs.values():
            assert secret not in mine.text, path
    assert sorted(cursors) == paths, "each of them has a second page"
    for path, cursor in cursors.items():
        for other in cursors.keys() - {path}:
            place = other.removeprefix("/v1").format(**two.own, name="order.paid")
            refused = await api.call("GET", place, two.one.key, params={"cursor": cursor})
            assert refused.status_code == 422, (path, other)
    for path in FOR_THE_PLATFORM:
        refused = await api.call("GET", path.removeprefix("/v1"), two.one.key)
        assert refused.status_code == 403, path


async def test_times_and_counts_of_another_do_not_show(api: Api, two: Two) -> None:
    """Check that what one organisation publishes changes no answer of the other."""
    paths = (
        "/rooms",
        "/rooms?shared=true",
        "/subscriptions",
        "/subscriptions?role=owner",
        "/jobs",
        "/keys",
        "/queues",
        "/directory",
        "/status",
        f"/rooms/{two.own['room_id']}/messages",
        f"/subscriptions/{two.own['subscription_id']}/counts",
    )

    async def look() -> dict[str, str]:
        found = {path: (await api.call("GET", path, two.one.key)).text for path in paths}
        return found | {"/status": re.sub(r'"at":"[^"]*"', "", found["/status"])}

    before = await look()
    await one_of_everything(api, two.other)
    await pulled(api, two.other, two.theirs["subscription_id"])
    assert await look() == before
