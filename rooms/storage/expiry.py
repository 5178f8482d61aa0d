"""Deliveries whose lifetime is over, found by time and ended a batch in one statement. It serves all rooms at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from rooms.domain.ids import DeliveryId, room_of
from rooms.domain.states import UNFINISHED, State
from rooms.storage.ends import end_statement
from rooms.storage.literals import array
from rooms.storage.writer import Writer

_OPEN: Final = "t.state IN ({})".format(", ".join(f"'{state}'" for state in sorted(UNFINISHED)))
_COLUMNS: Final = "t.room_id, t.id, t.generation, t.attempt, t.state, t.expires_at"
_PASSED: Final = f"""
    SELECT {_COLUMNS} FROM deliveries t WHERE t.expires_at >= %(low)s::timestamptz AND t.expires_at <= now() AND {_OPEN}
    ORDER BY t.expires_at LIMIT %(limit)s::int4
"""  # noqa: S608 - text of our own
_NAMED: Final = f"""
    SELECT t.* FROM unnest(%(room)s::int4[], %(id)s::uuid[]) AS v (room_id, id), LATERAL (
        SELECT {_COLUMNS} FROM deliveries t
        WHERE t.room_id = v.room_id AND t.id = v.id AND t.expires_at <= now() AND {_OPEN} LIMIT 1) t
"""  # noqa: S608 - text of our own
# A lease ends first, as a lease: what is acknowledged within it is delivered.
_LEASE_OVER: Final = "l.until <= now()"
_ANSWER: Final = """
    (SELECT count(*) FROM c), (SELECT max(expires_at) FROM c), now(), (SELECT array_agg(id::text) FROM spared),
    (SELECT array_agg(expires_at) FROM spared)
"""
_EXPIRE_PASSED: Final = end_statement(candidates=_PASSED, state=State.EXPIRED, lease_goes=_LEASE_OVER, answer=_ANSWER)
_EXPIRE_NAMED: Final = end_statement(candidates=_NAMED, state=State.EXPIRED, lease_goes=_LEASE_OVER, answer=_ANSWER)

_READ_MARK: Final = "SELECT 0, at FROM upkeep_marks WHERE name = 'expiry' UNION ALL SELECT 0, NULL"
_KEEP_MARK: Final = """
WITH m AS (
    INSERT INTO upkeep_marks AS m (name, at) VALUES ('expiry', %(at)s::timestamptz)
    ON CONFLICT (name) DO UPDATE SET at = excluded.at
) SELECT 0
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One batch: `found` candidates, of which `expired` ended; `spared` are left, with the times they expired at.

    `latest`: the last expiry among the candidates (None: there were none). `at`: PostgreSQL's time of the look.
    """

    found: int
    expired: int
    spared: dict[DeliveryId, datetime]
    latest: datetime | None
    at: datetime


class Expiry:
    """Expires deliveries through one writer. StorageUnavailableError: in doubt; StorageRefusedError: nothing written."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    async def expire(self, low: datetime, *, limit: int) -> Look:
        """Expire what is unfinished and whose time passed at `low` or later, the oldest first."""
        return await self._look(_EXPIRE_PASSED, {"low": low, "limit": limit})

    async def expire_again(self, deliveries: Sequence[DeliveryId]) -> Look:
        """The same for deliveries that an earlier look spared; those that ended since are not found any more."""
        rooms = array(room_of(identity) for identity in deliveries)
        return await self._look(_EXPIRE_NAMED, {"room": rooms, "id": array(deliveries)})

    async def mark(self) -> datetime | None:
        """Where the last upkeep had come to; None: nowhere."""
        rows = await self._writer.run(_READ_MARK, {})
        return rows[0][0] if rows else None

    async def keep_mark(self, at: datetime) -> None:
        """Everything that expired before `at` has ended."""
        await self._writer.run(_KEEP_MARK, {"at": at})

    async def _look(self, statement: str, parameters: dict[str, Any]) -> Look:
        rows = await self._writer.run(statement, {**parameters, "host": self._writer.host})
        expired, found, latest, at, spared, times = rows[0]
        return Look(
            found=found,
            expired=expired,
            spared={DeliveryId(identity): time for identity, time in zip(spared or (), times or (), strict=True)},
            latest=latest,
            at=at,
        )
