"""A test call: everything a webhook gets with a real delivery, for a message that nobody published."""

import math
from typing import Final

import msgspec

from delivery.endpoint import Endpoint
from rooms.domain.attempt import Answer
from rooms.domain.copy import Copy
from rooms.domain.ids import DeliveryId, IdMaker, MessageId
from rooms.domain.room import Subscription
from rooms.errors import NotFoundError
from rooms.ports import Clock, Sender
from rooms.storage.endpoints import load_endpoints
from rooms.storage.engine import KeptConnection
from rooms.storage.sealing import Seal

EVENT_TYPE: Final = "rooms.ping"


class Ping:
    """Calls webhooks by the sender that deliveries use, with the subscription's headers, secret and time-out."""

    def __init__(self, *, connection: KeptConnection, seal: Seal, sender: Sender, ids: IdMaker, clock: Clock) -> None:
        self._connection = connection
        self._seal = seal
        self._sender = sender
        self._ids = ids
        self._clock = clock

    async def __call__(self, subscription: Subscription) -> Answer:
        """What the webhook answers. NotFoundError where the subscription is gone by now."""
        wanted = [(subscription.room_id, subscription.id)]
        records = await self._connection.run(lambda connection: load_endpoints(connection, wanted))
        record = records.get(subscription.id)
        if record is None:
            raise NotFoundError(f"there is no subscription {subscription.id}")
        endpoint = Endpoint(record, self._seal)
        now_ms = self._clock.now_ms()
        identity = self._ids.make(subscription.room_id, now_ms)
        payload = msgspec.json.encode(
            {"type": EVENT_TYPE, "subscription_id": subscription.id, "sent_at": self._clock.now()}
        )
        copy = Copy(
            room_id=subscription.room_id,
            delivery_id=DeliveryId(identity),
            message_id=MessageId(identity),
            subscription_id=subscription.id,
            kind=subscription.type,
            generation=0,
            attempt=0,
            delay_ms=0,
            priority=9,
            event_type=EVENT_TYPE,
            event_version=1,
            correlation_id=identity,
            published_ms=now_ms,
            expires_ms=None,
            subscription_version=record.version,
            deadline=math.inf,
            headers=None,
            payload=payload,
        )
        headers = endpoint.headers(copy, now_ms // 1000)
        return await self._sender.send(
            endpoint.target, headers, payload, organisation=endpoint.organisation, timeout_s=endpoint.timeout_s
        )
