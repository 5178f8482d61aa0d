"""Check that an installation from before rooms were shared goes on as it was, and back again."""

import asyncio
import time
from typing import Any, Final

from alembic import command

from delivery.maintenance.operational_events import OperationalEvents
from rooms.db.catalog.api_keys import hash_key, new_key
from rooms.db.connection import open_connection
from rooms.db.queue.endpoints import load_endpoints
from rooms.db.queue.throttle import SharedLaneState
from rooms.db.secrets import Cipher
from rooms.db.writer import LogWriter
from rooms.domain.ids import IdGenerator, RoomId, SubscriptionId
from rooms.domain.operational_event import DEFAULT_OPERATIONAL_EVENTS
from rooms.domain.work_location import WorkLocation
from tests.integration.rooms.api.conftest import SEAL_KEY, Api, open_api
from tests.integration.rooms.api.members import (
    Member,
    accepted,
    approve,
    grant,
    member,
    publish,
    pulled,
    read,
    subscribe,
)
from tests.migrations.test_upgrades import alembic, run

BEFORE: Final = "0021"
OWN, TENANT = (f"00000000-0000-7000-8000-00000000000{number}" for number in "ab")
ROOM, ROOM_OF_TENANT = 41, 42
HOOK_URL, OPERATIONAL_URL = "https://hooks.example.com/in", "https://ops.example.com/in"
SECRET: Final = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
STATUSES: Final = ("active", "paused", "disabled", "deleted")
KEYS: Final = {
    name: new_key(bytes([number]).__mul__)
    for number, name in enumerate(("own", "tenant", "revoked"), 1)
}
_IDS: Final = IdGenerator(lambda bits: 1 << (bits - 1))


