"""Test which caller may use GovStack's interfaces under which name, and that others learn nothing."""

import itertools
import json
from random import Random
from typing import Any, Final
from urllib.parse import quote

import pytest

from rooms.api.app import govstack_handlers
from rooms.api.auth import SCOPES
from rooms.domain.state_machine import Scope
from tests.integration.rooms.api.conftest import Api, make_key
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
from tests.integration.rooms.api.govstack.routes import BODIES, EXPECTED, QUERIES
from tests.support.installation import until

INSTALLATION: Final = "installation"
ROLES: Final = (OWNER, PUBLISHER, SUBSCRIBER, STRANGER, INSTALLATION)


def routes(api: Api) -> list[str]:
    return [
        f"{next(iter(handler.http_methods))} {path}" for handler, path in govstack_handlers(api.app)
    ]


def place(
    route: str, event: str, subscription: str, publisher: str, *, room: str = ROOM
) -> tuple[str, str]:
    """Return method and path of a route of the shared room."""
    method, path = route.split(" ")
    instance, member_class, code = member_id(OWNER).split("/")
    return method, (path + QUERIES.get(route, "")).format(
        instance_id=instance,
        member_class=member_class,
        member_code=code,
        application_code=room,
        event_type=MADE,
        event_id=event,
        subscription_id=subscription,
        publisher_id=publisher,
        manager_id=UNKNOWN,
        version=1,
    )


async def add_publisher(gov: GovStack) -> str:
    """Grant publishing something more; return the grant's id."""
    body = {"organisation_id": PUBLISHER, "kind": "publish", "event_types": ["spare"]}
    return str((await gov.api.made(f"/rooms/{gov.room}/grants", body, OWNER))["id"])


async def renew(gov: GovStack) -> tuple[str, str, str]:
    """Return the ids of a new event, which is pulled, and of a new subscription and publisher."""
    await gov.call("DELETE", f"/api/v1/subs/{MADE}", SUBSCRIBER)
    item = await gov.subscribe()
    event, publisher = await gov.publish(), await add_publisher(gov)
    await gov.pull()
    return event, item["id"], publisher


@pytest.fixture
async def installation(gov: GovStack) -> GovStack:
    gov.api.keys[INSTALLATION] = await make_key(gov.api.services, INSTALLATION, Scope.PLATFORM)
    await gov.api.sql(
        "UPDATE organisations SET member_id = %s WHERE name = %s",
        member_id(INSTALLATION), INSTALLATION,
    )  # fmt: skip
    return gov


async def test_every_route_is_in_the_table(gov: GovStack) -> None:
    assert set(routes(gov.api)) == EXPECTED.keys()
    for handler, path in govstack_handlers(gov.api.app):
        scopes, _ = EXPECTED[f"{next(iter(handler.http_methods))} {path}"]
        assert frozenset(handler.opt[SCOPES]) == scopes


async def test_every_role_gets_its_answer(installation: GovStack) -> None:
    gov = installation
    found = {}
    for route in EXPECTED:
        codes = ""
        things: tuple[str, str, str] | None = None
        for role in ROLES:
            # What was refused changed nothing.
            if things is None:
                things = await renew(gov)
            method, path = place(route, *things)
            if "subs" in route and role == SUBSCRIBER and route.startswith("POST"):
                await gov.call("DELETE", f"/api/v1/subs/{MADE}", SUBSCRIBER)
                things = None
            answer = await gov.send(method, path, role, json=BODIES.get(route))
            assert answer.status_code < 500, (route, role, answer.text)
            codes += {403: "3", 404: "4"}.get(answer.status_code, "+")
            if answer.is_success:
                things = None
            if role == OWNER and answer.is_success:
                await gov.call("DELETE", f"/api/v1/subs/{MADE}", OWNER)
        found[route] = codes
    assert found == {route: codes for route, (_, codes) in EXPECTED.items()}


async def test_what_is_hidden_reads_like_what_is_not_there(gov: GovStack) -> None:
    """Check that status, body and headers are the same for a hidden room and for an unknown one."""
    item = await gov.subscribe()
    event, publisher = await gov.publish(), await add_publisher(gov)
    bodies = [None, {"eventType": MADE}, {"eventType": MADE, "options": {"TTL": 99_999_999}}, {}]
    for route, body in itertools.product(EXPECTED, (*bodies, "right")):
        sent = BODIES.get(route) if body == "right" else body
        answers = []
        for room, ids in (
            (ROOM, (event, item["id"], publisher)),
            ("unknown", (UNKNOWN, UNKNOWN, UNKNOWN)),
        ):
            if "application_code" not in route:
                continue
            method, path = place(route, *ids, room=room)
            answer = await gov.send(method, path, STRANGER, json=sent)
            headers = {name for name in answer.headers if name != "content-length"}
            text = answer.text.replace(room, "ROOM")
            for one in ids:
                text = text.replace(one, "ID")
            answers.append((answer.status_code, text, headers))
        if not answers:
            continue
        assert answers[0] == answers[1], (route, sent)
        assert answers[0][0] in {400, 404}


