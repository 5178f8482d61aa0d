"""A test message to an endpoint, signed and sent as every other, recorded nowhere."""

import json

from delivery.endpoint import Endpoint
from rooms.domain.attempt import Answer
from rooms.domain.copy import Copy
from rooms.domain.ids import DeliveryId, IdMaker, MessageId
from rooms.domain.room import Subscription
from rooms.domain.states import SubscriptionType
from rooms.errors import NotFoundError
from rooms.ports import Clock, Sender
from rooms.storage.endpoints import load_endpoints
from rooms.storage.engine import KeptConnection
from rooms.storage.sealing import Seal

EVENT_TYPE = "rooms.ping"


class Ping:
    """Call it with a PUSH subscription; it answers what the endpoint answered."""

    def __init__(self, *, sender: Sender, connection: KeptConnection, seal: Seal, ids: IdMaker, clock: Clock) -> None:
        self._sender = sender
        self._connection = connection
        self._seal = seal
        self._ids = ids
        self._clock = clock

    async def __call__(self, subscription: Subscription) -> Answer:
        """NotFoundError where the subscription was deleted meanwhile."""
        pair = (subscription.room_id, subscription.id)
        records = await self._connection.run(lambda connection: load_endpoints(connection, [pair]))
        if subscription.id not in records:
            raise NotFoundError("there is no such subscription any more")
        endpoint = Endpoint(records[subscription.id], self._seal)
        now_ms = self._clock.now_ms()
        message = self._ids.make(subscription.room_id, now_ms)
        payload = {"type": EVENT_TYPE, "subscription_id": subscription.id, "room_id": subscription.room_id}
        copy = Copy(
            room_id=subscription.room_id,
            delivery_id=DeliveryId(self._ids.make(subscription.room_id, now_ms)),
            message_id=MessageId(message),
            subscription_id=subscription.id,
            kind=SubscriptionType.PUSH,
            generation=0,
            attempt=0,
            delay_ms=0,
            priority=9,
            event_type=EVENT_TYPE,
            event_version=1,
            correlation_id=message,
            published_ms=now_ms,
            expires_ms=None,
            subscription_version=subscription.version,
            deadline=float("inf"),
            headers=None,
            payload=json.dumps(payload).encode(),
        )
        headers = endpoint.headers(copy, now_ms // 1000)
        return await self._sender.send(endpoint.target, headers, copy.payload, timeout_s=endpoint.timeout_s)
