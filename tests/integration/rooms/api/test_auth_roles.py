"""Test every route as each role of a shared room finds it.

A new route, or a route for something else, needs a line in `EXPECTED`.
"""

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Final
from uuid import uuid4

from tests.integration.rooms.api.conftest import Api
from tests.integration.rooms.api.sharing_world import OTHER_TYPE, ROLES, World, build_world
from tests.integration.rooms.api.test_auth import BODIES, WITHOUT_KEY, named, routes

# In the order of `ROLES`: owner, publisher, subscriber, stranger, suspended; the owner's keys for
# another room, another event type, another subscription; platform. "+": it may, whatever the answer
# is; "3": 403, the key may not; "4": 404, there is no such thing for it. The inner keys name whose
# thing it is, in the order of the path's parameters.
EXPECTED: Final[Mapping[str, Mapping[str, str]]] = {
    "GET /analysis/advice": {"": "++++++3+3"},
    "GET /analysis/advice/{subscription_id}": {
        "owner": "444444343",
        "subscriber": "444444343",
        "suspended": "444444343",
    },
    "GET /analysis/ages": {"": "++++++3+3"},
    "GET /analysis/cofailures": {"": "++++++3+3"},
    "GET /analysis/incidents": {"": "++++++3+3"},
    "GET /analysis/reconciliation": {"": "++++++3+3"},
    "GET /analysis/rollups": {"": "++++++3+3"},
    "GET /cluster": {"": "33333333+"},
    "GET /cluster/buckets": {"": "33333333+"},
    "GET /deliveries/{delivery_id}": {
        "owner": "+44444343",
        "subscriber": "44+444343",
        "suspended": "4444+4343",
    },
    "GET /directory": {"": "+++++++++"},
    "GET /doctor": {"": "33333333+"},
    "GET /analysis/runs": {"": "33333333+"},
    "GET /grants": {"": "++++++333"},
    "GET /jobs": {"": "++++++3+3"},
    "GET /jobs/{job_id}": {"owner": "+44444343"},
    "GET /journal": {"": "+++++3333"},
    "GET /journal/export": {"": "+++++3333"},
    "GET /journal/verify": {"": "+++++3333"},
    "GET /keys": {"": "+++++3333"},
    "GET /keys/{key_id}": {"owner": "+44443333"},
    "GET /magazines": {"": "+++++3333"},
    "GET /magazines/{magazine}": {"owner": "+44443333", "subscriber": "44+443333"},
    "GET /messages/{message_id}": {"owner": "+4+4+44+3", "publisher": "+++4+44+3"},
    "GET /messages/{message_id}/deliveries": {"owner": "+4+4+44+3", "publisher": "+++4+44+3"},
    "GET /messages/{message_id}/journey": {"owner": "+4+4+44+3", "publisher": "+++4+44+3"},
    "GET /messages/{message_id}/receipt": {"owner": "+4+4+44+3", "publisher": "+++4+44+3"},
    "GET /organisations": {"": "33333333+"},
    "GET /organisations/{organisation_id}": {"stranger": "33333333+"},
    "GET /queues": {"": "+++++3333"},
    "GET /queues/{queue}": {"owner": "+44443333"},
    "GET /queues/{queue}/sideline": {"owner": "+44443333"},
    "GET /retention-preview": {"": "33333333+"},
    "GET /rooms": {"": "++++++++3"},
    "GET /rooms/{room_id}": {"owner": "+++4+4++3"},
    "GET /rooms/{room_id}/counts": {"owner": "+44444333"},
    "GET /rooms/{room_id}/event-types": {"owner": "+++4+4++3"},
    "GET /rooms/{room_id}/event-types/{name}": {"owner ": "+++4+44+3"},
    "GET /rooms/{room_id}/event-types/{name}/versions": {"owner ": "+++4+44+3"},
    "GET /rooms/{room_id}/event-types/{name}/versions/{version}": {"owner  ": "+++4+44+3"},
    "GET /rooms/{room_id}/grants": {"owner": "+44444333"},
    "GET /rooms/{room_id}/messages": {"owner": "+++4+4++3"},
    "GET /rooms/{room_id}/messages/by-id/{caller_id}": {
        "owner owner": "+44444443",
        "owner publisher": "4+4444443",
    },
    "GET /rooms/{room_id}/subscriptions": {"owner": "+++4+43+3"},
    "GET /sessions": {"": "+++++3333"},
    "GET /people": {"": "+++++3333"},
    "POST /people/end-sessions": {"": "+44433333"},
    "GET /signing-keys": {"": "+++++3333"},
    "GET /signing-keys/{kid}": {"owner": "+44443333"},
    "GET /status": {"": "++++++3+3"},
    "GET /stream": {"owner": "+44434343", "subscriber": "44+434343", "suspended": "444434343"},
    "GET /search": {"": "++++++++3"},
    "GET /sidelines": {"": "++++++3+3"},
    "GET /subscriptions": {"": "++++++3+3"},
    "GET /subscriptions/{subscription_id}": {
        "owner": "+44444343",
        "subscriber": "+4+444343",
        "suspended": "+444+4343",
    },
    "GET /subscriptions/{subscription_id}/counts": {
        "owner": "+44444343",
        "subscriber": "+4+444343",
        "suspended": "+444+4343",
    },
    "GET /subscriptions/{subscription_id}/deliveries": {
        "owner": "+44444343",
        "subscriber": "44+444343",
        "suspended": "4444+4343",
    },
    "GET /subscriptions/{subscription_id}/history": {
        "owner": "+44444343",
        "subscriber": "+4+444343",
        "suspended": "+444+4343",
    },
    "GET /subscriptions/{subscription_id}/lane": {
        "owner": "+44444343",
        "subscriber": "44+444343",
        "suspended": "4444+4343",
    },
    "GET /subscriptions/{subscription_id}/ordering-keys": {
        "owner": "+44444343",
        "subscriber": "44+444343",
        "suspended": "4444+4343",
    },
    "GET /subscriptions/{subscription_id}/consumers": {
        "owner": "+44444343",
        "subscriber": "44+444343",
        "suspended": "4444+4343",
    },
    "GET /subscriptions/{subscription_id}/queue": {
        "owner": "+44444343",
        "subscriber": "44+444343",
        "suspended": "4444+4343",
    },
    "GET /subscriptions/{subscription_id}/sideline": {
        "owner": "+44444343",
        "subscriber": "44+444343",
        "suspended": "4444+4343",
    },
    "GET /subscriptions/{subscription_id}/sideline/schedule": {
        "owner": "+44444343",
        "subscriber": "44+444343",
        "suspended": "444444343",
    },
    "GET /subscriptions/{subscription_id}/stream": {
        "owner": "+44434343",
        "subscriber": "44+434343",
        "suspended": "444434343",
    },
    "GET /quotas": {"": "+++++3333"},
    "GET /rooms/{room_id}/quotas": {"owner": "+44444333"},
    "GET /organisations/{organisation_id}/quotas": {"stranger": "33333333+"},
    "PATCH /rooms/{room_id}/quotas": {"owner": "+44434333"},
    "PATCH /organisations/{organisation_id}/quotas": {"stranger": "33333333+"},
    "GET /activity": {"": "+++++333+"},
    "GET /subscriptions/{subscription_id}/activity": {
        "owner": "+44444343",
        "subscriber": "+4+444343",
        "suspended": "+444+4343",
    },
    "GET /usage": {"": "+++++333+"},
    "GET /usage/export": {"": "+++++333+"},
    "GET /push-template": {"": "+++++3333"},
    "PUT /push-template": {"": "++++33333"},
    "DELETE /push-template": {"": "++++33333"},
    "GET /whoami": {"": "+++++++++"},
    "PATCH /keys/{key_id}": {"owner": "+44433333"},
    "PATCH /messages/{message_id}": {"owner": "+44434433", "publisher": "++4434433"},
    "PATCH /organisations/{organisation_id}": {"stranger": "33333333+"},
    "PATCH /queues/{queue}": {"owner": "+44433333"},
    "PATCH /rooms/{room_id}": {"owner": "+44434333"},
    "PATCH /rooms/{room_id}/messages/by-id/{caller_id}": {
        "owner owner": "+44434433",
        "owner publisher": "4+4434433",
    },
    "PATCH /subscriptions/{subscription_id}": {
        "owner": "+44434343",
        "subscriber": "44+434343",
        "suspended": "444434343",
    },
    "POST /deliveries/{delivery_id}/redeliver": {
        "owner": "+44434343",
        "subscriber": "44+434343",
        "suspended": "444434343",
    },
    "POST /jobs/{job_id}/cancel": {"owner": "+44434343"},
    "POST /keys": {"": "++++33333"},
    "POST /keys/{key_id}/rotate": {"owner": "+44433333"},
    "POST /magazines/{magazine}/sweep": {"owner": "+44433333", "subscriber": "44+433333"},
    "POST /messages/{message_id}/restore": {"owner": "+44434333", "publisher": "+44434333"},
    "POST /organisations": {"": "33333333+"},
    "POST /organisations/{organisation_id}/keys": {"stranger": "33333333+"},
    "POST /organisations/{organisation_id}/resume": {"stranger": "33333333+"},
    "POST /organisations/{organisation_id}/suspend": {"stranger": "33333333+"},
    "POST /queues": {"": "++++33333"},
    "POST /queues/{queue}/messages": {"owner": "+44433333"},
    "POST /queues/{queue}/messages/batch": {"owner": "+44433333"},
    "POST /queues/{queue}/sideline/purge": {"owner": "+44433333"},
    "POST /doctor": {"": "33333333+"},
    "POST /analysis/runs": {"": "33333333+"},
    "POST /recover": {"": "33333333+"},
    "POST /retention-preview": {"": "33333333+"},
    "POST /rooms": {"": "++++33333"},
    "POST /rooms/{room_id}/clear": {"owner": "+44434333"},
    "POST /rooms/{room_id}/event-types": {"owner": "+44434333"},
    "POST /rooms/{room_id}/event-types/{name}/versions": {"owner ": "+44434333"},
    "POST /rooms/{room_id}/grants": {"owner": "+44434333"},
    "POST /rooms/{room_id}/messages": {"owner": "++4434333"},
    "POST /rooms/{room_id}/messages/batch": {"owner": "++4434333"},
    "POST /rooms/{room_id}/messages/check": {"owner": "++4434333"},
    "POST /rooms/{room_id}/restore": {"owner": "+44434333"},
    "POST /rooms/{room_id}/subscriptions": {"owner": "+3+434333"},
    "POST /subscriptions/{subscription_id}/ack": {
        "owner": "+44434343",
        "subscriber": "44+434343",
        "suspended": "444434343",
    },
    "POST /subscriptions/{subscription_id}/approve": {
        "owner": "+44434343",
        "subscriber": "+44434343",
        "suspended": "+44434343",
    },
    "POST /subscriptions/{subscription_id}/extend": {
        "owner": "+44434343",
        "subscriber": "44+434343",
        "suspended": "444434343",
    },
    "POST /subscriptions/{subscription_id}/filter/test": {
        "owner": "+44434343",
        "subscriber": "44+434343",
        "suspended": "444434343",
    },
    "POST /subscriptions/{subscription_id}/nack": {
        "owner": "+44434343",
        "subscriber": "44+434343",
        "suspended": "444434343",
    },
    "POST /portal-links": {"": "444434343"},
    "POST /sign-in-links": {"": "++++33333"},
    "POST /signing-keys": {"": "++++33333"},
    "POST /subscriptions/{subscription_id}/ordering-keys/skip": {
        "owner": "+44434343",
        "subscriber": "44+434343",
        "suspended": "444434343",
    },
    "POST /subscriptions/{subscription_id}/pause": {
        "owner": "+44434343",
        "subscriber": "44+434343",
        "suspended": "444434343",
    },
    "POST /subscriptions/{subscription_id}/pull": {
        "owner": "+44434343",
        "subscriber": "44+434343",
        "suspended": "444434343",
    },
    "POST /subscriptions/{subscription_id}/reinstate": {
        "owner": "+44434343",
        "subscriber": "+44434343",
        "suspended": "+44434343",
    },
    "POST /subscriptions/{subscription_id}/reject": {
        "owner": "+44434343",
        "subscriber": "+44434343",
        "suspended": "+44434343",
    },
    "POST /subscriptions/{subscription_id}/replay": {
        "owner": "+44434333",
        "subscriber": "44+434333",
        "suspended": "444434333",
    },
    "POST /subscriptions/{subscription_id}/resume": {
        "owner": "+44434343",
        "subscriber": "44+434343",
        "suspended": "444434343",
    },
    "POST /subscriptions/{subscription_id}/rotate-password": {
        "owner": "+44434343",
        "subscriber": "44+434343",
        "suspended": "444434343",
    },
    "POST /subscriptions/{subscription_id}/rotate-secret": {
        "owner": "+44434343",
        "subscriber": "44+434343",
        "suspended": "444434343",
    },
    "POST /subscriptions/{subscription_id}/sideline/purge": {
        "owner": "+44434343",
        "subscriber": "44+434343",
        "suspended": "444434343",
    },
    "POST /subscriptions/{subscription_id}/clear": {
        "owner": "+44434343",
        "subscriber": "44+434343",
        "suspended": "444434343",
    },
    "POST /subscriptions/{subscription_id}/skip-to-now": {
        "owner": "+44434343",
        "subscriber": "44+434343",
        "suspended": "444434343",
    },
    "POST /subscriptions/{subscription_id}/sideline/shovel": {
        "owner": "+44434343",
        "subscriber": "44+434343",
        "suspended": "444434343",
    },
    "POST /subscriptions/{subscription_id}/suspend": {
        "owner": "+44434343",
        "subscriber": "+44434343",
        "suspended": "+44434343",
    },
    "POST /subscriptions/{subscription_id}/terminate": {
        "owner": "+44434343",
        "subscriber": "+4+434343",
        "suspended": "+44434343",
    },
    "POST /subscriptions/{subscription_id}/test": {
        "owner": "+44434343",
        "subscriber": "44+434343",
        "suspended": "444434343",
    },
    "PUT /cluster/buckets": {"": "33333333+"},
    "PUT /rooms/{room_id}/event-types/{name}/versions/{version}": {"owner  ": "+44434333"},
    "PUT /subscriptions/{subscription_id}/sideline/schedule": {
        "owner": "+44434343",
        "subscriber": "44+434343",
        "suspended": "444434343",
    },
    "DELETE /keys/{key_id}": {"owner": "+44433333"},
    "DELETE /sessions/{session_id}": {"owner": "+44433333"},
    "DELETE /signing-keys/{kid}": {"owner": "+44433333"},
    "DELETE /messages/{message_id}": {"owner": "+44434433", "publisher": "++4434433"},
    "DELETE /organisations/{organisation_id}": {"stranger": "33333333+"},
    "DELETE /queues/{queue}": {"owner": "+44433333"},
    "DELETE /rooms/{room_id}": {"owner": "+44434333"},
    "DELETE /rooms/{room_id}/event-types/{name}": {"owner ": "+44434333"},
    "DELETE /rooms/{room_id}/event-types/{name}/versions/{version}": {"owner  ": "+44434333"},
    "DELETE /rooms/{room_id}/messages/by-id/{caller_id}": {
        "owner owner": "+44434433",
        "owner publisher": "4+4434433",
    },
    "DELETE /rooms/{room_id}/grants/{grant_id}": {"owner owner": "+44434333"},
    "DELETE /subscriptions/{subscription_id}": {
        "owner": "+44434343",
        "subscriber": "44+434343",
        "suspended": "444434343",
    },
    "DELETE /subscriptions/{subscription_id}/proposal": {
        "owner": "+44434343",
        "subscriber": "44+434343",
        "suspended": "444434343",
    },
    "DELETE /subscriptions/{subscription_id}/sideline/schedule": {
        "owner": "+44434343",
        "subscriber": "44+434343",
        "suspended": "444434343",
    },
}
NEVER_SUCCEED: Final = {
    "GET /analysis/advice/{subscription_id}", "GET /stream", "GET /subscriptions/{subscription_id}/consumers",
    "GET /subscriptions/{subscription_id}/queue", "GET /subscriptions/{subscription_id}/stream",
    "POST /deliveries/{delivery_id}/redeliver", "POST /jobs/{job_id}/cancel", "POST /portal-links",
    "POST /queues/{queue}/sideline/purge", "POST /rooms/{room_id}/clear", "POST /subscriptions/{subscription_id}/ack",
    "POST /subscriptions/{subscription_id}/approve", "POST /subscriptions/{subscription_id}/clear",
    "POST /subscriptions/{subscription_id}/extend", "POST /subscriptions/{subscription_id}/nack",
    "POST /subscriptions/{subscription_id}/ordering-keys/skip", "POST /subscriptions/{subscription_id}/pull",
    "POST /subscriptions/{subscription_id}/reinstate", "POST /subscriptions/{subscription_id}/reject",
    "POST /subscriptions/{subscription_id}/rotate-password", "POST /subscriptions/{subscription_id}/sideline/purge",
    "POST /subscriptions/{subscription_id}/skip-to-now", "PUT /rooms/{room_id}/event-types/{name}/versions/{version}",
    "DELETE /organisations/{organisation_id}", "DELETE /queues/{queue}", "DELETE /rooms/{room_id}",
    "DELETE /rooms/{room_id}/event-types/{name}", "DELETE /rooms/{room_id}/event-types/{name}/versions/{version}",
    "DELETE /subscriptions/{subscription_id}/proposal",
}  # fmt: skip
"""Routes that this world is not ready for: it has no PULL subscription and nothing that waits, and
no call confirms a loss. `test_restricted_roles` makes those of subscriptions where they succeed.
"""
_CHANGES_ROLES: Final = re.compile(
    r"DELETE|.*/terminate|.*/suspend|POST /organisations/\S*/resume|POST \S*/grants|PATCH /organ"
)
"""Calls after which, if they succeed, the world is another one."""
_UUID: Final = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_UNKNOWN: Final = {
    "room_id": "1000000001",
    "name": "unknown",
    "caller_id": "unknown",
    "version": "77",
    "queue": "unknown",
    "magazine": f"subscription-{uuid4()}_SIDELINE",
}


