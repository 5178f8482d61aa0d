"""Build the world of `test_auth_roles`: organisations that share rooms, and every kind of key.

Every call finds the same world: what one has changed is put back before the next.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from rooms.db.connection import Connection
from rooms.db.queries.analytics import replace_findings
from rooms.domain.ids import OrganisationId
from rooms.domain.principal import Restriction
from rooms.domain.role import Role
from rooms.domain.state_machine import Scope
from tests.integration.rooms.api.conftest import Api
from tests.integration.rooms.api.sharing_world import (
    MADE,
    OWNER,
    PLATFORM,
    PUBLISHER,
    STRANGER,
    SUBSCRIBER,
    SUSPENDED,
    World,
    build_world,
)
from tests.integration.rooms.api.sign_in import begin, make_session
from tests.integration.rooms.api.test_analytics import NOON, findings_of_every_kind

PULL, PENDING = "pull", "pending"
"""The subscriber's ordered PULL subscription; one to the listed room that waits for approval."""
SHARED, LISTED, SPARE = OWNER, "listed", "spare"
"""Rooms of the owner: the shared one, a listed one that asks for approval, and a private one."""
SPARE_OF_OWNER, SPARE_OF_SUBSCRIBER = "spare-of-owner", "spare-of-subscriber"
UNUSED: Final = "unused"
"""An event type that no message has, in two versions."""
SUBSCRIBERS: Final[Mapping[str, str]] = {
    OWNER: OWNER,
    SUBSCRIBER: SUBSCRIBER,
    SUSPENDED: SUSPENDED,
    PULL: SUBSCRIBER,
    PENDING: SUBSCRIBER,
}
"""The organisation of each target subscription. The first three are PUSH subscriptions."""
MESSAGE_RECEIVERS: Final = frozenset({OWNER, SUBSCRIBER, SUSPENDED, SPARE_OF_OWNER})
"""The subscriptions that the target messages were routed to."""
ROOM_MEMBERS: Final = frozenset({OWNER, PUBLISHER, SUBSCRIBER, SUSPENDED})
ORDERING_KEY: Final = "blocked"
_NOT_COPIED: Final = ("alembic_version", "journal", "journal_heads")


