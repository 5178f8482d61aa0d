"""Test ids of others in every field of a body that the API's document has."""

import itertools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rooms.domain.ids import RoomId, SubscriptionId
from rooms.domain.room import destination_name
from tests.integration.rooms.api.conftest import Api
from tests.integration.rooms.api.members import accepted
from tests.integration.rooms.api.scenarios.test_foreign_ids import (
    Two,
    assert_untouched,
    make_two,
    plain,
)
from tests.integration.rooms.api.test_auth import BODIES


@pytest.fixture
async def two(api: Api) -> Two:
    return await make_two(api)


Ids = dict[str, str]
IN_BODIES: dict[str, Callable[[Ids], Any]] = {
    "ack_ids": lambda ids: [ids["ack_id"]],
    "business_key": lambda ids: ids["caller"],
    "business_keys": lambda ids: [ids["caller"]],
    "correlation_id": lambda ids: ids["caller"],
    "correlation_ids": lambda ids: [ids["message_id"]],
    "delivery_ids": lambda ids: [ids["delivery_id"]],
    "destinations": lambda ids: [
        destination_name(RoomId(int(ids["room_id"])), SubscriptionId(ids["subscription_id"]))
    ],
    "from_message_id": lambda ids: ids["message_id"],
    "id": lambda ids: ids["caller"],
    "ordering_key": lambda ids: ids["caller"],
    "ordering_keys": lambda ids: [ids["caller"]],
    "organisation_id": lambda ids: ids["organisation_id"],
    "rooms": lambda ids: [int(ids["room_id"])],
    "subscription_ids": lambda ids: [ids["subscription_id"]],
    "subscriptions": lambda ids: [ids["subscription_id"]],
}
"""Fields of bodies that name something, with a value for it."""
PLAIN = {
    "access", "ack_by_next_pull", "application", "backfill", "batching", "bytes_per_day",
    "circuit_failures", "circuit_open_ms", "circuit_window_ms", "cloud_events", "concurrency",
    "contact", "count", "days", "delay_ms", "deliver_at", "delivery_attempts",
    "delivery_delay_ms", "delivery_delay_multiplier", "delivery_jitter", "delivery_max_delay_ms",
    "description", "disable_after_ms", "drain_per_s", "dry_run", "error", "event_item",
    "event_type", "event_types", "event_version", "expiration_ms", "expires_at", "expires_s",
    "filter", "full", "govstack", "headers", "ignorable_statuses", "include_expired",
    "interval_s", "jwk", "kind", "lease_ms", "max_concurrency", "max_messages", "max_receives",
    "max_shovels", "max_size", "max_wait_ms", "member_id", "message_expiration_ms",
    "message_expiry_s", "messages", "messages_per_day", "messages_per_s", "name", "native",
    "networks", "one_shot", "operational", "operational_events", "operational_url", "ordered",
    "overlap_s", "payload", "payload_bytes", "priority", "push_url", "queue_expiry_s",
    "rate_burst", "rate_per_s", "reapprove_on", "reason", "repair", "roles", "schema", "scopes",
    "selector", "session_s", "shards", "shovel", "signature", "since", "start_at", "starts_at",
    "states", "stored_messages", "subscription_policy", "sweep_duration_s", "template",
    "terminal_statuses", "timeout_ms", "transparent", "ttl_ms", "type", "until", "version",
    "versions", "visibility", "wait_ms",
}  # fmt: skip
"""Fields of bodies that name nothing of another organisation."""
NUMBERS = {
    "/v1/organisations/{organisation_id}/quotas": {"subscriptions"},
    "/v1/rooms/{room_id}/quotas": {"subscriptions"},
}
"""Fields whose name is elsewhere that of ids."""
MEMBERS_ARE_KNOWN = {("POST", "/v1/rooms/{room_id}/grants", "organisation_id")}
"""A grant may name every member: the installation's members know each other."""
EXCLUDED = {"organisation_id": ["subscription_ids"], "from_message_id": ["since"]}
"""Fields that may not stand beside another one."""
OF_ONE_CALL = re.compile(
    r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|rooms_[\w-]+|\d{4}-\d\d-\d\dT[\d:.]+Z"
)
"""Ids, keys and times that a call makes."""


