"""Test event types and their versions."""

import json
from typing import Any

import pytest

from tests.integration.rooms.api.conftest import Api, open_api

DRAFT_07 = "http://json-schema.org/draft-07/schema#"
LATEST = "https://json-schema.org/draft/2020-12/schema"
WRONG: list[tuple[Any, str]] = [
    ({"type": "strin"}, "schema.type"),
    ({"properties": {"amount": {"type": 5}}}, "schema.properties.amount.type"),
    ({"properties": {"a b": {"minimum": "x"}}}, 'schema.properties["a b"].minimum'),
    ({"pattern": "("}, "schema.pattern"),
    ({"$schema": "http://json-schema.org/draft-04/schema#"}, "schema.$schema"),
    ({"$schema": "https://example.com/mine"}, "schema.$schema"),
    ({"$schema": 5}, "schema.$schema"),
    ({"$ref": "https://example.com/x.json"}, "schema"),
    ({"properties": {"a": {"$ref": "file:///etc/passwd"}}}, "schema"),
    ({"$ref": "#/nope"}, "schema"),
    ({"$dynamicRef": "https://example.com/x.json"}, "schema"),
    (
        {
            "$schema": DRAFT_07,
            "definitions": {"a": {"$ref": "other.json"}},
            "$ref": "#/definitions/a",
        },
        "schema",
    ),
    (5, "schema"),
    ("object", "schema"),
    ([], "schema"),
    ({"title": "a\x00b"}, "schema.title"),
]
RIGHT: list[Any] = [
    True,
    False,
    {},
    None,
    {
        "$schema": LATEST,
        "$defs": {"a": {"type": "string"}},
        "properties": {"x": {"$ref": "#/$defs/a"}},
    },
    {
        "$schema": DRAFT_07,
        "definitions": {"a": {}},
        "properties": {"$ref": {"$ref": "#/definitions/a"}},
    },
    {"$ref": "#"},
    {"minimum": -(10**30), "maximum": 1.5e15, "enum": [{"$ref": "https://example.com"}]},
    {"pattern": "\\u0000"},
]


@pytest.fixture
async def room(api: Api) -> int:
    return int((await api.room())["id"])


async def test_versions_count_up_and_numbers_are_never_given_again(api: Api, room: int) -> None:
    path = f"/rooms/{room}/event-types"
    made = await api.made(path, {"name": "order.made", "schema": {"type": "object"}})
    assert made["versions"] == [1]
    for number in (2, 3):
        version = await api.made(
            f"{path}/order.made/versions", {"schema": {"$schema": DRAFT_07, "type": "string"}}
        )
        assert version["version"] == number
    assert (await api.call("DELETE", f"{path}/order.made/versions/3")).status_code == 204
    assert (await api.call("GET", f"{path}/order.made")).json()["latest_version"] == 2
    assert (await api.made(f"{path}/order.made/versions", {"schema": None}))["version"] == 4
    found = (await api.call("GET", f"{path}/order.made")).json()
    assert (found["versions"], found["latest_version"]) == ([1, 2, 4], 4)
    assert [
        one["version"]
        for one in (await api.call("GET", f"{path}/order.made/versions")).json()["items"]
    ] == [
        4,
        2,
        1,
    ]
    one = (await api.call("GET", f"{path}/order.made/versions/1")).json()
    assert (one["schema"], one["event_type"]) == ({"type": "object"}, "order.made")


async def test_the_last_version_stays(api: Api, room: int) -> None:
    path = f"/rooms/{room}/event-types"
    await api.made(path, {"name": "made"})
    answer = await api.call("DELETE", f"{path}/made/versions/1")
    assert answer.status_code == 409
    assert "only one" in answer.json()["detail"]
    await api.made(f"{path}/made/versions", {"schema": None})
    assert (await api.call("DELETE", f"{path}/made/versions/1")).status_code == 204
    assert (await api.call("DELETE", f"{path}/made/versions/2")).status_code == 409


