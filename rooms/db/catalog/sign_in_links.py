"""Store the links that begin sessions: to the console once, to a portal until they expire.

Only hashes of their texts are kept.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Final
from urllib.parse import quote

from sqlalchemy import and_, false, func, insert, not_, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.db.catalog.api_keys import hash_key
from rooms.db.catalog.sessions import known_scopes
from rooms.db.tables.organisations import api_keys, organisations, sign_in_links
from rooms.domain.ids import KeyId, OrganisationId, RoomId, SubscriptionId
from rooms.domain.sharing import OrganisationStatus
from rooms.domain.state_machine import Scope

SIGN_IN_PATH: Final = "/console/sign-in"
PORTAL_PATH: Final = "/console/portal"
PORTAL_ENTRY_PATH: Final = f"{PORTAL_PATH}/enter"
DEFAULT_LINK_S: Final = 900
"""Seconds for which a link is valid, unless its maker says otherwise."""


class LinkKind(StrEnum):
    """Name what a link opens."""

    CONSOLE = "console"
    """The console, once, for one person."""
    PORTAL = "portal"
    """A view of some subscriptions, until the link expires."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SignInLink:
    """Describe a link that is valid."""

    organisation_id: OrganisationId
    kind: LinkKind
    token_hash: bytes
    name: str
    scopes: frozenset[Scope]
    rooms: tuple[RoomId, ...] | None
    subscriptions: tuple[SubscriptionId, ...] | None
    application: str | None
    session_s: int
    """The longest time of a session that it begins."""
    ends_at: datetime | None
    """The end of the key that made it, and so of each session; None: it has none."""
    maker: KeyId | None
    """The key that made it, also by a session; None: it has none."""
    maker_hash: bytes | None
    """The hash of the text with which that key made it; None: the key has no text."""
    maker_session: KeyId | None
    """The session that made it and ends it; None: it was made by none, or one with `admin`."""

    @property
    def columns(self) -> Mapping[str, Any]:
        """Return the scopes and restrictions of a session that it begins, for `create_session`."""
        return {
            "scopes": sorted(scope.value for scope in self.scopes),
            "application": self.application,
            "rooms": None if self.rooms is None else list(self.rooms),
            "subscriptions": None if self.subscriptions is None else list(self.subscriptions),
            "portal": self.kind is LinkKind.PORTAL,
            "link_hash": self.token_hash if self.kind is LinkKind.PORTAL else None,
        }

    def session_end(self, now: datetime) -> datetime:
        """Return the last moment of a session that it begins now."""
        end = now + timedelta(seconds=self.session_s)
        return end if self.ends_at is None else min(end, self.ends_at)


def link_path(kind: LinkKind, text: str) -> str:
    """Return the path of a link with this token; the service's address goes before it."""
    path = PORTAL_ENTRY_PATH if kind is LinkKind.PORTAL else SIGN_IN_PATH
    return f"{path}?token={quote(text)}"


async def create_link(
    connection: AsyncConnection,
    *,
    text: str,
    kind: LinkKind,
    organisation: OrganisationId,
    fields: Mapping[str, Any],
) -> None:
    """Store the hash of a link. `fields`: the other columns."""
    await connection.execute(
        insert(sign_in_links).values(
            token_hash=hash_key(text.encode()),
            organisation_id=organisation,
            kind=kind.value,
            **fields,
        )
    )


async def use_link(connection: AsyncConnection, text: str, kind: LinkKind) -> SignInLink | None:
    """Return the link of a text, and use it up; a portal's stays valid.

    None: it is not valid, or of the other kind, and then it is as it was.
    """
    active = (
        select(organisations.c.id)
        .where(
            organisations.c.id == sign_in_links.c.organisation_id,
            organisations.c.status != OrganisationStatus.DELETING.value,
        )
        .exists()
    )
    made_by = sign_in_links.c.maker_hash
    is_in_overlap = and_(
        api_keys.c.previous_key_hash.is_not_distinct_from(made_by),
        func.coalesce(api_keys.c.previous_until > func.now(), false()),
    )
    was_rotated = and_(
        made_by.is_not(None), api_keys.c.key_hash.is_distinct_from(made_by), not_(is_in_overlap)
    )
    ended_maker = (
        select(api_keys.c.id)
        .where(
            api_keys.c.id == sign_in_links.c.created_by,
            or_(
                api_keys.c.revoked_at.is_not(None),
                api_keys.c.expires_at <= func.now(),
                was_rotated,
            ),
        )
        .exists()
    )
    maker_session = (
        select(api_keys.c.id)
        .where(api_keys.c.id == sign_in_links.c.session_id, api_keys.c.revoked_at.is_(None))
        .exists()
    )
    row = await connection.execute(
        update(sign_in_links)
        .where(
            sign_in_links.c.token_hash == hash_key(text.encode()),
            sign_in_links.c.kind == kind.value,
            sign_in_links.c.expires_at > func.now(),
            or_(
                sign_in_links.c.used_at.is_(None),
                sign_in_links.c.kind == LinkKind.PORTAL.value,
            ),
            active,
            ~ended_maker,
            or_(sign_in_links.c.session_id.is_(None), maker_session),
        )
        .values(used_at=func.now())
        .returning(sign_in_links)
    )
    found = row.mappings().one_or_none()
    if found is None:
        return None
    return SignInLink(
        organisation_id=OrganisationId(found["organisation_id"]),
        kind=LinkKind(found["kind"]),
        token_hash=found["token_hash"],
        name=found["name"],
        scopes=known_scopes(found["scopes"]),
        rooms=None if found["rooms"] is None else tuple(map(RoomId, found["rooms"])),
        subscriptions=None
        if found["subscriptions"] is None
        else tuple(map(SubscriptionId, found["subscriptions"])),
        application=found["application"],
        session_s=found["session_s"],
        ends_at=found["ends_at"],
        maker=None if found["created_by"] is None else KeyId(found["created_by"]),
        maker_hash=found["maker_hash"],
        maker_session=None if found["session_id"] is None else KeyId(found["session_id"]),
    )
