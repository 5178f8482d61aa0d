"""Test GovStack's interfaces on a running service: their documents as the contract, and all doors."""

import json
import secrets
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

import httpx
import jsonschema_rs
import pytest
import schemathesis
import standardwebhooks
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import ignored_auth, positive_data_acceptance

from tests.e2e.test_schemathesis import MODES, means_its_path
from tests.support.api_client import plain_client
from tests.support.polling import until
from tests.support.room import POLICY
from tests.support.service import Service
from tests.support.webhook_sink import Sink

MADE, SPARE = "order.made", "order.spare"
OWNER, PUBLISHER, SUBSCRIBER = "owner", "publisher", "subscriber"
UNKNOWN: Final = "01900000-0000-7000-8000-000000000000"
EXAMPLES = 10
LONG_MS = 600_000
PREFIX: Final = "/r1/{instanceId}/{memberClass}/{memberCode}/{applicationCode}"


@dataclass
class Members:
    """Three members that share a room, with a key each."""

    service: Service
    name: str = field(default_factory=lambda: secrets.token_hex(4))
    keys: dict[str, str] = field(default_factory=dict)
    room: int = 0

    @classmethod
    def open(cls, service: Service, **fields: Any) -> "Members":
        """Create the members and the room, with two event types."""
        made = cls(service)
        ids = {}
        for role in (OWNER, PUBLISHER, SUBSCRIBER):
            body = {"name": f"{role}-{made.name}", "member_id": made.member_id(role)}
            ids[role] = service.post("/organisations", body)["id"]
            key = {"name": "first", "scopes": ["admin"]}
            made.keys[role] = service.post(f"/organisations/{ids[role]}/keys", key)["key"]
        room = {"name": "orders", "govstack": True, **POLICY, **fields}
        made.room = made.v1("POST", "/rooms", OWNER, room)["id"]
        for event_type in (MADE, SPARE):
            made.v1("POST", f"/rooms/{made.room}/event-types", OWNER, {"name": event_type})
        for role, kind in ((PUBLISHER, "publish"), (SUBSCRIBER, "subscribe")):
            grant = {"organisation_id": ids[role], "kind": kind}
            made.v1("POST", f"/rooms/{made.room}/grants", OWNER, grant)
        return made

    def member_id(self, role: str) -> str:
        return f"EE/GOV/{self.name}-{role}"

    @property
    def parts(self) -> dict[str, str]:
        """Return the path parameters of the room."""
        instance, member_class, code = self.member_id(OWNER).split("/")
        return {
            "instanceId": instance,
            "memberClass": member_class,
            "memberCode": code,
            "applicationCode": "orders",
        }

    def headers(self, role: str) -> dict[str, str]:
        return {
            "Authorization": f"Bearer {self.keys[role]}",
            "X-GovStack-Client": f"{self.member_id(role)}/app",
        }

    def v1(self, method: str, path: str, role: str, body: Any = None) -> Any:
        """Return the answer's body of a call that must succeed."""
        headers = {"Authorization": f"Bearer {self.keys[role]}"}
        with plain_client() as http:
            answer = http.request(
                method, f"{self.service.url}/v1{path}", headers=headers, json=body
            )
        assert answer.is_success, answer.text
        return answer.json() if answer.content else None

    def r1(
        self, method: str, path: str, role: str, body: Any = None, **more: Any
    ) -> httpx.Response:
        """Call an operation of the specification."""
        headers = {**self.headers(role), **more.pop("headers", {})}
        at = f"{self.service.url}{PREFIX.format(**self.parts)}{path}"
        with plain_client() as http:
            return http.request(method, at, headers=headers, json=body, **more)


class Contract:
    """Check answers against a document that the service gave, and note which were seen."""

    def __init__(self, service: Service) -> None:
        self.document = httpx.get(f"{service.url}/r1/openapi.json").raise_for_status().json()
        self.seen: defaultdict[str, set[int]] = defaultdict(set)

    def operations(self) -> dict[str, set[int]]:
        """Return the documented statuses of each operation."""
        return {
            f"{method.upper()} {path.removeprefix(PREFIX)}": set(map(int, operation["responses"]))
            for path, item in self.document["paths"].items()
            for method, operation in item.items()
        }

    def check(self, name: str, answer: httpx.Response, expected: int) -> Any:
        """Return the body of an answer that has this status, and is as the document says."""
        assert answer.status_code == expected, (name, answer.text)
        method, path = name.split(" ")
        operation = self.document["paths"][PREFIX + path][method.lower()]
        reply = operation["responses"][str(answer.status_code)]
        self.seen[name].add(answer.status_code)
        for header in reply.get("headers", {}):
            if "Ours" not in reply["headers"][header]["description"]:
                assert header in answer.headers
        if "content" not in reply:
            assert answer.content == b"", (name, answer.text)
            return None
        media_type = answer.headers["content-type"].partition(";")[0]
        schema = {
            **reply["content"][media_type]["schema"],
            "components": self.document["components"],
        }
        found = json.loads(answer.content)
        jsonschema_rs.validator_for(schema).validate(found)
        return found