async def test_what_messages_used_is_neither_rewritten_nor_deleted(api: Api, room: int) -> None:
    path = f"/rooms/{room}/event-types"
    await api.made(path, {"name": "made"})
    await api.made(f"{path}/made/versions", {"schema": None})
    await api.publish(room, "made", {}, version=1)
    assert (
        await api.call("PUT", f"{path}/made/versions/1", json={"schema": True})
    ).status_code == 409
    assert (await api.call("DELETE", f"{path}/made/versions/1")).status_code == 409
    assert (await api.call("DELETE", f"{path}/made")).status_code == 409
    rewritten = await api.call(
        "PUT", f"{path}/made/versions/2", json={"schema": {"type": "integer"}}
    )
    assert rewritten.json()["schema"] == {"type": "integer"}
    assert (await api.call("DELETE", f"{path}/made/versions/2")).status_code == 204


async def test_what_a_subscription_names_is_not_deleted(api: Api, room: int) -> None:
    path = f"/rooms/{room}/event-types"
    await api.made(path, {"name": "made"})
    for _ in range(2):
        await api.made(f"{path}/made/versions", {"schema": None})
    subscription = await api.subscription(room, event_types=[{"name": "made", "versions": [1, 2]}])
    for place in ("made", "made/versions/1", "made/versions/2"):
        answer = await api.call("DELETE", f"{path}/{place}")
        assert answer.status_code == 409, place
        assert "sub" in answer.json()["detail"]
    assert (await api.call("DELETE", f"{path}/made/versions/3")).status_code == 204
    await api.call("DELETE", f"/subscriptions/{subscription['id']}")
    assert (await api.call("DELETE", f"{path}/made")).status_code == 204
    assert (await api.call("GET", f"{path}/made")).status_code == 404


@pytest.mark.parametrize("action", ["reject", "terminate"])
async def test_what_only_an_ended_subscription_names_is_deleted(
    api: Api, room: int, action: str
) -> None:
    path = f"/rooms/{room}/event-types"
    await api.made(path, {"name": "made"})
    policy = {"visibility": "listed", "subscription_policy": "approval"}
    await api.call("PATCH", f"/rooms/{room}", json=policy)
    body = {"name": "theirs", "type": "PULL", "event_types": [{"name": "made"}]}
    theirs = await api.made(f"/rooms/{room}/subscriptions", body, "stranger")
    assert (await api.call("DELETE", f"{path}/made")).status_code == 409
    if action == "terminate":
        approval = {"version": theirs["version"]}
        await api.call("POST", f"/subscriptions/{theirs['id']}/approve", json=approval)
    ended = await api.call("POST", f"/subscriptions/{theirs['id']}/{action}", json={})
    assert ended.status_code == 200, ended.text
    assert (await api.call("DELETE", f"{path}/made")).status_code == 204


async def test_a_name_is_declared_once(api: Api, room: int) -> None:
    await api.made(f"/rooms/{room}/event-types", {"name": "made"})
    assert (
        await api.call("POST", f"/rooms/{room}/event-types", json={"name": "made"})
    ).status_code == 409


async def test_a_malformed_schema_is_refused_by_place(api: Api, room: int) -> None:
    path = f"/rooms/{room}/event-types"
    await api.made(path, {"name": "kept"})
    for schema, field in WRONG:
        for method, place, body in (
            ("POST", path, {"name": "made", "schema": schema}),
            ("POST", f"{path}/kept/versions", {"schema": schema}),
            ("PUT", f"{path}/kept/versions/1", {"schema": schema}),
        ):
            answer = await api.call(method, place, json=body)
            assert answer.status_code == 422, (schema, answer.text)
            assert answer.json()["errors"][0]["field"] == field, schema
    assert (await api.call("GET", f"{path}/kept")).json()["versions"] == [1]


