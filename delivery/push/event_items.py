"""Put payloads into GovStack's EventItem, for the subscriptions that ask for it.

The member ids of publishers are read for a whole batch of tasks, and kept for a while.
"""

from collections.abc import Collection, Mapping
from typing import Final

from rooms.db.connection import Connection, PersistentConnection
from rooms.db.pg_arrays import literal_array
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.govstack import ClientId, ItemEnvelope, event_item
from rooms.domain.ids import OrganisationId
from rooms.errors import StorageUnavailableError

MAX_AGE_S: Final = 60.0
"""A changed member id is read after this time at the latest."""
_MAX_CACHED: Final = 10_000
_MEMBER_IDS: Final = """
SELECT id::text, member_id FROM organisations WHERE id = ANY (%(id)s::uuid[])
"""


class MemberIds:
    """Find the member ids of organisations. Times are monotonic seconds."""

    def __init__(self, connection: PersistentConnection) -> None:
        self._connection = connection
        self._cache: dict[OrganisationId, tuple[str | None, float]] = {}

    async def find(
        self, organisations: Collection[OrganisationId], now: float
    ) -> Mapping[OrganisationId, str | None]:
        """Return the member id of each organisation; None: it has none, or is gone."""
        found: dict[OrganisationId, str | None] = {}
        missing = []
        for one in organisations:
            known = self._cache.get(one)
            if known is None or now - known[1] > MAX_AGE_S:
                missing.append(one)
            else:
                found[one] = known[0]
        if missing:
            loaded = await self._load(missing)
            found |= loaded
            if len(self._cache) + len(loaded) > _MAX_CACHED:
                self._cache.clear()
            self._cache |= {one: (member_id, now) for one, member_id in loaded.items()}
        return found

    async def _load(self, missing: list[OrganisationId]) -> dict[OrganisationId, str | None]:
        async def load(connection: Connection) -> dict[OrganisationId, str | None]:
            cursor = await connection.execute(_MEMBER_IDS, {"id": literal_array(missing)})
            return dict.fromkeys(missing) | {
                OrganisationId(identity): member_id
                for identity, member_id in await cursor.fetchall()
            }

        try:
            return await self._connection.run(load)
        except StorageUnavailableError:
            # An idle connection may have been closed long ago: only a new one shows the truth.
            return await self._connection.run(load)


def publisher_of(task: DeliveryTask, room_owner: OrganisationId) -> OrganisationId | None:
    """Return the organisation that published a task's message; None: it is not known."""
    properties = task.properties
    if properties is None:
        return room_owner
    return (properties.organisation or room_owner) if properties.has_publisher else None


def envelope_of(task: DeliveryTask, member_id: str | None) -> ItemEnvelope:
    """Return the envelope of a task; `member_id` None: it names no publisher."""
    if member_id is None:
        return ItemEnvelope(None)
    application = None if task.properties is None else task.properties.application
    return ItemEnvelope(ClientId(member_id=member_id, application=application))


def request_body(task: DeliveryTask) -> bytes:
    """Return what is sent and signed: the payload, in an EventItem if the task has an envelope."""
    envelope = task.envelope
    if envelope is None:
        return task.payload
    properties = task.properties
    return event_item(
        task.message_id,
        task.event_type,
        task.payload,
        publisher=envelope.publisher,
        sequence=None if properties is None else properties.sequence,
    )
