"""Suspend very many subscriptions at once, which must not lock their rooms for long."""

from typing import Any

import pytest

from rooms.db.catalog.suspensions import PAGE
from rooms.db.operational.outbox import MAX_WAITING
from tests.integration.rooms.api.conftest import Api
from tests.integration.rooms.api.members import (
    PAID,
    SENT,
    Member,
    change,
    grant,
    history,
    member,
    revoke,
    shared_room,
    subscribe,
)
from tests.support.noted_statements import noted_statements

MANY = 2 * PAGE + 10
"""Subscriptions of three pages; the operational events of `MANY` overflow."""
STATEMENTS_OF_A_PAGE = 10
READS_PAGES = "(subscriptions.room_id, subscriptions.id) >"
WHY = "410 for a day"


async def multiply(api: Api, subscription: str, count: int) -> None:
    """Let there be as many subscriptions like this one."""
    found = await api.sql(
        "SELECT column_name FROM information_schema.columns WHERE table_name = 'subscriptions' ORDER BY ordinal_position"
    )
    given = {"id": "gen_random_uuid()", "name": "s.name || n"}
    names = [str(name) for (name,) in found]
    values = ", ".join(given.get(name, f"s.{name}") for name in names)
    await api.sql(
        f"INSERT INTO subscriptions ({', '.join(names)}) SELECT {values} FROM subscriptions s, generate_series(1, %s) n WHERE s.id = %s",
        count - 1,
        subscription,
    )


async def standings(api: Api, room: int) -> list[tuple[Any, ...]]:
    """Return the statuses of subscriptions that are not operational, each with its number."""
    return await api.sql(
        "SELECT status, own_status, suspended_by, status_reason, count(*)::int FROM subscriptions"
        " WHERE room_id = %s AND NOT operational GROUP BY 1, 2, 3, 4 ORDER BY 5",
        room,
    )


@pytest.fixture
async def shared(api: Api) -> tuple[Member, Member, int, str, str]:
    """Return owner, subscriber, room, a grant, and a subscription that was disabled."""
    owner, subscriber = await member(api), await member(api)
    room = await shared_room(
        api,
        owner,
        operational_url="https://ops.example.com/a",
        operational_events=["rooms.subscription.suspended", "rooms.subscription.reinstated"],
    )
    granted = await grant(api, owner, room, subscriber.id, "subscribe")
    made = await subscribe(api, subscriber, room)
    await api.sql(
        "UPDATE subscriptions SET status = 'disabled', status_reason = %s WHERE id = %s",
        WHY,
        made["id"],
    )
    await api.sql(
        "INSERT INTO subscription_history (room_id, subscription_id, action, status, reason, snapshot)"
        " VALUES (%s, %s, 'disabled', 'disabled', %s, '{}')",
        room,
        made["id"],
        WHY,
    )
    other = await subscribe(api, subscriber, room, "other")
    await multiply(api, other["id"], MANY - 1)
    return owner, subscriber, room, granted, str(made["id"])


def well() -> list[tuple[Any, ...]]:
    return [("disabled", None, [], WHY, 1), ("active", None, [], None, MANY - 1)]


def held(by: str, reason: str) -> list[tuple[Any, ...]]:
    return [
        ("suspended", "disabled", [by], reason, 1),
        ("suspended", "active", [by], reason, MANY - 1),
    ]


async def events(api: Api, room: int, kind: str) -> tuple[int, int]:
    """Return how many events wait with their details, and how many are only counted."""
    ((kept,),) = await api.sql(
        "SELECT count(*)::int FROM operational_outbox WHERE room_id = %s AND event = %s", room, kind
    )
    ((counted,),) = await api.sql(
        "SELECT coalesce(sum(total), 0)::int FROM operational_overflow WHERE room_id = %s AND event = %s",
        room,
        kind,
    )
    return kept, counted


async def test_the_end_of_a_grant_suspends_very_many_by_few_statements(
    api: Api, shared: tuple[Member, Member, int, str, str]
) -> None:
    owner, subscriber, room, granted, disabled = shared
    assert await standings(api, room) == well()
    with noted_statements(api.services.engine) as sent:
        await revoke(api, owner, room, granted)
    assert len(sent) < 3 * STATEMENTS_OF_A_PAGE
    assert len([text for text in sent if READS_PAGES in text]) == 3
    assert await standings(api, room) == held("grant", "grant")
    overflow = MANY - MAX_WAITING
    assert await events(api, room, "rooms.subscription.suspended") == (MAX_WAITING, overflow)
    with noted_statements(api.services.engine) as sent:
        await grant(api, owner, room, subscriber.id, "subscribe")
    assert len(sent) < 3 * STATEMENTS_OF_A_PAGE
    assert await standings(api, room) == well()
    assert await events(api, room, "rooms.subscription.reinstated") == (MAX_WAITING, overflow)
    steps = [
        (one["action"], one["status"], one["reason"])
        for one in await history(api, subscriber, disabled)
    ]
    assert steps[-2:] == [("suspended", "suspended", "grant"), ("reinstated", "disabled", "grant")]
    ((entries, versions),) = await api.sql(
        "SELECT (SELECT count(*)::int FROM subscription_history WHERE room_id = %s AND reason = 'grant'),"
        " (SELECT array_agg(DISTINCT version) FROM subscriptions WHERE room_id = %s AND NOT operational)",
        room,
        room,
    )
    assert (entries, versions) == (2 * MANY, [3])


@pytest.mark.parametrize("side", ["owner", "subscriber"])
async def test_an_organisation_suspends_very_many_by_few_statements(
    api: Api, shared: tuple[Member, Member, int, str, str], side: str
) -> None:
    owner, subscriber, room, _, __ = shared
    who = {"owner": owner, "subscriber": subscriber}[side]
    path = f"/organisations/{who.id}"
    with noted_statements(api.services.engine) as sent:
        answer = await api.call("POST", f"{path}/suspend", "platform")
    assert answer.status_code == 200, answer.text
    assert len(sent) < 3 * STATEMENTS_OF_A_PAGE
    reason = f"organisation {who.name}"
    assert await standings(api, room) == held(f"{side}_organisation", reason)
    answer = await api.call("POST", f"{path}/resume", "platform")
    assert answer.status_code == 200, answer.text
    assert await standings(api, room) == well()


async def test_a_change_of_one_subscription_reads_none_of_the_others(
    api: Api, shared: tuple[Member, Member, int, str, str]
) -> None:
    """Count rows: a subscriber must not make the API read all subscriptions of a room."""
    _, subscriber, room, __, ___ = shared
    one = await subscribe(api, subscriber, room, "narrow", event_types=[{"name": PAID}])
    with noted_statements(api.services.engine) as sent:
        answer = await change(api, subscriber, one["id"], event_types=[{"name": SENT}])
    assert answer.status_code == 200, answer.text
    assert [text for text in sent if "subscriptions.approved_at IS NULL" in text]
    assert not [text for text in sent if READS_PAGES in text]


async def test_a_grant_to_publish_reads_no_subscriptions_unless_another_is_due(
    api: Api, shared: tuple[Member, Member, int, str, str]
) -> None:
    owner, subscriber, room, granted, _ = shared
    with noted_statements(api.services.engine) as sent:
        made = await grant(api, owner, room, subscriber.id, "publish")
        await revoke(api, owner, room, made)
    assert not [text for text in sent if READS_PAGES in text]
    await api.sql("UPDATE grants SET until = now() WHERE id = %s", granted)
    await grant(api, owner, room, subscriber.id, "publish")
    assert await standings(api, room) == held("grant", "grant")
