"""Looking idempotency keys, and ids of publishers' own, up by themselves; taking them is part of the publish statement."""

from collections.abc import Collection, Mapping
from typing import Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from rooms.domain.ids import RoomId
from rooms.storage.publish_statement import KEYS_KEPT
from rooms.storage.transactions import transaction

_FIND: Final = text(
    "SELECT request_hash, answer FROM idempotency_keys "  # noqa: S608 - a constant of our own
    f"WHERE room_id = :room AND key = :key AND created_at > now() - interval '{KEYS_KEPT}'"
)


async def find_answer(engine: AsyncEngine, room: RoomId, key: str) -> tuple[bytes, bytes] | None:
    """The hash of the request that took a key, and its answer; None where the key is free.

    StorageUnavailableError, StorageRefusedError.
    """
    async with transaction(engine) as connection:
        row = (await connection.execute(_FIND, {"room": room, "key": key})).one_or_none()
    return None if row is None else (row[0], row[1])


_NAMED: Final = text(
    "SELECT caller_id, content_hash, answer FROM message_ids WHERE room_id = :room AND caller_id = ANY (:ids)"
)


async def find_named(engine: AsyncEngine, room: RoomId, ids: Collection[str]) -> Mapping[str, tuple[bytes, bytes]]:
    """Those of the ids that messages have already: the hash of each one's content, and its answer.

    StorageUnavailableError, StorageRefusedError.
    """
    async with transaction(engine) as connection:
        rows = await connection.execute(_NAMED, {"room": room, "ids": list(ids)})
        return {row[0]: (row[1], row[2]) for row in rows}
