"""Test what the directory shows of listed rooms, and that its filters reveal nothing of others."""

from typing import Any

from tests.integration.rooms.api.conftest import Api
from tests.integration.rooms.api.members import Member, member

SECRET = "secret.plan"


async def list_room(api: Api, owner: Member, name: str, *types: str, **fields: Any) -> int:
    room = int((await api.room(name, owner.key, **fields))["id"])
    for event_type in types:
        await api.made(f"/rooms/{room}/event-types", {"name": event_type}, owner.key)
    return room


async def found(api: Api, who: Member, **filters: str) -> list[dict[str, Any]]:
    answer = await api.call("GET", "/directory", who.key, params=filters)
    assert answer.status_code == 200, answer.text
    page = answer.json()
    assert page["next_cursor"] is None
    items: list[dict[str, Any]] = page["items"]
    return items


async def ids(api: Api, who: Member, **filters: str) -> list[int]:
    return [entry["room_id"] for entry in await found(api, who, **filters)]


async def test_the_directory_says_whose_a_room_is_and_how_to_join(api: Api) -> None:
    owner = await member(api, "owner", member_id="EE/GOV/1001")
    asker = await member(api, "asker")
    rooms = {
        policy: await list_room(
            api,
            owner,
            f"of-{policy}",
            "order.paid",
            visibility="listed",
            subscription_policy=policy,
            description=f"about {policy}",
        )
        for policy in ("owner_only", "approval", "automatic")
    }
    entries = {entry["subscription_policy"]: entry for entry in await found(api, asker)}
    join = {
        "owner_only": "ask the owner for a grant",
        "approval": f"POST /v1/rooms/{rooms['approval']}/subscriptions; the owner approves",
        "automatic": f"POST /v1/rooms/{rooms['automatic']}/subscriptions",
    }
    for policy, room in rooms.items():
        assert entries[policy] == {
            "room_id": room,
            "name": f"of-{policy}",
            "description": f"about {policy}",
            "owner": owner.name,
            "owner_member_id": "EE/GOV/1001",
            "subscription_policy": policy,
            "how_to_join": join[policy],
            "event_types": [{"name": "order.paid", "version": 1, "schema": None}],
            "event_type_count": 1,
        }
    for policy, status in (("owner_only", 403), ("approval", 201), ("automatic", 201)):
        body = {"name": "sub", "type": "PULL"}
        path = f"/rooms/{rooms[policy]}/subscriptions"
        answer = await api.call("POST", path, asker.key, json=body)
        assert answer.status_code == status, (policy, answer.text)


async def test_filters_of_the_directory_find_listed_rooms_only(api: Api) -> None:
    owner = await member(api, "owner", member_id="EE/GOV/1002")
    second, asker, private = [await member(api, name) for name in ("second", "asker", "private")]
    orders = await list_room(api, owner, "orders_1", "order.paid", visibility="listed")
    sent = await list_room(api, owner, "Shipments", "order.sent", visibility="listed")
    other = await list_room(api, second, "orders-of-second", "order.paid", visibility="listed")
    await list_room(api, owner, "orders-secret", "order.paid", SECRET)
    await list_room(api, private, "hidden", "order.paid", SECRET)
    await list_room(api, asker, "orders-own", "order.paid", visibility="listed")
    former = await list_room(api, owner, "orders-former", "order.paid", visibility="listed")
    await api.call("PATCH", f"/rooms/{former}", owner.key, json={"visibility": "private"})

    assert await ids(api, asker) == [other, sent, orders]
    for filters, rooms in (
        ({"name": "orders"}, [other, orders]),
        ({"name": "SHIP"}, [sent]),
        ({"name": "_"}, [orders]),
        ({"name": "%"}, []),
        ({"owner": owner.name}, [sent, orders]),
        ({"owner": "EE/GOV/1002"}, [sent, orders]),
        ({"owner": second.name}, [other]),
        ({"owner": owner.name[:-1]}, []),
        ({"event_type": "order.paid"}, [other, orders]),
        ({"event_type": "order.sent"}, [sent]),
        ({"event_type": "order"}, []),
        ({"event_type": "order.*"}, []),
        ({"name": "orders", "owner": owner.name}, [orders]),
        ({"name": "orders", "owner": owner.name, "event_type": "order.sent"}, []),
    ):
        assert await ids(api, asker, **filters) == rooms, filters
    for hidden, unknown in (
        ({"name": "orders-secret"}, {"name": "orders-unknown"}),
        ({"name": "hidden"}, {"name": "unknown"}),
        ({"name": "orders-own"}, {"name": "orders-unknown"}),
        ({"name": "orders-former"}, {"name": "orders-unknown"}),
        ({"owner": private.name}, {"owner": "unknown"}),
        ({"owner": asker.name}, {"owner": "unknown"}),
        ({"event_type": SECRET}, {"event_type": "unknown"}),
        ({"owner": owner.name, "event_type": SECRET}, {"owner": owner.name, "event_type": "x"}),
    ):
        answers = [
            await api.call("GET", "/directory", asker.key, params=one) for one in (hidden, unknown)
        ]
        assert answers[0].text == answers[1].text, hidden
        assert answers[0].json() == {"items": [], "next_cursor": None}

    await api.call("POST", f"/organisations/{owner.id}/suspend", "platform")
    for filters in ({}, {"event_type": "order.paid"}, {"name": "orders"}):
        assert await ids(api, asker, **filters) == [other], filters
    assert await ids(api, asker, owner=owner.name) == []


async def test_pages_of_the_directory_leave_out_what_is_hidden(api: Api) -> None:
    owner, asker = await member(api), await member(api)
    rooms = []
    for number in range(3):
        rooms.append(await list_room(api, owner, f"listed-{number}", visibility="listed"))
        await list_room(api, owner, f"private-{number}")
    pages, query = [], {"limit": 1, "name": "-"}
    while True:
        page = (await api.call("GET", "/directory", asker.key, params=query)).json()
        pages.append([entry["room_id"] for entry in page["items"]])
        if page["next_cursor"] is None:
            break
        query |= {"cursor": page["next_cursor"]}
    assert pages == [[room] for room in reversed(rooms)]
