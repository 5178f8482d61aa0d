"""Read what deliveries have beside those of plain messages, for the claims of push and relay.

A claim reads it with the message, as one column that is null for plain messages. Sequence numbers
are in the rows of deliveries, which no claim opens. So another statement reads them, and only where
a claim brought messages with ordering keys.
"""

# ruff: noqa: E501 - SQL statements keep their lines

import json
from collections.abc import Sequence
from typing import Final

from rooms.db.pg_arrays import number_array, word_array
from rooms.db.writer import LogWriter
from rooms.domain.delivery_properties import DeliveryProperties
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import DeliveryId, RoomId

PROPERTIES: Final = """CASE WHEN m.ordering_key IS NOT NULL OR m.business_key IS NOT NULL OR m.application IS NOT NULL
        OR m.publisher_organisation_id IS NOT NULL OR m.publisher_id IS NULL
        THEN json_build_array(m.ordering_key, m.business_key, m.publisher_organisation_id, m.application,
            m.publisher_id IS NOT NULL)::text END"""
"""The properties of the message `m` for `parse_properties`; null: it is a plain message."""

# As in `rooms.db.queue.outcomes`: by the least and the greatest id only these deliveries' days are
# opened.
_SEQUENCES: Final = """
SELECT 0, d.id::text, d.sequence FROM unnest(%(room)s::int4[], %(id)s::uuid[]) AS v (room_id, id) CROSS JOIN LATERAL (
    SELECT d.id, d.sequence FROM deliveries d WHERE d.room_id = v.room_id AND d.id = v.id
        AND d.id >= %(first)s::uuid AND d.id <= ANY (ARRAY[%(last)s::uuid]) LIMIT 1
) d WHERE d.sequence IS NOT NULL
UNION ALL SELECT 0, NULL, NULL
"""


def parse_properties(
    text: str | None, expires_at_ms: int | None = None
) -> DeliveryProperties | None:
    """Return the properties that `PROPERTIES` selected, with the delivery's expiry; None: none."""
    if text is None:
        return None if expires_at_ms is None else DeliveryProperties(expires_at_ms=expires_at_ms)
    ordering_key, business_key, organisation, application, has_publisher = json.loads(text)
    return DeliveryProperties(
        ordering_key, None, business_key, organisation, application, has_publisher, expires_at_ms
    )


async def read_sequences(
    writer: LogWriter, deliveries: Sequence[tuple[RoomId, DeliveryId]]
) -> dict[DeliveryId, int]:
    """Return the sequence numbers of those deliveries that have one. Errors: of `LogWriter.run`."""
    if not deliveries:
        return {}
    ids = [delivery for _, delivery in deliveries]
    rows = await writer.run(
        _SEQUENCES,
        {
            "room": number_array(room for room, _ in deliveries),
            "id": word_array(ids),
            "first": min(ids),
            "last": max(ids),
        },
    )
    return dict(rows)


async def add_sequences(writer: LogWriter, tasks: Sequence[DeliveryTask]) -> None:
    """Set the sequence numbers of tasks with an ordering key. Errors: those of `LogWriter.run`."""
    keyed = [task for task in tasks if task.properties is not None and task.properties.ordering_key]
    sequences = await read_sequences(writer, [(one.room_id, one.delivery_id) for one in keyed])
    for task in keyed:
        if task.properties is not None:
            task.properties.sequence = sequences.get(task.delivery_id)
