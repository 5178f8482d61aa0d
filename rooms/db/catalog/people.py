"""Find the people who have signed in to the console, by the names that the journal has.

Each name is one look-up in the index of sign-ins, however often a person came. Who signed in is
known as long as the journal is kept.
"""

# ruff: noqa: E501 - SQL statements keep their lines

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.db.catalog.sessions import end_sessions_of_links, known_scopes
from rooms.domain.ids import KeyId, OrganisationId
from rooms.domain.state_machine import Scope

MAX_SESSIONS: Final = 1000
"""So many open sessions of a person are counted."""
_SIGN_INS: Final = """
    SELECT j.actor_name, j.at, j.after FROM journal j
    WHERE j.organisation_id = CAST(:organisation AS uuid) AND j.action = 'sign_in' AND j.actor_name > {after}
    ORDER BY j.actor_name, j.at DESC LIMIT 1
"""
PEOPLE: Final = f"""
WITH RECURSIVE p AS (
    ({_SIGN_INS.format(after="CAST(:after AS text)")})
    UNION ALL
    SELECT n.* FROM p CROSS JOIN LATERAL ({_SIGN_INS.format(after="p.actor_name")}) n
), page AS MATERIALIZED (SELECT * FROM p LIMIT :limit)
SELECT page.actor_name AS name, page.at, page.after, coalesce(s.sessions, 0) AS sessions, s.last_used_at
FROM page LEFT JOIN LATERAL (
    SELECT count(*) FILTER (WHERE k.revoked_at IS NULL AND k.expires_at > now()) AS sessions,
        max(greatest(k.last_used_at, k.created_at)) FILTER (WHERE k.last_used_at IS NOT NULL) AS last_used_at
    FROM (
        SELECT k.* FROM api_keys k WHERE k.organisation_id = CAST(:organisation AS uuid) AND k.kind = 'session'
            AND k.name = page.actor_name LIMIT :most
    ) k
) s ON true ORDER BY page.actor_name
"""  # noqa: S608 - constants of this module
# One that was idle for too long has ended, and its links to portals have not.
END_ALL: Final = """
UPDATE api_keys k SET revoked_at = now()
WHERE k.organisation_id = CAST(:organisation AS uuid) AND k.kind = 'session' AND k.name = :name AND k.revoked_at IS NULL
    AND (k.expires_at > now() OR EXISTS (SELECT FROM sign_in_links l WHERE l.session_id = k.id AND l.expires_at > now()))
RETURNING k.id, k.scopes
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Person:
    """Describe a person by the last sign-in: how it was made (`by`), and what it allowed.

    `sessions`: how many are open, of the 1,000 that were looked at; `last_used_at`: to the hour;
    None: no session of the last day was used.
    """

    name: str
    by: str | None
    scopes: frozenset[Scope]
    signed_in_at: datetime
    sessions: int
    last_used_at: datetime | None


async def list_people(
    connection: AsyncConnection, organisation: OrganisationId, *, after: str | None, limit: int
) -> Sequence[Person]:
    """Return the people who have signed in, by name; `after`: the last one of the page before."""
    parameters = {
        "organisation": organisation,
        "after": after or "",
        "limit": limit,
        "most": MAX_SESSIONS,
    }
    rows = (await connection.execute(text(PEOPLE), parameters)).mappings()
    return [
        Person(
            name=row["name"],
            by=_details(row["after"]).get("by"),
            scopes=known_scopes(_details(row["after"]).get("scopes") or ()),
            signed_in_at=row["at"],
            sessions=row["sessions"],
            last_used_at=row["last_used_at"],
        )
        for row in rows
    ]


async def end_all_sessions(
    connection: AsyncConnection, organisation: OrganisationId, name: str
) -> Sequence[frozenset[Scope]]:
    """End the sessions of a person, and their links to portals; return the scopes of each.

    Every process refuses them within a second.
    """
    found = await connection.execute(text(END_ALL), {"organisation": organisation, "name": name})
    rows = found.all()
    await end_sessions_of_links(connection, [KeyId(str(row.id)) for row in rows])
    return [known_scopes(row.scopes) for row in rows]


def _details(after: Any) -> dict[str, Any]:
    return after if isinstance(after, dict) else {}
