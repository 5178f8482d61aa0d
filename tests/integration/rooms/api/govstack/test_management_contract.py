"""Test each documented status, body and header of the first implementation's interface."""

import json
from collections import defaultdict
from types import SimpleNamespace
from typing import Any, Final
from urllib.parse import quote

import httpx
import jsonschema_rs
import pytest

from rooms.api.govstack import callers
from rooms.api.govstack.management import members as members_module
from rooms.domain.state_machine import Scope
from rooms.errors import RateLimitedError, StorageUnavailableError
from tests.integration.rooms.api.conftest import make_key
from tests.integration.rooms.api.govstack.conftest import (
    MADE,
    OWNER,
    PAID,
    PUBLISHER,
    ROOM,
    STRANGER,
    SUBSCRIBER,
    UNKNOWN,
    GovStack,
    member_id,
)
from tests.integration.rooms.api.govstack.scenarios.test_journal import NEW_ROOM

OPERATOR: Final = "operator"
UNDER_PRESSURE: Final = {413, 429, 503}
"""The same for every operation: `test_limits_and_outages`."""


class Contract:
    """Call operations by their names in the document, and check each answer against it."""

    def __init__(self, gov: GovStack, document: dict[str, Any]) -> None:
        self.gov = gov
        self.document = document
        self.seen: defaultdict[str, set[int]] = defaultdict(set)

    def operations(self) -> dict[str, set[int]]:
        """Return the documented statuses of each operation."""
        return {
            f"{method.upper()} {path}": set(map(int, operation["responses"]))
            for path, item in self.document["paths"].items()
            for method, operation in item.items()
        }

    async def call(
        self,
        name: str,
        expected: int,
        role: str = OWNER,
        body: Any = None,
        *,
        query: str = "",
        **values: Any,
    ) -> Any:
        """Return the body of an answer that has this status, and is as the document says."""
        more: dict[str, Any] = {
            one: values.pop(one) for one in ("client", "headers", "content") if one in values
        }
        method, path = name.split(" ")
        path = path.format(
            **{
                "memberId": quote(member_id(OWNER), safe=""),
                "roomId": ROOM,
                "eventType": MADE,
                "version": 1,
                **dict.fromkeys(("eventId", "publisherId", "subscriptionId", "managerId"), UNKNOWN),
                **values,
            }
        )
        if body is not None:
            more["json"] = body
        answer = await self.gov.send(method, path + query, role, **more)
        return self.check(name, answer, expected)

    def check(self, name: str, answer: httpx.Response, expected: int) -> Any:
        """Check status, headers and body; return the body."""
        assert answer.status_code == expected, (name, answer.text)
        method, path = name.split(" ")
        reply = self.document["paths"][path][method.lower()]["responses"][str(expected)]
        self.seen[name].add(expected)
        for header in reply.get("headers", {}):
            assert header in answer.headers, (name, header)
        if "content" not in reply:
            assert answer.content == b"", (name, answer.text)
            return None
        media_type = answer.headers["content-type"].partition(";")[0]
        schema = reply["content"][media_type]["schema"]
        if media_type == "text/csv":
            return answer.text
        found = json.loads(answer.content)
        schema = {**schema, "components": self.document["components"]}
        jsonschema_rs.validator_for(schema).validate(found)
        return found


@pytest.fixture
async def contract(gov: GovStack) -> Contract:
    gov.api.keys[OPERATOR] = await make_key(gov.api.services, OPERATOR, Scope.PLATFORM)
    await gov.api.sql(
        "UPDATE organisations SET member_id = %s WHERE name = %s", member_id(OPERATOR), OPERATOR
    )
    return Contract(gov, (await gov.api.http.get("/rooms/openapi.json")).json())


IN_MEMBER, IN_ROOM = "/rooms/{memberId}", "/rooms/{memberId}/{roomId}"
TYPES: Final = f"{IN_ROOM}/event-types"
SUBSCRIPTIONS: Final = f"{IN_ROOM}/subscriptions"


