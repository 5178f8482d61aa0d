"""Test that any request of a client gets a problem that names its fault, never a 500."""

import asyncio
import functools
import gzip
import json
from collections.abc import AsyncIterator
from typing import Any, cast

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rooms.api.app import route_handlers
from rooms.api.auth import authenticate
from rooms.api.codec import decode
from rooms.api.fast_routes import FastRoutes
from rooms.domain.state_machine import Scope
from rooms.errors import InvalidError
from tests.conftest import administer
from tests.integration.rooms.api.conftest import Api, make_key, open_api, room_body

DEEP = 100_000


async def test_malformed_json_is_refused(api: Api) -> None:
    made = await api.room()
    for method, path in (
        ("POST", "/rooms"),
        ("PATCH", f"/rooms/{made['id']}"),
        ("POST", f"/rooms/{made['id']}/event-types"),
        ("POST", f"/rooms/{made['id']}/subscriptions"),
        ("POST", "/keys"),
    ):
        for body in (
            b"",
            b"{",
            b"\xff\xfe",
            b'{"name": "\xff"}',
            b'{"name": "\\ud800"}',
            b"{'name': 1}",
            b'{"name": NaN}',
            b"name=a&type=PUSH",
        ):
            answer = await api.call(method, path, content=body)
            assert answer.status_code == 400, (path, body[:20], answer.text)
            assert answer.headers["content-type"].startswith("application/problem+json")
            assert answer.json()["type"] == "urn:rooms:problem:malformed"
        for body in (b"[" * DEEP, b'{"name":' * DEEP, b'{"schema":' * DEEP, b'{"name": "a"} x'):
            answer = await api.call(method, path, content=body)
            assert answer.status_code in {400, 422}, (path, body[:20], answer.text)
        for body in (
            b"null",
            b"5",
            b'"x"',
            b"[]",
            b"true",
            b'{"x":' + b"1" * 5000 + b"}",
            b'{"\\u0000": 1}',
        ):
            answer = await api.call(method, path, content=body)
            assert answer.status_code == 422, (path, body[:20], answer.text)
            assert answer.json()["errors"]


async def test_the_content_type_does_not_matter_where_the_body_is_json(api: Api) -> None:
    for number, kind in enumerate(
        ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "x", "")
    ):
        answer = await api.call(
            "POST", "/rooms", json=room_body(f"room-{number}"), headers={"Content-Type": kind}
        )
        assert answer.status_code == 201, answer.text


async def test_a_problem_has_everything_that_rfc_9457_asks_for(api: Api) -> None:
    answer = await api.call("GET", "/rooms/5")
    assert answer.json() == {
        "type": "urn:rooms:problem:not-found",
        "title": "Not found",
        "status": 404,
        "detail": "there is no room 5",
        "instance": "/v1/rooms/5",
        "errors": [],
    }


async def test_unknown_routes_and_methods_are_problems_too(api: Api) -> None:
    answer = await api.call("GET", "/nothing")
    assert (answer.status_code, answer.headers["content-type"]) == (404, "application/problem+json")
    assert answer.json()["detail"] == "nothing is at /v1/nothing; /schema shows what there is"
    answer = await api.call("PUT", "/rooms")
    assert (answer.status_code, answer.headers["content-type"]) == (405, "application/problem+json")
    assert set(answer.headers["allow"].split(", ")) >= {"GET", "POST"}
    assert (
        answer.json()["detail"] == f"PUT is not for /v1/rooms; it takes {answer.headers['allow']}"
    )


async def test_a_problem_names_what_would_have_been_right(api: Api) -> None:
    room = (await api.room())["id"]

    async def reported(method: str, path: str, **more: Any) -> list[dict[str, str]]:
        answer = await api.call(method, path, **more)
        assert answer.status_code == 422, answer.text
        found: list[dict[str, str]] = answer.json()["errors"]
        return found

    states = await reported("GET", f"/rooms/{room}/messages", params={"state": "bored"})
    assert [error["field"] for error in states] == ["state"]
    assert states[0]["message"].startswith("must be one of cancelled, delivered, ")
    wrong = {"name": "s", "type": "POSH"}
    assert await reported("POST", f"/rooms/{room}/subscriptions", json=wrong) == [
        {"field": "type", "message": "must be one of PULL, PUSH"}
    ]
    assert await reported("POST", "/keys", json={"name": "k", "scopes": ["publish", "root"]}) == [
        {
            "field": "scopes[1]",
            "message": "must be one of admin, audit, manage, operate, platform, publish, subscribe, view",
        }
    ]
    assert await reported("POST", "/rooms", json=room_body("b") | {"delivery_attempt": 3}) == [
        {
            "field": "delivery_attempt",
            "message": "there is no such field; is delivery_attempts meant?",
        }
    ]
    filtered = {"name": "s", "type": "PULL", "filter": "amount > 3"}
    (error,) = await reported("POST", f"/rooms/{room}/subscriptions", json=filtered)
    assert "; the variables are payload, headers, event_type" in error["message"]
    answer = await api.call("GET", "/rooms/orders")
    assert (answer.status_code, "GET /v1/rooms?name=" in answer.json()["detail"]) == (404, True)
    answer = await api.call("POST", f"/rooms/{room}/messages", content=b"\x1f\x8b\x08")
    assert (answer.status_code, "not compressed" in answer.json()["detail"]) == (400, True)


