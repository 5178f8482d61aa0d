"""Test handler queues over REST: their life, their messages, and their magazines."""

import asyncio
import json
import re
from collections.abc import Sequence
from typing import Any, cast

import pytest

from delivery.magazines.postgres import PostgresMagazine
from rooms.api.pagination import PageRequest
from rooms.db.catalog.handler_queues import read_shovel_request
from rooms.db.connection import transaction
from rooms.domain.magazine import Entry, MagazineName, Slot, sideline_name
from rooms.domain.role import Role
from rooms.errors import MagazineUnavailableError
from rooms.publishing.batch_bounds import MOST_COMMAS
from tests.integration.rooms.api.conftest import Api, open_api
from tests.integration.rooms.api.sign_in import begin
from tests.support.installation import until


async def stored(
    api: Api, name: str, key: str = "admin", *, sideline: bool = False
) -> MagazineName:
    """Return the store's name of a queue's magazine."""
    queue = (await api.call("GET", f"/queues/{name}", key)).json()["store_name"]
    return sideline_name(queue) if sideline else MagazineName(queue)


async def test_a_queue_is_made_with_its_magazines(api: Api) -> None:
    made = await api.made("/queues", {"name": "orders", "shards": 3, "concurrency": 5}, "manage")
    assert (made["magazine"], made["sideline"], made["active"]) == (
        "orders",
        "orders_SIDELINE",
        True,
    )
    assert made["shovel"] == {
        "interval_s": 600,
        "concurrency": 4,
        "one_shot": False,
        "max_shovels": 3,
    }
    assert (made["batching"], made["sweep_duration_s"], made["message_expiry_s"]) == (
        None,
        1200,
        None,
    )
    for sideline in (False, True):
        magazine = await api.services.magazines.open(await stored(api, "orders", sideline=sideline))
        assert magazine.shards == 3
    (record,) = await api.services.magazines.list_queue_records()
    assert (record.name, record.concurrency, record.shovel_interval_s) == (
        made["store_name"],
        5,
        600,
    )
    assert re.fullmatch("queue-[0-9a-f-]{36}", made["store_name"])
    assert (await api.call("GET", "/queues/orders", "publish")).json() == made


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"concurrency": 101}, "concurrency"),
        ({"concurrency": 0}, "concurrency"),
        ({"shards": 513}, "shards"),
        ({"name": "a b"}, "name"),
        ({"name": "orders_SIDELINE"}, "name"),
        ({"name": "subscription-00000000-0000-7000-8000-00000000002a"}, "name"),
        ({"sweep_duration_s": 119}, "sweep_duration_s"),
        ({"shovel": {"interval_s": 0}}, "shovel.interval_s"),
        ({"shovel": {"speed": 1}}, "shovel.speed"),
        ({"batching": {}}, "batching.max_size"),
        ({"batching": {"max_size": 1001}}, "batching.max_size"),
        ({"batching": {"max_size": 2, "max_wait_ms": 30_001}}, "batching.max_wait_ms"),
        ({"more": 1}, "more"),
    ],
)
async def test_wrong_fields_of_a_queue_are_named(
    api: Api, body: dict[str, Any], field: str
) -> None:
    answer = await api.call("POST", "/queues", json={"name": "orders", **body})
    assert answer.status_code == 422, answer.text
    assert [error["field"] for error in answer.json()["errors"]] == [field]
    assert (await api.call("GET", "/queues")).json()["items"] == []


async def test_a_queue_name_is_unique_and_private_in_its_organisation(api: Api) -> None:
    await api.made("/queues", {"name": "orders", "shards": 1})
    assert (await api.call("POST", "/queues", json={"name": "orders"})).status_code == 409
    assert (await api.call("GET", "/queues", "stranger")).json()["items"] == []
    body = {"payload": 1}
    for method, path in (
        ("GET", "/queues/orders"),
        ("POST", "/queues/orders/messages"),
        ("GET", "/magazines/orders"),
    ):
        answer = await api.call(method, path, "stranger", json=body if method == "POST" else None)
        assert answer.status_code == 404, (method, path)
    # Another organisation must not learn by asking that the queue exists.
    theirs = await api.made("/queues", {"name": "orders", "shards": 2}, "stranger")
    assert (theirs["name"], theirs["shards"], theirs["magazine"]) == ("orders", 2, "orders")


