"""Native subscriptions: what the broker is to keep of their passwords."""

from collections.abc import Mapping
from typing import Final

from rooms.domain.ids import SubscriptionId
from rooms.domain.states import SubscriptionStatus
from rooms.storage.writer import Writer

_PASSWORDS: Final = f"""
SELECT 0, s.id::text, s.native_password FROM subscriptions s
WHERE s.native_password IS NOT NULL AND s.status <> '{SubscriptionStatus.DELETED}'
    AND NOT EXISTS (SELECT FROM rooms r WHERE r.id = s.room_id AND r.deleting)
UNION ALL SELECT 0, NULL, NULL
"""  # noqa: S608 - a word of our own


async def passwords(writer: Writer) -> Mapping[SubscriptionId, str]:
    """Hashed, of all native subscriptions that nobody has deleted. Errors are `Writer.run`'s."""
    return {SubscriptionId(row[0]): row[1] for row in await writer.run(_PASSWORDS, {})}
