"""The broker's management by its own messages: a request to `activemq.management`, an answer to a queue of ours.

No second address, port or protocol, and the same login as for everything else; that user needs the broker's permission `manage`.
"""

import asyncio
import itertools
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rooms.brokers.frames import Frame, encode, header
from rooms.brokers.layout import Queue
from rooms.brokers.link import Link, LinkEndedError

_ADDRESS: Final = "activemq.management"
_PAGE: Final = 500


class ManagementError(Exception):
    """The broker carried a request out and said no, in its own words."""

    def has(self, *codes: str) -> bool:
        """Whether it gave one of these codes."""
        return any(code in str(self) for code in codes)


HAS_CONSUMERS: Final = "AMQ229025"


def read_answers(frames: list[Frame]) -> list[tuple[str, bool, str]]:
    """(which request, whether it went well, JSON) of each answer."""
    return [
        (
            (header(frame.head, b"correlation-id") or b"").decode(),
            header(frame.head, b"_AMQ_OperationSucceeded") == b"true",
            frame.body.decode(errors="replace"),
        )
        for frame in frames
    ]


class Management:
    """Requests over one link, any number at a time. LinkEndedError: what was asked for is in doubt."""

    def __init__(self, *, replies: str, timeout_s: float) -> None:
        self._replies = replies
        self._timeout_s = timeout_s
        self._link: Link | None = None
        self._reply_to = ""
        self._numbers = itertools.count(1)
        self._asked: dict[str, asyncio.Future[list[Any]]] = {}

    @property
    def alive(self) -> bool:
        return self._link is not None and self._link.alive

    def close(self) -> None:
        """End the link."""
        if self._link is not None:
            self._link.close()

    async def begin(self, link: Link) -> None:
        """Take a new link, whose messages go to `deliver`; the queue of the answers lives as long as it."""
        self._link = link
        name = f"{self._replies}-{secrets.token_hex(8)}"
        self._reply_to = f"{self._replies}::{name}"
        wanted = {
            "name": name,
            "address": self._replies,
            "routing-type": "ANYCAST",
            "durable": False,
            "auto-delete": True,
            "auto-create-address": True,
        }
        # The only request without an answer: there is no queue for one yet. Subscribing tells whether it went well.
        receipt = link.next_receipt()
        made = link.expect(receipt)
        link.write(
            self._frame("broker", {"_AMQ_OperationName": "createQueue", "receipt": receipt}, [_text(wanted), True])
        )
        await link.answered([made], self._timeout_s)
        subscribe = {"destination": self._reply_to, "id": "replies", "ack": "auto", "subscription-type": "ANYCAST"}
        await link.request("SUBSCRIBE", subscribe, self._timeout_s)

    def deliver(self, answers: list[tuple[str, bool, str]]) -> None:
        """Answers that came."""
        for name, well, text in answers:
            future = self._asked.pop(name, None)
            if future is None or future.done():
                continue
            if well:
                future.set_result(json.loads(text) if text else [])
            else:
                future.set_exception(ManagementError(text))

    def ended(self) -> None:
        """The link is over."""
        asked, self._asked = self._asked, {}
        end = self._link.end if self._link is not None and self._link.end is not None else LinkEndedError("it ended")
        for future in asked.values():
            if not future.done():
                future.set_exception(end)
                future.exception()

    async def make(self, queues: Sequence[Queue], *, owner: str) -> None:
        """Make queues and their addresses where they are not there yet; all at once, durable when it returns."""
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
        for start in range(0, len(wanted), _PAGE):
            await self.ask([("broker", "createQueue", [_text(one), True]) for one in wanted[start : start + _PAGE]])

    async def delete(self, queue: Queue) -> bool:
        """Delete a queue, and its address with the last one. False: somebody consumes it."""
        try:
            await self.ask([("broker", "destroyQueue", [queue.name, False, True])])
        except ManagementError as exc:
            if exc.has(HAS_CONSUMERS):
                return False
            if not await self.exists(queue):
                return True
            raise
        return True

    async def exists(self, queue: Queue) -> bool:
        """Whether a queue is there."""
        options = _text({"field": "name", "operation": "EQUALS", "value": queue.name})
        ((found,),) = await self.ask([("broker", "listQueues", [options, 1, 1])])
        return bool(json.loads(found)["data"])

    async def owned(self, owner: str) -> list[str]:
        """The names of all queues that were made for this owner."""
        return list(dict.fromkeys([row["name"] for row in await self._queues_of(owner)]))

    async def _queues_of(self, owner: str) -> list[dict[str, str]]:
        options = _text({"field": "user", "operation": "EQUALS", "value": owner})
        found: list[dict[str, str]] = []
        for page in itertools.count(1):
            ((text,),) = await self.ask([("broker", "listQueues", [options, page, _PAGE])])
            rows = json.loads(text)["data"]
            found += [row for row in rows if row["user"] == owner]
            if len(rows) < _PAGE:
                break
        return found

    async def depths(self, owner: str) -> Mapping[str, int]:
        """Return the messages in each queue that was made for this owner, by the queue's name."""
        return {row["name"]: int(row["messageCount"]) for row in await self._queues_of(owner)}

    async def disk_usage(self) -> float | None:
        """Return the used share of the broker's disk, 0 to 1, at its last look; None before the first."""
        ((share,),) = await self._send([("broker", {"_AMQ_Attribute": "diskStoreUsage"}, [])])
        return float(share) if share > 0 else None

    async def depth(self, queue: Queue) -> int:
        """Messages in a queue: waiting, scheduled, handed out. 0 where it is not there.

        The broker counts a message when it takes it up, which is a moment after its receipt.
        """
        return await self._counted(queue, {"_AMQ_Attribute": "messageCount"}, [])

    async def holds(self, queue: Queue) -> bool:
        """Whether there is anything in a queue; what got its receipt is. For small queues: an empty one is searched."""
        if await self.depth(queue):
            return True
        # Whatever removes messages takes up first what has come.
        await self.purge(queue, where="FALSE")
        return await self.depth(queue) > 0

    async def purge(self, queue: Queue, *, where: str | None = None) -> int:
        """Forget the messages that nobody was handed, all or by a filter; how many. 0 where the queue is not there."""
        if where is None:
            return await self._counted(queue, {"_AMQ_OperationName": "removeAllMessages"}, [])
        return await self._counted(queue, {"_AMQ_OperationName": "removeMessages"}, [where])

    async def _counted(self, queue: Queue, what: dict[str, str], arguments: list[Any]) -> int:
        try:
            ((count,),) = await self._send([(f"queue.{queue.name}", what, arguments)])
        except ManagementError:
            if await self.exists(queue):
                raise
            return 0
        return int(count)

    async def ask(self, requests: Sequence[tuple[str, str, list[Any]]]) -> list[list[Any]]:
        """Have (resource, operation, arguments) done, in their order; what each returned. ManagementError: one was refused."""
        return await self._send(
            [(resource, {"_AMQ_OperationName": name}, values) for resource, name, values in requests]
        )

    async def _send(self, requests: list[tuple[str, dict[str, str], list[Any]]]) -> list[list[Any]]:
        if self._link is None or not self._link.alive:
            raise LinkEndedError("there is no connection")
        futures: list[asyncio.Future[list[Any]]] = []
        frames = []
        for resource, what, arguments in requests:
            name = str(next(self._numbers))
            future: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
            self._asked[name] = future
            futures.append(future)
            frames.append(
                self._frame(resource, {**what, "reply-to": self._reply_to, "correlation-id": name}, arguments)
            )
        self._link.write(b"".join(frames))
        await self._link.answered(futures, self._timeout_s)
        return [future.result() for future in futures]

    def _frame(self, resource: str, headers: dict[str, str], arguments: list[Any]) -> bytes:
        # Without a length the body is a text message, which is what management reads.
        head = {"destination": _ADDRESS, "destination-type": "ANYCAST", "_AMQ_ResourceName": resource, **headers}
        return encode("SEND", head)[:-1] + json.dumps(arguments).encode() + b"\0"


def _text(value: dict[str, Any]) -> str:
    return json.dumps(value)
