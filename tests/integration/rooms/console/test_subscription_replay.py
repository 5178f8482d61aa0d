"""Test that the count before a replay is of what the replay would read."""

from datetime import UTC, datetime

import pytest

from rooms.domain.ids import created_ms, room_of
from tests.integration.rooms.api.conftest import Api
from tests.integration.rooms.console.browser import Browser, Document
from tests.integration.rooms.console.test_subscriptions import submit

NOT_KNOWN = "How many messages a replay would deliver is not known before"


async def world(api: Api, count: int) -> tuple[str, list[str]]:
    """Publish so many messages for a subscription; return its page, and their ids in order."""
    room = (await api.room("shop"))["id"]
    await api.made(f"/rooms/{room}/event-types", {"name": "made"})
    crm = (await api.subscription(room, "crm"))["id"]
    sent = [(await api.publish(room, "made", n))["message_id"] for n in range(count)]
    return f"/console/subscriptions/{crm}/replay", sorted(sent)


async def counted(browser: Browser, at: str, **fields: str) -> Document:
    return await submit(browser, await browser.get(at), at, {**fields, "count": "on"})


async def test_a_count_begins_with_the_message_that_is_named(browser: Browser) -> None:
    at, sent = await world(browser.api, 3)
    await browser.sign_in("owner")
    for number, first in enumerate(sent):
        page = await counted(browser, at, from_message_id=first)
        left = len(sent) - number
        expected = "One message" if left == 1 else f"{left} messages"
        assert f"{expected} of the room" in page.text, page.text
        assert ("from_message_id", first) in page.form(at).fields
    last_ms = created_ms(sent[-1])
    until = datetime.fromtimestamp((last_ms + 1) / 1000 + 60, UTC).isoformat()
    assert "3 messages" in (await counted(browser, at, from_message_id=sent[0], until=until)).text
    none = await counted(browser, at, from_message_id=sent[0], until="2026-01-01T00:00")
    assert "0 messages of the room" in none.text


async def test_messages_of_the_same_millisecond_are_counted_by_their_ids(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids of one publish share their time; those before the first one are not replayed."""
    at, (first, *_) = await world(browser.api, 1)
    room = room_of(first)
    monkeypatch.setattr("rooms.console.subscription_replay._COUNTED", 3)
    clock = browser.api.services.clock.now_ms()
    same = sorted(browser.api.services.ids.generate(room, clock + 60_000) for _ in range(6))
    for identity in same:
        await browser.api.sql(
            "INSERT INTO messages SELECT (jsonb_populate_record(m, jsonb_build_object('id', %s::text,"
            " 'caller_id', null))).* FROM messages m WHERE m.id = %s RETURNING 1",
            identity,
            first,
        )
    await browser.sign_in("owner")
    for number, text in (
        (5, "One message of the room"),
        (4, "2 messages of the room"),
        (3, "3 messages of the room"),
        (2, "More than 3 messages"),
        (0, "More than 3 messages"),
    ):
        page = await counted(browser, at, from_message_id=same[number])
        assert text in page.text, (number, page.text)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "since"),
        ({"since": "2026-01-01T00:00", "from_message_id": "ID"}, "since"),
        ({"from_message_id": "x"}, "from_message_id"),
        ({"from_message_id": "01900000-0000-7000-8000-00000000ffff"}, "from_message_id"),
        ({"from_message_id": "UPPER"}, "from_message_id"),
    ],
)
async def test_a_count_refuses_what_a_replay_does(
    browser: Browser, fields: dict[str, str], field: str
) -> None:
    at, (message,) = await world(browser.api, 1)
    words = {"ID": message, "UPPER": message.upper()}
    given = {name: words.get(value, value) for name, value in fields.items()}
    await browser.sign_in("owner")
    page = await browser.get(at)
    refused = await counted(browser, at, **given)
    begun = await submit(browser, page, at, given)
    assert (refused.status, begun.status) == (422, 422)
    for answer in (refused, begun):
        assert f'name="{field}"' in answer.html.partition('aria-invalid="true"')[0]
        assert 'aria-invalid="true"' in answer.html


async def test_a_guest_is_not_given_a_number(browser: Browser) -> None:
    """It sees only what it received; a replay may deliver more."""
    api = browser.api
    room = (
        await api.room("shop", "stranger", visibility="listed", subscription_policy="automatic")
    )["id"]
    await api.made(f"/rooms/{room}/event-types", {"name": "made"}, "stranger")
    sent = {"event_type": "made", "payload": {}}
    answer = await api.call("POST", f"/rooms/{room}/messages", "other-publish", json=sent)
    message = answer.json()["message_id"]
    made = await api.made(f"/rooms/{room}/subscriptions", {"name": "crm", "type": "PULL"})
    at = f"/console/subscriptions/{made['id']}/replay"
    await browser.sign_in("owner")
    for fields in ({"since": "2026-01-01T00:00"}, {"from_message_id": message}):
        page = await counted(browser, at, **fields)
        assert NOT_KNOWN in page.text, page.text
        assert "of the room" not in page.text.partition("Published since")[0].partition("Replay")[2]


async def test_a_session_for_some_subscriptions_is_not_given_a_number(browser: Browser) -> None:
    at, _ = await world(browser.api, 2)
    crm = at.split("/")[3]
    body = {"name": "some", "scopes": ["manage", "operate", "view"], "subscriptions": [crm]}
    browser.api.keys["some"] = (await browser.api.made("/keys", body))["key"]
    key = browser.api.keys["some"]
    page = await browser.get("/console/sign-in")
    signed_in = await browser.submit(page, "/console/sign-in", key=key)
    assert signed_in.status == 200
    assert NOT_KNOWN in (await counted(browser, at, since="2026-01-01T00:00")).text