async def test_an_organisation_has_a_bounded_number_of_queues(database: str) -> None:
    """Those that are being deleted count: their magazines are still there."""
    async with open_api(database, ROOMS_MAX_HANDLER_QUEUES="2") as api:
        for name in ("one", "two"):
            await api.made("/queues", {"name": name})
        assert (await api.call("DELETE", "/queues/two?confirm=two")).status_code == 202
        refused = await api.call("POST", "/queues", json={"name": "three"})
        assert refused.status_code == 409
        assert "at most 2 handler queues (ROOMS_MAX_HANDLER_QUEUES)" in refused.json()["detail"]
        assert len(await api.services.magazines.list_queue_records()) == 2
        await api.made("/queues", {"name": "one"}, "stranger")


async def test_a_repeated_request_of_a_one_shot_shovel_is_a_new_one(api: Api) -> None:
    """Compare the requests, whose bodies and results are the same, as a pass under way does."""
    await api.made("/queues", {"name": "orders", "shovel": {"one_shot": True}})
    name = await stored(api, "orders")
    seen = []
    for body in (
        {"shovel": {"one_shot": True}},
        {"shovel": {"one_shot": True}},
        {"concurrency": 9},
    ):
        changed = await api.call("PATCH", "/queues/orders", json=body)
        assert changed.json()["shovel"]["one_shot"]
        async with transaction(api.services.engine) as connection:
            seen.append(await read_shovel_request(connection, name))
    assert len(set(seen)) == 2, "another setting requests no pass"
    assert None not in seen


async def test_queues_of_one_name_keep_their_messages_apart(api: Api) -> None:
    """Check that no message, depth, sweep, purge or deletion reaches the other's queue."""
    for number, key in enumerate(("admin", "stranger")):
        await api.made("/queues", {"name": "orders", "shards": 1}, key)
        for _ in range(number + 1):
            answer = await api.call("POST", "/queues/orders/messages", key, json={"payload": key})
            assert answer.status_code == 202
    for number, key in enumerate(("admin", "stranger")):
        shown = (await api.call("GET", "/magazines/orders", key)).json()
        assert (shown["name"], shown["queue"], shown["depth"]) == ("orders", "orders", number + 1)
        found = await (await api.services.magazines.open(await stored(api, "orders", key))).peek(10)
        assert {one.entry.body for one in found} == {f'"{key}"'.encode()}
        await (
            await api.services.magazines.open(await stored(api, "orders", key, sideline=True))
        ).load([Entry(id=key, body=b"1")])
    purged = await api.call(
        "POST", "/queues/orders/sideline/purge", "stranger", params={"confirm": "orders"}
    )
    assert purged.json()["purged"] == 1
    assert [
        one["id"] for one in (await api.call("GET", "/queues/orders/sideline")).json()["items"]
    ] == ["admin"]
    assert (
        await api.call("DELETE", "/queues/orders", "stranger", params={"confirm": "orders"})
    ).status_code == 202
    assert (await api.call("GET", "/queues/orders", "stranger")).status_code == 404
    assert (await api.call("GET", "/magazines/orders")).json()["depth"] == 1
    assert (await api.call("PATCH", "/queues/orders", json={"concurrency": 3})).json()[
        "concurrency"
    ] == 3


