"""Check that an installation from before rooms were shared goes on as it was, and back again."""

import asyncio
import time
from typing import Any, Final

from alembic import command

from rooms.db.catalog.api_keys import hash_key, new_key
from rooms.domain.ids import IdGenerator, RoomId
from rooms.domain.work_location import WorkLocation
from tests.integration.rooms.api.conftest import Api, open_api
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
    before = everything(database)
    move(database, "head")
    assert everything(database) == before
    rows = run(
        database,
        "SELECT s.organisation_id::text, s.approved_at = s.created_at, s.suspended_by, s.own_status,"
        " s.proposal, r.visibility, r.subscription_policy FROM subscriptions s"
        " JOIN rooms r ON r.id = s.room_id",
    )
    assert rows == [(OWN, True, [], None, None, "private", "owner_only")] * len(STATUSES)
    assert run(database, "SELECT DISTINCT status, member_id FROM organisations") == [
        ("active", None)
    ]
    assert run(database, "SELECT count(*) FROM grants") == [(0,)]
    asyncio.run(work_on(database, subscriptions, message))
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
