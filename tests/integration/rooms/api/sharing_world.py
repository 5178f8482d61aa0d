"""Build a world of five organisations that share a room, for tests of who may see and do what."""

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from rooms.domain.state_machine import Scope
from rooms.evidence.jose import generate_key
from tests.integration.rooms.api.conftest import Api, make_key
from tests.integration.rooms.api.sign_in import make_session

OWNER, PUBLISHER, SUBSCRIBER, STRANGER, SUSPENDED, PLATFORM = (
    "owner",
    "publisher",
    "subscriber",
    "stranger",
    "suspended",
    "platform",
)
MADE: Final = "made"
"""The event type that everything is about; there is another one, `spare`."""


@dataclass(frozen=True, kw_only=True)
class World:
    """Hold keys by role, the ids of all organisations, and the ids that stand in paths.

    `paths` has several of a kind where they belong to different organisations, by name.
    """

    keys: Mapping[str, str]
    organisations: Mapping[str, str]
    paths: Mapping[str, Mapping[str, str]]


_worlds = itertools.count(1)


async def build_world(api: Api) -> World:
    """Create it by the API, as its members would; each is new."""
    number = next(_worlds)
    keys = {PLATFORM: await make_key(api.services, "installation", Scope.PLATFORM)}
    organisations = {}
    for name in (OWNER, PUBLISHER, SUBSCRIBER, STRANGER, SUSPENDED):
        made = await api.made("/organisations", {"name": f"{name}-{number}"}, keys[PLATFORM])
        organisations[name] = made["id"]
        body = {"name": "first", "scopes": ["admin"]}
        first = await api.made(f"/organisations/{made['id']}/keys", body, keys[PLATFORM])
        keys[name] = first["key"]
    room = await api.room("shared", keys[OWNER])
    await api.room("spare", keys[OWNER])
    rooms = f"/rooms/{room['id']}"
    for name in (MADE, "spare"):
        await api.made(f"{rooms}/event-types", {"name": name}, keys[OWNER])
    grant = {"kind": "publish", "organisation_id": organisations[PUBLISHER]}
    grant_id = (await api.made(f"{rooms}/grants", grant, keys[OWNER]))["id"]
    for role in (SUBSCRIBER, SUSPENDED):
        grant = {"kind": "subscribe", "organisation_id": organisations[role]}
        await api.made(f"{rooms}/grants", grant, keys[OWNER])
    subscriptions = {}
    for role in (OWNER, SUBSCRIBER, SUSPENDED):
        body = {"name": role, "type": "PUSH", "push_url": f"https://{role}.example.com/in"}
        subscriptions[role] = (await api.made(f"{rooms}/subscriptions", body, keys[role]))["id"]
    await api.made(f"{rooms}/subscriptions", {"name": "x", "type": "PULL"}, keys[OWNER])
    messages = {}
    for role in (OWNER, PUBLISHER):
        principal = await api.services.keys.authenticate(f"Bearer {keys[role]}".encode())
        sent = b'{"event_type":"made","payload":{},"id":"named-%s"}' % role.encode()
        answer = await api.services.publisher.publish(principal, room["id"], sent, None)
        messages[role] = _message_id(answer.body)
    listed = await api.call("GET", f"/messages/{messages[OWNER]}/deliveries", keys[OWNER])
    deliveries = {item["subscription_id"]: item["id"] for item in listed.json()["items"]}
    for role in (OWNER, SUBSCRIBER):
        schedule = f"/subscriptions/{subscriptions[role]}/sideline/schedule"
        await api.call("PUT", schedule, keys[role], json={"interval_s": 60})
    jwk = generate_key("EdDSA").public.to_jwk()
    signing_key = await api.made("/signing-keys", {"name": "x", "jwk": jwk}, keys[OWNER])
    queue = await api.made("/queues", {"name": "handled", "shards": 1}, keys[OWNER])
    gone = await api.made(f"{rooms}/subscriptions", {"name": "y", "type": "PULL"}, keys[OWNER])
    job = await api.call("DELETE", f"/subscriptions/{gone['id']}", keys[OWNER])
    suspended = organisations[SUSPENDED]
    await api.call("POST", f"/organisations/{suspended}/suspend", keys[PLATFORM])
    api.services.keys.forget()
    own_keys = (await api.call("GET", "/keys?name=first", keys[OWNER])).json()["items"]
    return World(
        keys=keys,
        organisations=organisations,
        paths={
            "room_id": {OWNER: str(room["id"])},
            "name": {"": MADE},
            "version": {"": "1"},
            "subscription_id": subscriptions,
            "message_id": messages,
            "caller_id": {role: f"named-{role}" for role in messages},
            "delivery_id": {
                role: deliveries[subscriptions[role]] for role in (OWNER, SUBSCRIBER, SUSPENDED)
            },
            "job_id": {OWNER: job.json()["job_id"]},
            "key_id": {OWNER: own_keys[0]["id"]},
            "session_id": {OWNER: await make_session(api, organisations[OWNER])},
            "grant_id": {OWNER: grant_id},
            "kid": {OWNER: signing_key["kid"]},
            "organisation_id": {STRANGER: organisations[STRANGER]},
            "queue": {OWNER: queue["name"]},
            "magazine": {
                role: f"subscription-{subscriptions[role]}_SIDELINE" for role in (OWNER, SUBSCRIBER)
            },
        },
    )


def _message_id(body: bytes) -> str:
    found: dict[str, Any] = json.loads(body)
    return str(found["message_id"])
