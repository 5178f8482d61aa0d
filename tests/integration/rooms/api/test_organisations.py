"""Test organisations: names that mean one, suspensions that lose nothing, and deletion."""

import asyncio
from typing import Any

import pytest
from sqlalchemy import event

from rooms.db.notify import Channel
from tests.integration.rooms.api.conftest import Api
from tests.integration.rooms.api.members import (
    Member,
    accepted,
    act,
    approve,
    change,
    grant,
    history,
    member,
    publish,
    pulled,
    read,
    revoke,
    shared_room,
    subscribe,
)

SUSPENDED = "urn:rooms:problem:organisation-suspended"


async def suspend(api: Api, who: Member, action: str = "suspend") -> None:
    """Suspend or resume an organisation, and let every key be looked up again."""
    answer = await api.call("POST", f"/organisations/{who.id}/{action}", "platform")
    assert answer.status_code == 200, answer.text
    api.services.keys.forget()


async def open_room(api: Api, owner: Member) -> int:
    return await shared_room(api, owner, subscription_policy="automatic", visibility="listed")


@pytest.mark.parametrize(
    "member_id",
    [
        "",
        "SE",
        "SE/GOV",
        "SE/GOV/1/2",
        "SE//1",
        "/GOV/1",
        "SE/GOV/ 1",
        "SE/GOV/1\n",
        "SE/GÖV/1",
        "SE/GOV/" + "1" * 65,
        "SE/GOV/1\x00",
    ],
)
async def test_a_wrong_member_id_is_refused(api: Api, member_id: str) -> None:
    one = await member(api)
    for method, path, body in (
        ("POST", "/organisations", {"name": "new"}),
        ("PATCH", f"/organisations/{one.id}", {}),
    ):
        refused = await api.call(method, path, "platform", json={**body, "member_id": member_id})
        assert refused.status_code == 422
        assert refused.json()["errors"][0]["field"] == "member_id"


async def test_no_name_or_member_id_means_two_organisations(api: Api) -> None:
    one = await member(api, member_id="SE/GOV/1234")
    for fields, status in (
        ({"name": one.name}, 409),
        ({"name": "x", "member_id": "SE/GOV/1234"}, 409),
        ({"name": one.id}, 422),
        ({"name": one.id.upper()}, 422),
        ({"name": "SE/GOV/1234"}, 422),
        ({"name": "DE/COM/1"}, 422),
        ({"name": "*"}, 422),
        ({"name": " x"}, 422),
        ({"name": "x\u200b"}, 422),
    ):
        other = await member(api)
        refused = await api.call("POST", "/organisations", "platform", json=fields)
        assert refused.status_code == status, fields
        refused = await api.call("PATCH", f"/organisations/{other.id}", "platform", json=fields)
        assert refused.status_code == status, fields
        unchanged = await api.call("GET", f"/organisations/{other.id}", "platform")
        assert unchanged.json()["name"] == other.name
    # A change to what it is called already is none.
    same = {"name": one.name, "member_id": "SE/GOV/1234"}
    assert (
        await api.call("PATCH", f"/organisations/{one.id}", "platform", json=same)
    ).status_code == 200
    for query in (f"name={one.name}", "member_id=SE/GOV/1234"):
        found = (await api.call("GET", f"/organisations?{query}", "platform")).json()["items"]
        assert [each["id"] for each in found] == [one.id]


