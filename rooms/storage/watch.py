"""What ends a stream from outside: its key was revoked, its subscription is gone."""

from collections.abc import Sequence
from typing import Final

from rooms.domain.ids import KeyId, RoomId, SubscriptionId
from rooms.storage.literals import array
from rooms.storage.writer import Writer

_WATCH: Final = """
SELECT 0, k.n, NULL::int8 FROM unnest(%(key)s::uuid[]) WITH ORDINALITY AS k (id, n)
WHERE EXISTS (SELECT FROM api_keys a WHERE a.id = k.id AND a.revoked_at IS NOT NULL)
UNION ALL
SELECT 0, NULL::int8, v.n FROM unnest(%(room)s::int4[], %(subscription)s::uuid[]) WITH ORDINALITY AS v (room_id, id, n)
WHERE NOT EXISTS (
    SELECT FROM subscriptions s JOIN rooms r ON r.id = s.room_id
    WHERE s.room_id = v.room_id AND s.id = v.id AND s.status <> 'deleted' AND NOT r.deleting
)
UNION ALL SELECT 0, NULL, NULL
"""


async def watch(
    writer: Writer, keys: Sequence[KeyId], queues: Sequence[tuple[RoomId, SubscriptionId]]
) -> tuple[frozenset[KeyId], frozenset[SubscriptionId]]:
    """Those of the keys that were revoked, and those of the subscriptions that are no more."""
    asked = {
        "key": array(keys),
        "room": array(room for room, _ in queues),
        "subscription": array(subscription for _, subscription in queues),
    }
    rows = await writer.run(_WATCH, asked)
    revoked = frozenset(keys[key - 1] for key, _ in rows if key is not None)
    return revoked, frozenset(queues[queue - 1][1] for _, queue in rows if queue is not None)