def test_every_documented_answer_is_given_and_fits_its_schema(embedded_service: Service) -> None:
    members, contract = Members.open(embedded_service), Contract(embedded_service)

    def call(
        method: str, path: str, expected: int, role: str = OWNER, body: Any = None, **more: Any
    ) -> Any:
        name = f"{method} {path}"
        values = {"eventType": MADE, "eventId": UNKNOWN} | more.pop("values", {})
        return contract.check(
            name, members.r1(method, path.format(**values), role, body, **more), expected
        )

    types, one_type = "/api/v1/eventType", "/api/v1/eventType/{eventType}"
    new: Any = {"values": {"eventType": "order.new"}}
    assert call("GET", types, 200) == [SPARE, MADE]
    body = {"eventType": "order.new", "schema": {"type": "object"}}
    assert call("POST", types, 200, body=body) == body
    call("POST", types, 409, body=body)
    call("POST", types, 400, body={"eventType": "a b"})
    assert call("GET", one_type, 200, **new) == body
    call("DELETE", one_type, 204, **new)
    call("GET", one_type, 204, **new)
    call("DELETE", one_type, 404, **new)

    subs, one_sub = "/api/v1/subs", "/api/v1/subs/{eventType}"
    call("GET", subs, 404, SUBSCRIBER)
    call("GET", one_sub, 404, SUBSCRIBER)
    item: Any = {"eventType": MADE, "delivery": "PULL", "options": {"TTL": 60, "FIFO": True}}
    made = call("POST", one_sub, 200, SUBSCRIBER, item)
    assert made["subscriberId"]["memberCode"] == members.member_id(SUBSCRIBER).split("/")[2]
    call("POST", one_sub, 409, SUBSCRIBER, item)
    call("POST", one_sub, 400, SUBSCRIBER, {"eventType": MADE, "delivery": "PUSH"})
    assert call("GET", subs, 200, SUBSCRIBER) == [made]
    assert call("GET", one_sub, 200, SUBSCRIBER) == made
    assert call("PATCH", one_sub, 201, SUBSCRIBER, made) == made
    call("PATCH", one_sub, 400, SUBSCRIBER, {"eventType": SPARE})
    call("PATCH", one_sub, 404, PUBLISHER, item)

    publish, event_path = "/pub/v1/{eventType}", "/pub/v1/{eventType}/{eventId}"
    event_body = {"eventType": MADE, "event": {"n": 1}}
    key: Any = {"headers": {"Idempotency-Key": "k"}}
    event = call("POST", publish, 201, PUBLISHER, event_body, **key)["id"]
    call("POST", publish, 409, PUBLISHER, {**event_body, "event": 2}, **key)
    call("POST", publish, 400, PUBLISHER, {"eventType": MADE})
    unknown: Any = {"values": {"eventType": "unknown"}}
    call("POST", publish, 404, PUBLISHER, {"eventType": "unknown", "event": 1}, **unknown)
    this: Any = {"values": {"eventId": event}}
    assert call("GET", event_path, 200, PUBLISHER, **this)["states"] == {"queued": 1}
    call("GET", event_path, 404, PUBLISHER)

    pull, ack = "/pull/v1/{eventType}", "/pull/v1/{eventType}/{eventId}"
    call("GET", pull, 400, SUBSCRIBER, params={"leaseSeconds": "0"})
    call("DELETE", ack, 409, SUBSCRIBER, **this)
    pulled = call("GET", pull, 200, SUBSCRIBER)
    assert (pulled["id"], pulled["sequence"], pulled["event"]) == (event, 1, {"n": 1})
    call("DELETE", event_path, 409, PUBLISHER, **this)
    call("DELETE", ack, 404, SUBSCRIBER)
    call("DELETE", ack, 204, SUBSCRIBER, **this)
    call("GET", pull, 404, SUBSCRIBER)
    call("DELETE", event_path, 204, PUBLISHER, **this)
    call("DELETE", event_path, 404, PUBLISHER)
    call("DELETE", one_type, 409)
    call("DELETE", one_sub, 204, SUBSCRIBER)
    call("DELETE", one_sub, 404, SUBSCRIBER)
    members.v1("PUT", "/push-template", SUBSCRIBER, {"template": "https://ss.example.com/in"})
    call("POST", one_sub, 200, SUBSCRIBER, {"eventType": MADE})
    call("GET", pull, 409, SUBSCRIBER)

    elsewhere = Members.open(embedded_service)
    for name in (MADE, SPARE):
        elsewhere.v1("DELETE", f"/rooms/{elsewhere.room}/event-types/{name}", OWNER)
    contract.check(f"GET {types}", elsewhere.r1("GET", types, OWNER), 204)
    for name, statuses in contract.operations().items():
        method, path = name.split(" ")
        at = path.format(eventType=MADE, eventId=UNKNOWN)
        sent = None if method in {"GET", "DELETE"} else {"eventType": MADE}
        nowhere = {"X-GovStack-Client": "unknown"}
        contract.check(name, members.r1(method, at, OWNER, sent, headers=nowhere), 400)
        other = {"X-GovStack-Client": members.member_id(PUBLISHER) + "/app"}
        contract.check(name, members.r1(method, at, OWNER, sent, headers=other), 403)
        wrong = {"Authorization": "Bearer rooms_x"}
        contract.check(name, members.r1(method, at, OWNER, sent, headers=wrong), 401)
        assert statuses - contract.seen[name] <= {404, 409, 413, 429, 503}, name
    late = {"POST /api/v1/eventType", "GET /api/v1/eventType", "GET /api/v1/eventType/{eventType}"}
    for name, statuses in contract.operations().items():
        missing = statuses - contract.seen[name] - {413, 429, 503}
        assert missing <= ({404} if name in late or name.startswith("POST /api/v1/subs") else
                           {409} if name.startswith("PATCH") else set()), (name, missing)  # fmt: skip