@dataclass(frozen=True, kw_only=True)
class Caller:
    """Describe a key: whose it is, and what it is restricted to, by the names of targets."""

    name: str
    organisation: str
    scopes: frozenset[Scope] = frozenset({Scope.ADMIN})
    rooms: frozenset[str] | None = None
    event_types: frozenset[str] | None = None
    subscriptions: frozenset[str] | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Other fields that the key is made with."""
    valid: bool = True
    session: bool = False
    """A person who is signed in to the console."""

    @property
    def restrictions(self) -> set[Restriction]:
        """Return the kinds of its restrictions; one to subscriptions is one to their rooms, too."""
        found = {kind for kind in Restriction if getattr(self, kind) is not None}
        return found | ({Restriction.ROOMS} if Restriction.SUBSCRIPTIONS in found else set())


def _restricted(organisation: str, name: str, **values: Any) -> Caller:
    return Caller(name=f"{organisation}/{name}", organisation=organisation, **values)


CALLERS: Final = (
    *(Caller(name=who, organisation=who) for who in (OWNER, PUBLISHER, SUBSCRIBER, STRANGER)),
    Caller(name=SUSPENDED, organisation=SUSPENDED),
    Caller(name=PLATFORM, organisation=PLATFORM, scopes=frozenset({Scope.PLATFORM})),
    *(
        Caller(name=f"{who}:{scope}", organisation=who, scopes=frozenset({scope}))
        for who, scopes in {
            OWNER: (scope for scope in Scope if scope not in {Scope.ADMIN, Scope.PLATFORM}),
            PUBLISHER: (Scope.PUBLISH,),
            SUBSCRIBER: (Scope.MANAGE, Scope.SUBSCRIBE, Scope.OPERATE),
        }.items()
        for scope in scopes
    ),
    _restricted(OWNER, "room", rooms=frozenset({SHARED})),
    _restricted(OWNER, "other room", rooms=frozenset({SPARE})),
    _restricted(OWNER, "type", event_types=frozenset({MADE, UNUSED})),
    _restricted(OWNER, "other type", event_types=frozenset({SPARE})),
    _restricted(OWNER, "subscription", rooms=frozenset({SHARED}), subscriptions=frozenset({OWNER})),
    _restricted(
        OWNER, "other subscription", rooms=frozenset({SHARED}),
        subscriptions=frozenset({SPARE_OF_OWNER}),
    ),
    _restricted(PUBLISHER, "room", rooms=frozenset({SHARED})),
    _restricted(PUBLISHER, "other room", rooms=frozenset({LISTED})),
    _restricted(PUBLISHER, "type", event_types=frozenset({MADE, UNUSED})),
    _restricted(PUBLISHER, "other type", event_types=frozenset({SPARE})),
    _restricted(SUBSCRIBER, "room", rooms=frozenset({SHARED})),
    _restricted(SUBSCRIBER, "other room", rooms=frozenset({LISTED})),
    _restricted(
        SUBSCRIBER, "subscription", rooms=frozenset({SHARED}), subscriptions=frozenset({PULL})
    ),
    _restricted(
        SUBSCRIBER, "other subscription", rooms=frozenset({SHARED}),
        subscriptions=frozenset({SPARE_OF_SUBSCRIBER}),
    ),
    _restricted(OWNER, "session", session=True),
    _restricted(OWNER, "other network", fields={"networks": ["192.0.2.0/24"]}, valid=False),
    _restricted(OWNER, "expired", fields={"expires_at": "2099-01-01T00:00:00Z"}, valid=False),
    _restricted(OWNER, "revoked", valid=False),
    Caller(name="unknown key", organisation="", valid=False),
    Caller(name="no key", organisation="", valid=False),
)  # fmt: skip


@dataclass(kw_only=True)
class AccessWorld:
    """Hold the texts of all keys by caller, and the values of paths by target."""

    api: Api
    keys: Mapping[str, str | None]
    names: Mapping[str, str]
    """Of the organisations."""
    paths: Mapping[str, Mapping[str, str]]
    bodies: Mapping[str, Any]
    """By route: bodies that name something of this world."""
    connection: Connection

    async def restore(self) -> None:
        """Put back every row that calls have changed, but those of the journal."""
        await self.connection.execute("CALL copied.restore()")
        self.api.services.keys.forget()


async def build_access_world(api: Api, connection: Connection) -> AccessWorld:
    """Create it by the API, as its members would, and keep a copy of its rows."""
    world = await build_world(api)
    owner, subscriber = world.keys[OWNER], world.keys[SUBSCRIBER]
    shared = world.paths["room_id"][OWNER]
    await _make_type(api, shared, owner)
    sharing = {"visibility": "listed", "subscription_policy": "approval"}
    listed = str((await api.room(LISTED, owner, **sharing))["id"])
    await api.made(f"/rooms/{listed}/event-types", {"name": MADE}, owner)
    found = (await api.call("GET", "/rooms?name=spare", owner)).json()["items"]
    rooms = {SHARED: int(shared), LISTED: int(listed), SPARE: found[0]["id"]}
    path = f"/rooms/{shared}/subscriptions"
    ids = dict(world.paths["subscription_id"])
    found = (await api.call("GET", f"{path}?contains=x", owner)).json()["items"]
    ids[SPARE_OF_OWNER] = found[0]["id"]
    for name, room in ((PULL, shared), (SPARE_OF_SUBSCRIBER, shared), (PENDING, listed)):
        body = {"name": name, "type": "PULL", "ordered": True, "max_receives": 1}
        made = await api.made(f"/rooms/{room}/subscriptions", body, subscriber)
        ids[name] = made["id"]
    await _block_key(api, shared, ids[PULL], world.keys)
    acks = await _lease(api, shared, ids[PULL], world.keys)
    listed_deliveries = await api.call("GET", f"/subscriptions/{ids[PULL]}/deliveries", subscriber)
    sidelined = [one for one in listed_deliveries.json()["items"] if one["state"] == "sidelined"]
    replay = f"/subscriptions/{ids[OWNER]}/replay"
    job = await api.call("POST", replay, owner, json={"since": "2026-01-01T00:00:00Z"})
    findings = [
        one
        for number, who in enumerate((OWNER, SUBSCRIBER))
        for one in findings_of_every_kind(
            OrganisationId(world.organisations[who]), number, int(shared), ids[who]
        )
    ]
    assert replace_findings(api.url, run=1, analysed_at=NOON, findings=findings)
    organisations = await api.sql("SELECT id::text, name FROM organisations")
    names = {who: dict(organisations)[one] for who, one in world.organisations.items()}
    session = await make_session(api, world.organisations[OWNER])
    keys = await _make_keys(api, world, rooms, ids)
    await _copy_rows(connection)
    return AccessWorld(
        api=api,
        keys=keys,
        names=names,
        paths={
            **world.paths,
            "room_id": {SHARED: shared, LISTED: listed},
            "name": {"": UNUSED},
            "subscription_id": {name: ids[name] for name in SUBSCRIBERS},
            "delivery_id": {**world.paths["delivery_id"], PULL: sidelined[0]["id"]},
            "job_id": {OWNER: job.json()["job_id"]},
            "session_id": {OWNER: session},
        },
        bodies={
            "POST /subscriptions/{subscription_id}/ack": acks,
            "POST /subscriptions/{subscription_id}/nack": acks,
            "POST /subscriptions/{subscription_id}/extend": acks | {"lease_ms": 60_000},
            "POST /subscriptions/{subscription_id}/ordering-keys/skip": {
                "ordering_key": ORDERING_KEY
            },
            "POST /portal-links": {"name": "a person", "subscription_ids": [ids[PULL]]},
        },
        connection=connection,
    )


async def _make_type(api: Api, room: str, key: str) -> None:
    path = f"/rooms/{room}/event-types"
    await api.made(path, {"name": UNUSED}, key)
    await api.made(f"{path}/{UNUSED}/versions", {"schema": {"type": "object"}}, key)


async def _block_key(api: Api, room: str, queue: str, keys: Mapping[str, str]) -> None:
    """Let an ordering key of a PULL subscription wait for its sidelined head."""
    acks = await _lease(api, room, queue, keys, ordering_key=ORDERING_KEY)
    nacked = await api.call("POST", f"/subscriptions/{queue}/nack", keys[SUBSCRIBER], json=acks)
    assert nacked.status_code == 200, nacked.text


async def _lease(
    api: Api, room: str, queue: str, keys: Mapping[str, str], **fields: Any
) -> dict[str, Any]:
    """Publish, and lease the message; return the body that settles it."""
    message = {"event_type": MADE, "payload": {}, **fields}
    await api.call("POST", f"/rooms/{room}/messages", keys[OWNER], json=message)
    body = {"max_messages": 1, "wait_ms": 0, "lease_ms": 600_000}
    leased = await api.call("POST", f"/subscriptions/{queue}/pull", keys[SUBSCRIBER], json=body)
    (one,) = leased.json()["messages"]
    return {"ack_ids": [one["ack_id"]]}


async def _make_keys(
    api: Api, world: World, rooms: Mapping[str, int], subscriptions: Mapping[str, str]
) -> dict[str, str | None]:
    """Make the keys of all callers."""
    keys: dict[str, str | None] = {**world.keys}
    for caller in CALLERS:
        if caller.name in keys or not caller.organisation:
            continue
        if caller.session:
            organisation = world.organisations[caller.organisation]
            _, keys[caller.name] = await begin(api, organisation, roles=[Role.OWNER])
            continue
        body: dict[str, Any] = {"name": "made", "scopes": sorted(caller.scopes), **caller.fields}
        if caller.subscriptions is not None:
            body["subscriptions"] = [subscriptions[one] for one in caller.subscriptions]
        elif caller.rooms is not None:
            body["rooms"] = [rooms[one] for one in caller.rooms]
        if caller.event_types is not None:
            body["event_types"] = sorted(caller.event_types)
        made = await api.made("/keys", body, world.keys[caller.organisation])
        keys[caller.name] = made["key"]
        column = {"owner/expired": "expires_at", "owner/revoked": "revoked_at"}.get(caller.name)
        if column is not None:
            await api.sql(f"UPDATE api_keys SET {column} = now() WHERE id = %s", made["id"])
    api.services.keys.forget()
    return keys | {"unknown key": "rooms_" + "a" * 43, "no key": None}


async def _copy_rows(connection: Connection) -> None:
    """Copy all tables, and make the procedure that puts the rows back, unseen by triggers."""
    cursor = await connection.execute(
        "SELECT c.relname, string_agg(quote_ident(a.attname), ', ' ORDER BY a.attnum)"
        " FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid"
        " WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'p')"
        " AND NOT c.relispartition AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = ''"
        " AND c.relname <> ALL (%s) GROUP BY 1 ORDER BY 1",
        (list(_NOT_COPIED),),
    )
    tables = await cursor.fetchall()
    copies = "".join(f"CREATE TABLE copied.{name} AS TABLE {name};" for name, _ in tables)
    moved = "".join(
        f"DELETE FROM {name};"
        f"INSERT INTO {name} ({columns}) OVERRIDING SYSTEM VALUE"
        f" SELECT {columns} FROM copied.{name};"
        for name, columns in tables
    )
    body = f"BEGIN SET LOCAL session_replication_role = replica; {moved} END"
    procedure = f"CREATE PROCEDURE copied.restore() LANGUAGE plpgsql AS $body$ {body} $body$"
    for statement in ("CREATE SCHEMA copied", copies, procedure):
        await connection.execute(statement.encode())