async def rooms_and_event_types(contract: Contract) -> None:
    call = contract.call
    own = quote(member_id(STRANGER), safe="")
    await call(f"POST {IN_MEMBER}", 201, STRANGER, NEW_ROOM, memberId=own)
    await call(f"POST {IN_MEMBER}", 409, STRANGER, NEW_ROOM, memberId=own)
    assert len((await call(f"GET {IN_MEMBER}", 200, STRANGER, memberId=own))["items"]) == 1
    await call(f"GET {IN_ROOM}", 200)
    await call(f"POST {TYPES}", 201, body={"name": "x"})
    await call(f"POST {TYPES}", 409, body={"name": "x"})
    assert len((await call(f"GET {TYPES}", 200))["items"]) == 3
    versions = f"{TYPES}/{{eventType}}/versions"
    await call(f"POST {versions}", 201, body={"schema": True}, eventType="x")
    assert len((await call(f"GET {versions}", 200, eventType="x"))["items"]) == 2
    rewritten = {"version": 2, "schema": {"type": "integer"}}
    assert (await call(f"PUT {versions}", 200, body=rewritten, eventType="x"))["version"] == 2
    one_version = f"DELETE {versions}/{{version}}"
    await call(one_version, 204, eventType="x", version=2)
    await call(one_version, 409, eventType="x", version=1)
    await call(one_version, 404, eventType="x", version=2)
    await call(f"DELETE {TYPES}/{{eventType}}", 204, eventType="x")
    here = {"memberId": own, "roomId": "new"}
    second = {**NEW_ROOM, "name": "second"}
    await call(f"POST {IN_MEMBER}", 201, STRANGER, second, memberId=own)
    await call(f"PUT {IN_ROOM}", 409, STRANGER, {"name": "second"}, **here)
    changed = await call(f"PUT {IN_ROOM}", 200, STRANGER, {"description": "changed"}, **here)
    assert changed["description"] == "changed"
    await call(f"DELETE {IN_ROOM}", 400, STRANGER, query="?confirm=other", **here)
    await call(f"DELETE {IN_ROOM}", 202, STRANGER, query="?confirm=new", **here)
    await call(f"GET {IN_ROOM}", 404, STRANGER, **here)


async def publishers(contract: Contract) -> None:
    call, one = contract.call, f"{IN_ROOM}/publishers/{{publisherId}}"
    body = {"organisation_id": STRANGER}
    made = await call(f"POST {IN_ROOM}/publishers", 201, body=body)
    change = {"event_types": [PAID]}
    changed = await call(f"PUT {one}", 200, body=change, publisherId=made["id"])
    assert len((await call(f"GET {IN_ROOM}/publishers", 200))["items"]) == 2
    await contract.gov.api.sql(
        "INSERT INTO grants (room_id, id, organisation_id, kind, event_types) SELECT %s,"
        " gen_random_uuid(), organisation_id, 'publish', ARRAY['x' || n] FROM rooms,"
        " generate_series(1, 1000) n WHERE id = %s",
        contract.gov.room, contract.gov.room,
    )  # fmt: skip
    await call(f"POST {IN_ROOM}/publishers", 409, body={**body, "event_types": ["y"]})
    await call(f"PUT {one}", 409, body={"event_types": ["z"]}, publisherId=changed["id"])
    await contract.gov.api.sql("DELETE FROM grants WHERE event_types[1] LIKE 'x%%'")
    await call(f"DELETE {one}", 204, publisherId=changed["id"])


async def subscriptions(contract: Contract) -> None:
    call, one = contract.call, f"{SUBSCRIPTIONS}/{{subscriptionId}}"
    policy = {"subscription_policy": "approval", "visibility": "listed"}
    await contract.gov.api.call("PATCH", f"/rooms/{contract.gov.room}", OWNER, json=policy)
    body = {"name": "pulling", "type": "PULL"}
    made = await call(f"POST {SUBSCRIPTIONS}", 201, STRANGER, body)
    await call(f"POST {SUBSCRIPTIONS}", 409, STRANGER, body)
    this = {"subscriptionId": made["id"]}
    assert len((await call(f"GET {SUBSCRIPTIONS}", 200))["items"]) == 1
    decision = {"approved": True, "version": made["version"]}
    await call(f"POST {one}", 200, body=decision, **this)
    await call(f"POST {one}", 409, body=decision, **this)
    await call(f"GET {one}", 200, **this)
    assert (await call(f"GET {one}/queue", 200, **this))["waiting"] == 0
    await call(f"DELETE {one}", 204, **this)
    await call(f"DELETE {one}", 409, **this)