async def test_a_queue_from_before_per_organisation_names_keeps_its_magazines(api: Api) -> None:
    """Check that a queue from before names were per organisation keeps its name and messages."""
    made = await api.made("/queues", {"name": "orders", "shards": 1})
    await api.sql(
        "UPDATE queues SET name = 'kept', display_name = NULL WHERE name = %s RETURNING 1",
        made["store_name"],
    )
    for suffix in ("", "_SIDELINE"):
        await api.services.magazines.create(
            MagazineName(f"kept{suffix}"), shards=1, expires=not suffix
        )
    found = (await api.call("GET", "/queues/kept")).json()
    assert (found["name"], found["store_name"], found["magazine"]) == ("kept", "kept", "kept")
    assert (await api.call("POST", "/queues/kept/messages", json={"payload": 1})).status_code == 202
    assert (await api.call("GET", "/magazines/kept")).json()["depth"] == 1
    assert (await api.call("POST", "/queues", json={"name": "kept"})).status_code == 409
    theirs = await api.made("/queues", {"name": "kept", "shards": 1}, "stranger")
    assert theirs["store_name"] != "kept"
    assert (await api.call("GET", "/magazines/kept", "stranger")).json()["depth"] == 0
    # The queue's name in the store opens nothing in the API.
    assert (await api.call("GET", f"/queues/{theirs['store_name']}", "stranger")).status_code == 404


async def test_concurrent_creations_of_a_name_make_one_queue(api: Api) -> None:
    answers = await asyncio.gather(
        *(api.call("POST", "/queues", json={"name": "orders"}) for _ in range(6))
    )
    assert sorted(answer.status_code for answer in answers) == [201, 409, 409, 409, 409, 409]


async def test_no_queue_is_created_while_the_store_does_not_answer(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: Any, **__: Any) -> None:
        raise MagazineUnavailableError("away")

    with monkeypatch.context() as patch:
        patch.setattr(api.services.magazines, "save_queue_record", away)
        assert (await api.call("POST", "/queues", json={"name": "orders"})).status_code == 503
    assert (await api.call("GET", "/queues/orders")).status_code == 404
    await api.made("/queues", {"name": "orders"})


async def test_fields_left_out_of_a_change_stay(api: Api) -> None:
    made = await api.made("/queues", {"name": "orders", "message_expiry_s": 60})
    body = {"concurrency": 7, "shovel": None, "batching": {"max_size": 4}}
    changed = (await api.call("PATCH", "/queues/orders", json=body)).json()
    assert changed == made | {
        "concurrency": 7,
        "shovel": None,
        "batching": {"max_size": 4, "max_wait_ms": 0},
        "updated_at": changed["updated_at"],
    }
    assert (await api.call("PATCH", "/queues/orders", json={})).json() == changed
    answer = await api.call("PATCH", "/queues/orders", json={"shards": 4})
    assert answer.json()["errors"][0]["field"] == "shards"
    answer = await api.call("PATCH", "/queues/orders", json={"concurrency": 101})
    assert answer.status_code == 422
    for name in ("others", "%00", "%20", "%ed%a0%80"):
        assert (
            await api.call("PATCH", f"/queues/{name}", json={"concurrency": 1})
        ).status_code == 404
        assert (await api.call("GET", f"/magazines/{name}")).status_code == 404


async def test_a_deletion_is_confirmed_and_a_job(api: Api) -> None:
    made = await api.made("/queues", {"name": "orders"})
    assert (await api.call("DELETE", "/queues/orders")).json()["errors"][0]["field"] == "confirm"
    answer = await api.call("DELETE", "/queues/orders", params={"confirm": "orders"})
    assert answer.status_code == 202, answer.text
    job = (await api.call("GET", f"/jobs/{answer.json()['job_id']}")).json()
    arguments = {"queue": "orders", "store_name": made["store_name"]}
    assert (job["kind"], job["arguments"], job["room_id"]) == ("delete_queue", arguments, None)
    for method, path in (
        ("GET", "/queues/orders"),
        ("DELETE", "/queues/orders"),
        ("GET", "/magazines/orders"),
    ):
        assert (await api.call(method, path, params={})).status_code == 404
    assert (await api.call("POST", "/queues", json={"name": "orders"})).status_code == 409


