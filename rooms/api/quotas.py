"""Serve quotas: of organisations, set by the platform, and of rooms, set by their owners."""

from datetime import timedelta
from typing import Annotated, Final

import msgspec
from litestar import get, patch
from litestar.params import JSONBody
from msgspec import UNSET, Meta, Struct, UnsetType

from rooms.api.auth import BELOW_ROOM, Caller, ServicesDep, require_scopes
from rooms.api.changes import ChangeDep
from rooms.api.codec import Body
from rooms.api.params import IdPath, RoomPath, parse_id, parse_room
from rooms.db import quotas as records
from rooms.db.catalog.organisations import find_organisation
from rooms.db.catalog.rooms import find_room, touch_room, touch_rooms_under
from rooms.db.connection import transaction
from rooms.db.notify import Channel
from rooms.domain.ids import OrganisationId
from rooms.domain.quota import Quotas
from rooms.domain.state_machine import Scope

_TAGS: Final = ["quotas"]
_PLATFORM: Final = require_scopes(Scope.PLATFORM)
_MAX: Final = 10**15
_MAX_STORED: Final = 10_000_000
_MAX_EXPIRATION_MS: Final = timedelta(days=3650) // timedelta(milliseconds=1)

Rate = Annotated[
    int, Meta(ge=1, le=1_000_000, description="Messages in a second, of all API processes.")
]
DailyMessages = Annotated[int, Meta(ge=0, le=_MAX, description="Messages in a day of UTC.")]
DailyBytes = Annotated[int, Meta(ge=0, le=_MAX, description="Bytes of payloads in a day of UTC.")]
PayloadBytes = Annotated[int, Meta(ge=1, le=_MAX, description="Bytes of one payload.")]
Stored = Annotated[
    int, Meta(ge=0, le=_MAX_STORED, description="Messages that are kept, finished ones, too.")
]
Subscriptions = Annotated[
    int,
    Meta(
        ge=0,
        le=1_000_000,
        description="Subscriptions that have not ended; of a room, also not those that wait for "
        "its owner's approval.",
    ),
]
Expiration = Annotated[
    int, Meta(ge=1000, le=_MAX_EXPIRATION_MS, description="Longest lifetime of a message.")
]


class UpdateRoomQuotas(Struct, forbid_unknown_fields=True, kw_only=True):
    """Change the given limits of what is published into a room; null removes one."""

    messages_per_s: Rate | UnsetType | None = UNSET
    messages_per_day: DailyMessages | UnsetType | None = UNSET
    bytes_per_day: DailyBytes | UnsetType | None = UNSET
    payload_bytes: PayloadBytes | UnsetType | None = UNSET
    stored_messages: Stored | UnsetType | None = UNSET
    subscriptions: Subscriptions | UnsetType | None = UNSET


class UpdateQuotas(UpdateRoomQuotas, forbid_unknown_fields=True, kw_only=True):
    """Change the given limits of an organisation; null removes one."""

    expiration_ms: Expiration | UnsetType | None = UNSET


class QuotaLimits(Struct, kw_only=True):
    """List the limits; null: no limit, or for `subscriptions` that of the settings."""

    messages_per_s: int | None
    messages_per_day: int | None
    bytes_per_day: int | None
    payload_bytes: int | None
    stored_messages: int | None
    subscriptions: int | None
    expiration_ms: int | None


class QuotaUseResponse(Struct, kw_only=True):
    """Count what is used: of the day, a second ago; stored, up to the limit and a minute ago.

    Null: it is not counted, because there is no limit.
    """

    messages_per_day: int | None
    bytes_per_day: int | None
    stored_messages: int | None
    subscriptions: int


class QuotaResponse(Struct, kw_only=True):
    """Show the limits, and what is used of them."""

    limits: QuotaLimits
    used: QuotaUseResponse


@get(
    "/quotas",
    opt=require_scopes(Scope.MANAGE, Scope.OPERATE, Scope.PUBLISH, Scope.SUBSCRIBE, Scope.AUDIT),
    tags=_TAGS,
    summary="Read the own quotas",
)
async def read_quotas(services: ServicesDep, principal: Caller) -> QuotaResponse:
    """Return the limits that the platform set for the own organisation, and what is used."""
    return await _of_organisation(services, principal.organisation_id)


@get(
    "/organisations/{organisation_id:str}/quotas",
    opt=_PLATFORM,
    tags=_TAGS,
    summary="Read the quotas of an organisation",
)
async def read_organisation_quotas(services: ServicesDep, organisation_id: IdPath) -> QuotaResponse:
    """Return the limits of an organisation, and what is used."""
    return await _of_organisation(
        services, OrganisationId(parse_id(organisation_id, "organisation"))
    )


