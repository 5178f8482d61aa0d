"""Serve signed receipts of messages, and the keys to verify them: `/.well-known/jwks.json`."""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Final

from litestar import get
from litestar.datastructures import ResponseHeader
from msgspec import Meta, Struct
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.api.auth import (
    FOR_EVERY_KEY,
    Caller,
    ServicesDep,
    for_portals,
    require_scopes,
)
from rooms.api.deliveries import to_visible_delivery
from rooms.api.deps import ApiServices
from rooms.api.params import IdPath, parse_message
from rooms.api.signing_keys import to_public_key
from rooms.db.catalog.organisations import ListedOrganisation, find_members
from rooms.db.catalog.signing_keys import find_key
from rooms.db.connection import autocommit, snapshot
from rooms.db.queries.deliveries import DeliveryRecord, deliveries_of_message
from rooms.db.queries.message_scope import (
    MessageView,
    count_own_subscriptions,
    find_message_view,
    is_payload_visible,
)
from rooms.db.queries.messages import MessageRecord, delivery_states, find_message
from rooms.db.receipt_keys import current_key
from rooms.domain.ids import MessageId, OrganisationId
from rooms.domain.message_headers import SIGNATURE_HEADER
from rooms.domain.state_machine import Scope
from rooms.errors import NotFoundError
from rooms.evidence.message_signature import payload_hash, read_signature
from rooms.evidence.receipt import (
    Receipt,
    ReceiptDelivery,
    ReceiptPublisher,
    ReceiptSignature,
    sign_receipt,
)

MAX_DELIVERIES: Final = 500
KEYS_CACHE_S: Final = 300
_TAGS: Final = ["evidence"]


class ReceiptResponse(Struct, kw_only=True):
    """Hold a receipt, as a compact JWS of the installation."""

    receipt: Annotated[
        str, Meta(description="Verify it by `rooms receipt verify`, or any library for JWS.")
    ]


class JwkSet(Struct, kw_only=True):
    """List public keys (RFC 7517). `nbf` and `exp`: from when until when receipts name a key."""

    keys: list[dict[str, Any]]


@get(
    "/messages/{message_id:str}/receipt",
    opt=for_portals(require_scopes(Scope.MANAGE, Scope.OPERATE, allows=FOR_EVERY_KEY)),
    tags=_TAGS,
    summary="Get a signed receipt of a message",
)
async def read_receipt(
    services: ServicesDep, principal: Caller, message_id: IdPath
) -> ReceiptResponse:
    """Return what was accepted, from which organisation and when, and what became of it, signed.

    It states what the caller may see of the message now: the room's owner everything, the publisher
    its message and counts of deliveries, a subscriber its own deliveries. Who published is named to
    a subscriber once the message may be sent to it, without the API key. To a key that has only
    the scope `view` it says nothing about the payload. At most 500 deliveries are listed. Messages
    end with the retention; keep receipts that must last longer.
    """
    identity = parse_message(message_id)
    # Before the snapshot: it may create the key, and no receipt may be older than its key.
    async with autocommit(services.engine) as connection:
        key = await current_key(connection, services.cipher, services.random)
    async with snapshot(services.engine) as connection:
        # The first statement: whatever the others see was committed before this time.
        signed_at = (await connection.execute(select(func.clock_timestamp()))).scalar_one()
        view = await find_message_view(connection, principal, identity)
        receipt = await _receipt(
            connection,
            services,
            view,
            identity,
            signed_at,
            reads_payload=principal.reads_payloads,
        )
    return ReceiptResponse(receipt=sign_receipt(receipt, key))


@get(
    "/.well-known/jwks.json",
    response_headers=[
        ResponseHeader(name="Cache-Control", value=f"public, max-age={KEYS_CACHE_S}")
    ],
    tags=_TAGS,
    summary="Public keys of receipts",
)
async def read_jwk_set(services: ServicesDep) -> JwkSet:
    """Return the keys by which receipts are verified, the newest 100, with retired ones."""
    found = await services.receipt_keys.current()
    return JwkSet(keys=[key.to_jwk() for key in found])


async def _receipt(
    connection: AsyncConnection,
    services: ApiServices,
    view: MessageView,
    identity: MessageId,
    signed_at: datetime,
    *,
    reads_payload: bool,
) -> Receipt:
    room = view.scope.room
    message = await find_message(connection, room.id, identity)
    _, states = await delivery_states(connection, room.id, identity, view.counted_deliveries())
    listed = await deliveries_of_message(connection, view, after=None, limit=MAX_DELIVERIES + 1)
    signature = None
    is_sent = await is_payload_visible(connection, view)
    shown = reads_payload and is_sent
    whose = message.publisher_organisation_id or room.organisation_id
    members = await find_members(connection, [whose])
    if shown:
        signature = await _signature(connection, message, whose, members)
    payload = message.payload or b""
    return Receipt(
        iss=f"rooms:{services.settings.farm}/{services.settings.client}",
        iat=int(signed_at.timestamp()),
        message_id=message.id,
        room=room.id,
        event_type=message.event_type,
        version=message.version,
        accepted_at=message.published_at,
        fanout=message.fanout
        if view.sees_counts
        else await count_own_subscriptions(connection, view),
        states={state.value: count for state, count in sorted(states.items())},
        deliveries=[_delivery(one, view) for one in listed[:MAX_DELIVERIES]],
        more_deliveries=len(listed) > MAX_DELIVERIES,
        id=message.caller_id if view.sees_counts else None,
        ordering_key=message.ordering_key,
        correlation_id=message.correlation_id,
        # What was sent named it, but not its key.
        publisher=_publisher(message, whose, members, names_key=view.sees_counts)
        if is_sent
        else None,
        sha256=payload_hash(payload) if shown else None,
        payload_bytes=len(payload) if shown else None,
        signature=signature,
    )


def _publisher(
    message: MessageRecord,
    whose: OrganisationId,
    members: Mapping[OrganisationId, ListedOrganisation],
    *,
    names_key: bool,
) -> ReceiptPublisher | None:
    if message.publisher_id is None:
        return None  # Rooms itself published it
    member = members.get(whose)
    return ReceiptPublisher(
        organisation_id=whose,
        organisation=None if member is None else member.name,
        application=message.application,
        key_id=message.publisher_id if names_key else None,
    )


async def _signature(
    connection: AsyncConnection,
    message: MessageRecord,
    whose: OrganisationId,
    members: Mapping[OrganisationId, ListedOrganisation],
) -> ReceiptSignature | None:
    """Return the signature with its key. A publisher that signs names itself by it."""
    jws = json.loads(message.headers or b"{}").get(SIGNATURE_HEADER)
    if jws is None:
        return None
    try:
        record = await find_key(connection, whose, read_signature(jws).header.kid)
    except NotFoundError:
        return None  # deleted with its organisation
    member = members.get(whose)
    return ReceiptSignature(
        jws=jws,
        key=to_public_key(record).to_jwk(),
        organisation_id=whose,
        organisation=None if member is None else member.name,
    )


def _delivery(record: DeliveryRecord, view: MessageView) -> ReceiptDelivery:
    shown = to_visible_delivery(record, view)
    return ReceiptDelivery(
        subscription_id=shown.subscription_id,
        subscription=shown.subscription,
        organisation_id=shown.organisation_id,
        state=shown.state.value,
        reason=shown.reason,
        attempts=shown.attempts,
        updated_at=shown.updated_at,
    )


ROUTES: Final = [read_receipt]
PUBLIC_ROUTES: Final = [read_jwk_set]
