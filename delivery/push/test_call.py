"""Make a test call: a webhook gets the same request as for a real delivery."""

import math
from typing import Final

import msgspec

from delivery.push.endpoints import Endpoint
from delivery.push.errors import ResourceShortageError
from delivery.push.event_items import envelope_of, request_body
from rooms.db.connection import PersistentConnection
from rooms.db.queue.endpoints import load_endpoints
from rooms.db.secrets import Cipher
from rooms.domain.attempt import AttemptResult, ErrorClass
from rooms.domain.delivery_properties import DeliveryProperties
from rooms.domain.delivery_task import DEFAULT_PRIORITY, DeliveryTask
from rooms.domain.ids import DeliveryId, IdGenerator, MessageId
from rooms.domain.room import Subscription
from rooms.errors import ConflictError, NotFoundError
from rooms.ports import Clock, Sender

EVENT_TYPE: Final = "rooms.ping"


class PingSender:
    """Call webhooks with the subscription's own headers, secret and time-out."""

    def __init__(
        self,
        *,
        connection: PersistentConnection,
        cipher: Cipher,
        sender: Sender,
        ids: IdGenerator,
        clock: Clock,
    ) -> None:
        self._connection = connection
        self._cipher = cipher
        self._sender = sender
        self._ids = ids
        self._clock = clock

    async def __call__(self, subscription: Subscription) -> AttemptResult:
        """Return the webhook's response.

        Raises NotFoundError if the subscription is gone, ConflictError if its secrets or headers
        cannot be decrypted.
        """
        ids = [(subscription.room_id, subscription.id)]
        records = await self._connection.run(lambda connection: load_endpoints(connection, ids))
        record = records.get(subscription.id)
        if record is None:
            raise NotFoundError(f"there is no subscription {subscription.id}")
        try:
            endpoint = Endpoint(record, self._cipher)
        except ValueError as exc:
            raise ConflictError(str(exc)) from exc
        now_ms = self._clock.now_ms()
        new_id = self._ids.generate(subscription.room_id, now_ms)
        payload = msgspec.json.encode(
            {"type": EVENT_TYPE, "subscription_id": subscription.id, "sent_at": self._clock.now()}
        )
        task = DeliveryTask(
            room_id=subscription.room_id,
            delivery_id=DeliveryId(new_id),
            message_id=MessageId(new_id),
            subscription_id=subscription.id,
            kind=subscription.type,
            generation=0,
            attempt=0,
            delay_ms=0,
            priority=DEFAULT_PRIORITY,
            event_type=EVENT_TYPE,
            event_version=1,
            correlation_id=new_id,
            published_ms=now_ms,
            expires_ms=None,
            subscription_version=record.version,
            deadline=math.inf,
            headers=None,
            payload=payload,
            properties=DeliveryProperties(has_publisher=False),
        )
        if record.event_item:
            task.envelope = envelope_of(task, None)
        body = request_body(task)
        headers = endpoint.headers(task, body, now_ms // 1000)
        try:
            result = await self._sender.send(
                endpoint.url,
                headers,
                body,
                organisation=endpoint.organisation,
                timeout_s=endpoint.timeout_s,
            )
        except ResourceShortageError as exc:
            detail = f"the webhook was not called, because this service lacks something: {exc}"
            return AttemptResult(None, ErrorClass.CONNECT, detail, b"", None, 0.0)
        return endpoint.hide_headers(result)