async def test_a_refused_attempt_says_nothing_in_the_journal_either(gov: GovStack) -> None:
    for room in (ROOM, "unknown"):
        path = f"/r1/{member_id(OWNER)}/{room}/api/v1/eventType"
        await gov.send("POST", path, STRANGER, json={"eventType": "another"})

    async def written() -> list[str]:
        rows = await gov.api.sql("SELECT reason FROM journal WHERE action = 'create_event_type'"
                                 " AND outcome = 'refused'")  # fmt: skip
        return [row[0] for row in rows] if len(rows) == 2 else []

    first, second = await until(written, "refusals")
    assert first == second


async def test_the_header_is_required_and_well_formed(gov: GovStack) -> None:
    path = f"/r1/{member_id(OWNER)}/{ROOM}/api/v1/eventType"
    missing = await gov.send("GET", path, client=None)
    assert missing.status_code == 400
    assert missing.json()["errors"][0]["field"] == "X-GovStack-Client"
    for wrong in (
        "EE/GOV/owner",
        "EE/GOV/owner/app/more",
        "EE//owner/app",
        "EE/GOV/owner/",
        "EE/GOV/ow ner/app",
        "EE%2FGOV%2Fowner%2Fapp",
        "x" * 300,
        "/".join(["x" * 65] * 4),
        "EE/GOV/owner/äpp",
        "../../../..%00",
    ):
        refused = await gov.send(
            "GET", path, client=None, headers={"X-GovStack-Client": wrong.encode()}
        )
        assert refused.status_code == 400, (wrong, refused.text)
    twice = await gov.api.http.get(
        path,
        headers=[
            ("Authorization", f"Bearer {gov.api.keys[OWNER]}"),
            ("X-GovStack-Client", f"{member_id(OWNER)}/app"),
            ("X-GovStack-Client", f"{member_id(OWNER)}/app"),
        ],
    )
    assert twice.status_code == 400


async def test_no_caller_is_another_member(gov: GovStack) -> None:
    """Check 403 for reads, changes and messages, each with an entry in the caller's journal."""
    calls: tuple[tuple[str, str, Any], ...] = (
        ("GET", "/api/v1/eventType", None),
        ("POST", "/api/v1/eventType", {"eventType": "another"}),
        ("POST", f"/pub/v1/{MADE}", {"eventType": MADE, "event": 1}),
        ("GET", f"/pull/v1/{MADE}", None),
    )
    for method, path, body in calls:
        refused = await gov.call(
            method, path, STRANGER, client=f"{member_id(OWNER)}/app", json=body
        )
        assert refused.status_code == 403, refused.text
        assert member_id(STRANGER) in refused.json()["detail"]
    item = {
        "eventType": MADE,
        "delivery": "PULL",
        "subscriberId": {
            "instanceId": "EE",
            "memberClass": "GOV",
            "memberCode": "other",
            "applicationCode": "app",
        },
    }
    refused = await gov.call("POST", f"/api/v1/subs/{MADE}", SUBSCRIBER, json=item)
    assert refused.status_code == 403

    async def written() -> list[tuple[Any, ...]]:
        rows = await gov.api.sql(
            "SELECT action, outcome, organisation_id::text, reason FROM journal"
            " WHERE outcome = 'refused' ORDER BY id"
        )
        return rows if len(rows) == len(calls) + 1 else []

    rows = await until(written, "refusals")
    assert {row[0] for row in rows} == {
        "list_event_types",
        "create_event_type",
        "publish_event",
        "pull_event",
        "create_subscription",
    }
    of_stranger = [row for row in rows if row[2] == gov.organisations[STRANGER]]
    assert len(of_stranger) == len(calls)
    assert all(member_id(OWNER) in row[3] for row in of_stranger)


