"""The endpoints a worker knows: a cache that each copy checks by the version of its subscription."""

from collections.abc import Iterable
from typing import Final

from delivery.endpoint import Endpoint
from rooms.domain.copy import Copy
from rooms.domain.ids import RoomId, SubscriptionId, room_of
from rooms.storage.endpoints import load_endpoints
from rooms.storage.engine import KeptConnection
from rooms.storage.sealing import Seal

_OLDEST_S: Final = 5.0


class Endpoints:
    """Loads what is missing or outdated, many at once. May be lost at any time."""

    def __init__(self, connection: KeptConnection, seal: Seal) -> None:
        self._connection = connection
        self._seal = seal
        self._known: dict[SubscriptionId, tuple[Endpoint | None, float]] = {}

    def forget(self, rooms: frozenset[str]) -> None:
        """Settings of these rooms changed (empty: of any room)."""
        if not rooms:
            self._known.clear()
        for identity in [known for known in self._known if str(room_of(known)) in rooms]:
            del self._known[identity]

    async def for_copies(self, copies: Iterable[Copy]) -> dict[SubscriptionId, Endpoint | None]:
        """The endpoint of every copy, no older than the version the copy was taken with; None where it is gone."""
        wanted: dict[SubscriptionId, Endpoint | None] = {}
        stale: dict[SubscriptionId, RoomId] = {}
        for copy in copies:
            identity, version = copy.subscription_id, copy.subscription_version
            if identity in wanted:
                continue
            endpoint = self._known.get(identity, (None, 0.0))[0]
            wanted[identity] = endpoint
            if version is None:
                wanted[identity] = None
            elif endpoint is None or endpoint.record.version < version:
                stale[identity] = copy.room_id
        if stale:
            await self._load(stale, 0.0)
            wanted.update({identity: self._known[identity][0] for identity in stale})
        return wanted

    async def current(self, identities: Iterable[SubscriptionId], now: float) -> dict[SubscriptionId, Endpoint | None]:
        """The endpoints of these subscriptions, known for a few seconds at most (monotonic `now`)."""
        identities = list(identities)
        stale = {
            identity: room_of(identity)
            for identity in identities
            if identity not in self._known or now - self._known[identity][1] > _OLDEST_S
        }
        if stale:
            await self._load(stale, now)
        return {identity: self._known[identity][0] for identity in identities}

    async def _load(self, wanted: dict[SubscriptionId, RoomId], now: float) -> None:
        records = await self._connection.run(
            lambda connection: load_endpoints(connection, [(room, identity) for identity, room in wanted.items()])
        )
        for identity in wanted:
            record = records.get(identity)
            known = self._known.get(identity, (None, 0.0))[0]
            if record is None:
                self._known[identity] = (None, now)
            elif known is not None and known.record == record:
                self._known[identity] = (known, now)
            else:
                self._known[identity] = (Endpoint(record, self._seal), now)
