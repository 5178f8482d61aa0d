"""Test PULL over HTTP: both routes answer alike, and match the OpenAPI document."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from rooms.api.app import create_app
from rooms.api.deps import ApiServices
from rooms.api.fast_routes import App
from rooms.app.api import make_asgi
from tests.integration.rooms.api.conftest import Api, open_api
from tests.support.pull_service import until

NOWHERE = "00000000-0000-7000-8000-000000000001"
UNKNOWN = "AQ" + "A" * 26

# Name → the route, what is sent, and the answer's status. `{ack}` is the ack id of the one message
# pulled first.
REQUESTS: dict[str, dict[str, Any]] = {
    "pull": {"status": 200, "route": "pull", "json": {"max_messages": 1}},
    "pull nothing": {"status": 200, "route": "pull", "json": {}},
    "pull without a body": {"status": 200, "route": "pull"},
    "pull by halves": {"status": 422, "route": "pull", "json": {"max_messages": 0.5}},
    "pull a whole float": {"status": 200, "route": "pull", "json": {"max_messages": 2.0}},
    "pull too many": {"status": 422, "route": "pull", "json": {"max_messages": 1001}},
    "pull unknown field": {"status": 422, "route": "pull", "json": {"max": 1}},
    "pull junk": {"status": 400, "route": "pull", "content": b"{"},
    "pull a list": {"status": 422, "route": "pull", "json": []},
    "pull null": {"status": 422, "route": "pull", "json": None, "content": b"null"},
    "pull with a query": {"status": 422, "route": "pull?max_messages=1", "json": {}},
    "pull nowhere": {"status": 404, "route": "pull", "json": {}, "queue": NOWHERE},
    "pull no id": {"status": 404, "route": "pull", "json": {}, "queue": "nothing"},
    "pull upper case": {"status": 404, "route": "pull", "json": {}, "upper": True},
    "pull a webhook": {"status": 409, "route": "pull", "json": {}, "queue": "{hook}"},
    "pull by a publisher": {"status": 403, "route": "pull", "json": {}, "as": "publish"},
    "pull by a stranger": {"status": 404, "route": "pull", "json": {}, "as": "stranger"},
    "pull without a key": {"status": 401, "route": "pull", "json": {}, "as": None},
    "ack": {"status": 200, "route": "ack", "json": {"ack_ids": ["{ack}", UNKNOWN]}},
    "ack again": {"status": 200, "route": "ack", "json": {"ack_ids": ["{ack}"]}},
    "ack none": {"status": 422, "route": "ack", "json": {"ack_ids": []}},
    "ack nothing": {"status": 400, "route": "ack"},
    "ack malformed": {"status": 422, "route": "ack", "json": {"ack_ids": ["{ack}", "x", "é"]}},
    "ack malformed by a stranger": {"status": 404, "route": "ack", "json": {"ack_ids": ["x"]}, "as": "stranger"},
    "ack too much": {"status": 413, "route": "ack", "content": b" " * 70_000},
    "ack a webhook": {"status": 409, "route": "ack", "json": {"ack_ids": [UNKNOWN]}, "queue": "{hook}"},
    "nack what is acked": {"status": 409, "route": "nack", "json": {"ack_ids": ["{ack}"]}},
    "extend what is acked": {"status": 409, "route": "extend", "json": {"ack_ids": ["{ack}"], "lease_ms": 1000}},
    "extend for ever": {"status": 422, "route": "extend", "json": {"ack_ids": ["{ack}"], "lease_ms": 10**9}},
}  # fmt: skip


@pytest.fixture
async def small(database: str, tmp_path: Path) -> AsyncIterator[Api]:
    async with open_api(database, ROOMS_MAX_BODY_BYTES="65536") as opened:
        yield opened


def client(app: App) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://rooms.test")


async def furnish(api: Api, name: str) -> dict[str, str]:
    """Hold a queue with one message, and a webhook."""
    room = await api.room(name)
    await api.made(f"/rooms/{room['id']}/event-types", {"name": "made"})
    queue = await api.subscription(room["id"], "queue", type="PULL")
    hook = await api.subscription(room["id"], "hook")
    await api.publish(room["id"], "made", {"n": 1})
    return {"queue": queue["id"], "hook": hook["id"]}


def put_in(value: Any, names: dict[str, str]) -> Any:
    match value:
        case str():
            return names.get(value.strip("{}"), value) if value.startswith("{") else value
        case list():
            return [put_in(item, names) for item in value]
        case dict():
            return {key: put_in(item, names) for key, item in value.items()}
        case _:
            return value


async def test_fast_routes_and_litestar_answer_alike(small: Api) -> None:
    answers = []
    for name, make in (("front", make_asgi), ("litestar", create_app)):
        names = await furnish(small, name)
        found: dict[str, Any] = {}
        async with client(await asyncio.to_thread(make, small.services)) as http:
            for called, asked in REQUESTS.items():
                queue = put_in(asked.get("queue", "{queue}"), names)
                path = f"/v1/subscriptions/{queue.upper() if asked.get('upper') else queue}/{asked['route']}"
                key = asked.get("as", "subscribe")
                headers = {} if key is None else {"Authorization": f"Bearer {small.keys[key]}"}
                content = asked.get("content")
                if content is None and "json" in asked:
                    content = json.dumps(put_in(asked["json"], names)).encode()
                answer = await http.post(path, content=content, headers=headers)
                assert answer.status_code == asked["status"], (called, answer.text)
                if called == "pull":
                    (message,) = answer.json()["messages"]
                    names.update(
                        {
                            field: str(message[field])
                            for field in ("ack_id", "delivery_id", "message_id")
                        }
                    )
                    names |= {"ack": message["ack_id"], "at": message["published_at"]}
                    names["until"] = message["lease_until"]
                found[called] = comparable(answer, names)
        answers.append(found)
    front, litestar = answers
    for called in REQUESTS:
        assert front[called] == litestar[called], called


def comparable(answer: httpx.Response, names: dict[str, str]) -> tuple[Any, ...]:
    """Return an answer without the ids that must differ."""
    text = answer.text
    for name, value in names.items():
        text = text.replace(value, name).replace(value.upper(), name)
    headers = ("content-type", "retry-after", "www-authenticate", "allow")
    assert answer.headers["content-length"] == str(len(answer.content))
    return answer.status_code, text, [answer.headers.get(name) for name in headers]


@pytest.mark.parametrize("route", ["ack", "nack", "extend"])
@pytest.mark.parametrize("make", [make_asgi, create_app])
async def test_all_late_is_a_problem_that_has_the_results(
    small: Api, make: Callable[[ApiServices], App], route: str
) -> None:
    names = await furnish(small, "late")
    async with client(await asyncio.to_thread(make, small.services)) as http:
        http.headers["Authorization"] = f"Bearer {small.keys['subscribe']}"
        path = f"/v1/subscriptions/{names['queue']}"
        (message,) = (await http.post(f"{path}/pull")).json()["messages"]
        await small.sql("UPDATE leases SET until = now()")
        body = {"ack_ids": [message["ack_id"]]} | ({"lease_ms": 1000} if route == "extend" else {})
        answer = await http.post(f"{path}/{route}", json=body)
    assert answer.status_code == 409
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["type"] == "urn:rooms:problem:late"
    assert problem["results"] == [{"ack_id": message["ack_id"], "status": "late"}]
    assert problem["instance"] == f"{path}/{route}"


async def test_other_problems_have_no_results(small: Api) -> None:
    answer = await small.call("POST", f"/subscriptions/{NOWHERE}/pull", "subscribe")
    assert "results" not in answer.json()


@pytest.mark.parametrize("make", [make_asgi, create_app])
async def test_a_poll_ends_with_its_client(small: Api, make: Callable[[ApiServices], App]) -> None:
    """Close the connection while the poll waits.

    Oracle: nothing waits any more, and the next poll gets the message.
    """
    names = await furnish(small, "gone")
    assert len(await pull(small, names["queue"])) == 1
    body, closed = b'{"wait_ms": 30000}', asyncio.Event()
    events = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if events:
            return events.pop()
        await closed.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    sent: list[Any] = []
    path = f"/v1/subscriptions/{names['queue']}/pull"
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "client": ("test", 1),
        "server": ("test", 80), "headers": [
            (b"authorization", f"Bearer {small.keys['subscribe']}".encode()),
            (b"content-length", str(len(body)).encode()),
        ],
    }  # fmt: skip
    app = await asyncio.to_thread(make, small.services)
    polling = asyncio.ensure_future(app(scope, receive, send))
    waiters = small.services.pull_service._waiters
    await until(lambda: bool(waiters.waiting_keys()))
    closed.set()
    await until(lambda: not waiters.waiting_keys())
    await polling


async def pull(api: Api, queue: str) -> list[dict[str, Any]]:
    answer = await api.call("POST", f"/subscriptions/{queue}/pull", "subscribe", json={})
    found: list[dict[str, Any]] = answer.json()["messages"]
    return found


async def test_the_document_describes_bodies_and_answers(api: Api) -> None:
    document = (await api.http.get("/schema/openapi.json")).json()
    for route, field in (
        ("pull", "max_messages"),
        ("ack", "ack_ids"),
        ("nack", "delay_ms"),
        ("extend", "lease_ms"),
    ):
        operation = document["paths"][f"/v1/subscriptions/{{subscription_id}}/{route}"]["post"]
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        assert field in schema["properties"]
        assert schema["additionalProperties"] is False
        assert operation["requestBody"]["required"] is (route != "pull")
        assert set(operation["responses"]) == {
            "200", "400", "401", "403", "404", "409", "413", "422", "429", "503",
        }  # fmt: skip
    message = document["components"]["schemas"]["PulledMessage"]
    assert set(message["required"]) == {
        "ack_id", "delivery_id", "message_id", "attempt", "event_type", "version", "correlation_id", "published_at",
        "priority", "delay_ms", "lease_until", "payload",
    }  # fmt: skip