async def test_a_compressed_body_is_refused_by_its_encoding(api: Api) -> None:
    room = (await api.room())["id"]
    subscription = (await api.subscription(room, type="PULL"))["id"]
    message = {"event_type": "made", "payload": 1}
    for path in (
        "/rooms",
        f"/rooms/{room}/messages",
        f"/rooms/{room}/messages/batch",
        f"/rooms/{room}/messages/check",
        f"/subscriptions/{subscription}/pull",
    ):
        for encoding in ("gzip", "identity"):
            headers = {"content-encoding": encoding}
            sent = gzip.compress(json.dumps(message).encode())
            answer = await api.call("POST", path, content=sent, headers=headers)
            problem = answer.json()
            if encoding == "identity":
                assert (answer.status_code, problem["type"][-9:]) == (400, "malformed"), path
            else:
                assert answer.status_code == 415, (path, answer.text)
                assert problem["type"] == "urn:rooms:problem:encoded-body"
                assert "Content-Encoding gzip; send JSON without one" in problem["detail"]


async def test_a_query_parameter_that_is_missing_is_named(api: Api) -> None:
    answer = await api.call("GET", "/search")
    assert answer.status_code == 422
    assert answer.json()["type"] == "urn:rooms:problem:invalid"
    assert answer.json()["errors"] == [{"field": "q", "message": "is missing"}]


async def test_unknown_query_parameters_are_refused_by_every_route(api: Api) -> None:
    key = await make_key(api.services, "default", Scope.ADMIN, Scope.PLATFORM)
    for handler, path in route_handlers(api.app):
        if path.startswith("/v1"):
            for method in handler.http_methods:
                answer = await api.http.request(
                    method, f"{path}?bogus=1", headers={"Authorization": f"Bearer {key}"}
                )
                assert answer.status_code == 422, (method, path)
                missing = {"subscription"} if path == "/v1/stream" else set()
                assert {error["field"] for error in answer.json()["errors"]} == {"bogus"} | missing


async def test_a_body_beyond_the_limit_is_refused_however_it_comes(database: str) -> None:
    async with open_api(database, ROOMS_MAX_BODY_BYTES="2048") as api:

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(30):
                yield b" " * 100

        for body in (b" " * 3000, chunks()):
            answer = await api.call("POST", "/rooms", content=body)
            assert answer.status_code == 413, answer.text
            assert answer.json()["type"] == "urn:rooms:problem:too-large"
        assert (await api.call("POST", "/rooms", json=room_body())).status_code == 201