async def test_a_suspended_organisation_reads_and_nothing_else(api: Api) -> None:
    owner, other = await member(api), await member(api)
    room, theirs = await open_room(api, owner), await open_room(api, other)
    await grant(api, owner, room, other.id)
    await grant(api, other, theirs, owner.id)
    mine, foreign = await subscribe(api, owner, room), await subscribe(api, owner, theirs)
    await suspend(api, owner)
    for method, path, body in (
        ("POST", "/rooms", {"name": "x"}),
        ("PATCH", f"/rooms/{room}", {"description": "x"}),
        ("POST", f"/rooms/{room}/messages", {"event_type": "order", "payload": 1}),
        ("POST", f"/rooms/{theirs}/messages", {"event_type": "order", "payload": 1}),
        ("POST", f"/subscriptions/{mine['id']}/pull", {"max_messages": 1}),
        ("POST", f"/subscriptions/{foreign['id']}/pause", None),
        ("POST", "/keys", {"name": "x", "scopes": ["publish"]}),
    ):
        refused = await api.call(method, path, owner.key, json=body)
        assert (refused.status_code, refused.json()["type"]) == (403, SUSPENDED), path
    for path in ("/rooms", f"/rooms/{room}", "/subscriptions", "/keys", "/journal", "/whoami"):
        assert (await api.call("GET", path, owner.key)).status_code == 200, path
    refused = await publish(api, other.key, room)
    assert (refused.status_code, refused.json()["type"]) == (403, SUSPENDED)
    await accepted(api, other.key, theirs)
    await suspend(api, owner, "resume")
    await accepted(api, other.key, room)
    await accepted(api, owner.key, theirs)


async def test_a_room_without_subscriptions_is_closed_too(api: Api) -> None:
    """Check it in a process that has the room's routing in memory."""
    owner, other = await member(api), await member(api)
    room = await shared_room(api, owner)
    await grant(api, owner, room, other.id)
    await accepted(api, other.key, room)
    await suspend(api, owner)
    assert (await publish(api, other.key, room)).status_code == 403
    await suspend(api, owner, "resume")
    await accepted(api, other.key, room)


async def statuses(api: Api, found: dict[str, str]) -> dict[str, str]:
    rows = await api.sql("SELECT id::text, status FROM subscriptions")
    by_id = dict(rows)
    return {name: by_id[identity] for name, identity in found.items()}


async def test_resume_brings_what_would_have_been(api: Api) -> None:
    """Check every status, with what subscriber and owner do while the organisation is suspended."""
    owner, subscriber = await member(api), await member(api)
    room = await shared_room(api, owner, subscription_policy="approval", visibility="listed")
    names = ("active", "paused", "later", "held", "kept", "waits", "approved", "ended", "gone")
    found = {name: (await subscribe(api, subscriber, room, name))["id"] for name in names}
    for name in names:
        if name not in {"waits", "approved"}:
            await approve(api, owner, found[name])
    await act(api, subscriber, found["paused"], "pause")
    await act(api, owner, found["kept"], "suspend")
    await act(api, owner, found["gone"], "terminate")
    before = await statuses(api, found)
    for who in (subscriber, owner):
        await suspend(api, who)
        while_suspended = await statuses(api, found)
        assert {while_suspended.pop(name) for name in ("waits", "approved")} == {"pending"}
        assert while_suspended.pop("gone") == "terminated"
        assert set(while_suspended.values()) == {"suspended"}
        await suspend(api, who, "resume")
        assert await statuses(api, found) == before
    await suspend(api, subscriber)
    # The owner still decides, and its decisions stand.
    await act(api, owner, found["held"], "suspend")
    await act(api, owner, found["kept"], "reinstate")
    assert (await approve(api, owner, found["approved"]))["status"] == "suspended"
    await act(api, owner, found["ended"], "terminate")
    await suspend(api, owner)
    await suspend(api, subscriber, "resume")
    await act(api, subscriber, found["later"], "pause")
    assert (await statuses(api, found))["active"] == "suspended", "the room's owner is suspended"
    await suspend(api, owner, "resume")
    assert await statuses(api, found) == {
        "active": "active",
        "paused": "paused",
        "later": "paused",
        "held": "suspended",
        "kept": "active",
        "waits": "pending",
        "approved": "active",
        "ended": "terminated",
        "gone": "terminated",
    }


async def test_what_is_held_by_a_suspension_is_delivered_after_it(api: Api) -> None:
    owner, subscriber = await member(api), await member(api)
    room = await open_room(api, owner)
    foreign = await subscribe(api, subscriber, room)
    first = await accepted(api, owner.key, room)
    await suspend(api, subscriber)
    second = await accepted(api, owner.key, room)
    await suspend(api, subscriber, "resume")
    assert sorted(await pulled(api, subscriber, foreign["id"])) == sorted([first, second])


