"""Read the principals of keys from their rows."""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Any, Final

from sqlalchemy import ColumnElement, RowMapping, Select, and_, or_, select
from sqlalchemy.sql import func

from rooms.db.catalog.api_keys import KeyKind, key_from_row
from rooms.db.tables.organisations import api_keys, organisations
from rooms.domain.ids import room_of
from rooms.domain.member_identity import MemberIdentity
from rooms.domain.principal import Principal
from rooms.domain.quota import Quotas
from rooms.domain.sharing import OrganisationStatus

Network = IPv4Network | IPv6Network


class KeyStanding(StrEnum):
    """Say whether a key that was authenticated before may go on."""

    VALID = "valid"
    SUSPENDED = "suspended"
    """Its organisation is suspended."""
    OVER = "over"
    """It is revoked, has ended, or may do less than it could."""


@dataclass(frozen=True, slots=True)
class KnownKey:
    """Hold a valid key: its principal, the networks that may use it, and its end."""

    principal: Principal
    networks: tuple[Network, ...] | None
    ends_at: datetime | None
    """The end of the key, or of the text that was presented."""

    def is_over(self, now: datetime) -> bool:
        """Return whether the key has ended."""
        return self.ends_at is not None and self.ends_at <= now


def _keys_with_owners(*columns: ColumnElement[Any]) -> Select[Any]:
    return select(
        api_keys,
        organisations.c.status.label("organisation_status"),
        organisations.c.quotas,
        organisations.c.member_id,
        *columns,
    ).join(organisations, organisations.c.id == api_keys.c.organisation_id)


_IS_VALID: Final = and_(
    api_keys.c.revoked_at.is_(None),
    organisations.c.status != OrganisationStatus.DELETING.value,
    or_(api_keys.c.expires_at.is_(None), api_keys.c.expires_at > func.now()),
)


def valid_keys(*columns: ColumnElement[Any]) -> Select[Any]:
    """Return the keys that are neither revoked nor ended, with their organisations' columns."""
    return _keys_with_owners(*columns).where(_IS_VALID)


def all_keys(*columns: ColumnElement[Any]) -> Select[Any]:
    """Return the keys with their organisations' columns, and whether each is valid (`is_valid`)."""
    return _keys_with_owners(_IS_VALID.label("is_valid"), *columns)


def select_client(identity: MemberIdentity) -> Select[Any]:
    """Return the credential of a client: of its application if it ever had one, else the general.

    An application whose own credential was revoked must not fall back to a wider one.
    """
    application = api_keys.c.application
    return (
        all_keys()
        .where(
            organisations.c.member_id == identity.member_id,
            api_keys.c.kind == KeyKind.CLIENT.value,
            or_(application == identity.application, application.is_(None)),
        )
        .order_by(application.is_(None), api_keys.c.revoked_at.is_not(None), api_keys.c.id.desc())
        .limit(1)
    )


def _to_principal(row: RowMapping, text_hash: bytes | None) -> Principal:
    key = key_from_row(row)
    rooms = None if key.rooms is None else frozenset(key.rooms)
    subscriptions = None if key.subscriptions is None else frozenset(key.subscriptions)
    if rooms is None and subscriptions is not None:
        rooms = frozenset(map(room_of, subscriptions))
    return Principal(
        key_id=key.id,
        organisation_id=key.organisation_id,
        scopes=key.scopes,
        key_name=key.name,
        member_id=row["member_id"],
        application=key.application,
        rooms=rooms,
        event_types=key.event_types,
        subscriptions=subscriptions,
        networks=key.networks,
        suspended=row["organisation_status"] != OrganisationStatus.ACTIVE.value,
        quotas=Quotas.from_document(row["quotas"]),
        is_session=row["kind"] == KeyKind.SESSION.value,
        is_portal=row["portal"],
        text_hash=text_hash,
    )


def standing_of(principal: Principal, row: RowMapping | None) -> KeyStanding:
    """Return the standing of a principal whose key has this row now; None: it is not valid."""
    if row is None:
        return KeyStanding.OVER
    text_hash = principal.text_hash
    is_previous = row["previous_is_valid"] and row["previous_key_hash"] == text_hash
    if text_hash is not None and row["key_hash"] != text_hash and not is_previous:
        return KeyStanding.OVER
    if text_hash is None and row["member_id"] != principal.member_id:
        return KeyStanding.OVER  # the name in the certificate is another organisation's now
    current = _to_principal(row, text_hash)
    if not current.includes(principal):
        return KeyStanding.OVER
    return KeyStanding.SUSPENDED if current.suspended else KeyStanding.VALID


def known_key(row: RowMapping, digest: bytes | None) -> KnownKey:
    ends = [row["expires_at"]]
    if row["key_hash"] != digest:
        ends.append(row["previous_until"])
    principal = _to_principal(row, digest)
    return KnownKey(
        principal=principal,
        networks=None if principal.networks is None else tuple(map(ip_network, principal.networks)),
        ends_at=min((end for end in ends if end is not None), default=None),
    )