async def test_types_of_problems_show_what_an_upload_can_mend(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command line sends such batches in halves (`rooms.cli.bulk_publish`)."""
    made = await api.room()
    types, subscriptions = (
        f"/rooms/{made['id']}/{name}" for name in ("event-types", "subscriptions")
    )
    assert (await api.call("POST", types, json={"name": "paid", "schema": {}})).status_code == 201
    for name in ("a", "b"):
        body = {"name": name, "type": "PULL"}
        assert (await api.call("POST", subscriptions, json=body)).status_code == 201

    async def publish(count: int, key: str) -> tuple[int, str | None]:
        answer = await api.call(
            "POST",
            f"/rooms/{made['id']}/messages/batch",
            json={
                "messages": [{"event_type": "paid", "payload": number} for number in range(count)]
            },
            headers={"Idempotency-Key": key},
        )
        return answer.status_code, answer.json().get("type")

    assert await publish(1, "first") == (202, None)
    reused = "urn:rooms:problem:idempotency-key-reused"
    assert await publish(2, "first") == (409, reused)
    monkeypatch.setattr("rooms.publishing.batch_bounds.MAX_BATCH_DELIVERIES", 3)
    assert await publish(2, "second") == (413, "urn:rooms:problem:batch-too-costly")
    assert await publish(1, "second") == (202, None)


async def test_a_rate_limited_key_gets_retry_after(database: str) -> None:
    async with open_api(database, ROOMS_RATE_LIMIT_PER_S="5") as api:
        api.services.rate_limiter._buckets._monotonic = lambda: 1000.0
        answers = [await api.call("GET", "/jobs", "manage") for _ in range(30)]
        refused = [answer for answer in answers if answer.status_code == 429]
        assert len(answers) - len(refused) == 5
        assert refused[0].headers["retry-after"] == "1"
        assert refused[0].json()["type"] == "urn:rooms:problem:rate-limited"
        assert (await api.call("GET", "/jobs", "operate")).status_code == 200


async def test_without_postgresql_a_503_reveals_no_internals(api: Api) -> None:
    made = await api.room()
    await api.sql(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND datname = current_database()"
    )
    assert (await api.call("GET", f"/rooms/{made['id']}")).status_code in {200, 503}
    name = api.url.rpartition("/")[2].partition("?")[0]
    administer(api.url, "ALTER DATABASE {} ALLOW_CONNECTIONS false", name)
    await api.services.engine.dispose()
    await api.services.writer.close()
    for method, path in (
        ("GET", f"/rooms/{made['id']}"),
        ("POST", "/deliveries/01900000-0000-7000-8000-000000000000/redeliver"),
    ):
        answer = await api.call(method, path)
        assert answer.status_code == 503, answer.text
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["type"] == "urn:rooms:problem:unavailable"
        assert name not in answer.text
    assert (await api.http.get("/health/live")).status_code == 200
    assert (await api.http.get("/health/ready")).json()["parts"]["database"] == "down"
    assert "rooms_database_up 0.0" in (await api.http.get("/metrics")).text


TEXTS = st.text(max_size=20) | st.sampled_from(
    ["\x00", "a\x00b", "\ud800".encode("utf-8", "replace").decode(), "x" * 300]
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**40), 10**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    [
        "name",
        "type",
        "schema",
        "event_types",
        "headers",
        "push_url",
        "delivery_delay_ms",
        "delivery_delay_multiplier",
        "delivery_attempts",
        "message_expiration_ms",
        "terminal_statuses",
        "timeout_ms",
        "scopes",
        "description",
        "overlap_s",
        "max_receives",
    ]
)


@pytest.fixture
async def paths(api: Api) -> list[tuple[str, str, dict[str, object]]]:
    made = await api.room()
    await api.made(f"/rooms/{made['id']}/event-types", {"name": "made"})
    subscription = await api.subscription(made["id"])
    room = f"/rooms/{made['id']}"
    return [
        ("POST", "/rooms", dict(room_body("fuzz"))),
        ("PATCH", room, {}),
        ("POST", f"{room}/event-types", {"name": "fuzz"}),
        ("POST", f"{room}/event-types/made/versions", {"schema": None}),
        ("PUT", f"{room}/event-types/made/versions/1", {"schema": None}),
        (
            "POST",
            f"{room}/subscriptions",
            {"name": "fuzz", "type": "PUSH", "push_url": "https://example.com"},
        ),
        ("PATCH", f"/subscriptions/{subscription['id']}", {}),
        ("POST", f"/subscriptions/{subscription['id']}/rotate-secret", {}),
        ("POST", "/keys", {"name": "fuzz", "scopes": ["publish"]}),
    ]


@pytest.mark.blocking("drawing the first example reads many files")
async def test_no_body_gives_a_500(
    api: Api, paths: list[tuple[str, str, dict[str, object]]]
) -> None:
    bodies: list[dict[str, object]] = []

    @given(st.dictionaries(FIELDS, VALUES, min_size=1, max_size=3))
    @settings(
        max_examples=60, database=None, suppress_health_check=list(HealthCheck), deadline=None
    )
    def collect(body: dict[str, object]) -> None:
        bodies.append(body)

    collect()
    for number, body in enumerate(bodies):
        method, path, right = paths[number % len(paths)]
        for sent in (right | body, body):
            answer = await api.call(method, path, json=sent)
            assert answer.status_code in {200, 201, 400, 409, 422}, (
                method,
                path,
                sent,
                answer.text,
            )


async def test_options_names_every_method_without_a_key(api: Api) -> None:
    document = (await api.http.get("/schema/openapi.json")).json()
    for path, item in document["paths"].items():
        if path.startswith("/v1"):
            answer = await api.http.options(path)
            assert answer.status_code == 204
            assert set(answer.headers["allow"].split(", ")) == {"OPTIONS"} | {
                method.upper() for method in item
            }, path
            assert answer.content == b""


async def test_a_whole_number_may_be_written_as_a_fraction(api: Api) -> None:
    body = b'{"name":"a","delivery_delay_ms":1000.0,"delivery_delay_multiplier":2,"delivery_attempts":3e0}'
    answer = await api.call("POST", "/rooms", content=body)
    assert answer.status_code == 201
    assert answer.json()["delivery_delay_ms"] == 1000
    answer = await api.call("POST", "/rooms", content=body.replace(b"1000.0", b"1000.5"))
    assert [error["field"] for error in answer.json()["errors"]] == ["delivery_delay_ms"]


async def test_long_names_of_a_request_are_cut_in_its_problem(api: Api) -> None:
    long = "a" * 1_000_000
    many = {f"unknown{number}": 1 for number in range(10)}
    for body in (
        {**room_body(), long: 1},
        {**room_body(), f" - at `{long}`": 1},
        {**room_body(), "name": {long: 1}},
        {**room_body(), "x": {long: {long[:500_000]: "\x00"}}},
        {**room_body(), f"{long}\x00": 1},
        {**room_body(), **many},
    ):
        answer = await api.call("POST", "/rooms", json=body)
        assert answer.status_code == 422
        assert answer.json()["errors"]
        assert len(answer.content) < 10_000
    query = "&".join(f"unknown{number}=1" for number in range(3000))
    answer = await api.call("GET", f"/rooms?{query}")
    assert answer.status_code == 422
    assert len(answer.json()["errors"]) == 100


def test_the_place_of_a_wrong_character_is_found_without_the_paths_of_all_others() -> None:
    # A stalled loop would last half a minute; the field had 15 million characters.
    name = "k" * 17_000
    body = (f'{{"{name}":' * 900 + '"\\u0000"' + "}" * 900).encode()
    with pytest.raises(InvalidError) as refused:
        decode(body, dict[str, Any])
    (problem,) = refused.value.problems
    assert len(problem.field) < 130 * 900
    for text, path in (
        ('{"a": [1, {"b c": "\\u0000"}]}', "a[1].b c"),
        ('{"a": {"b\\u0000": 1}}', "a.b\\u0000"),
        ('["\\u0000"]', "[0]"),
        ('"\\u0000"', "body"),
    ):
        with pytest.raises(InvalidError) as refused:
            decode(text.encode(), Any)
        assert refused.value.problems[0].field == path


async def test_what_is_no_batch_has_a_smaller_body(api: Api) -> None:
    room = (await api.room())["id"]
    huge = b'{"name": "t", "schema": {"a": [' + b",".join([b"{}"] * 1_000_000) + b"]}}"
    answer = await api.call("POST", f"/rooms/{room}/event-types", content=huge)
    assert answer.status_code == 413
    assert "may have 2097152 bytes" in answer.json()["detail"]
    await api.made("/queues", {"name": "orders"})
    messages = {"messages": [{"payload": "x" * 200_000}] * 15}
    batch = await api.call("POST", "/queues/orders/messages/batch", json=messages)
    assert batch.status_code == 202
    one = await api.call("POST", "/queues/orders/messages", content=b" " * 3_000_000)
    assert one.status_code == 413
    for path in ("messages", "messages/check"):
        answer = await api.call("POST", f"/rooms/{room}/{path}", content=b" " * 3_000_000)
        assert answer.status_code == 413, path


async def test_the_hot_routes_have_the_same_bounds(api: Api) -> None:
    app: Any = api.app
    front = FastRoutes(
        app,
        authenticate=functools.partial(authenticate, api.services),
        publisher=api.services.publisher,
        pull_api=api.services.pull_service,
        max_body_bytes=4_000,
        max_single_body_bytes=2_000,
    )
    room = (await api.room())["id"]
    transport = httpx.ASGITransport(cast(Any, front))
    statuses = {}
    async with httpx.AsyncClient(transport=transport, base_url="http://rooms.test") as http:
        for path in (f"rooms/{room}/messages", f"rooms/{room}/messages/batch"):
            for size in (1_000, 3_000, 5_000):
                answer = await http.post(
                    f"/v1/{path}",
                    content=b" " * size,
                    headers={"Authorization": f"Bearer {api.keys['admin']}"},
                )
                statuses[path.endswith("batch"), size] = answer.status_code
    assert statuses == {
        (False, 1_000): 400,
        (False, 3_000): 413,
        (False, 5_000): 413,
        (True, 1_000): 400,
        (True, 3_000): 400,
        (True, 5_000): 413,
    }
    found = front.match(f"/v1/rooms/{room}/messages")
    assert found is not None
    status, _, _ = await front.answer(
        *found,
        path="/",
        headers_in={b"authorization": f"Bearer {api.keys['admin']}".encode()},
        body=b" " * 3_000,  # as the protocol has read it
        wait_disconnect=asyncio.Event().wait,
        on_authenticated=lambda _: None,
    )
    assert status == 413
