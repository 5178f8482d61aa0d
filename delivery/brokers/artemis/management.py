"""Call the broker's management by messages to `activemq.management` and a reply queue.

It needs no second address, port, protocol or login. The user must have the broker's permission
`manage`.
"""

import asyncio
import itertools
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final

from delivery.brokers.artemis.connection import BrokerConnection, ConnectionEndedError
from delivery.brokers.artemis.frames import Frame, encode, header
from delivery.brokers.artemis.queue_names import BrokerQueue

_ADDRESS: Final = "activemq.management"
_PAGE_SIZE: Final = 500


class ManagementError(Exception):
    """Report that the broker processed a request and rejected it, in its own words."""

    def has_code(self, *codes: str) -> bool:
        """Return whether the error has one of these codes."""
        return any(code in str(self) for code in codes)


HAS_CONSUMERS: Final = "AMQ229025"


def decode_replies(frames: list[Frame]) -> list[tuple[str, bool, str]]:
    """Return (request, whether it succeeded, JSON) for each reply."""
    return [
        (
            (header(frame.head, b"correlation-id") or b"").decode(),
            header(frame.head, b"_AMQ_OperationSucceeded") == b"true",
            frame.body.decode(errors="replace"),
        )
        for frame in frames
    ]


class ManagementClient:
    """Call the management over one connection. ConnectionEndedError: the request is in doubt."""

    def __init__(self, *, reply_address: str, timeout_s: float) -> None:
        self._reply_address = reply_address
        self._timeout_s = timeout_s
        self._connection: BrokerConnection | None = None
        self._reply_to = ""
        self._request_numbers = itertools.count(1)
        self._pending: dict[str, asyncio.Future[list[Any]]] = {}

    @property
    def is_open(self) -> bool:
        return self._connection is not None and self._connection.is_open

    def close(self) -> None:
        """End the connection."""
        if self._connection is not None:
            self._connection.close()

    async def attach(self, connection: BrokerConnection) -> None:
        """Use a new connection, whose messages go to `on_replies`.

        Its reply queue lives as long as it.
        """
        self._connection = connection
        name = f"{self._reply_address}-{secrets.token_hex(8)}"
        self._reply_to = f"{self._reply_address}::{name}"
        wanted = {
            "name": name,
            "address": self._reply_address,
            "routing-type": "ANYCAST",
            "durable": False,
            "auto-delete": True,
            "auto-create-address": True,
        }
        # Without a reply, since its queue does not exist yet. SUBSCRIBE shows if it worked.
        receipt = connection.next_receipt()
        made = connection.expect_receipt(receipt)
        connection.write(
            self._frame(
                "broker",
                {"_AMQ_OperationName": "createQueue", "receipt": receipt},
                [_json_text(wanted), True],
            )
        )
        await connection.wait_all([made], self._timeout_s)
        subscribe = {
            "destination": self._reply_to,
            "id": "replies",
            "ack": "auto",
            "subscription-type": "ANYCAST",
        }
        await connection.request("SUBSCRIBE", subscribe, self._timeout_s)

    def on_replies(self, replies: list[tuple[str, bool, str]]) -> None:
        """Resolve the requests that these replies answer."""
        for name, succeeded, text in replies:
            future = self._pending.pop(name, None)
            if future is None or future.done():
                continue
            if succeeded:
                future.set_result(json.loads(text) if text else [])
            else:
                future.set_exception(ManagementError(text))

    def on_connection_end(self) -> None:
        """Fail the pending requests, because the connection has ended."""
        pending, self._pending = self._pending, {}
        end = (
            self._connection.error
            if self._connection is not None and self._connection.error is not None
            else ConnectionEndedError("it ended")
        )
        for future in pending.values():
            if not future.done():
                future.set_exception(end)
                future.exception()

    async def create_queues(self, queues: Sequence[BrokerQueue], *, owner: str) -> None:
        """Create missing queues and addresses in one go; they are durable when it returns."""
        wanted = [
            {
                "name": queue.name,
                "address": queue.address,
                "routing-type": queue.routing,
                "durable": True,
                "auto-delete": False,
                "auto-create-address": True,
                "max-consumers": -1,
                "purge-on-no-consumers": False,
                "user": owner,
            }
            for queue in queues
        ]
        for start in range(0, len(wanted), _PAGE_SIZE):
            await self.call(
                [
                    ("broker", "createQueue", [_json_text(one), True])
                    for one in wanted[start : start + _PAGE_SIZE]
                ]
            )

    async def delete_queue(self, queue: BrokerQueue) -> bool:
        """Delete a queue, and its address with the last queue. False: it has a consumer."""
        try:
            await self.call([("broker", "destroyQueue", [queue.name, False, True])])
        except ManagementError as exc:
            if exc.has_code(HAS_CONSUMERS):
                return False
            if not await self.queue_exists(queue):
                return True
            raise
        return True

    async def queue_exists(self, queue: BrokerQueue) -> bool:
        """Return whether a queue exists."""
        options = _json_text({"field": "name", "operation": "EQUALS", "value": queue.name})
        ((found,),) = await self.call([("broker", "listQueues", [options, 1, 1])])
        return bool(json.loads(found)["data"])

    async def queue_names(self, owner: str) -> list[str]:
        """Return the names of all queues that were created for this owner."""
        return list(dict.fromkeys([row["name"] for row in await self._list_queues(owner)]))

    async def _list_queues(self, owner: str) -> list[dict[str, str]]:
        options = _json_text({"field": "user", "operation": "EQUALS", "value": owner})
        found: list[dict[str, str]] = []
        for page in itertools.count(1):
            ((text,),) = await self.call([("broker", "listQueues", [options, page, _PAGE_SIZE])])
            rows = json.loads(text)["data"]
            found += [row for row in rows if row["user"] == owner]
            if len(rows) < _PAGE_SIZE:
                break
        return found

    async def depths(self, owner: str) -> Mapping[str, int]:
        """Return the messages in each queue that was made for this owner, by the queue's name."""
        return {row["name"]: int(row["messageCount"]) for row in await self._list_queues(owner)}

    async def disk_usage(self) -> float | None:
        """Return the used share of the broker's disk, 0 to 1, when last measured; None before."""
        ((share,),) = await self._send([("broker", {"_AMQ_Attribute": "diskStoreUsage"}, [])])
        return float(share) if share > 0 else None

    async def interceptors(self) -> Sequence[str]:
        """Return the class names of the broker's interceptors of incoming frames."""
        ((names,),) = await self._send(
            [("broker", {"_AMQ_Attribute": "incomingInterceptorClassNames"}, [])]
        )
        return [str(name) for name in names]

    async def depth(self, queue: BrokerQueue) -> int:
        """Return the messages in a queue: waiting, scheduled or handed out. 0 if it does not exist.

        The broker counts a message when it processes it, which is a moment after its receipt.
        """
        return await self._count_or_zero(queue, {"_AMQ_Attribute": "messageCount"}, [])

    async def has_messages(self, queue: BrokerQueue) -> bool:
        """Return whether a queue has a message with a receipt.

        For small queues: an empty one is searched.
        """
        if await self.depth(queue):
            return True
        # Removing messages makes the broker process what has come.
        await self.purge(queue, where="FALSE")
        return await self.depth(queue) > 0

    async def purge(self, queue: BrokerQueue, *, where: str | None = None) -> int:
        """Remove messages that were not handed out, all or by a filter; return how many.

        0 if the queue does not exist.
        """
        if where is None:
            return await self._count_or_zero(queue, {"_AMQ_OperationName": "removeAllMessages"}, [])
        return await self._count_or_zero(queue, {"_AMQ_OperationName": "removeMessages"}, [where])

    async def move(self, queue: BrokerQueue, to: BrokerQueue, *, where: str) -> int:
        """Move the messages that a filter selects; return how many. 0: `queue` does not exist."""
        operation = {"_AMQ_OperationName": "moveMessages"}
        return await self._count_or_zero(queue, operation, [where, to.name])

    async def _count_or_zero(
        self, queue: BrokerQueue, operation: dict[str, str], arguments: list[Any]
    ) -> int:
        try:
            ((count,),) = await self._send([(f"queue.{queue.name}", operation, arguments)])
        except ManagementError:
            if await self.queue_exists(queue):
                raise
            return 0
        return int(count)

    async def call(self, requests: Sequence[tuple[str, str, list[Any]]]) -> list[list[Any]]:
        """Run (resource, operation, arguments) in order; return their results.

        ManagementError: one was rejected.
        """
        return await self._send(
            [
                (resource, {"_AMQ_OperationName": name}, values)
                for resource, name, values in requests
            ]
        )

    async def _send(self, calls: list[tuple[str, dict[str, str], list[Any]]]) -> list[list[Any]]:
        if self._connection is None or not self._connection.is_open:
            raise ConnectionEndedError("there is no connection")
        futures: list[asyncio.Future[list[Any]]] = []
        frames = []
        for resource, what, arguments in calls:
            name = str(next(self._request_numbers))
            future: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
            self._pending[name] = future
            futures.append(future)
            frames.append(
                self._frame(
                    resource,
                    {**what, "reply-to": self._reply_to, "correlation-id": name},
                    arguments,
                )
            )
        self._connection.write(b"".join(frames))
        await self._connection.wait_all(futures, self._timeout_s)
        return [future.result() for future in futures]

    def _frame(self, resource: str, headers: dict[str, str], arguments: list[Any]) -> bytes:
        # Without a length the body is a text message, which management reads.
        head = {
            "destination": _ADDRESS,
            "destination-type": "ANYCAST",
            "_AMQ_ResourceName": resource,
            **headers,
        }
        return encode("SEND", head)[:-1] + json.dumps(arguments).encode() + b"\0"


def _json_text(value: dict[str, Any]) -> str:
    return json.dumps(value)
