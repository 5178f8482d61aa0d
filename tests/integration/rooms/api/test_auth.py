"""Test the scopes of every route, and that another organisation sees and changes nothing.

A new route needs a line in `ALLOWED`, and one in `OF_NO_RESOURCE` where it names no resource.
`test_auth_roles` calls every route with every scope.
"""

import re
from typing import Any, Final

import pytest

from rooms.api.app import route_handlers
from rooms.api.auth import ALLOWS
from rooms.domain.principal import Restriction
from rooms.domain.state_machine import Scope
from rooms.evidence.jose import generate_key
from tests.integration.rooms.api.conftest import Api, make_key
from tests.integration.rooms.api.sign_in import make_session

MANAGE, PUBLISH, SUBSCRIBE, OPERATE = Scope.MANAGE, Scope.PUBLISH, Scope.SUBSCRIBE, Scope.OPERATE
AUDIT = Scope.AUDIT
ANY = frozenset({MANAGE, PUBLISH, SUBSCRIBE, OPERATE})
ADMIN_ONLY: Final[frozenset[Scope]] = frozenset()
INSTALLATION: Final = frozenset({Scope.PLATFORM})

# The scopes that open a route besides `admin`, which does not open those of the installation.
ALLOWED: Final[dict[tuple[str, str], frozenset[Scope]]] = {
    ("POST", "/v1/rooms"): frozenset({MANAGE}),
    ("GET", "/v1/rooms"): ANY,
    ("GET", "/v1/rooms/{room_id}"): ANY,
    ("PATCH", "/v1/rooms/{room_id}"): frozenset({MANAGE}),
    ("DELETE", "/v1/rooms/{room_id}"): frozenset({MANAGE}),
    ("POST", "/v1/rooms/{room_id}/event-types"): frozenset({MANAGE}),
    ("GET", "/v1/rooms/{room_id}/event-types"): frozenset({MANAGE, OPERATE, PUBLISH}),
    ("GET", "/v1/rooms/{room_id}/event-types/{name}"): frozenset({MANAGE, OPERATE, PUBLISH}),
    ("DELETE", "/v1/rooms/{room_id}/event-types/{name}"): frozenset({MANAGE}),
    ("POST", "/v1/rooms/{room_id}/event-types/{name}/versions"): frozenset({MANAGE}),
    ("GET", "/v1/rooms/{room_id}/event-types/{name}/versions"): frozenset(
        {MANAGE, OPERATE, PUBLISH}
    ),
    ("GET", "/v1/rooms/{room_id}/event-types/{name}/versions/{version}"): frozenset(
        {MANAGE, OPERATE, PUBLISH}
    ),
    ("PUT", "/v1/rooms/{room_id}/event-types/{name}/versions/{version}"): frozenset({MANAGE}),
    ("DELETE", "/v1/rooms/{room_id}/event-types/{name}/versions/{version}"): frozenset({MANAGE}),
    ("POST", "/v1/rooms/{room_id}/subscriptions"): frozenset({MANAGE}),
    ("GET", "/v1/rooms/{room_id}/subscriptions"): frozenset({MANAGE, OPERATE, SUBSCRIBE}),
    ("GET", "/v1/subscriptions/{subscription_id}"): frozenset({MANAGE, OPERATE, SUBSCRIBE}),
    ("PATCH", "/v1/subscriptions/{subscription_id}"): frozenset({MANAGE}),
    ("DELETE", "/v1/subscriptions/{subscription_id}"): frozenset({MANAGE}),
    ("GET", "/v1/subscriptions/{subscription_id}/lane"): frozenset({MANAGE, OPERATE, SUBSCRIBE}),
    ("POST", "/v1/subscriptions/{subscription_id}/pause"): frozenset({MANAGE, OPERATE}),
    ("POST", "/v1/subscriptions/{subscription_id}/resume"): frozenset({MANAGE, OPERATE}),
    ("POST", "/v1/subscriptions/{subscription_id}/rotate-secret"): frozenset({MANAGE}),
    ("POST", "/v1/subscriptions/{subscription_id}/rotate-password"): frozenset({MANAGE}),
    ("POST", "/v1/subscriptions/{subscription_id}/test"): frozenset({MANAGE}),
    ("POST", "/v1/subscriptions/{subscription_id}/filter/test"): frozenset({MANAGE, OPERATE}),
    ("GET", "/v1/subscriptions/{subscription_id}/ordering-keys"): frozenset({MANAGE, OPERATE}),
    ("POST", "/v1/subscriptions/{subscription_id}/ordering-keys/skip"): frozenset({OPERATE}),
    ("GET", "/v1/subscriptions/{subscription_id}/deliveries"): frozenset(
        {MANAGE, OPERATE, SUBSCRIBE}
    ),
    ("POST", "/v1/subscriptions/{subscription_id}/pull"): frozenset({SUBSCRIBE}),
    ("POST", "/v1/subscriptions/{subscription_id}/ack"): frozenset({SUBSCRIBE}),
    ("POST", "/v1/subscriptions/{subscription_id}/nack"): frozenset({SUBSCRIBE}),
    ("POST", "/v1/subscriptions/{subscription_id}/extend"): frozenset({SUBSCRIBE}),
    ("GET", "/v1/subscriptions/{subscription_id}/stream"): frozenset({SUBSCRIBE}),
    ("GET", "/v1/stream"): frozenset({SUBSCRIBE}),
    ("POST", "/v1/rooms/{room_id}/messages"): frozenset({PUBLISH}),
    ("POST", "/v1/rooms/{room_id}/messages/batch"): frozenset({PUBLISH}),
    ("POST", "/v1/rooms/{room_id}/messages/check"): frozenset({PUBLISH}),
    ("GET", "/v1/rooms/{room_id}/counts"): frozenset({MANAGE, OPERATE}),
    ("GET", "/v1/rooms/{room_id}/messages"): frozenset({MANAGE, OPERATE}),
    ("GET", "/v1/messages/{message_id}"): frozenset({MANAGE, OPERATE}),
    ("PATCH", "/v1/messages/{message_id}"): frozenset({PUBLISH, OPERATE}),
    ("DELETE", "/v1/messages/{message_id}"): frozenset({PUBLISH, OPERATE}),
    ("GET", "/v1/rooms/{room_id}/messages/by-id/{caller_id}"): frozenset({MANAGE, OPERATE}),
    ("PATCH", "/v1/rooms/{room_id}/messages/by-id/{caller_id}"): frozenset({PUBLISH, OPERATE}),
    ("DELETE", "/v1/rooms/{room_id}/messages/by-id/{caller_id}"): frozenset({PUBLISH, OPERATE}),
    ("GET", "/v1/messages/{message_id}/deliveries"): frozenset({MANAGE, OPERATE}),
    ("GET", "/v1/messages/{message_id}/journey"): frozenset({MANAGE, OPERATE}),
    ("GET", "/v1/messages/{message_id}/receipt"): frozenset({MANAGE, OPERATE}),
    ("GET", "/v1/deliveries/{delivery_id}"): frozenset({MANAGE, OPERATE, SUBSCRIBE}),
    ("POST", "/v1/deliveries/{delivery_id}/redeliver"): frozenset({OPERATE}),
    ("POST", "/v1/messages/{message_id}/restore"): frozenset({OPERATE}),
    ("POST", "/v1/rooms/{room_id}/restore"): frozenset({OPERATE}),
    ("POST", "/v1/rooms/{room_id}/clear"): frozenset({OPERATE}),
    ("POST", "/v1/subscriptions/{subscription_id}/replay"): frozenset({OPERATE}),
    ("POST", "/v1/subscriptions/{subscription_id}/clear"): frozenset({OPERATE}),
    ("POST", "/v1/subscriptions/{subscription_id}/skip-to-now"): frozenset({OPERATE}),
    ("POST", "/v1/subscriptions/{subscription_id}/retry"): frozenset({MANAGE, OPERATE}),
    ("POST", "/v1/recover"): INSTALLATION,
    ("GET", "/v1/jobs"): frozenset({MANAGE, OPERATE}),
    ("GET", "/v1/jobs/{job_id}"): frozenset({MANAGE, OPERATE}),
    ("POST", "/v1/jobs/{job_id}/cancel"): frozenset({OPERATE}),
    ("GET", "/v1/sidelines"): frozenset({MANAGE, OPERATE, SUBSCRIBE}),
    ("GET", "/v1/search"): ANY,
    ("GET", "/v1/subscriptions/{subscription_id}/queue"): frozenset({MANAGE, OPERATE, SUBSCRIBE}),
    ("GET", "/v1/subscriptions/{subscription_id}/sideline"): frozenset(
        {MANAGE, OPERATE, SUBSCRIBE}
    ),
    ("POST", "/v1/subscriptions/{subscription_id}/sideline/shovel"): frozenset({OPERATE}),
    ("POST", "/v1/subscriptions/{subscription_id}/sideline/purge"): frozenset({OPERATE}),
    ("POST", "/v1/queues"): frozenset({MANAGE}),
    ("GET", "/v1/queues"): frozenset({MANAGE, OPERATE, PUBLISH}),
    ("GET", "/v1/queues/{queue}"): frozenset({MANAGE, OPERATE, PUBLISH}),
    ("PATCH", "/v1/queues/{queue}"): frozenset({MANAGE}),
    ("DELETE", "/v1/queues/{queue}"): frozenset({MANAGE}),
    ("POST", "/v1/queues/{queue}/messages"): frozenset({PUBLISH}),
    ("POST", "/v1/queues/{queue}/messages/batch"): frozenset({PUBLISH}),
    ("GET", "/v1/queues/{queue}/sideline"): frozenset({MANAGE, OPERATE}),
    ("GET", "/v1/subscriptions/{subscription_id}/sideline/schedule"): frozenset({MANAGE, OPERATE}),
    ("PUT", "/v1/subscriptions/{subscription_id}/sideline/schedule"): frozenset({OPERATE}),
    ("DELETE", "/v1/subscriptions/{subscription_id}/sideline/schedule"): frozenset({OPERATE}),
    ("POST", "/v1/queues/{queue}/sideline/purge"): frozenset({OPERATE}),
    ("GET", "/v1/status"): frozenset({MANAGE, OPERATE}),
    ("GET", "/v1/magazines"): frozenset({MANAGE, OPERATE}),
    ("GET", "/v1/magazines/{magazine}"): frozenset({MANAGE, OPERATE}),
    ("POST", "/v1/magazines/{magazine}/sweep"): frozenset({OPERATE}),
    ("GET", "/v1/analysis/incidents"): frozenset({MANAGE, OPERATE}),
    ("GET", "/v1/analysis/reconciliation"): frozenset({MANAGE, OPERATE}),
    ("GET", "/v1/analysis/ages"): frozenset({MANAGE, OPERATE}),
    ("GET", "/v1/analysis/cofailures"): frozenset({MANAGE, OPERATE}),
    ("GET", "/v1/analysis/rollups"): frozenset({MANAGE, OPERATE}),
    ("GET", "/v1/analysis/advice"): frozenset({MANAGE, OPERATE}),
    ("GET", "/v1/analysis/advice/{subscription_id}"): frozenset({MANAGE, OPERATE}),
    ("POST", "/v1/doctor"): INSTALLATION,
    ("POST", "/v1/analysis/runs"): INSTALLATION,
    ("GET", "/v1/analysis/runs"): INSTALLATION,
    ("GET", "/v1/doctor"): INSTALLATION,
    ("POST", "/v1/retention-preview"): INSTALLATION,
    ("GET", "/v1/retention-preview"): INSTALLATION,
    ("GET", "/v1/cluster"): INSTALLATION,
    ("GET", "/v1/cluster/buckets"): INSTALLATION,
    ("PUT", "/v1/cluster/buckets"): INSTALLATION,
    ("POST", "/v1/keys"): ADMIN_ONLY,
    ("GET", "/v1/keys"): ADMIN_ONLY,
    ("GET", "/v1/keys/{key_id}"): ADMIN_ONLY,
    ("DELETE", "/v1/keys/{key_id}"): ADMIN_ONLY,
    ("PATCH", "/v1/keys/{key_id}"): ADMIN_ONLY,
    ("POST", "/v1/keys/{key_id}/rotate"): ADMIN_ONLY,
    ("POST", "/v1/sign-in-links"): ADMIN_ONLY,
    ("POST", "/v1/portal-links"): frozenset({MANAGE}),
    ("GET", "/v1/sessions"): ADMIN_ONLY,
    ("GET", "/v1/people"): ADMIN_ONLY,
    ("POST", "/v1/people/end-sessions"): ADMIN_ONLY,
    ("DELETE", "/v1/sessions/{session_id}"): ADMIN_ONLY,
    ("POST", "/v1/signing-keys"): ADMIN_ONLY,
    ("GET", "/v1/signing-keys"): ADMIN_ONLY,
    ("GET", "/v1/signing-keys/{kid}"): ADMIN_ONLY,
    ("DELETE", "/v1/signing-keys/{kid}"): ADMIN_ONLY,
    ("GET", "/v1/subscriptions"): frozenset({MANAGE, OPERATE, SUBSCRIBE}),
    ("POST", "/v1/subscriptions/{subscription_id}/approve"): frozenset({MANAGE}),
    ("POST", "/v1/subscriptions/{subscription_id}/reject"): frozenset({MANAGE}),
    ("DELETE", "/v1/subscriptions/{subscription_id}/proposal"): frozenset({MANAGE}),
    ("POST", "/v1/subscriptions/{subscription_id}/suspend"): frozenset({MANAGE}),
    ("POST", "/v1/subscriptions/{subscription_id}/reinstate"): frozenset({MANAGE}),
    ("POST", "/v1/subscriptions/{subscription_id}/terminate"): frozenset({MANAGE}),
    ("GET", "/v1/subscriptions/{subscription_id}/history"): frozenset(
        {MANAGE, OPERATE, SUBSCRIBE, AUDIT}
    ),
    ("GET", "/v1/subscriptions/{subscription_id}/counts"): frozenset(
        {MANAGE, OPERATE, SUBSCRIBE, AUDIT}
    ),
    ("POST", "/v1/rooms/{room_id}/grants"): frozenset({MANAGE}),
    ("GET", "/v1/grants"): frozenset({MANAGE, OPERATE, AUDIT}),
    ("GET", "/v1/rooms/{room_id}/grants"): frozenset({MANAGE, OPERATE, AUDIT}),
    ("DELETE", "/v1/rooms/{room_id}/grants/{grant_id}"): frozenset({MANAGE}),
    ("GET", "/v1/directory"): ANY | {AUDIT, Scope.PLATFORM},
    ("GET", "/v1/push-template"): frozenset({MANAGE, OPERATE}),
    ("PUT", "/v1/push-template"): frozenset({MANAGE}),
    ("DELETE", "/v1/push-template"): frozenset({MANAGE}),
    ("GET", "/v1/whoami"): ANY | {AUDIT, Scope.PLATFORM},
    ("GET", "/v1/journal"): frozenset({AUDIT, Scope.PLATFORM}),
    ("GET", "/v1/journal/export"): frozenset({AUDIT, Scope.PLATFORM}),
    ("GET", "/v1/journal/verify"): frozenset({AUDIT, Scope.PLATFORM}),
    ("GET", "/v1/quotas"): ANY | {AUDIT},
    ("GET", "/v1/rooms/{room_id}/quotas"): frozenset({MANAGE, OPERATE, AUDIT}),
    ("PATCH", "/v1/rooms/{room_id}/quotas"): frozenset({MANAGE}),
    ("GET", "/v1/organisations/{organisation_id}/quotas"): INSTALLATION,
    ("PATCH", "/v1/organisations/{organisation_id}/quotas"): INSTALLATION,
    ("GET", "/v1/subscriptions/{subscription_id}/consumers"): frozenset(
        {MANAGE, OPERATE, SUBSCRIBE}
    ),
    ("GET", "/v1/activity"): frozenset({MANAGE, OPERATE, AUDIT, Scope.PLATFORM}),
    ("GET", "/v1/subscriptions/{subscription_id}/activity"): frozenset(
        {MANAGE, OPERATE, SUBSCRIBE}
    ),
    ("GET", "/v1/usage"): frozenset({MANAGE, OPERATE, AUDIT, Scope.PLATFORM}),
    ("GET", "/v1/usage/export"): frozenset({MANAGE, OPERATE, AUDIT, Scope.PLATFORM}),
    ("POST", "/v1/organisations"): INSTALLATION,
    ("GET", "/v1/organisations"): INSTALLATION,
    ("GET", "/v1/organisations/{organisation_id}"): INSTALLATION,
    ("PATCH", "/v1/organisations/{organisation_id}"): INSTALLATION,
    ("DELETE", "/v1/organisations/{organisation_id}"): INSTALLATION,
    ("POST", "/v1/organisations/{organisation_id}/suspend"): INSTALLATION,
    ("POST", "/v1/organisations/{organisation_id}/resume"): INSTALLATION,
    ("POST", "/v1/organisations/{organisation_id}/keys"): INSTALLATION,
}
# The scope `view` reads what `manage` and `operate` read, and moves no messages.
ALLOWED.update(
    ((method, path), scopes | {Scope.VIEW})
    for (method, path), scopes in list(ALLOWED.items())
    if method == "GET" and not scopes.isdisjoint({MANAGE, OPERATE})
)
WITHOUT_KEY: Final = {
    ("GET", "/.well-known/jwks.json"),
    ("GET", "/health/live"),
    ("GET", "/health/ready"),
    ("GET", "/metrics"),
    ("GET", "/schema"),
    ("GET", "/schema/openapi.json"),
    ("GET", "/schema/{path}"),
}
# Correct bodies, so that only the key can be refused.
BODIES: Final[dict[tuple[str, str], Any]] = {
    ("POST", "/v1/subscriptions/{subscription_id}/filter/test"): {"payload": 1},
    ("POST", "/v1/subscriptions/{subscription_id}/ordering-keys/skip"): {"ordering_key": "k"},
    ("POST", "/v1/rooms"): {
        "name": "another",
        "delivery_delay_ms": 1,
        "delivery_delay_multiplier": 1,
        "delivery_attempts": 1,
    },
    ("PATCH", "/v1/rooms/{room_id}"): {"description": "taken"},
    ("POST", "/v1/subscriptions/{subscription_id}/replay"): {"since": "2026-01-01T00:00:00Z"},
    ("POST", "/v1/rooms/{room_id}/event-types"): {"name": "another"},
    ("POST", "/v1/rooms/{room_id}/event-types/{name}/versions"): {"schema": None},
    ("PUT", "/v1/rooms/{room_id}/event-types/{name}/versions/{version}"): {"schema": None},
    ("POST", "/v1/rooms/{room_id}/subscriptions"): {"name": "another", "type": "PULL"},
    ("PATCH", "/v1/subscriptions/{subscription_id}"): {"timeout_ms": 200},
    ("PATCH", "/v1/messages/{message_id}"): {"delay_ms": 0},
    ("PATCH", "/v1/rooms/{room_id}/messages/by-id/{caller_id}"): {"delay_ms": 0},
    ("PUT", "/v1/cluster/buckets"): {"count": 8},
    ("POST", "/v1/rooms/{room_id}/messages"): {"event_type": "made", "payload": {}},
    ("POST", "/v1/rooms/{room_id}/messages/check"): {"event_type": "made", "payload": {}},
    ("POST", "/v1/rooms/{room_id}/messages/batch"): {
        "messages": [{"event_type": "made", "payload": {}}]
    },
    ("POST", "/v1/subscriptions/{subscription_id}/pull"): {
        "max_messages": 1,
        "wait_ms": 0,
        "lease_ms": 1000,
    },
    ("POST", "/v1/subscriptions/{subscription_id}/ack"): {"ack_ids": ["x"]},
    ("POST", "/v1/subscriptions/{subscription_id}/nack"): {"ack_ids": ["x"]},
    ("POST", "/v1/subscriptions/{subscription_id}/extend"): {"ack_ids": ["x"], "lease_ms": 1000},
    ("PUT", "/v1/subscriptions/{subscription_id}/sideline/schedule"): {"interval_s": 60},
    ("POST", "/v1/queues"): {"name": "another"},
    ("PATCH", "/v1/queues/{queue}"): {"concurrency": 2},
    ("POST", "/v1/queues/{queue}/messages"): {"payload": {}},
    ("POST", "/v1/queues/{queue}/messages/batch"): {"messages": [{"payload": {}}]},
    ("POST", "/v1/keys"): {"name": "another", "scopes": ["publish"]},
    ("PATCH", "/v1/keys/{key_id}"): {"name": "taken"},
    ("POST", "/v1/portal-links"): {
        "name": "a person",
        "subscription_ids": ["01900000-0000-7000-8000-000000000000"],
    },
    ("POST", "/v1/sign-in-links"): {"name": "a person", "roles": ["viewer"]},
    ("POST", "/v1/people/end-sessions"): {"name": "a person"},
    ("POST", "/v1/signing-keys"): {"name": "another", "jwk": generate_key("ES256").public.to_jwk()},
    ("POST", "/v1/subscriptions/{subscription_id}/approve"): {"version": 1},
    ("POST", "/v1/rooms/{room_id}/grants"): {"organisation_id": "*", "kind": "publish"},
    ("PUT", "/v1/push-template"): {"template": "https://ss.example.com/{eventType}"},
    ("POST", "/v1/organisations"): {"name": "another"},
    ("PATCH", "/v1/organisations/{organisation_id}"): {"contact": "taken"},
    ("PATCH", "/v1/organisations/{organisation_id}/quotas"): {"messages_per_day": 1_000_000},
    ("PATCH", "/v1/rooms/{room_id}/quotas"): {"messages_per_day": 1_000_000},
    ("POST", "/v1/organisations/{organisation_id}/keys"): {"name": "x", "scopes": ["publish"]},
}
OF_NO_RESOURCE: Final = {
    "/v1/rooms", "/v1/jobs", "/v1/keys", "/v1/sessions", "/v1/people", "/v1/sign-in-links", "/v1/signing-keys", "/v1/cluster", "/v1/cluster/buckets", "/v1/magazines", "/v1/queues", "/v1/status",
    "/v1/analysis/incidents", "/v1/analysis/reconciliation", "/v1/analysis/ages", "/v1/analysis/cofailures", "/v1/analysis/rollups",
    "/v1/analysis/advice", "/v1/recover", "/v1/subscriptions", "/v1/directory", "/v1/grants", "/v1/sidelines",
}  # fmt: skip
OF_THE_KEY: Final = {
    "/v1/whoami", "/v1/journal", "/v1/journal/export", "/v1/journal/verify", "/v1/usage", "/v1/usage/export",
    "/v1/quotas", "/v1/push-template", "/v1/search", "/v1/activity", "/v1/people/end-sessions",
}  # fmt: skip
"""Routes that answer about the key and its organisation."""
OF_INSTALLATION: Final = {path for (_, path), scopes in ALLOWED.items() if scopes == INSTALLATION}
OF_NO_OWNER: Final = OF_NO_RESOURCE | OF_THE_KEY | OF_INSTALLATION
QUERIES: Final = {
    "/v1/stream": "?subscription={subscription_id}",
    "/v1/search": "?q=nothing",
}
"""Routes whose query names the resource."""
NO_KEYS: Final = [
    None,
    "",
    "Bearer",
    "Bearer ",
    "Basic cm9vbXM6eA==",
    "Bearer rooms_" + "a" * 43,
    "Bearer rooms_" + "a" * 4000,
    "Bearer \x80\xff",
    "rooms_" + "a" * 43,
]


