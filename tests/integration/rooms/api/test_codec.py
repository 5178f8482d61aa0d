"""Test that malformed or unstorable JSON always gets a precise problem, never a 500."""

import json
from typing import Any

import pytest

from tests.integration.rooms.api.conftest import Api
from tests.unit.rooms.publishing.test_schema_bounds import doubling

MALFORMED = {
    "cut": b'{"delivery_delay_ms":1.0,"x":[',
    "bytes": b'{"delivery_delay_ms":1.0,"name":"\xff"}',
    "lone": b"\xff",
    "brackets": b"[" * 600,
    "closed": b"[" * 600 + b"]" * 600,
    "deep": b'{"delivery_delay_ms":1.0,"x":' + b"[" * 600 + b"]" * 600 + b"}",
    "very deep": b'{"delivery_delay_ms":1.0,"x":' + b"[" * 5000 + b"]" * 5000 + b"}",
    "surrogate": b'{"delivery_delay_ms":1.0,"name":"\\ud800"}',
    "nan": b'{"delivery_delay_ms":NaN}',
}


@pytest.mark.parametrize("body", list(MALFORMED.values()), ids=list(MALFORMED))
async def test_malformed_json_is_a_problem(api: Api, body: bytes) -> None:
    answer = await api.call(
        "POST", "/rooms", content=body, headers={"content-type": "application/json"}
    )
    assert answer.status_code in {400, 422}, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    if body in (MALFORMED["cut"], MALFORMED["bytes"], MALFORMED["deep"]):
        assert (answer.status_code, answer.json()["type"]) == (400, "urn:rooms:problem:malformed")


@pytest.mark.parametrize(
    "number", ["1e400", "-1e400", "1e308", "9" * 400, "18446744073709551616", "5.0"]
)
async def test_huge_numbers_are_refused_or_stored(api: Api, number: str) -> None:
    room = await api.room()
    subscription = await api.subscription(room["id"], type="PULL")
    headers = {"content-type": "application/json"}
    for path, body in (
        (
            f"/subscriptions/{subscription['id']}/filter/test",
            f'{{"payload":{number},"priority":4.0,"filter":"payload > 1"}}',
        ),
        (
            f"/subscriptions/{subscription['id']}/filter/test",
            f'{{"payload":{number},"filter":"payload > 1"}}',
        ),
        (
            f"/rooms/{room['id']}/event-types",
            f'{{"name":"t{len(number)}","schema":{{"maximum":{number}}}}}',
        ),
        (
            "/rooms",
            f'{{"name":"x","delivery_delay_ms":{number},"delivery_delay_multiplier":2,"delivery_attempts":3}}',
        ),
    ):
        answer = await api.call("POST", path, content=body.encode(), headers=headers)
        assert answer.status_code < 500, (body, answer.text)


async def test_a_schema_that_unfolds_to_too_much_is_refused_with_its_place(api: Api) -> None:
    room = await api.room()
    for body in (
        {"name": "t", "schema": doubling(22)},
        {"name": "t", "schema": {"items": {"$ref": "file:///etc/passwd"}}},
    ):
        answer = await api.call("POST", f"/rooms/{room['id']}/event-types", json=body)
        assert answer.status_code == 422
        assert answer.json()["errors"][0]["field"] == "schema"
    await api.made(
        f"/rooms/{room['id']}/event-types", {"name": "t", "schema": {"items": {"$ref": "#"}}}
    )
    answer = await api.call(
        "POST",
        f"/rooms/{room['id']}/event-types/t/versions",
        json={"schema": doubling(22, "allOf")},
    )
    assert answer.status_code == 422
    assert "unfolds" in answer.text


async def test_a_tested_filter_runs_within_its_bounds(api: Api) -> None:
    room = await api.room()
    subscription = await api.subscription(room["id"], type="PULL")
    path = f"/subscriptions/{subscription['id']}/filter/test"

    async def tried(expression: str, payload: Any, **more: Any) -> Any:
        return await api.call("POST", path, json={"filter": expression, "payload": payload, **more})

    refused = await tried("payload.s.matches(payload.s)", {"s": "a"})
    assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "filter")
    large = {"l": list(range(300)), "s": "a" * 5000}
    found = await tried("payload.l.filter(x, x > 1).size() == 298", large)
    assert found.json() == {"matches": True, "error": None}
    found = await tried(
        "headers['x'] == 'y'", 1, headers={"x": "y", **{f"h{n}": "z" * 5000 for n in range(9)}}
    )
    assert found.json() == {"matches": True, "error": None}
    assert (await tried("true", "x" * 300_000)).status_code == 413
    assert (await tried("true", 1, headers={f"h{n}": "z" for n in range(30)})).status_code == 422
    assert b'rooms_sandbox_checks_total{outcome="done"} 2.0' in api.services.metrics.render()


async def test_duplicate_keys_keep_the_last_and_never_fail(api: Api) -> None:
    room = await api.room()
    answer = await api.call(
        "POST",
        f"/rooms/{room['id']}/event-types",
        content=b'{"name":"a","name":"b"}',
        headers={"content-type": "application/json"},
    )
    assert (answer.status_code, json.loads(answer.content).get("name")) == (201, "b")