@pytest.mark.parametrize("action", ["suspend", "resume", "delete"])
async def test_processes_are_notified_of_a_suspension_after_its_commit(
    api: Api, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    """Check it for workers and polls: what one reads before the commit, it believes for seconds."""
    owner, subscriber = await member(api), await member(api)
    room, empty = await open_room(api, owner), await open_room(api, subscriber)
    push = await subscribe(api, subscriber, room, "push", push_url="https://a.example.com/")
    pull = await subscribe(api, subscriber, room, "pull")
    if action == "resume":
        await suspend(api, subscriber)
    happened: list[tuple[str, ...]] = []
    monkeypatch.setattr(api.services.notifier, "notify", lambda *one: happened.append(one))
    engine = api.services.engine.sync_engine

    def commit(_: Any) -> None:
        happened.append(("commit",))

    event.listen(engine, "commit", commit)
    try:
        if action == "delete":
            path = f"/organisations/{subscriber.id}?confirm={subscriber.name}"
            answer = await api.call("DELETE", path, "platform")
            assert answer.status_code == 202, answer.text
        else:
            await suspend(api, subscriber, action)
    finally:
        event.remove(engine, "commit", commit)
    last_commit = max(index for index, one in enumerate(happened) if one == ("commit",))
    assert set(happened[:last_commit]) <= {("commit",)}
    assert {
        (Channel.CONFIG, str(room)),
        (Channel.CONFIG, str(empty)),
        (Channel.PUSH,),
        (Channel.PULL, pull["id"]),
    } == set(happened[last_commit + 1 :])
    wanted = "active" if action == "resume" else "suspended"
    assert set((await statuses(api, {"push": push["id"], "pull": pull["id"]})).values()) == {wanted}


async def test_a_grant_lost_during_a_suspension_stays_lost(api: Api) -> None:
    owner, subscriber = await member(api), await member(api)
    room = await shared_room(api, owner)
    given = await grant(api, owner, room, subscriber.id, "subscribe")
    made = await subscribe(api, subscriber, room)
    await suspend(api, subscriber)
    await revoke(api, owner, room, given)
    await suspend(api, subscriber, "resume")
    now = await read(api, subscriber, made["id"])
    assert (now["status"], now["suspended_by"]) == ("suspended", ["grant"])
    await grant(api, owner, room, subscriber.id, "subscribe")
    assert (await read(api, subscriber, made["id"]))["status"] == "active"


async def test_suspensions_and_other_changes_at_once_lose_neither(api: Api) -> None:
    """Check that an ended subscription stays so, and that a new one of a suspended member waits."""
    owner, subscriber = await member(api), await member(api)
    room = await open_room(api, owner)

    async def create(number: int) -> dict[str, Any]:
        body = {"name": f"new-{number}", "type": "PULL"}
        answer = await api.call("POST", f"/rooms/{room}/subscriptions", subscriber.key, json=body)
        return {"status_code": answer.status_code, **answer.json()}

    for number in range(6):
        ending = (await subscribe(api, subscriber, room, f"ending-{number}"))["id"]
        held = (await subscribe(api, subscriber, room, f"held-{number}"))["id"]
        who = (subscriber, owner)[number % 2]
        results = await asyncio.gather(
            act(api, owner, ending, "terminate"),
            suspend(api, who),
            act(api, owner, held, "suspend"),
            create(number),
        )
        new = results[3]
        await suspend(api, who)
        by_id = dict(await api.sql("SELECT id::text, status FROM subscriptions"))
        if results[0].status_code == 200:
            assert by_id[ending] == "terminated"
            steps = await api.sql(
                "SELECT status FROM subscription_history WHERE subscription_id = %s ORDER BY at",
                ending,
            )
            assert steps[-1] == ("terminated",)
        if new["status_code"] == 201:
            assert by_id[new["id"]] == "suspended"
        await suspend(api, who, "resume")
        by_id = dict(await api.sql("SELECT id::text, status FROM subscriptions"))
        assert by_id[held] == ("suspended" if results[2].status_code == 200 else "active")


async def test_a_new_subscription_waits_for_a_suspension_that_is_being_written(api: Api) -> None:
    """Check both sides: the first transaction has locked the organisation, and has not ended."""
    owner, subscriber = await member(api), await member(api)
    room = await open_room(api, owner)
    for number, who in enumerate((owner, subscriber)):
        async with api.services.engine.connect() as connection:
            await connection.exec_driver_sql(
                f"UPDATE organisations SET status = 'suspended' WHERE id = '{who.id}'"
            )
            creating = asyncio.create_task(subscribe(api, subscriber, room, f"s{number}"))
            done, _ = await asyncio.wait([creating], timeout=0.3)
            assert not done
            await connection.commit()
        made = await creating
        assert made["status"] == "suspended"
        await suspend(api, who, "resume")
        assert (await read(api, subscriber, made["id"]))["status"] == "active"


async def test_the_history_names_a_suspended_organisation(api: Api) -> None:
    owner, subscriber = await member(api), await member(api)
    room = await open_room(api, owner)
    made = await subscribe(api, subscriber, room)
    await change(api, subscriber, made["id"], max_receives=3)
    await suspend(api, owner)
    await suspend(api, owner, "resume")
    for who in (owner, subscriber):
        steps = await history(api, who, made["id"])
        assert [(one["action"], one["status"]) for one in steps] == [
            ("created", "active"),
            ("changed", "active"),
            ("suspended", "suspended"),
            ("reinstated", "active"),
        ]
        assert {one["key_id"] for one in steps[2:]} == {None}


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PATCH", "", {"contact": "desk@example.test"}),
        ("POST", "/suspend", None),
        ("POST", "/resume", None),
        ("PATCH", "/quotas", {"messages_per_s": 7}),
        ("DELETE", "?confirm={name}", None),
    ],
)
async def test_a_change_counts_at_once_for_keys_that_this_process_knows(
    api: Api, method: str, path: str, body: dict[str, Any] | None
) -> None:
    one, other = await member(api), await member(api)
    for who in (one, other):
        await api.services.keys.authenticate(f"Bearer {who.key}".encode())
    given = {} if body is None else {"json": body}
    place = f"/organisations/{one.id}{path.format(name=one.name)}"
    answer = await api.call(method, place, "platform", **given)
    assert answer.is_success, answer.text
    found = [
        api.services.keys.find_cached(f"Bearer {who.key}".encode(), None) for who in (one, other)
    ]
    assert [known is None for known in found] == [True, False]


async def test_a_deletion_repeats_the_name(api: Api) -> None:
    one, other = await member(api), await member(api)
    for query in ("", f"?confirm={other.name}", "?confirm=", f"?confirm={one.name.upper()}"):
        refused = await api.call("DELETE", f"/organisations/{one.id}{query}", "platform")
        assert refused.status_code == 422
        assert refused.json()["errors"][0]["field"] == "confirm"
    assert (await api.call("GET", "/rooms", one.key)).status_code == 200
    answer = await api.call("DELETE", f"/organisations/{one.id}?confirm={one.name}", "platform")
    assert answer.status_code == 202
    api.services.keys.forget()
    assert (await api.call("GET", "/rooms", one.key)).status_code == 401
    own = (await api.call("GET", "/whoami", "platform")).json()["organisation"]
    for method, path in (
        ("DELETE", f"/organisations/{own['id']}?confirm={own['name']}"),
        ("POST", f"/organisations/{own['id']}/suspend"),
        ("POST", f"/organisations/{one.id}/suspend"),
        ("POST", f"/organisations/{one.id}/resume"),
    ):
        assert (await api.call(method, path, "platform")).status_code == 409, path