def routes(api: Api) -> list[tuple[str, str]]:
    """Return every route of the application."""
    return sorted(
        {
            (method, path)
            for handler, path in route_handlers(api.app)
            for method in handler.http_methods
        }
    )


def named(path: str) -> str:
    """Return the path under /v1, with the query that names the resource."""
    return path.removeprefix("/v1") + QUERIES.get(path, "")


@pytest.fixture
async def things(api: Api) -> dict[str, str]:
    """Create one of everything, in the default organisation."""
    room = await api.room()
    await api.made(f"/rooms/{room['id']}/event-types", {"name": "made"})
    subscription = await api.subscription(room["id"])
    message = (await api.publish(room["id"], "made", {}, id="named"))["message_id"]
    delivery = (await api.call("GET", f"/messages/{message}/deliveries")).json()["items"][0]["id"]
    spare = await api.subscription(room["id"], "spare")
    job = (await api.call("DELETE", f"/subscriptions/{spare['id']}")).json()["job_id"]
    key = (await api.call("GET", "/keys")).json()["items"][-1]["id"]
    queue = await api.made("/queues", {"name": "made", "shards": 1})
    body = {"organisation_id": "*", "kind": "publish", "event_types": ["granted"]}
    grant = await api.made(f"/rooms/{room['id']}/grants", body)
    await api.call("DELETE", f"/rooms/{room['id']}/grants/{grant['id']}")
    whoami = (await api.call("GET", "/whoami")).json()
    jwk = generate_key("EdDSA").public.to_jwk()
    signing_key = await api.made("/signing-keys", {"name": "made", "jwk": jwk})
    return {
        "kid": signing_key["kid"],
        "grant_id": grant["id"],
        "organisation_id": whoami["organisation"]["id"],
        "room_id": str(room["id"]),
        "name": "made",
        "version": "1",
        "subscription_id": subscription["id"],
        "message_id": message,
        "caller_id": "named",
        "delivery_id": delivery,
        "job_id": job,
        "key_id": key,
        "session_id": await make_session(api),
        "queue": queue["name"],
        "magazine": f"subscription-{subscription['id']}_SIDELINE",
    }