async def test_pages_of_queues_follow_each_other(api: Api) -> None:
    for name in ("c", "a", "b"):
        await api.made("/queues", {"name": name, "shards": 1})
    first = (await api.call("GET", "/queues", params={"limit": 2})).json()
    second = (
        await api.call("GET", "/queues", params={"limit": 2, "cursor": first["next_cursor"]})
    ).json()
    assert [item["name"] for item in first["items"] + second["items"]] == ["a", "b", "c"]
    assert second["next_cursor"] is None


async def test_messages_are_stored_as_they_were_sent(api: Api) -> None:
    await api.made("/queues", {"name": "orders", "shards": 1, "message_expiry_s": 60})
    answer = await api.call(
        "POST",
        "/queues/orders/messages",
        "publish",
        content=b'{"id": "mine", "payload": {"b":1.50,  "a":[]}}',
        headers={"Content-Type": "application/json"},
    )
    assert (answer.status_code, answer.json()) == (202, {"id": "mine"})
    batch = {"messages": [{"payload": n} for n in range(3)]}
    accepted = (await api.call("POST", "/queues/orders/messages/batch", json=batch)).json()[
        "messages"
    ]
    found = await (await api.services.magazines.open(await stored(api, "orders"))).peek(10)
    assert [one.entry.body for one in found] == [b'{"b":1.50,  "a":[]}', b"0", b"1", b"2"]
    assert [one.entry.id for one in found] == ["mine", *(one["id"] for one in accepted)]
    assert all(one.entry.expires_at is not None for one in found)
    label = await stored(api, "orders")
    assert (
        f'rooms_handler_queue_loaded_total{{queue="{label}"}} 4.0'.encode()
        in api.services.metrics.render()
    )


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("messages", {}),
        ("messages", {"payload": 1, "id": ""}),
        ("messages", {"payload": 1, "more": 1}),
        ("messages/batch", {"messages": []}),
        ("messages/batch", {"messages": [{"payload": 1}] * 1001}),
        ("messages/batch", {"messages": [{"id": "x"}]}),
    ],
)
async def test_a_malformed_message_refuses_its_batch(
    api: Api, path: str, body: dict[str, Any]
) -> None:
    await api.made("/queues", {"name": "orders", "shards": 1})
    assert (await api.call("POST", f"/queues/orders/{path}", json=body)).status_code == 422
    assert await (await api.services.magazines.open(await stored(api, "orders"))).count() == 0


@pytest.mark.parametrize("item", ["1", '{"payload":1}'])
async def test_a_batch_is_counted_before_its_messages_are_decoded(
    api: Api, monkeypatch: pytest.MonkeyPatch, item: str
) -> None:
    await api.made("/queues", {"name": "orders", "shards": 1})
    monkeypatch.setattr("rooms.api.codec.decode_json", None)
    answer = await api.call(
        "POST",
        "/queues/orders/messages/batch",
        "publish",
        content=b'{"messages":[%b]}' % ",".join([item] * (MOST_COMMAS + 2)).encode(),
        headers={"Content-Type": "application/json"},
    )
    assert answer.status_code == 422, answer.text
    (problem,) = answer.json()["errors"]
    assert problem["field"] == "messages"
    assert "1 to 1000" in problem["message"]


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        (
            b'{"messages":[{"payload":1},{"payload":[1,2,"\\u0000"]}]}',
            422,
            "messages[1].payload[2]",
        ),
        (b'{"messages":[{"payload":1},{"payload":2,"x":1}]}', 422, "messages[1].x"),
        (b'{"messages":{"a":1,"b":2}}', 422, "messages"),
        (b'{"messages":[{"payload":1}],"other":1}', 422, "other"),
        (b'{"other":1,"and":2}', 422, "other"),
        (b'{"messages":[{"payload":1},{"payload":2}', 400, None),
        (b'{"messages":[{"payload":1},{"payload":2}],"messages":[{"payload":3}]}', 202, None),
    ],
)
async def test_a_counted_batch_is_decoded_as_a_small_one(
    api: Api, monkeypatch: pytest.MonkeyPatch, body: bytes, status: int, field: str | None
) -> None:
    await api.made("/queues", {"name": "orders", "shards": 1})
    headers = {"Content-Type": "application/json"}
    path = "/queues/orders/messages/batch"
    for most in (MOST_COMMAS, 0):
        monkeypatch.setattr("rooms.publishing.batch_bounds.MOST_COMMAS", most)
        answer = await api.call("POST", path, "publish", content=body, headers=headers)
        assert answer.status_code == status, answer.text
        if field is not None:
            assert answer.json()["errors"][0]["field"] == field