async def test_a_schema_reads_as_it_was_made(api: Api, room: int) -> None:
    for number, schema in enumerate(RIGHT):
        await api.made(f"/rooms/{room}/event-types", {"name": f"type-{number}", "schema": schema})
        found = (
            await api.call("GET", f"/rooms/{room}/event-types/type-{number}/versions/1")
        ).json()
        assert found["schema"] == schema


async def test_a_deeply_nested_schema_is_refused(api: Api, room: int) -> None:
    for depth in (500, 5_000, 200_000):
        body = b'{"name":"deep","schema":' + b'{"not":' * depth + b"true" + b"}" * depth + b"}"
        answer = await api.call("POST", f"/rooms/{room}/event-types", content=body)
        assert answer.status_code in {201, 400, 422}, (depth, answer.text)
        assert depth == 500 or answer.status_code != 201


async def test_schemas_and_filters_beyond_a_bound_are_counted(api: Api, room: int) -> None:
    refused = api.services.metrics.bounds_refused
    path = f"/rooms/{room}/event-types"
    # Large ones are measured by the sandbox only.
    large: dict[str, object] = {"description": "x" * 40_000}
    for _ in range(200):
        large = {"items": large}
    for schema in ({"type": 1}, {"$ref": "#none"}, {"description": "x" * 300_000}, large):
        answer = await api.call("POST", path, json={"name": "bounded", "schema": schema})
        assert answer.status_code == 422
    for expression in ("payload.", "payload.s.matches(payload.s)"):
        body = {"name": "bounded", "type": "PULL", "filter": expression}
        answer = await api.call("POST", f"/rooms/{room}/subscriptions", json=body)
        assert answer.status_code == 422
    assert [refused.labels(bound)._value.get() for bound in ("schema", "filter")] == [3, 1]


async def test_an_invalid_version_is_not_found(api: Api, room: int) -> None:
    await api.made(f"/rooms/{room}/event-types", {"name": "made"})
    for version in ("0", "-1", "x", "2147483648", "9" * 40, "1.0", "%00"):
        for method in ("GET", "DELETE"):
            answer = await api.call(method, f"/rooms/{room}/event-types/made/versions/{version}")
            assert answer.status_code == 404, version


async def test_an_invalid_event_type_is_not_found(api: Api, room: int) -> None:
    for name in ("a%20b", "%00", "%ff", "a" * 129, "nothing"):
        for place in (name, f"{name}/versions", f"{name}/versions/1"):
            assert (await api.call("GET", f"/rooms/{room}/event-types/{place}")).status_code == 404
        answer = await api.call(
            "POST", f"/rooms/{room}/event-types/{name}/versions", json={"schema": None}
        )
        assert answer.status_code == 404


async def test_lists_go_by_pages(api: Api, room: int) -> None:
    names = [f"type-{number}" for number in range(5)]
    for name in names:
        await api.made(f"/rooms/{room}/event-types", {"name": name})
    first = (await api.call("GET", f"/rooms/{room}/event-types?limit=3")).json()
    rest = (
        await api.call("GET", f"/rooms/{room}/event-types?limit=3&cursor={first['next_cursor']}")
    ).json()
    assert [one["name"] for one in first["items"] + rest["items"]] == list(reversed(names))
    assert rest["next_cursor"] is None


async def test_a_page_of_large_schemas_ends_early(api: Api, room: int) -> None:
    schema = {"description": "x" * 200_000}
    path = f"/rooms/{room}/event-types"
    await api.made(path, {"name": "large", "schema": schema})
    for _ in range(7):
        await api.made(f"{path}/large/versions", {"schema": schema})
    seen: list[list[int]] = []
    cursor: str | None = ""
    while cursor is not None:
        after = f"&cursor={cursor}" if cursor else ""
        answer = await api.call("GET", f"{path}/large/versions?limit=200{after}")
        assert len(answer.content) < 1_300_000
        seen.append([one["version"] for one in answer.json()["items"]])
        cursor = answer.json()["next_cursor"]
    assert seen == [[8, 7, 6, 5, 4, 3], [2, 1]]