async def test_every_route_has_an_entry_here(api: Api) -> None:
    assert set(routes(api)) - ALLOWED.keys() - WITHOUT_KEY == set()


def opens(scope: Scope | None, method: str, path: str) -> bool:
    """Return whether a key with only this scope may use the route."""
    scopes = ALLOWED[method, path]
    return scope in scopes or (scope is Scope.ADMIN and scopes != INSTALLATION)


async def test_lists_show_nothing_of_another_organisation(api: Api, things: dict[str, str]) -> None:
    one_each = {"/v1/keys", "/v1/magazines", "/v1/status", "/v1/sign-in-links"}
    for path in OF_NO_RESOURCE - OF_INSTALLATION - one_each:
        assert (await api.call("GET", path.removeprefix("/v1"), "stranger")).json()["items"] == []
    theirs = (await api.call("GET", "/keys", "stranger")).json()["items"]
    assert things["key_id"] not in {key["id"] for key in theirs}


async def test_another_organisation_changed_nothing(api: Api, things: dict[str, str]) -> None:
    before = await api.sql(
        "SELECT to_jsonb(r) FROM rooms r UNION ALL SELECT to_jsonb(s) FROM subscriptions s UNION ALL SELECT to_jsonb(q) FROM queues q"
    )
    for method, path in routes(api):
        if path not in OF_NO_OWNER and (method, path) not in WITHOUT_KEY and method != "GET":
            place = named(path).format(**things)
            await api.call(method, place, "stranger", json=BODIES.get((method, path)), params={})
    after = await api.sql(
        "SELECT to_jsonb(r) FROM rooms r UNION ALL SELECT to_jsonb(s) FROM subscriptions s UNION ALL SELECT to_jsonb(q) FROM queues q"
    )
    assert after == before