async def events(contract: Contract) -> None:
    call = contract.call
    body = {"name": "queue", "type": "PULL", "ack_by_next_pull": False}
    queue = (await call(f"POST {SUBSCRIPTIONS}", 201, SUBSCRIBER, body))["id"]
    pull, of_queue = f"GET {IN_ROOM}/pull", {"query": f"?subscriptionId={queue}"}
    await call(pull, 404, SUBSCRIBER, **of_queue)
    publish, key = f"POST {IN_ROOM}/publish", {"Idempotency-Key": "k"}
    event: dict[str, Any] = {"eventType": MADE, "content": None}
    made = await call(publish, 200, PUBLISHER, event, headers=key)
    await call(publish, 409, PUBLISHER, {**event, "content": 2}, headers=key)
    acknowledge, first = f"DELETE {IN_ROOM}/pull/{{eventId}}", {"eventId": made["eventId"]}
    await call(acknowledge, 409, SUBSCRIBER, **of_queue, **first)
    second = await call(publish, 200, PUBLISHER, {**event, "content": 1})
    await call(pull, 204, SUBSCRIBER, **of_queue)
    await call(acknowledge, 204, SUBSCRIBER, **of_queue, **first)
    assert await call(pull, 200, SUBSCRIBER, **of_queue) == 1
    assert len((await call(f"GET {IN_ROOM}/events", 200))["items"]) == 2
    await call(f"GET {IN_ROOM}/events/{{eventId}}", 200, eventId=second["eventId"])
    body = {"name": "hook", "type": "PUSH", "push_url": "https://example.com/in"}
    hook = (await call(f"POST {SUBSCRIPTIONS}", 201, SUBSCRIBER, body))["id"]
    await call(pull, 409, SUBSCRIBER, query=f"?subscriptionId={hook}")
    await call(f"DELETE {TYPES}/{{eventType}}", 409)
    used = {"version": 1, "schema": False}
    await call(f"PUT {TYPES}/{{eventType}}/versions", 409, body=used)


async def members(contract: Contract) -> None:
    call = contract.call
    count, listed = len(contract.gov.organisations), []
    body = {"name": "new", "member_id": "EE/GOV/new"}
    managers = "/api/admin/managers"
    made = await call(f"POST {managers}", 201, OPERATOR, body)
    assert made["member_id"] == "EE/GOV/new"
    await call(f"POST {managers}", 409, OPERATOR, body)
    await call(f"POST {managers}", 400, OPERATOR, {"name": "without"})
    gone = await call(f"DELETE {managers}/{{managerId}}", 409, OPERATOR, managerId=made["id"])
    assert "/v1/organisations/{id}/suspend" in gone["detail"]
    await call(f"DELETE {managers}/{{managerId}}", 404, OPERATOR)
    for path in ("/api/members", "/api/admin/members", managers):
        listed = (await call(f"GET {path}", 200, OPERATOR, query="?limit=200"))["items"]
        assert len(listed) > count
        page = await call(f"GET {path}", 200, OPERATOR, query="?limit=1")
        assert page["items"] == listed[:1]
    for path in ("/api/export/members", "/api/admin/export/members", "/api/admin/export/managers"):
        assert await call(f"GET {path}", 200, OPERATOR) == listed
        table = await call(f"GET {path}", 200, OPERATOR, query="?format=csv")
        assert f",new,EE/GOV/new,,active,{made['created_at']}\r\n" in table
        assert table.count("\r\n") == len(listed) + 1
        await call(f"GET {path}", 400, OPERATOR, query="?format=xml")
    of_room = "/api/admin/export/rooms/{memberId}/{roomId}/event-types"
    for path in (of_room, "/api/export/rooms/{roomId}/event-types"):
        assert await call(f"GET {path}", 200) == [PAID, MADE]
        assert (
            await call(f"GET {path}", 200, query="?format=csv") == f"name\r\n{PAID}\r\n{MADE}\r\n"
        )
    await call("GET /api/export/rooms/{roomId}/event-types", 404, PUBLISHER)
    assert await call(f"GET {of_room}", 200, PUBLISHER) == [PAID, MADE]