async def test_the_directory_shows_schemas_up_to_a_size_of_a_room(api: Api) -> None:
    listed = (await api.room("listed", key="stranger", visibility="listed"))["id"]
    for number in range(10):
        schema = {"description": f"{number}" + "x" * 4000}
        body = {"name": f"type-{number}", "schema": schema}
        await api.made(f"/rooms/{listed}/event-types", body, "stranger")
    await api.made(
        f"/rooms/{listed}/event-types",
        {"name": "huge", "schema": {"description": "x" * 200_000}},
        "stranger",
    )
    (found,) = (await api.call("GET", "/directory")).json()["items"]
    shown = [one["name"] for one in found["event_types"] if one["schema"] is not None]
    assert shown == [f"type-{number}" for number in range(8)]
    assert len(found["event_types"]) == 11


async def test_the_schemas_of_a_room_are_bounded_together(database: str) -> None:
    async with open_api(database, ROOMS_MAX_ROOM_SCHEMA_BYTES="3000") as api:
        room = (await api.room())["id"]
        path = f"/rooms/{room}/event-types"
        schema = {"description": "x" * 1000}
        await api.made(path, {"name": "first", "schema": schema})
        await api.made(f"{path}/first/versions", {"schema": schema})
        for tried, body in (
            (path, {"name": "second", "schema": schema}),
            (f"{path}/first/versions", {"schema": schema}),
        ):
            refused = await api.call("POST", tried, json=body)
            assert refused.status_code == 422
            (problem,) = refused.json()["errors"]
            assert problem["field"] == "schema"
            assert "the limit is 3000" in problem["message"]
        larger = {"schema": {"description": "x" * 2000}}
        refused = await api.call("PUT", f"{path}/first/versions/2", json=larger)
        assert refused.status_code == 422
        names = [one["name"] for one in (await api.call("GET", path)).json()["items"]]
        assert names == ["first"]
        assert (await api.call("DELETE", f"{path}/first/versions/1")).status_code == 204
        await api.made(path, {"name": "second", "schema": schema})
        # Versions without a schema count, too.
        statuses = {
            (await api.call("POST", path, json={"name": f"more-{number}"})).status_code
            for number in range(5)
        }
        assert statuses == {201, 422}


async def test_a_schema_is_measured_with_its_numbers_written_out(api: Api, room: int) -> None:
    """So PostgreSQL stores them, and so publishing reads them."""
    path = f"/rooms/{room}/event-types"
    usable = {"maximum": 1.797e308, "examples": [1e308] * 700}
    await api.made(path, {"name": "usable", "schema": usable})
    assert (await api.publish(room, "usable", 5))["message_id"]
    for schema in ({"examples": [1e308] * 1000}, {"examples": [1e308] * 30_000}):
        for method, place, body in (
            ("POST", path, {"name": "large", "schema": schema}),
            ("POST", f"{path}/usable/versions", {"schema": schema}),
        ):
            refused = await api.call(method, place, json=body)
            assert refused.status_code == 422
            (problem,) = refused.json()["errors"]
            assert problem["field"] == "schema"
            assert "its numbers written out" in problem["message"]
    assert (await api.call("GET", f"{path}/usable")).json()["versions"] == [1]


async def test_a_stored_schema_of_too_many_bytes_is_refused_undecoded(
    api: Api, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    await api.made(f"/rooms/{room}/event-types", {"name": "made"})
    long = json.dumps({"examples": [1e308] * 2_000})
    await api.sql("UPDATE event_type_versions SET schema = %s::jsonb RETURNING 1", long)
    monkeypatch.setattr("rooms.publishing.routing.decode_json", None)
    body = {"event_type": "made", "payload": 1}
    refused = await api.call("POST", f"/rooms/{room}/messages", json=body)
    assert refused.status_code == 422
    (problem,) = refused.json()["errors"]
    assert problem["field"] == "event_type"
    assert "more than 262,144 bytes" in problem["message"]
