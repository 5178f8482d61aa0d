"""Test that a message can be checked without being published."""

import pytest

from tests.integration.rooms.api.conftest import Api, Shared


async def test_a_check_says_what_a_publish_would_say_and_publishes_nothing(api: Api) -> None:
    room = (await api.room())["id"]
    schema = {"type": "object", "required": ["id"]}
    await api.made(f"/rooms/{room}/event-types", {"name": "order.made", "schema": schema})
    subscription = await api.subscription(room)
    at = f"/rooms/{room}/messages"
    good = {"event_type": "order.made", "payload": {"id": 1}}
    checked = await api.call("POST", f"{at}/check", "publish", json=good)
    assert checked.status_code == 200
    assert checked.json() == {"destinations": [subscription["destination"]], "destination_count": 1}
    for wrong in (
        {"event_type": "order.made", "payload": {}},
        {"event_type": "unknown", "payload": 1},
        {"event_type": "order.made", "payload": {"id": 1}, "version": 2},
        {"payload": {"id": 1}},
    ):
        checked_wrong = (await api.call("POST", f"{at}/check", "publish", json=wrong)).json()
        published = (await api.call("POST", at, "publish", json=wrong)).json()
        assert (checked_wrong["status"], checked_wrong.get("errors")) == (
            published["status"],
            published["errors"],
        )
    assert (await api.call("GET", at)).json()["items"] == []
    assert await api.sql("SELECT count(*) FROM deliveries") == [(0,)]
    assert await api.sql("SELECT count(*) FROM delivery_log") == [(0,)]


async def test_an_id_that_is_taken_is_not_looked_at(api: Api) -> None:
    room = (await api.room())["id"]
    schema = {"type": "integer"}
    await api.made(f"/rooms/{room}/event-types", {"name": "made", "schema": schema})
    message = {"event_type": "made", "payload": 1, "id": "one"}
    assert (await api.call("POST", f"/rooms/{room}/messages", json=message)).status_code == 202
    at = f"/rooms/{room}/messages/check"
    other = message | {"payload": 2}
    assert (await api.call("POST", at, json=other)).status_code == 200
    wrong = await api.call("POST", at, json=message | {"payload": "text"})
    assert (wrong.status_code, wrong.json()["errors"][0]["field"]) == (422, "payload")
    unknown = await api.call("POST", at, json=message | {"event_type": "odd"})
    assert (unknown.status_code, unknown.json()["errors"][0]["field"]) == (422, "event_type")


async def test_a_check_shows_a_publisher_what_its_publish_shows(shared: Shared) -> None:
    at = f"/rooms/{shared.room}/messages/check"
    body = {"event_type": "order.made", "payload": 1}
    strange = await shared.api.call("POST", at, shared.api.keys["stranger"], json=body)
    missing = await shared.api.call("POST", "/rooms/1/messages/check", "stranger", json=body)
    assert strange.status_code == missing.status_code == 404
    assert strange.json()["title"] == missing.json()["title"]
    seen = (await shared.api.call("POST", at, shared.api.keys["publisher"], json=body)).json()
    assert seen["destinations"] == []
    owner = (await shared.api.call("POST", at, shared.api.keys["admin"], json=body)).json()
    assert seen["destination_count"] == owner["destination_count"] == 2
    assert len(owner["destinations"]) == 2


async def test_the_counts_of_a_room(api: Api) -> None:
    room = (await api.room())["id"]
    await api.made(f"/rooms/{room}/event-types", {"name": "made"})
    await api.subscription(room, "first")
    await api.subscription(room, "second", type="PULL")
    await api.publish(room, "made", 1)
    counts = (await api.call("GET", f"/rooms/{room}/counts")).json()
    assert counts == {
        "waiting": 2,
        "leased": 0,
        "held": 0,
        "sidelined": 0,
        "subscriptions": 2,
        "event_types": 1,
        "messages": 1,
    }
    assert (await api.call("GET", f"/rooms/{room}/counts", "stranger")).status_code == 404


async def test_lists_are_filtered_by_a_part_of_a_name_and_by_type(api: Api) -> None:
    for name in ("Shop-orders", "shop_100", "billing"):
        await api.room(name)
    found = (await api.call("GET", "/rooms?contains=SHOP")).json()["items"]
    assert {one["name"] for one in found} == {"Shop-orders", "shop_100"}
    assert len((await api.call("GET", "/rooms?contains=_")).json()["items"]) == 1
    assert (await api.call("GET", f"/rooms?contains={'x' * 500}")).status_code == 422
    room = found[0]["id"]
    await api.subscription(room, "crm")
    await api.subscription(room, "crm-pull", type="PULL")
    for path in ("/subscriptions", f"/rooms/{room}/subscriptions"):
        of_type = (await api.call("GET", f"{path}?type=PULL")).json()["items"]
        assert [one["name"] for one in of_type] == ["crm-pull"]
        named = (await api.call("GET", f"{path}?contains=CRM")).json()["items"]
        assert len(named) == 2


async def test_an_unknown_event_type_is_answered_with_the_nearest_one_once(api: Api) -> None:
    room = (await api.room())["id"]
    await api.made(f"/rooms/{room}/event-types", {"name": "order.created"})
    message = {"event_type": "order.creatd", "payload": 1}
    at = f"/rooms/{room}/messages"
    begun = "this room has no event type 'order.creatd'"
    listed = f"; GET /v1/rooms/{room}/event-types lists them"
    named = {"field": "event_type", "message": f"{begun}; is order.created meant?{listed}"}
    for path in (at, f"{at}/check"):
        answer = await api.call("POST", path, "publish", json=message)
        assert (answer.status_code, answer.json()["errors"]) == (422, [named])
    batch = await api.call("POST", f"{at}/batch", "publish", json={"messages": [message] * 2})
    # The search takes longer than the rest, so a request causes it once.
    assert batch.json()["errors"] == [
        {"field": "messages[0].event_type", "message": named["message"]},
        {"field": "messages[1].event_type", "message": begun},
    ]


@pytest.mark.parametrize(
    ("names", "status", "problems"), [(40_000, 422, 100), (40_001, 422, 1), (600_000, 413, 0)]
)
@pytest.mark.parametrize("path", ["messages", "messages/check"])
async def test_very_many_unknown_destinations_keep_no_other_waiting(
    api: Api, path: str, names: int, status: int, problems: int
) -> None:
    """A loop that stalls fails the test."""
    room = (await api.room())["id"]
    await api.made(f"/rooms/{room}/event-types", {"name": "made"})
    listed = ",".join(['"a"' if names <= 40_001 else '""'] * names)
    body = f'{{"event_type":"made","payload":1,"destinations":[{listed}]}}'
    answer = await api.call("POST", f"/rooms/{room}/{path}", "publish", content=body)
    assert (answer.status_code, len(answer.json()["errors"])) == (status, problems)


async def test_a_batch_of_many_destinations_keeps_no_other_waiting(api: Api) -> None:
    room = (await api.room())["id"]
    await api.made(f"/rooms/{room}/event-types", {"name": "made"})
    listed = ",".join(['"a"'] * 40_000)
    message = f'{{"event_type":"made","payload":1,"destinations":[{listed}]}}'
    at = f"/rooms/{room}/messages/batch"
    answers = {
        count: await api.call(
            "POST", at, "publish", content=f'{{"messages":[{",".join([message] * count)}]}}'
        )
        for count in (2, 3)
    }
    assert [one.status_code for one in answers.values()] == [422, 413]
    assert len(answers[2].json()["errors"]) == 100
    assert "publish fewer messages at a time" in answers[3].json()["detail"]