async def test_a_key_of_an_application_speaks_for_no_other(gov: GovStack) -> None:
    body = {"name": "bound", "scopes": ["admin"], "application": "billing"}
    gov.api.keys["bound"] = (await gov.api.made("/keys", body, SUBSCRIBER))["key"]
    path = "/api/v1/eventType"
    refused = await gov.call("GET", path, "bound", client=f"{member_id(SUBSCRIBER)}/other")
    assert refused.status_code == 403
    assert "billing" in refused.json()["detail"]
    allowed = await gov.call("GET", path, "bound", client=f"{member_id(SUBSCRIBER)}/billing")
    assert allowed.status_code == 200


async def test_an_organisation_without_member_id_calls_nothing(gov: GovStack) -> None:
    refused = await gov.call("GET", "/api/v1/eventType", "admin", client=f"{member_id(OWNER)}/app")
    assert refused.status_code == 403
    assert "no member_id" in refused.json()["detail"]


async def test_the_application_is_in_log_and_journal(gov: GovStack) -> None:
    client = f"{member_id(OWNER)}/registry"
    await gov.call("POST", "/api/v1/eventType", client=client, json={"eventType": "x"})
    event = await gov.publish(role=OWNER)
    rows = await gov.api.sql(
        "SELECT application, object FROM journal WHERE action = 'create_event_type'"
        " AND application IS NOT NULL"
    )
    assert rows == [("registry", f"/r1/{member_id(OWNER)}/{ROOM}/api/v1/eventType")]
    assert (await gov.api.sql("SELECT application FROM messages WHERE id = %s", event)) == [
        ("app",)
    ]


async def test_restricted_keys_do_as_much_as_in_v1(gov: GovStack) -> None:
    item = await gov.subscribe()
    await gov.subscribe(kind=PAID)
    event = await gov.publish()
    restrictions: tuple[tuple[str, dict[str, Any]], ...] = (
        ("elsewhere", {"subscriptions": [item["id"]]}),
        ("typed", {"event_types": [MADE]}),
    )
    for name, restriction in restrictions:
        body = {"name": name, "scopes": ["admin"], **restriction}
        role = SUBSCRIBER if name == "elsewhere" else OWNER
        gov.api.keys[name] = (await gov.api.made("/keys", body, role))["key"]
    own = {"client": f"{member_id(SUBSCRIBER)}/app"}
    listed = await gov.call("GET", "/api/v1/subs", "elsewhere", **own)
    assert [one["eventType"] for one in listed.json()] == [MADE]
    assert (await gov.call("GET", f"/api/v1/subs/{PAID}", "elsewhere", **own)).status_code == 404
    assert (await gov.call("GET", f"/pull/v1/{MADE}", "elsewhere", **own)).json()["id"] == event
    body = {"eventType": PAID, "event": 1}
    refused = await gov.call("POST", f"/pub/v1/{PAID}", "elsewhere", json=body, **own)
    assert refused.status_code == 403
    mine = {"client": f"{member_id(OWNER)}/app"}
    listed = await gov.call("GET", "/api/v1/eventType", "typed", **mine)
    assert listed.json() == [MADE]
    assert (await gov.call("GET", f"/api/v1/eventType/{PAID}", "typed", **mine)).status_code == 204
    assert (
        await gov.call("POST", f"/pub/v1/{PAID}", "typed", json=body, **mine)
    ).status_code == 403
    refused = await gov.call("POST", "/api/v1/eventType", "typed", json={"eventType": "y"}, **mine)
    assert refused.status_code == 403


async def test_a_suspended_organisation_reads_only(gov: GovStack) -> None:
    await gov.subscribe()
    path = f"/organisations/{gov.organisations[SUBSCRIBER]}/suspend"
    assert (await gov.api.call("POST", path, "platform")).is_success
    gov.api.services.keys.forget()
    read = await gov.call("GET", f"/api/v1/subs/{MADE}", SUBSCRIBER)
    assert (read.status_code, read.json()["status"]) == (200, "suspended")
    for method, at in (("GET", f"/pull/v1/{MADE}"), ("DELETE", f"/api/v1/subs/{MADE}")):
        refused = await gov.call(method, at, SUBSCRIBER)
        assert refused.status_code == 403
        assert refused.json()["type"] == "urn:rooms:problem:organisation-suspended"


async def test_quotas_hold(gov: GovStack) -> None:
    limits = {"subscriptions": 1}
    await gov.api.call("PATCH", f"/rooms/{gov.room}/quotas", OWNER, json=limits)
    await gov.subscribe()
    body = {"eventType": PAID, "delivery": "PULL"}
    refused = await gov.call("POST", f"/api/v1/subs/{PAID}", SUBSCRIBER, json=body)
    assert (refused.status_code, refused.json()["limit"]) == (409, "subscriptions")


