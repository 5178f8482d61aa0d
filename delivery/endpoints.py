"""The endpoints a worker knows: a cache that each copy checks by the version of its subscription."""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Final

from delivery.endpoint import Endpoint
from rooms.domain.copy import Copy
from rooms.domain.ids import RoomId, SubscriptionId, room_of
from rooms.domain.states import SubscriptionStatus
from rooms.errors import StorageUnavailableError
from rooms.storage.endpoints import EndpointRecord, load_endpoints
from rooms.storage.engine import KeptConnection
from rooms.storage.sealing import Seal

_log = logging.getLogger(__name__)

_OLDEST_S: Final = 5.0
_TRUSTED_S: Final = 60.0
"""Longer than this nobody goes without asking: the secret before may have ended its overlap."""
_MOST: Final = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Unusable:
    """A subscription whose settings make no endpoint, because its secrets cannot be opened or its URL is none."""

    record: EndpointRecord
    fault: str


Known = Endpoint | Unusable | None
"""None: the subscription is gone."""


class Endpoints:
    """Loads what is missing or outdated, many at once. May be lost at any time. Times are monotonic seconds."""

    def __init__(
        self, connection: KeptConnection, seal: Seal, *, remark: Callable[[EndpointRecord, str | None], None]
    ) -> None:
        """`remark` is told why an active subscription cannot be served, and (None) when its record says so no longer rightly."""
        self._connection = connection
        self._seal = seal
        self._remark = remark
        self._known: dict[SubscriptionId, tuple[Known, float]] = {}
        self.ordered: set[SubscriptionId] = set()
        """Those of them that get what has an ordering key in order."""

    def forget(self, rooms: frozenset[str]) -> None:
        """Settings of these rooms changed (empty: of any room)."""
        if not rooms:
            self._known.clear()
        for identity in [known for known in self._known if str(room_of(known)) in rooms]:
            del self._known[identity]

    async def for_copies(self, copies: Iterable[Copy], now: float) -> dict[SubscriptionId, Known]:
        """The endpoint of every copy, no older than the version the copy was taken with."""
        wanted: dict[SubscriptionId, Known] = {}
        stale: dict[SubscriptionId, RoomId] = {}
        for copy in copies:
            identity, version = copy.subscription_id, copy.subscription_version
            if identity in wanted:
                continue
            if version is None:
                wanted[identity] = None
                continue
            wanted[identity], since = self._known.get(identity, (None, 0.0))
            known = wanted[identity]
            if known is None or known.record.version < version or now - since > _TRUSTED_S:
                stale[identity] = copy.room_id
        if stale:
            wanted.update(await self._load(stale, now))
        return wanted

    async def current(self, identities: Iterable[SubscriptionId], now: float) -> dict[SubscriptionId, Known]:
        """The endpoints of these subscriptions, known for a few seconds at most."""
        wanted: dict[SubscriptionId, Known] = {}
        stale: dict[SubscriptionId, RoomId] = {}
        for identity in identities:
            wanted[identity], since = self._known.get(identity, (None, float("-inf")))
            if now - since > _OLDEST_S:
                stale[identity] = room_of(identity)
        if stale:
            wanted.update(await self._load(stale, now))
        return wanted

    async def _load(self, wanted: Mapping[SubscriptionId, RoomId], now: float) -> dict[SubscriptionId, Known]:
        pairs = [(room, identity) for identity, room in wanted.items()]
        try:
            records = await self._connection.run(lambda connection: load_endpoints(connection, pairs))
        except StorageUnavailableError:
            # A connection that idled may have been closed long ago: only a fresh one tells.
            records = await self._connection.run(lambda connection: load_endpoints(connection, pairs))
        loaded: dict[SubscriptionId, Known] = {}
        for identity in wanted:
            record = records.get(identity)
            known = self._known.pop(identity, (None, 0.0))[0]
            if record is None:
                loaded[identity] = None
            elif known is not None and known.record == record:
                loaded[identity] = known
            else:
                loaded[identity] = self._made(record)
            made = loaded[identity]
            self._known[identity] = made, now
            if record is not None and record.ordered:
                self.ordered.add(identity)
            if record is not None and record.status is SubscriptionStatus.ACTIVE:
                reason = f"its deliveries are held: {made.fault}" if isinstance(made, Unusable) else None
                if record.status_reason != reason:
                    self._remark(record, reason)
        for identity in list(islice(self._known, max(0, len(self._known) - _MOST))):
            del self._known[identity]
            self.ordered.discard(identity)
        return loaded

    def _made(self, record: EndpointRecord) -> Endpoint | Unusable:
        try:
            return Endpoint(record, self._seal)
        except ValueError as exc:
            _log.error("subscription %s cannot be served, its copies are held: %s", record.subscription_id, exc)
            return Unusable(record=record, fault=str(exc))