async def test_a_payload_beyond_the_limit_is_refused_with_its_batch(api: Api) -> None:
    await api.made("/queues", {"name": "orders", "shards": 1})
    most = api.services.settings.max_payload_bytes
    fits, large = ({"payload": "x" * (most - 2 + more)} for more in (0, 1))
    for path, body in (("messages", large), ("messages/batch", {"messages": [fits, large]})):
        answer = await api.call("POST", f"/queues/orders/{path}", json=body)
        assert (answer.status_code, answer.json()["type"]) == (413, "urn:rooms:problem:too-large")
    assert await (await api.services.magazines.open(await stored(api, "orders"))).count() == 0
    assert (await api.call("POST", "/queues/orders/messages", json=fits)).status_code == 202


async def test_an_expired_queue_refuses_messages_and_an_emptied_store_recovers(
    api: Api,
) -> None:
    await api.made("/queues", {"name": "orders", "queue_expiry_s": 1})
    await api.sql("UPDATE queues SET created_at = created_at - interval '2 s'")
    assert (await api.call("GET", "/queues/orders")).json()["active"] is False
    assert (
        await api.call("POST", "/queues/orders/messages", json={"payload": 1})
    ).status_code == 409
    await api.made("/queues", {"name": "emptied"})
    await api.services.magazines.drop(await stored(api, "emptied"))
    assert (
        await api.call("POST", "/queues/emptied/messages", json={"payload": 1})
    ).status_code == 503