async def test_every_route_answers_each_role_as_it_should(api: Api) -> None:
    world = await build_world(api)
    found: dict[str, dict[str, str]] = {}
    succeeded: set[str] = set()
    for method, path in _ordered_routes(api):
        line = f"{method} {path.removeprefix('/v1')}"
        for variant in _variants(world, path):
            codes = ""
            for role in reversed(ROLES):
                place = named(path).format(**_ids(world, path, variant))
                body = BODIES.get((method, path))
                answer = await api.call(method, place, world.keys[role], json=body)
                assert answer.status_code < 500, (line, variant, role, answer.text)
                assert answer.status_code != 401, (line, variant, role)
                if answer.is_success:
                    succeeded.add(line)
                codes = {403: "3", 404: "4"}.get(answer.status_code, "+") + codes
                if answer.is_success and method != "GET" and _CHANGES_ROLES.match(line):
                    world = await build_world(api)
            found.setdefault(line, {})[" ".join(variant)] = codes
    assert found == EXPECTED
    assert EXPECTED.keys() - succeeded == NEVER_SUCCEED


async def test_what_is_hidden_reads_like_what_is_not_there(api: Api) -> None:
    """Check bodies and headers of 404: the same for things of others and for unknown ids."""
    world = await build_world(api)
    different = []
    for method, path in _ordered_routes(api):
        names = _names(path)
        if not names:
            continue
        unknown = {name: _UNKNOWN.get(name, str(uuid4())) for name in names}
        for variant, role in itertools.product(_variants(world, path), ROLES):
            ids = _ids(world, path, variant)
            line = EXPECTED[f"{method} {path.removeprefix('/v1')}"]
            if role in variant or line[" ".join(variant)][ROLES.index(role)] != "4":
                continue
            kept = {"room_id": ids["room_id"]} if role == OTHER_TYPE and "name" in ids else {}
            answers = []
            for chosen in (ids, unknown | kept):
                place = named(path).format(**chosen)
                body = BODIES.get((method, path))
                answer = await api.call(method, place, world.keys[role], json=body)
                text = _UUID.sub("…", answer.text)
                for identity in chosen.values():
                    # Not by `\b`: a `kid` may begin or end with a hyphen.
                    text = re.sub(rf"(?<!\w){re.escape(identity)}(?!\w)", "…", text)
                headers = {name for name in answer.headers if name != "x-request-id"}
                answers.append((answer.status_code, text, headers))
            if answers[0] != answers[1]:
                different.append((method, path, variant, role, *answers))
    assert not different


def _ordered_routes(api: Api) -> list[tuple[str, str]]:
    """Return the routes that need a key: first those that read, last those that delete."""
    return sorted(
        (one for one in routes(api) if one not in WITHOUT_KEY),
        key=lambda one: (one[0] != "GET", one[0] == "DELETE", one),
    )


def _names(path: str) -> list[str]:
    return re.findall(r"{(\w+)}", named(path))


def _variants(world: World, path: str) -> Iterator[tuple[str, ...]]:
    return itertools.product(*(world.paths[name] for name in _names(path)))


def _ids(world: World, path: str, variant: tuple[str, ...]) -> dict[str, str]:
    return {name: world.paths[name][of] for name, of in zip(_names(path), variant, strict=True)}