def fields_of(document: dict[str, Any], schema: dict[str, Any], at: str = "") -> Iterator[str]:
    """Yield the path of every field of a body, such as `messages.id`."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        yield from fields_of(document, document["components"]["schemas"][name], at)
    for part in ("oneOf", "anyOf", "allOf"):
        for one in schema.get(part, ()):
            yield from fields_of(document, one, at)
    if isinstance(schema.get("items"), dict):
        yield from fields_of(document, schema["items"], at)
    for name, one in schema.get("properties", {}).items():
        yield f"{at}{name}"
        yield from fields_of(document, one, f"{at}{name}.")


async def bodies_with_ids(api: Api) -> list[tuple[str, str, str]]:
    """Return (method, path, field) for each field of a body that names something.

    A new field needs a line in `IN_BODIES` or a word in `PLAIN`.
    """
    document = (await api.http.get("/schema/openapi.json")).json()
    found, unknown = [], set()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            content = operation.get("requestBody", {}).get("content", {})
            fields = (fields_of(document, one["schema"]) for one in content.values())
            for field in itertools.chain.from_iterable(fields):
                name = field.rpartition(".")[2]
                if name in IN_BODIES and name not in NUMBERS.get(path, ()):
                    found.append((method.upper(), path, field))
                elif name not in PLAIN | NUMBERS.get(path, set()):
                    unknown.add((path, field))
    assert not unknown
    return found


def body_with(method: str, path: str, field: str, ids: Ids) -> dict[str, Any]:
    """Return a valid body in which this field names one of these things."""
    body: dict[str, Any] = json.loads(json.dumps(BODIES.get((method, path), {})))
    if body.get("event_type") == "made":
        body["event_type"] = "order.paid"
    within, _, name = field.rpartition(".")
    for one in body.get("messages", ()):
        if "event_type" in one:
            one["event_type"] = "order.paid"
    target = body[within][0] if within else body
    target[name] = IN_BODIES[name](ids)
    for other in EXCLUDED.get(name, ()):
        body.pop(other, None)
    return body


async def test_every_id_in_every_body_reveals_nothing(api: Api, two: Two) -> None:
    """Check each field of the document that can hold an id, without a dry run."""
    pull = {"max_messages": 10, "wait_ms": 0, "lease_ms": 60_000}
    path = f"/subscriptions/{two.theirs['subscription_id']}/pull"
    leased = (await api.call("POST", path, two.other.key, json=pull)).json()["messages"]
    ack = leased[0]["ack_id"]
    theirs = two.theirs | {"ack_id": ack, "caller": "of-other"}
    unknown = two.unknown | {"ack_id": f"{ack[:-4]}AAAA", "caller": "of-no-caller"}
    await accepted(
        api, two.other.key, int(two.theirs["room_id"]), id="of-other", business_key="of-other"
    )
    spare = await api.made("/keys", {"name": "spare", "scopes": ["publish"]}, two.one.key)
    own = two.own | {"key_id": spare["id"]}
    kept = await stored_rows(api, two)
    different, tried = [], set()
    for method, path, field in await bodies_with_ids(api):
        if path.startswith("/v1/organisations"):  # for the platform only
            continue
        place = path.removeprefix("/v1").format(
            **own, name="order.paid", version=1, caller_id="caller"
        )
        query = {"confirm": "sub"} if path.endswith("/purge") else {}
        answers = []
        for ids in (theirs, unknown):
            body = body_with(method, path, field, ids)
            answer = await api.call(method, place, two.one.key, json=body, params=query)
            status, text = plain(answer, theirs, unknown)
            answers.append((status, OF_ONE_CALL.sub("…", text)))
        tried.add((method, path, field))
        if (method, path, field) in MEMBERS_ARE_KNOWN:
            assert [status for status, _ in answers] == [201, 422]
        elif answers[0] != answers[1] or answers[0][0] >= 500:
            different.append((method, path, field, *answers))
    assert not different
    assert tried > MEMBERS_ARE_KNOWN
    assert await stored_rows(api, two) == kept
    await assert_untouched(api, two, leased)


async def stored_rows(api: Api, two: Two) -> list[tuple[Any, ...]]:
    """Return the other organisation's deliveries, messages and keys as they are stored."""
    room = int(two.theirs["room_id"])
    return await api.sql(
        "SELECT to_jsonb(d) FROM deliveries d WHERE room_id = %s"
        " UNION ALL SELECT to_jsonb(m) FROM messages m WHERE room_id = %s"
        " UNION ALL SELECT to_jsonb(s) FROM subscriptions s WHERE room_id = %s"
        " UNION ALL SELECT to_jsonb(k) - 'last_used_at' FROM api_keys k WHERE organisation_id = %s",
        *(room, room, room, two.other.id),
    )