async def test_every_documented_answer_is_given_and_fits_its_schema(contract: Contract) -> None:
    for part in (rooms_and_event_types, publishers, subscriptions, events, members):
        await part(contract)
    for name, statuses in contract.operations().items():
        role = OPERATOR if name.split(" ")[1].startswith("/api/") and "rooms" not in name else OWNER
        body: Any = None if name.startswith(("GET", "DELETE")) else {}
        await contract.call(name, 400, role, body, client="nothing")
        await contract.call(name, 403, role, body, client=f"{member_id(PUBLISHER)}/app")
        await contract.call(name, 401, "rooms_x", body, client=f"{member_id(OWNER)}/app")
        if "{roomId}" in name and body is None:
            query = f"?subscriptionId={UNKNOWN}" if "/pull" in name else ""
            await contract.call(name, 404, query=query, roomId="unknown")
        missing = statuses - contract.seen[name] - UNDER_PRESSURE
        # Of a room: `test_what_a_caller_may_not_see_is_not_there`. All others are always there.
        assert missing <= ({404} if "{roomId}" not in name or body is not None else set()), name


async def test_what_a_caller_may_not_see_is_not_there(contract: Contract) -> None:
    """Check 404 with right bodies, by a caller that the owner gave nothing."""
    bodies: dict[str, Any] = {
        f"POST {TYPES}": {"name": "y"},
        f"POST {TYPES}/{{eventType}}/versions": {"schema": True},
        f"PUT {IN_ROOM}": {"description": "x"},
        f"PUT {TYPES}/{{eventType}}/versions": {"version": 1, "schema": None},
        f"POST {IN_ROOM}/publishers": {"organisation_id": PUBLISHER},
        f"PUT {IN_ROOM}/publishers/{{publisherId}}": {"event_types": None},
        f"POST {SUBSCRIPTIONS}": {"name": "y", "type": "PULL"},
        f"POST {SUBSCRIPTIONS}/{{subscriptionId}}": {"approved": False},
        f"POST {IN_ROOM}/publish": {"eventType": MADE, "content": 1},
    }
    assert bodies.keys() == {
        name
        for name in contract.operations()
        if "{roomId}" in name and name.startswith(("POST", "PUT"))
    }
    for name, body in bodies.items():
        await contract.call(name, 404, STRANGER, body)


async def test_limits_and_outages(contract: Contract, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check what every operation may answer: a body beyond the limit, a quota, and an outage."""
    call, gov = contract.call, contract.gov
    largest = gov.api.services.settings.max_body_bytes
    publish, event = f"POST {IN_ROOM}/publish", {"eventType": MADE, "content": 1}
    for name in (publish, f"POST {TYPES}"):
        await call(name, 413, content=b" " * (largest + 1))
    limits = {"messages_per_day": 1}
    path = f"/rooms/{gov.room}/quotas"
    assert (await gov.api.call("PATCH", path, OWNER, json=limits)).is_success
    await call(publish, 200, PUBLISHER, event)
    refused = await call(publish, 429, PUBLISHER, event)
    assert refused["limit"] == "messages_per_day"

    async def away(*_: Any) -> None:
        raise StorageUnavailableError("PostgreSQL is away")

    monkeypatch.setattr(callers, "find_members", away)
    for name in (publish, f"GET {TYPES}", "GET /api/export/rooms/{roomId}/event-types"):
        await call(name, 503, OWNER, event if name == publish else None)


class _Refusing:
    """Answer with pages of one item; refuse each later one for now, once."""

    def __init__(self) -> None:
        self.refused: set[str] = set()

    async def answer(self, _handler: Any, *, limit: int, cursor: str | None) -> Any:
        assert limit
        if cursor is not None and cursor not in self.refused:
            self.refused.add(cursor)
            raise RateLimitedError("others use the connections", retry_after_s=0)
        number = int(cursor or 0)
        return SimpleNamespace(items=[number], next_cursor=str(number + 1) if number < 2 else None)


async def test_an_export_waits_where_its_later_pages_are_refused_for_now() -> None:
    refusing: Any = _Refusing()
    assert [page async for page in members_module._pages(refusing, None)] == [[0], [1], [2]]
    assert refusing.refused == {"1", "2"}