def new_id(room: int = 0) -> str:
    return _IDS.generate(RoomId(room), time.time_ns() // 1_000_000)


def furnish(url: str) -> dict[str, str]:
    """Fill the database as the former version did; return the ids of subscriptions by status."""
    for identity, name in ((OWN, "own"), (TENANT, "tenant")):
        run(url, "INSERT INTO organisations (id, name) VALUES (%s, %s)", identity, name)
    for name, text in KEYS.items():
        run(
            url,
            "INSERT INTO api_keys (id, organisation_id, name, key_hash, scopes, revoked_at)"
            " VALUES (%s, %s, %s, %s, '{admin}', CASE WHEN %s THEN now() END)",
            new_id(),
            TENANT if name == "tenant" else OWN,
            name,
            hash_key(text.encode()),
            name == "revoked",
        )
    for room, owner in ((ROOM, OWN), (ROOM_OF_TENANT, TENANT)):
        run(
            url,
            "INSERT INTO rooms (id, organisation_id, name, delivery_delay_ms,"
            " delivery_delay_multiplier, delivery_attempts) VALUES (%s, %s, 'room', 1000, 2, 5)",
            room,
            owner,
        )
        kind = new_id(room)
        run(
            url,
            "INSERT INTO event_types (room_id, id, name, latest_version)"
            " VALUES (%s, %s, 'order.paid', 1)",
            room,
            kind,
        )
        run(
            url,
            "INSERT INTO event_type_versions (room_id, id, event_type_id, version)"
            " VALUES (%s, %s, %s, 1)",
            room,
            new_id(room),
            kind,
        )
    found = {}
    for status in STATUSES:
        found[status] = new_id(ROOM)
        run(
            url,
            "INSERT INTO subscriptions (room_id, id, name, type, timeout_ms, status, version)"
            " VALUES (%s, %s, %s, 'PULL', 10000, %s, 7)",
            ROOM,
            found[status],
            f"sub-{status}",
            status,
        )
    return found


def furnish_push(url: str) -> dict[str, str]:
    """Add a webhook with a secret and a sidelined delivery, and the room's operational URL."""
    run(url, "UPDATE rooms SET operational_url = %s WHERE id = %s", OPERATIONAL_URL, ROOM)
    found = {}
    for name, push_url in (("hook", HOOK_URL), ("~operational", OPERATIONAL_URL)):
        found[name] = new_id(ROOM)
        run(
            url,
            "INSERT INTO subscriptions (room_id, id, name, type, push_url, timeout_ms, secret,"
            " version, operational, event_types)"
            " VALUES (%s, %s, %s, 'PUSH', %s, 10000, %s, 7, %s, %s)",
            *(ROOM, found[name], name, push_url, Cipher(SEAL_KEY).encrypt(SECRET.encode())),
            *((True, "[]") if name == "~operational" else (False, None)),
        )
    found["message"], found["delivery"] = new_id(ROOM), new_id(ROOM)
    run(
        url,
        "INSERT INTO messages (room_id, id, event_type, event_version, priority, fanout,"
        " correlation_id, payload) VALUES (%s, %s, 'order.paid', 1, 4, 1, 'c', '{\"n\": 1}')",
        *(ROOM, found["message"]),
    )
    run(
        url,
        "INSERT INTO deliveries (room_id, id, message_id, subscription_id, state, reason,"
        " last_status) VALUES (%s, %s, %s, %s, 'sidelined', 'attempts_exhausted', 503)",
        *(ROOM, found["delivery"], found["message"], found["hook"]),
    )
    run(
        url,
        "INSERT INTO sidelined (room_id, id, subscription_id, generation, reason)"
        " VALUES (%s, %s, %s, 0, 'attempts_exhausted')",
        *(ROOM, found["delivery"], found["hook"]),
    )
    return found


def waiting_message(url: str, subscription: str) -> str:
    """Store a message with a delivery that waits for a pull; return the message's id."""
    message, delivery = new_id(ROOM), new_id(ROOM)
    run(
        url,
        "INSERT INTO messages (room_id, id, event_type, event_version, priority, fanout,"
        " correlation_id, payload) VALUES (%s, %s, 'order.paid', 1, 4, 1, 'c', '{}')",
        ROOM,
        message,
    )
    run(
        url,
        "INSERT INTO deliveries (room_id, id, message_id, subscription_id, state, due_at)"
        " VALUES (%s, %s, %s, %s, 'queued', now())",
        ROOM,
        delivery,
        message,
        subscription,
    )
    run(
        url,
        "INSERT INTO outbox (room_id, id, message_id, subscription_id, kind, priority, generation,"
        " attempt, due_at) VALUES (%s, %s, %s, %s, %s, 4, 0, 0, now())",
        ROOM,
        delivery,
        message,
        subscription,
        int(WorkLocation.PULL_LOCAL),
    )
    return message


def everything(url: str) -> dict[str, list[Any]]:
    """Return the rows of the former tables, without what only the later ones have."""
    columns = {
        "organisations": "id, name",
        "api_keys": "id, organisation_id, name, key_hash, scopes, revoked_at IS NULL",
        "rooms": "id, organisation_id, name, delivery_attempts, deleting",
        "subscriptions": "room_id, id, name, type, status, version, event_types",
        "messages": "room_id, id, event_type, payload",
        "deliveries": "room_id, id, message_id, subscription_id, state",
        "outbox": "room_id, id, kind",
    }
    return {
        name: sorted(map(str, run(url, f"SELECT {of} FROM {name}"))) for name, of in columns.items()
    }


def move(url: str, revision: str) -> None:
    with alembic(url) as config:
        step = command.downgrade if revision == BEFORE else command.upgrade
        step(config, revision)


def test_everything_is_as_it_was_and_private(database: str) -> None:
    move(database, BEFORE)
    subscriptions = furnish(database)
    message = waiting_message(database, subscriptions["active"])
    push = furnish_push(database)
    before = everything(database)
    move(database, "head")
    assert everything(database) == before
    rows = run(
        database,
        "SELECT s.organisation_id::text, s.approved_at = s.created_at, s.suspended_by, s.own_status,"
        " s.proposal, r.visibility, r.subscription_policy FROM subscriptions s"
        " JOIN rooms r ON r.id = s.room_id",
    )
    assert rows == [(OWN, True, [], None, None, "private", "owner_only")] * (len(STATUSES) + 2)
    assert run(database, "SELECT DISTINCT status, member_id FROM organisations") == [
        ("active", None)
    ]
    assert run(database, "SELECT count(*) FROM grants") == [(0,)]
    asyncio.run(work_on(database, subscriptions, message))
    asyncio.run(push_on(database, push))
    move(database, BEFORE)
    kept = everything(database)
    for name in ("organisations", "api_keys", "rooms", "subscriptions"):
        assert [row for row in kept[name] if row in before[name]] == before[name], name


async def work_on(url: str, subscriptions: dict[str, str], message: str) -> None:
    """Use the former keys, rooms and subscriptions, as before."""
    async with open_api(url) as api:
        own, tenant = (
            Member(id_, name, KEYS[name]) for id_, name in ((OWN, "own"), (TENANT, "tenant"))
        )
        assert (await api.call("GET", "/rooms", KEYS["revoked"])).status_code == 401
        for status, identity in subscriptions.items():
            path = f"/subscriptions/{identity}"
            answer = await api.call("GET", path, own.key)
            assert answer.status_code == (404 if status == "deleted" else 200)
            assert (await api.call("GET", path, tenant.key)).status_code == 404
            if status != "deleted":
                assert (answer.json()["status"], answer.json()["version"]) == (status, 7)
        later = await accepted(api, own.key, ROOM)
        assert sorted(await pulled(api, own, subscriptions["active"])) == sorted([message, later])
        assert (await publish(api, tenant.key, ROOM)).status_code == 404
        for status in ("paused", "disabled"):
            path = f"/subscriptions/{subscriptions[status]}/resume"
            assert (await api.call("POST", path, own.key)).json()["status"] == "active"
            undo = "UPDATE subscriptions SET status = %s, version = 7 WHERE id = %s"
            await api.sql(undo, status, subscriptions[status])
        report = await api.call("GET", "/journal/verify", own.key)
        assert (report.json()["whole"], report.json()["entries"]) == (True, 2)


async def push_on(url: str, push: dict[str, str]) -> None:
    """Use the webhook, its secret and sideline, and the room's operational URL, as before."""
    hook, operational = (SubscriptionId(push[name]) for name in ("hook", "~operational"))
    async with open_api(url) as api, LogWriter(url, kind="settler") as writer:
        own = Member(OWN, "own", KEYS["own"])
        room = (await api.call("GET", f"/rooms/{ROOM}", own.key)).json()
        assert room["operational_url"] == OPERATIONAL_URL
        assert set(room["operational_events"]) == DEFAULT_OPERATIONAL_EVENTS
        found = await read(api, own, hook)
        assert (found["push_url"], found["status"], found["version"]) == (HOOK_URL, "active", 7)
        async with open_connection(url, name="test") as connection:
            records = await load_endpoints(
                connection, [(RoomId(ROOM), one) for one in (hook, operational)]
            )
        for record in records.values():
            secrets = [Cipher(SEAL_KEY).decrypt(one) for one in record.encrypted_secrets]
            assert secrets == [SECRET.encode()]

        message = await accepted(api, own.key, ROOM)
        queued = "SELECT state::text FROM deliveries WHERE message_id = %s AND subscription_id = %s"
        assert await api.sql(queued, message, hook) == [("queued",)]
        assert await api.sql(queued, message, operational) == []

        path = f"/subscriptions/{hook}/sideline"
        (listed,) = (await api.call("GET", path, own.key)).json()["items"]
        assert (listed["delivery_id"], listed["message_id"]) == (push["delivery"], push["message"])
        body = {"delivery_ids": [push["delivery"]]}
        answer = await api.call("POST", f"{path}/shovel", own.key, json=body)
        assert answer.status_code == 202, answer.text
        again = f"/deliveries/{push['delivery']}/redeliver"
        assert (await api.call("POST", again, own.key)).status_code == 200
        assert await api.sql(queued, push["message"], hook) == [("queued",)]

        assert await SharedLaneState(writer).disable(records[hook], reason="gone")
        await OperationalEvents(
            writer, api.services.clock, api.services.ids, notify_queued=lambda _: None
        ).run(lambda: True)
        rows = await api.sql(
            "SELECT m.event_type, d.state::text FROM deliveries d"
            " JOIN messages m ON m.id = d.message_id WHERE d.subscription_id = %s",
            operational,
        )
        assert rows == [("rooms.endpoint.disabled", "queued")]
        resumed = await api.call("POST", f"/subscriptions/{hook}/resume", own.key)
        assert resumed.json()["status"] == "active"
        await api.sql("UPDATE subscriptions SET version = 7 WHERE id = %s", hook)


def test_what_the_former_version_cannot_hold_ends(database: str) -> None:
    """Check that a downgrade opens nothing: no narrow key, and no key of a suspended member."""
    move(database, BEFORE)
    subscriptions = furnish(database)
    move(database, "head")
    ended = asyncio.run(share(database, subscriptions))
    move(database, BEFORE)
    statuses = dict(run(database, "SELECT id::text, status FROM subscriptions"))
    assert {name: statuses[identity] for name, identity in ended.items()} == {
        "foreign": "deleted",
        "pending": "deleted",
        "terminated": "deleted",
        "held": "paused",
    }
    assert statuses[subscriptions["active"]] == "active"
    valid = {row[0] for row in run(database, "SELECT name FROM api_keys WHERE revoked_at IS NULL")}
    assert {"own", "tenant"} <= valid
    assert not valid & {"narrow", "ending", "of-suspended"}
    move(database, "head")
    assert run(database, "SELECT count(*) FROM grants") == [(0,)]
    assert run(database, "SELECT DISTINCT visibility FROM rooms") == [("private",)]


async def share(url: str, subscriptions: dict[str, str]) -> dict[str, str]:
    """Share a room in every way; return ids of subscriptions."""
    async with open_api(url) as api:
        own, tenant = (
            Member(id_, name, KEYS[name]) for id_, name in ((OWN, "own"), (TENANT, "tenant"))
        )
        sharing = {"visibility": "listed", "subscription_policy": "approval"}
        await api.call("PATCH", f"/rooms/{ROOM}", own.key, json=sharing)
        await grant(api, own, ROOM, "*")
        made = {
            name: (await subscribe(api, who, ROOM, name))["id"]
            for name, who in (
                ("foreign", tenant),
                ("pending", tenant),
                ("terminated", own),
                ("held", own),
            )
        }
        await approve(api, own, made["foreign"])
        path = f"/subscriptions/{made['terminated']}/terminate"
        assert (await api.call("POST", path, own.key)).status_code == 200
        await hold(api, own, made["held"])
        for name, fields in (
            ("narrow", {"rooms": [ROOM]}),
            ("ending", {"expires_at": "2099-01-01T00:00:00Z"}),
        ):
            body = {"name": name, "scopes": ["publish"], **fields}
            await api.made("/keys", body, own.key)
        third = await member(api, "third")
        body = {"name": "of-suspended", "scopes": ["admin"]}
        await api.made("/keys", body, third.key)
        await api.call("POST", f"/organisations/{third.id}/suspend", "platform")
        assert (await read(api, own, subscriptions["active"]))["status"] == "active"
        return made


async def hold(api: Api, own: Member, identity: str) -> None:
    """Pause a subscription, and suspend it as if its organisation were."""
    await api.call("POST", f"/subscriptions/{identity}/pause", own.key)
    await api.sql(
        "UPDATE subscriptions SET status = 'suspended', own_status = 'paused',"
        " suspended_by = '{owner_organisation}' WHERE id = %s",
        identity,
    )