async def test_magazines_of_queues_are_shown_and_swept(api: Api) -> None:
    for name in ("a", "b"):
        await api.made("/queues", {"name": name, "shards": 2})
    batch = {"messages": [{"payload": n} for n in range(3)]}
    await api.call("POST", "/queues/b/messages/batch", json=batch)
    names: list[str] = []
    cursor = None
    while True:
        page = (
            await api.call(
                "GET", "/magazines", params={"limit": 1} | ({"cursor": cursor} if cursor else {})
            )
        ).json()
        names += [item["name"] for item in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert names == ["a", "a_SIDELINE", "b", "b_SIDELINE"]
    shown = (await api.call("GET", "/magazines/b")).json()
    assert (shown["depth"], shown["queue"], shown["subscription_id"], shown["expected"]) == (
        3,
        "b",
        None,
        None,
    )
    assert shown["counters"]["loaded"] == 3
    assert shown["oldest_at"] is not None
    assert (await api.call("GET", "/magazines/a")).json()["oldest_at"] is None
    answer = await api.call("POST", "/magazines/b_SIDELINE/sweep", "operate")
    assert answer.status_code == 202
    job = (await api.call("GET", f"/jobs/{answer.json()['job_id']}")).json()
    arguments = {"queue": "b", "store_name": await stored(api, "b"), "magazine": "b_SIDELINE"}
    assert (job["kind"], job["arguments"]) == ("sweep_queue", arguments)


async def test_failed_messages_are_listed_and_purged(api: Api) -> None:
    await api.made("/queues", {"name": "orders", "shards": 2})
    sideline = await api.services.magazines.open(await stored(api, "orders", sideline=True))
    for start in (0, 3):
        failed = [
            Entry(
                id=f"m-{n}",
                body=b'{"n":  1}',
                shovels=n,
                reason="handler_failed",
                detail="KeyError",
            )
            for n in range(start, start + 3)
        ]
        await sideline.load(failed)
    path = "/queues/orders/sideline"
    _, person = await begin(api, roles=[Role.OPERATOR])
    reads = "SELECT actor_kind, object FROM journal WHERE action = 'read_payload'"
    for key, query in (("view", ""), ("admin", "?payload=false"), (person, "?payload=false")):
        listed = (await api.call("GET", path + query, key)).json()["items"]
        assert [one["reason"] for one in listed if "payload" not in one] == ["handler_failed"] * 6
    assert await api.sql(reads) == []
    shown = (await api.call("GET", path, person)).json()["items"]
    assert [one["payload"] for one in shown] == [{"n": 1}] * 6
    assert await api.sql(reads) == [("person", f"/v1{path}")]
    first = (await api.call("GET", path, params={"limit": 4})).json()
    second = (
        await api.call("GET", path, params={"limit": 4, "cursor": first["next_cursor"]})
    ).json()
    items = first["items"] + second["items"]
    assert [len(first["items"]), len(items), second["next_cursor"]] == [4, 6, None]
    assert {item["id"]: item["shovel_count"] for item in items} == {f"m-{n}": n for n in range(6)}
    for item in items:
        assert (item["reason"], item["error"], item["payload"]) == (
            "handler_failed",
            "KeyError",
            {"n": 1},
        )
        assert (item["taken_at"], item["expires_at"]) == (None, None)

    wrong = await api.call("POST", f"{path}/purge", params={"confirm": "other"})
    assert wrong.json()["errors"][0]["field"] == "confirm"
    assert (await api.call("GET", path, "stranger")).status_code == 404
    assert (
        await api.call("POST", f"{path}/purge", "stranger", params={"confirm": "orders"})
    ).status_code == 404
    assert await sideline.count() == 6
    purged = await api.call("POST", f"{path}/purge", params={"confirm": "orders"})
    assert (purged.status_code, purged.json()) == (200, {"purged": 6, "more": False})
    assert await sideline.count() == 0
    assert not await sideline.fire(10)
    assert (await api.call("GET", path)).json()["items"] == []


async def test_a_page_of_large_failed_messages_ends_early(api: Api) -> None:
    await api.made("/queues", {"name": "orders"})
    sideline = await api.services.magazines.open(await stored(api, "orders", sideline=True))
    body = json.dumps("x" * 200_000).encode()
    for number in range(16):
        await sideline.load([Entry(id=str(number), body=body)])
    seen: list[str] = []
    pages = 0
    cursor: str | None = ""
    while cursor is not None:
        after = f"&cursor={cursor}" if cursor else ""
        answer = await api.call("GET", f"/queues/orders/sideline?limit=200{after}")
        assert len(answer.content) < 1_300_000
        seen += [one["id"] for one in answer.json()["items"]]
        pages += 1
        cursor = answer.json()["next_cursor"]
    assert pages == 3
    assert sorted(seen, key=int) == [str(number) for number in range(16)]
    bare = (await api.call("GET", "/queues/orders/sideline?limit=200&payload=false")).json()
    assert len(bare["items"]) == 16
    assert bare["next_cursor"] is None


async def test_a_large_sideline_is_purged_in_several_calls(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rooms.api.handler_sideline.MAX_BATCH", 3)
    monkeypatch.setattr("rooms.api.handler_sideline.MAX_PURGED", 6)
    await api.made("/queues", {"name": "orders", "shards": 1})
    sideline = await api.services.magazines.open(await stored(api, "orders", sideline=True))
    await sideline.load([Entry(id=str(n), body=b"1") for n in range(8)])
    for purged, more in ((6, True), (2, False)):
        answer = await api.call(
            "POST", "/queues/orders/sideline/purge", params={"confirm": "orders"}
        )
        assert answer.json() == {"purged": purged, "more": more}


async def test_no_body_is_kept_in_memory_that_is_not_shown(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a purge nor a list without payloads holds those of all its messages."""
    await api.made("/queues", {"name": "orders", "shards": 1})
    sideline = await api.services.magazines.open(await stored(api, "orders", sideline=True))
    await sideline.load([Entry(id=str(n), body=json.dumps("x" * 1000).encode()) for n in range(20)])
    held: list[int] = []
    peek, respond = type(sideline).peek, PageRequest.respond

    async def counted(*given: Any, **named: Any) -> Any:
        found = await peek(*given, **named)
        held.append(len(found))
        return found

    def shown(self: PageRequest, page: Any, found: Any, *given: Any, **named: Any) -> Any:
        assert all(one.entry.body == b"" for one in found)
        return respond(self, page, found, *given, **named)

    monkeypatch.setattr(type(sideline), "peek", counted)
    with monkeypatch.context() as patch:
        patch.setattr(PageRequest, "respond", shown)
        found = await api.call("GET", "/queues/orders/sideline?limit=200&payload=false")
    assert len(found.json()["items"]) == 20
    assert max(held) <= 8
    held.clear()
    answer = await api.call("POST", "/queues/orders/sideline/purge", params={"confirm": "orders"})
    assert answer.json() == {"purged": 20, "more": False}
    assert held == []


async def test_organisations_take_turns_at_the_store(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many loads of one, eight are at the store; the next free place is another's."""
    async with open_api(database) as api:
        for key in ("admin", "stranger"):
            await api.made("/queues", {"name": "orders"}, key)
        load = PostgresMagazine.load
        began: list[str] = []
        places: asyncio.Semaphore = asyncio.Semaphore(0)

        async def wait(magazine: PostgresMagazine, entries: Sequence[Entry]) -> Sequence[Slot]:
            began.append(entries[0].id)
            await places.acquire()
            return await load(magazine, entries)

        async def send(identity: str, key: str = "admin") -> int:
            body = {"id": identity, "payload": 1}
            return (await api.call("POST", "/queues/orders/messages", key, json=body)).status_code

        async def are_begun(count: int) -> bool:
            return len(began) >= count

        monkeypatch.setattr(PostgresMagazine, "load", wait)
        sent = [asyncio.create_task(send(f"own-{n}")) for n in range(12)]
        await until(lambda: are_begun(8), "the loads to begin")
        sent += [asyncio.create_task(send(f"other-{n}", "stranger")) for n in range(12)]
        await until(lambda: are_begun(16), "those of the other one to begin")
        assert sum(one.startswith("own") for one in began) == 8
        for _ in range(24):
            places.release()
        assert set(await asyncio.gather(*sent)) == {202}
        assert len(began) == 24


@pytest.mark.parametrize("purged", [0, 3])
async def test_a_purge_that_fails_is_noted_as_such(
    api: Api, monkeypatch: pytest.MonkeyPatch, purged: int
) -> None:
    """The store is away from the beginning, or after the first batch."""
    monkeypatch.setattr("rooms.api.handler_sideline.MAX_BATCH", 3)
    await api.made("/queues", {"name": "orders", "shards": 1})
    sideline = await api.services.magazines.open(await stored(api, "orders", sideline=True))
    await sideline.load([Entry(id=str(n), body=b"1") for n in range(8)])
    delete, calls = type(sideline).delete, 0

    async def break_off(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > purged // 3:
            raise MagazineUnavailableError("the store is away")
        return await delete(*arguments)

    monkeypatch.setattr(type(sideline), "delete", break_off)
    answer = await api.call("POST", "/queues/orders/sideline/purge", params={"confirm": "orders"})
    assert answer.status_code == 503
    for close in api.app.on_shutdown:
        await cast(Any, close)()
    found = await api.sql(
        "SELECT outcome, reason, after FROM journal WHERE action = 'purge_queue_sideline'"
    )
    assert found == [("failed", "the store is away", {"purged": 3} if purged else None)]
    assert await sideline.count() == 8 - purged