@patch(
    "/organisations/{organisation_id:str}/quotas",
    dto=Body[UpdateQuotas],
    return_dto=None,
    opt=_PLATFORM,
    tags=_TAGS,
    summary="Change the quotas of an organisation",
)
async def change_organisation_quotas(
    data: JSONBody[UpdateQuotas], services: ServicesDep, change: ChangeDep, organisation_id: IdPath
) -> QuotaResponse:
    """Limit what an organisation publishes, wherever, and what it has.

    `stored_messages` and `expiration_ms` are of its own rooms. Processes know it within a second.
    """
    identity = OrganisationId(parse_id(organisation_id, "organisation"))
    rooms = []
    async with change.transaction() as connection:
        await find_organisation(connection, identity, lock=True)
        before = await records.find_quotas(connection, organisation=identity)
        after = _changed(before, data)
        change.before = _given(before, data)
        change.keys_of = identity
        await records.set_quotas(connection, after, organisation=identity)
        if after.expiration_ms != before.expiration_ms:
            # The routing tables of its rooms have the lifetime.
            rooms = list(await touch_rooms_under(connection, identity))
    for room in rooms:
        services.notifier.notify(Channel.CONFIG, str(room))
    return await _of_organisation(services, identity)


@get(
    "/rooms/{room_id:str}/quotas",
    opt=require_scopes(Scope.MANAGE, Scope.OPERATE, Scope.AUDIT, allows=BELOW_ROOM),
    tags=_TAGS,
    summary="Read the quotas of a room",
)
async def read_room_quotas(
    services: ServicesDep, principal: Caller, room_id: RoomPath
) -> QuotaResponse:
    """Return the limits of a room, and what is used; only its owner sees them."""
    identity = parse_room(room_id)
    async with transaction(services.engine) as connection:
        await find_room(connection, principal, identity)
        limits = await records.find_quotas(connection, room=identity)
        use = await records.find_use(connection, room=identity)
    return _to_response(limits, use)


@patch(
    "/rooms/{room_id:str}/quotas",
    dto=Body[UpdateRoomQuotas],
    return_dto=None,
    opt=require_scopes(Scope.MANAGE, allows=BELOW_ROOM),
    tags=_TAGS,
    summary="Change the quotas of a room",
)
async def change_room_quotas(
    data: JSONBody[UpdateRoomQuotas],
    services: ServicesDep,
    principal: Caller,
    change: ChangeDep,
    room_id: RoomPath,
) -> QuotaResponse:
    """Limit what all publishers together publish into a room, and how many subscribe."""
    identity = parse_room(room_id)
    async with change.transaction() as connection:
        await touch_room(connection, principal, identity)
        before = await records.find_quotas(connection, room=identity)
        after = _changed(before, data)
        change.before = _given(before, data)
        await records.set_quotas(connection, after, room=identity)
        use = await records.find_use(connection, room=identity)
    services.notifier.notify(Channel.CONFIG, str(identity))
    return _to_response(after, use)


def _given(quotas: Quotas, data: UpdateRoomQuotas) -> dict[str, int | None]:
    """Return the limits that a request names."""
    given = msgspec.structs.asdict(data)
    return {name: getattr(quotas, name) for name, value in given.items() if value is not UNSET}


def _changed(before: Quotas, data: UpdateRoomQuotas) -> Quotas:
    document = before.to_document() or {}
    given = msgspec.structs.asdict(data)
    document |= {name: value for name, value in given.items() if value is not UNSET}
    return Quotas(**document)


async def _of_organisation(services: ServicesDep, identity: OrganisationId) -> QuotaResponse:
    async with transaction(services.engine) as connection:
        await find_organisation(connection, identity)
        limits = await records.find_quotas(connection, organisation=identity)
        use = await records.find_use(connection, organisation=identity)
    return _to_response(limits, use)


def _to_response(limits: Quotas, use: records.QuotaUse) -> QuotaResponse:
    return QuotaResponse(
        limits=msgspec.convert(limits, QuotaLimits, from_attributes=True),
        used=QuotaUseResponse(
            messages_per_day=use.messages_per_day if limits.counts_days else None,
            bytes_per_day=use.bytes_per_day if limits.counts_days else None,
            stored_messages=None if limits.stored_messages is None else use.stored_messages,
            subscriptions=use.subscriptions,
        ),
    )


ROUTES: Final = [
    read_quotas,
    read_organisation_quotas,
    change_organisation_quotas,
    read_room_quotas,
    change_room_quotas,
]