async def test_an_unknown_key_is_refused_everywhere(api: Api) -> None:
    for header in NO_KEYS:
        headers = {} if header is None else {b"Authorization": header.encode("latin-1")}
        answer = await api.http.get("/v1/rooms", headers=headers)
        assert answer.status_code == 401, header
        assert answer.headers["www-authenticate"] == 'Bearer realm="rooms"'
        assert answer.json()["type"] == "urn:rooms:problem:unauthenticated"


async def test_the_document_names_the_scopes(api: Api) -> None:
    document = (await api.http.get("/schema/openapi.json")).json()
    for (method, path), scopes in ALLOWED.items():
        operation = document["paths"].get(path, {}).get(method.lower())
        if operation is not None:
            reported = {scope for one in operation["security"] for scope in one["api_key"]}
            assert reported == {scope for scope in Scope if opens(scope, method, path)}, (
                method,
                path,
            )
            assert reported >= scopes
            assert "Needs a key with the scope" in operation["description"]


async def test_the_document_names_the_restricted_keys_of_every_route(api: Api) -> None:
    """Check it against what the guard reads."""
    document = (await api.http.get("/schema/openapi.json")).json()
    for handler, path in route_handlers(api.app):
        if not path.startswith("/v1/"):
            continue
        allowed = {one.value for one in handler.opt[ALLOWS]}
        for method in handler.http_methods:
            operation = document["paths"].get(path, {}).get(method.lower())
            if operation is None:
                continue
            last = operation["description"].splitlines()[-1]
            said = re.search(r"restricted to ([a-z_, ]+) may use it", last)
            if said is None:
                assert ("Every restricted key may" in last, "No restricted key may" in last) == (
                    len(allowed) == len(Restriction),
                    not allowed,
                ), (method, path, last)
            else:
                assert set(re.split(", | or ", said[1])) == allowed, (method, path, last)


