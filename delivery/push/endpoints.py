"""Build webhook endpoints from subscriptions, and cache them.

An endpoint holds everything about its requests that does not change between messages. A worker
checks each task's subscription version against its cache.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import Final

from delivery.push.event_items import MemberIds, envelope_of, publisher_of
from delivery.push.http.signing import Signer, parse_secret
from delivery.push.redaction import hidden_texts, redact
from rooms.cache_shares import CacheShares
from rooms.db.connection import PersistentConnection
from rooms.db.encrypted_headers import decrypt_headers
from rooms.db.queue.endpoints import EndpointRecord, load_endpoints
from rooms.db.secrets import Cipher
from rooms.domain.attempt import AttemptResult
from rooms.domain.delivery_properties import DeliveryProperties, expiry_text, header_value
from rooms.domain.delivery_task import DEFAULT_PRIORITY, DeliveryTask
from rooms.domain.ids import RoomId, SubscriptionId, is_replayed, room_of
from rooms.domain.message_headers import header_key, is_withheld
from rooms.domain.push_url import PushUrl
from rooms.domain.state_machine import SubscriptionStatus

_log = logging.getLogger(__name__)

USER_AGENT: Final = "Rooms/1"
_MAX_AGE_S: Final = 5.0
_MAX_TRUSTED_AGE_S: Final = 60.0
"""Endpoints are loaded again after this time: an old secret may have ended its overlap."""
_MAX_CACHED: Final = 20_000
_LOADED_AT_A_TIME: Final = 200


def _decrypt_secret(secret: bytes, cipher: Cipher) -> str:
    try:
        return cipher.decrypt(secret).decode()
    except ValueError as exc:
        raise ValueError(
            "its signing secret was encrypted with another key; put that key back "
            "(ROOMS_SECRET_KEY, or the file secret-key), or rotate the secret"
        ) from exc


def _decrypt_headers(record: EndpointRecord, cipher: Cipher) -> Mapping[str, str]:
    if record.headers or record.sealed_headers is None:
        return record.headers
    try:
        return decrypt_headers(cipher, record.subscription_id, record.sealed_headers)
    except ValueError as exc:
        raise ValueError(
            "its headers were encrypted with another key; put that key back "
            "(ROOMS_SECRET_KEY, or the file secret-key), or set the headers again"
        ) from exc


class Endpoint:
    """Build the header lines of each attempt from the settings in `record`."""

    __slots__ = (
        "_configured",
        "_event_source",
        "_hidden",
        "_plain_headers",
        "_signer",
        "_static_headers",
        "host",
        "organisation",
        "record",
        "timeout_s",
        "url",
    )

    def __init__(self, record: EndpointRecord, cipher: Cipher) -> None:
        self.record = record
        self.url = PushUrl.parse(record.push_url)
        self.host = self.url.host
        self.organisation = record.organisation_id
        self.timeout_s = record.throttle.timeout_ms / 1000
        self._signer = Signer(
            tuple(
                parse_secret(_decrypt_secret(secret, cipher)) for secret in record.encrypted_secrets
            )
        )
        headers = _decrypt_headers(record, cipher)
        self._hidden = hidden_texts(headers.values())
        # A receiver may believe the last of two lines: the publisher adds none to the subscriber's.
        self._configured = frozenset(map(header_key, headers))
        configured = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._static_headers = (
            f"Content-Type: application/json\r\nUser-Agent: {USER_AGENT}\r\n{configured}"
        )
        self._plain_headers = (
            f"{self._static_headers}Rooms-Publisher: {header_value(record.room_owner_id)}\r\n"
        )
        self._event_source = f"/rooms/{record.room_id}" if record.cloud_events else None

    @property
    def is_active(self) -> bool:
        """Return whether attempts may be made now."""
        return self.record.status is SubscriptionStatus.ACTIVE

    def is_probe(self, task: DeliveryTask) -> bool:
        """Return whether this is the one task that may be sent while the circuit is open."""
        record = self.record
        return record.circuit_open and record.probe == (
            task.delivery_id,
            task.generation,
            task.attempt,
        )

    def hide_headers(self, result: AttemptResult) -> AttemptResult:
        """Return a result that repeats no value of the configured headers."""
        if result.error is None and not self._hidden:
            return result
        return redact(result, self._hidden)

    def headers(self, task: DeliveryTask, body: bytes, now_s: int) -> bytes:
        """Return the header lines of an attempt that sends `body`, signed for `now_s`.

        `now_s`: epoch seconds.
        """
        properties = task.properties
        lines = (
            f"webhook-id: {task.delivery_id}\r\n"
            f"webhook-timestamp: {now_s}\r\n"
            f"webhook-signature: {self._signer.sign(task.delivery_id, now_s, body)}\r\n"
            f"Rooms-Delivery-Attempt: {task.attempt}\r\n"
            f"Rooms-Delivery-Delay: {task.delay_ms}\r\n"
            f"Rooms-Correlation-Id: {task.correlation_id}\r\n"
            f"Rooms-Message-Id: {task.message_id}\r\n"
            f"Rooms-Event-Type: {task.event_type}\r\n"
            f"Rooms-Event-Version: {task.event_version}\r\n"
            f"{self._plain_headers if properties is None else self._own_headers(properties)}"
        )
        if task.priority != DEFAULT_PRIORITY:
            lines += f"Rooms-Priority: {task.priority}\r\n"
        if is_replayed(task.delivery_id, task.message_id):
            lines += "Rooms-Replayed: true\r\n"
        if self._event_source is not None:
            lines += self._cloud_event_headers(task)
        if task.headers is not None:
            lines += "".join(
                f"{name}: {value}\r\n"
                for name, value in json.loads(task.headers).items()
                if header_key(name) not in self._configured and not is_withheld(name)
            )
        return lines.encode("latin-1")

    def _own_headers(self, properties: DeliveryProperties) -> str:
        """Return the headers that replace the plain ones where a delivery has properties."""
        lines = self._static_headers
        if (publisher := properties.publisher(self.record.room_owner_id)) is not None:
            lines += f"Rooms-Publisher: {header_value(publisher)}\r\n"
        if properties.ordering_key is not None:
            lines += f"Rooms-Ordering-Key: {header_value(properties.ordering_key)}\r\n"
        if properties.sequence is not None:
            lines += f"Rooms-Sequence: {properties.sequence}\r\n"
        if properties.business_key is not None:
            lines += f"Rooms-Business-Key: {header_value(properties.business_key)}\r\n"
        if properties.expires_at_ms is not None:
            lines += f"Rooms-Expires-At: {expiry_text(properties.expires_at_ms)}\r\n"
        return lines

    def _cloud_event_headers(self, task: DeliveryTask) -> str:
        """Return the `ce-` headers of CloudEvents 1.0, binary content mode."""
        at = datetime.fromtimestamp(task.published_ms / 1000, UTC).isoformat(
            timespec="milliseconds"
        )
        return (
            "ce-specversion: 1.0\r\n"
            f"ce-id: {task.message_id}\r\n"
            f"ce-source: {self._event_source}\r\n"
            f"ce-type: {task.event_type}\r\n"
            f"ce-time: {at.replace('+00:00', 'Z')}\r\n"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class InvalidEndpoint:
    """Stand for a subscription whose secrets or headers cannot be decrypted, or with a bad URL."""

    record: EndpointRecord
    error: str


EndpointLookup = Endpoint | InvalidEndpoint | None
"""The result of a lookup; None: the subscription is gone."""


class EndpointCache:
    """Load missing and outdated endpoints, many at once. Times are monotonic seconds.

    Where there are too many, the organisation with the most of them loses its oldest one.
    """

    def __init__(
        self,
        connection: PersistentConnection,
        cipher: Cipher,
        *,
        set_status_reason: Callable[[EndpointRecord, str | None], None],
    ) -> None:
        """Configure the cache.

        `set_status_reason` gets the reason why an active subscription cannot be served, and None
        when the recorded reason no longer holds.
        """
        self._connection = connection
        self._cipher = cipher
        self._set_status_reason = set_status_reason
        self._cache: dict[SubscriptionId, tuple[EndpointLookup, float]] = {}
        self._shares = CacheShares[SubscriptionId]()
        self._by_room: dict[str, set[SubscriptionId]] = {}
        self._members = MemberIds(connection)
        self.ordered_subscriptions: set[SubscriptionId] = set()
        """Those in the cache that deliver messages of one ordering key in order."""

    def invalidate(self, rooms: frozenset[str]) -> None:
        """Load the endpoints of these rooms (empty: of all) again when they are next asked for."""
        # They stay in the cache: while attempts end, it must be known which are ordered.
        for room in rooms or self._by_room:
            for changed in self._by_room.get(room, ()):
                self._cache[changed] = self._cache[changed][0], float("-inf")

    async def for_tasks(
        self, tasks: Iterable[DeliveryTask], now: float
    ) -> dict[SubscriptionId, EndpointLookup]:
        """Return the endpoints of tasks, no older than the version each was claimed with.

        A task whose endpoint asks for EventItems gets its envelope. One that was released and
        claimed again may get another.
        """
        found: dict[SubscriptionId, EndpointLookup] = {}
        stale: dict[SubscriptionId, RoomId] = {}
        for task in tasks:
            wanted, version = task.subscription_id, task.subscription_version
            if wanted in found:
                continue
            if version is None:
                found[wanted] = None
                continue
            known, loaded_at = self._cache.get(wanted, (None, 0.0))
            found[wanted] = known
            if (
                known is None
                or known.record.version < version
                or now - loaded_at > _MAX_TRUSTED_AGE_S
            ):
                stale[wanted] = task.room_id
        if stale:
            await self._load_into(found, stale, now)
        if any(isinstance(one, Endpoint) and one.record.event_item for one in found.values()):
            await self._set_envelopes(tasks, found, now)
        return found

    async def _set_envelopes(
        self,
        tasks: Iterable[DeliveryTask],
        endpoints: Mapping[SubscriptionId, EndpointLookup],
        now: float,
    ) -> None:
        wanted = []
        for task in tasks:
            endpoint = endpoints[task.subscription_id]
            if isinstance(endpoint, Endpoint) and endpoint.record.event_item:
                wanted.append((task, publisher_of(task, endpoint.record.room_owner_id)))
        members = await self._members.find({one for _, one in wanted if one is not None}, now)
        for task, organisation in wanted:
            member_id = None if organisation is None else members[organisation]
            task.envelope = envelope_of(task, member_id)

    async def current(
        self, subscription_ids: Iterable[SubscriptionId], now: float
    ) -> dict[SubscriptionId, EndpointLookup]:
        """Return the endpoints of these subscriptions, at most a few seconds old."""
        found: dict[SubscriptionId, EndpointLookup] = {}
        stale: dict[SubscriptionId, RoomId] = {}
        for wanted in subscription_ids:
            found[wanted], loaded_at = self._cache.get(wanted, (None, float("-inf")))
            if now - loaded_at > _MAX_AGE_S:
                stale[wanted] = room_of(wanted)
        if stale:
            await self._load_into(found, stale, now)
        return found

    async def _load_into(
        self,
        found: dict[SubscriptionId, EndpointLookup],
        stale: Mapping[SubscriptionId, RoomId],
        now: float,
    ) -> None:
        """Load what is stale, and look at the others again: they may have changed meanwhile."""
        found.update(await self._load(stale, now))
        for wanted, endpoint in found.items():
            if endpoint is not None:
                found[wanted] = self._cache.get(wanted, (endpoint, now))[0]

    async def _load(
        self, room_ids: Mapping[SubscriptionId, RoomId], now: float
    ) -> dict[SubscriptionId, EndpointLookup]:
        # Building a thousand endpoints takes a tenth of a second.
        loaded: dict[SubscriptionId, EndpointLookup] = {}
        wanted = iter(room_ids.items())
        while portion := dict(islice(wanted, _LOADED_AT_A_TIME)):
            if loaded:
                await asyncio.sleep(0)
            loaded |= await self._load_portion(portion, now)
        return loaded

    async def _load_portion(
        self, room_ids: Mapping[SubscriptionId, RoomId], now: float
    ) -> dict[SubscriptionId, EndpointLookup]:
        pairs = [(room, identity) for identity, room in room_ids.items()]
        records = await self._connection.run(lambda connection: load_endpoints(connection, pairs))
        loaded: dict[SubscriptionId, EndpointLookup] = {}
        for subscription_id in room_ids:
            record = records.get(subscription_id)
            known = self._cache.pop(subscription_id, (None, 0.0))[0]
            endpoint: EndpointLookup
            if record is None:
                endpoint = None
            elif isinstance(known, Endpoint) and known.record == record:
                endpoint = known
            else:
                # An invalid one is tried again, as the key that it lacked may be back.
                endpoint = self._build_endpoint(record, known)
            loaded[subscription_id] = endpoint
            self._cache[subscription_id] = endpoint, now
            owner = endpoint or known
            self._shares.add(subscription_id, owner.record.organisation_id if owner else "")
            self._by_room.setdefault(str(room_of(subscription_id)), set()).add(subscription_id)
            if record is None:
                self.ordered_subscriptions.discard(subscription_id)
            elif record.ordered:
                self.ordered_subscriptions.add(subscription_id)
            if record is not None and record.status is SubscriptionStatus.ACTIVE:
                reason = (
                    f"its deliveries are held: {endpoint.error}"
                    if isinstance(endpoint, InvalidEndpoint)
                    else None
                )
                if record.status_reason != reason:
                    self._set_status_reason(record, reason)
        while len(self._cache) > _MAX_CACHED:
            self._remove(self._shares.displaced())
        return loaded

    def _remove(self, subscription_id: SubscriptionId) -> None:
        del self._cache[subscription_id]
        self._shares.discard(subscription_id)
        self.ordered_subscriptions.discard(subscription_id)
        room = str(room_of(subscription_id))
        self._by_room[room].discard(subscription_id)
        if not self._by_room[room]:
            del self._by_room[room]

    def _build_endpoint(
        self, record: EndpointRecord, known: EndpointLookup
    ) -> Endpoint | InvalidEndpoint:
        try:
            return Endpoint(record, self._cipher)
        except ValueError as exc:
            if not (isinstance(known, InvalidEndpoint) and known.error == str(exc)):
                _log.error(
                    "subscription %s cannot be served, its deliveries are held: %s",
                    record.subscription_id,
                    exc,
                )
            return InvalidEndpoint(record=record, error=str(exc))