@pytest.mark.parametrize(
    "part",
    [
        "x" * 8000,
        "%00",
        "%ff%fe",
        "..",
        "%2e%2e",
        "a%2fb",
        "%252F",
        "order.*",
        "*",
        "'",
        "%0d%0a",
        "🦆",
    ],
)
async def test_hostile_paths_find_nothing(gov: GovStack, part: str) -> None:
    sent = part if part.isascii() else quote(part)
    owner = member_id(OWNER)
    for path in (
        f"/r1/{owner}/{sent}/api/v1/eventType",
        f"/r1/EE/GOV/{sent}/{ROOM}/api/v1/eventType",
        f"/r1/{owner}/{ROOM}/api/v1/eventType/{sent}",
        f"/r1/{owner}/{ROOM}/pub/v1/{MADE}/{sent}",
        f"/r1/{owner}/{ROOM}/pull/v1/{sent}",
        f"/r1/{owner}/{ROOM}/api/v1/subs/{sent}",
    ):
        answer = await gov.send("GET", path)
        assert answer.status_code in {204, 404, 405}, (path, answer.text)
    for method in ("POST", "PATCH"):
        body = {"eventType": part, "delivery": "PULL"}
        answer = await gov.call(method, f"/api/v1/subs/{sent}", SUBSCRIBER, json=body)
        assert answer.status_code in {400, 404, 405}, answer.text


TEXTS: Final = (
    *("", "x" * 3000, "\x00", "%", "null", "{}", "[]", "a/b", "..", "🦆", MADE, ROOM, UNKNOWN),
    *(member_id(OWNER), "-1", "1e999", "true", '"', "'; --", "\u202e"),
)
BYTES: Final = (
    *(b"", b"\xff\xfe", b"{", b"[" * 2000),
    *(b'{"eventType":1e999}', b'{"eventType":"\\u0000"}'),
)
FIELDS: Final = (
    *("eventType", "delivery", "options", "TTL", "FIFO", "subscriberId", "event", "content"),
    *("schema", "approved", "version", "name", "type", "event_types"),
)
NAMES: Final = (
    *("event_type", "event_id", "subscription_id", "publisher_id", "manager_id", "version"),
)


def random_value(rng: Random, depth: int = 0) -> Any:
    """Return a value for a body."""
    match rng.randrange(7 if depth < 3 else 4):
        case 0:
            return rng.choice(TEXTS)
        case 1:
            return rng.choice([None, True, 0, -1, 2**70, 1.5])
        case 2 | 3:
            return MADE
        case 4:
            return [random_value(rng, depth + 1) for _ in range(rng.randrange(3))]
    names = rng.sample(FIELDS, rng.randrange(1, 5))
    return {name: random_value(rng, depth + 1) for name in names}


def random_path(rng: Random, path: str) -> str:
    """Return a path with mostly the right room, and anything else in it."""
    instance, member_class, code = member_id(OWNER).split("/")
    right = {
        "instance_id": instance,
        "member_class": member_class,
        "member_code": code,
        "application_code": ROOM,
    }
    for name, value in {**right, **dict.fromkeys(NAMES, "")}.items():
        chosen = value if name in right and rng.random() < 0.9 else rng.choice(TEXTS)
        path = path.replace(f"{{{name}}}", quote(chosen, safe=""))
    if rng.random() < 0.3:
        names = ("leaseSeconds", "subscriptionId", "limit", "cursor", "x")
        path += f"?{rng.choice(names)}={quote(rng.choice(TEXTS))}"
    return path


@pytest.mark.parametrize("seed", range(4))
async def test_random_requests_are_answered_clearly(gov: GovStack, seed: int) -> None:
    """Check that no combination of paths, headers and bodies is an error of the service."""
    rng = Random(seed)
    for _ in range(100):
        method, path = rng.choice(sorted(EXPECTED)).split(" ")
        content = json.dumps(random_value(rng)).encode()
        client = f"{member_id(OWNER)}/app" if rng.random() < 0.8 else rng.choice(TEXTS)
        answer = await gov.send(
            method,
            random_path(rng, path),
            client=None,
            headers={"X-GovStack-Client": client.encode()},
            content=rng.choice(BYTES) if rng.random() < 0.3 else content,
        )
        assert answer.status_code < 500, (method, path, content, answer.text)
        if answer.status_code >= 400:
            assert answer.headers["content-type"] == "application/problem+json"
            assert answer.json()["detail"]