async def test_an_admin_cannot_read_the_installation(api: Api) -> None:
    """Check that an admin sees no host, no process, no total of the installation, and no job on it."""
    job = (await api.call("POST", "/recover", "platform")).json()["job_id"]
    for key in ("admin", "operate", "stranger"):
        assert (await api.call("GET", f"/jobs/{job}", key)).status_code == 404
        assert (await api.call("POST", f"/jobs/{job}/cancel", key)).status_code == 404
        assert (await api.call("GET", "/jobs", key)).json()["items"] == []
    both = await make_key(api.services, "default", Scope.ADMIN, Scope.PLATFORM)
    assert (await api.call("GET", f"/jobs/{job}", both)).json()["state"] == "queued"
    assert [one["id"] for one in (await api.call("GET", "/jobs", both)).json()["items"]] == [job]
    assert (await api.call("POST", f"/jobs/{job}/cancel", both)).json()["state"] == "cancelled"


async def test_no_key_grants_what_it_does_not_have(api: Api) -> None:
    """Check that only a platform key creates or revokes platform keys."""
    both = await make_key(api.services, "default", Scope.ADMIN, Scope.PLATFORM)
    for scopes in (["platform"], ["publish", "platform"], ["admin", "platform"]):
        body = {"name": "more", "scopes": scopes}
        refused = await api.call("POST", "/keys", json=body)
        assert (refused.status_code, refused.json()["type"]) == (403, "urn:rooms:problem:forbidden")
        assert (await api.call("POST", "/keys", "platform", json=body)).status_code == 403, (
            "it makes no keys at all"
        )
        made = await api.made("/keys", body, both)
        assert made["scopes"] == sorted(scopes)
        assert (await api.call("DELETE", f"/keys/{made['id']}")).status_code == 403
        assert (await api.call("GET", "/cluster/buckets", made["key"])).status_code == 200
        assert (await api.call("DELETE", f"/keys/{made['id']}", both)).status_code == 204
    assert (
        await api.made(
            "/keys", {"name": "all", "scopes": [scope for scope in Scope if scope != "platform"]}
        )
    )["key"]