def test_no_answer_is_undocumented(embedded_service: Service) -> None:
    """Run Schemathesis on both documents, with paths of what exists and bodies right and wrong."""
    members = Members.open(embedded_service)
    failures = []
    for document in ("/r1/openapi.json", "/rooms/openapi.json"):
        schema = schemathesis.openapi.from_url(f"{embedded_service.url}{document}")
        operations = [one.ok() for one in schema.get_all_operations() if isinstance(one, Ok)]
        assert len(operations) >= 14
        failures += [_probe(operation, members) for operation in operations]
    assert "\n".join(filter(None, failures)) == ""


def _probe(
    operation: "schemathesis.APIOperation[Any, Any, Any, Any]", members: Members
) -> str | None:
    values: Mapping[str, str] = {
        **members.parts,
        "memberId": members.member_id(OWNER),
        "roomId": "orders",
        "eventType": MADE,
    }

    def call(case: "schemathesis.Case[Any]") -> None:
        assume(means_its_path(case))
        given_parts = case.path_parameters
        case.path_parameters = {name: values.get(name, given_parts[name]) for name in given_parts}
        # What is wrong on purpose stays wrong.
        right = _right_locations(case)
        if "BODY" in right and isinstance(case.body, dict) and "eventType" in case.body:
            case.body["eventType"] = MADE
        headers = members.headers(OWNER)
        if "HEADER" not in right:
            del headers["X-GovStack-Client"]
        case.headers.update(headers)
        answer = case.call_and_validate(excluded_checks=[positive_data_acceptance, ignored_auth])
        assert answer.status_code < 500

    cases = st.one_of(*(operation.as_strategy(generation_mode=mode) for mode in MODES))
    steady = settings(
        max_examples=EXAMPLES,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    try:
        steady(given(case=cases)(lambda case: call(case)))()  # noqa: PLW0108 - given() needs a function of its own
    except (AssertionError, BaseExceptionGroup) as failure:
        return f"{operation.label}: {failure!r}"
    return None


def test_one_event_through_all_doors(service: Service, sink: Sink) -> None:
    """Publish by GovStack, pull by /v1, be called with an EventItem, read the status, and stop."""
    members = Members.open(service, delivery_delay_ms=LONG_MS)
    base = sink.url(f"/{members.name}")
    template = base + "/{instanceId}/{memberClass}/{memberCode}/{applicationCode}/{eventType}"
    members.v1("PUT", "/push-template", SUBSCRIBER, {"template": template})
    path = f"/{members.name}/{members.member_id(SUBSCRIBER)}/app/{MADE}"
    subscribed = members.r1("POST", f"/api/v1/subs/{MADE}", SUBSCRIBER, {"eventType": MADE})
    assert subscribed.status_code == 200, subscribed.text
    body = {"name": "queue", "type": "PULL"}
    queue = members.v1("POST", f"/rooms/{members.room}/subscriptions", SUBSCRIBER, body)["id"]

    def publish(content: Any) -> str:
        sent = {"eventType": MADE, "event": content}
        answer = members.r1("POST", f"/pub/v1/{MADE}", PUBLISHER, sent)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    def states(event: str) -> dict[str, int]:
        answer = members.r1("GET", f"/pub/v1/{MADE}/{event}", PUBLISHER)
        found: dict[str, int] = answer.json()["states"]
        return found

    event = publish({"n": 1})
    (arrival,) = sink.wait(path, 1)
    instance, member_class, code = members.member_id(PUBLISHER).split("/")
    assert json.loads(arrival.body) == {
        "id": event,
        "publisherId": {
            "instanceId": instance,
            "memberClass": member_class,
            "memberCode": code,
            "applicationCode": "app",
        },
        "eventType": MADE,
        "event": {"n": 1},
    }
    pull = {"max_messages": 1, "wait_ms": 20_000}
    (pulled,) = members.v1("POST", f"/subscriptions/{queue}/pull", SUBSCRIBER, pull)["messages"]
    assert (pulled["message_id"], pulled["payload"]) == (event, {"n": 1})
    acks = {"ack_ids": [pulled["ack_id"]]}
    members.v1("POST", f"/subscriptions/{queue}/ack", SUBSCRIBER, acks)
    until(lambda: states(event) == {"delivered": 2}, lambda: f"{states(event)}")

    sink.script(path, 500)
    stopped = publish({"n": 2})
    sink.wait(path, 2)
    until(
        lambda: _is_waiting_for_its_retry(members, stopped),
        lambda: f"{states(stopped)}: the first attempt fails",
    )
    answer = members.r1("DELETE", f"/pub/v1/{MADE}/{stopped}", PUBLISHER)
    assert answer.status_code == 204, answer.text
    assert states(stopped) == {"cancelled": 2}
    last = publish({"n": 3})
    found = sink.wait(path, 3)
    assert [json.loads(one.body)["id"] for one in found] == [event, stopped, last]


def test_every_attempt_carries_the_same_signed_item(service: Service, sink: Sink) -> None:
    """Check retries, a changed member id, a subscription of /v1, and a publisher without member id."""
    members = Members.open(service, delivery_delay_ms=50)
    path = f"/{members.name}/items"
    body = {"name": "items", "type": "PUSH", "push_url": sink.url(path), "event_item": True}
    at = f"/rooms/{members.room}/subscriptions"
    hook = members.v1("POST", at, SUBSCRIBER, body)
    body = {"name": "plain", "type": "PUSH", "push_url": sink.url(f"{path}-plain")}
    members.v1("POST", at, SUBSCRIBER, body)
    sink.script(path, 500, 500)
    sent = b'{"eventType":"order.made","event":{ "n": 1.0 }}'
    base = f"{service.url}{PREFIX.format(**members.parts)}/pub/v1/{MADE}"
    answer = httpx.post(base, headers=members.headers(PUBLISHER), content=sent)
    event = answer.json()["id"]
    arrivals = sink.wait(path, 3)
    assert len({one.body for one in arrivals}) == 1
    assert arrivals[0].body.endswith(b'"event":{ "n": 1.0 }}')
    assert json.loads(arrivals[0].body)["id"] == event
    for one in arrivals:
        standardwebhooks.Webhook(hook["secret"]).verify(one.body, dict(one.headers))
    (plain,) = sink.wait(f"{path}-plain", 1)
    assert plain.body == b'{ "n": 1.0 }'
    whoami = members.v1("GET", "/whoami", OWNER)
    service.call(
        "PATCH", f"/organisations/{whoami['organisation']['id']}", {"member_id": None}
    ).raise_for_status()
    published = {"event_type": MADE, "payload": 2}
    second = members.v1("POST", f"/rooms/{members.room}/messages", OWNER, published)["message_id"]
    last = sink.wait(path, 4)[3]
    assert json.loads(last.body) == {"id": second, "eventType": MADE, "event": 2}


def _right_locations(case: "schemathesis.Case[Any]") -> set[str]:
    assert case.meta is not None
    components = case.meta.components.items()
    return {location.name for location, info in components if info.mode.is_positive}


def _is_waiting_for_its_retry(members: Members, event: str) -> bool:
    steps = members.v1("GET", f"/messages/{event}/journey", OWNER)["items"]
    return any(step["kind"] == "retry_scheduled" for step in steps)


@pytest.mark.parametrize("path", ["/r1/openapi.json", "/rooms/openapi.json"])
def test_the_documents_need_no_key(service: Service, path: str) -> None:
    found = httpx.get(f"{service.url}{path}")
    assert found.status_code == 200
    assert urlsplit(service.url).netloc not in found.text
