"""One connection as the event loop sees it: requests with receipts, messages in batches, and one end."""

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final

from rooms.brokers.frames import Frame, encode, header, unescape
from rooms.brokers.wire import Wire, Wires

_FAREWELL_S: Final = 2.0
_MESSAGE: Final = b"MESSAGE"
_MOST_TOLD: Final = 300
_MISSING: Final = "does not exist"


class LinkEndedError(Exception):
    """The connection is over, or a request had no answer in time. `refused`: the broker said so in an ERROR frame;
    `receipt` then is the receipt that the refused frame had asked for, where it had.
    """

    def __init__(self, reason: str, *, refused: bool = False, receipt: str | None = None) -> None:
        super().__init__(reason)
        self.refused = refused
        self.receipt = receipt

    @property
    def queue_missing(self) -> bool:
        """Whether the frame was refused because its queue is not there (or is of another routing type)."""
        return self.refused and _MISSING in str(self)


class Link:
    """Belongs to the event loop that makes it."""

    def __init__(
        self,
        wires: Wires,
        *,
        translate: Callable[[list[Any]], Any] | None = None,
        deliver: Callable[[Any], None] | None = None,
        ended: Callable[[], None] | None = None,
    ) -> None:
        """MESSAGE frames of one read, and what a shortcut made of others, go through `translate` in the wires' thread, and
        what it gives to `deliver` in the loop; `ended` is called once, in the loop.
        """
        self._loop = asyncio.get_running_loop()
        self._wires = wires
        self._wire: Wire | None = None
        self._translate = translate
        self._deliver = deliver
        self._ended = ended
        self._receipts: dict[str, asyncio.Future[None]] = {}
        self._numbers = itertools.count(1)
        self.end: LinkEndedError | None = None

    def attach(self, wire: Wire) -> None:
        """Begin on a wire whose line this is."""
        self._wire = wire
        self._wires.add(wire)

    @property
    def alive(self) -> bool:
        return self._wire is not None and self.end is None

    def next_receipt(self) -> str:
        """A receipt name that this connection has not used."""
        return f"r{next(self._numbers)}"

    def write(self, data: bytes) -> None:
        """Have frames written; nothing where the connection is over."""
        if self._wire is not None and self.end is None:
            self._wires.write(self._wire, data)

    def expect(self, receipt: str) -> asyncio.Future[None]:
        """Done when the receipt comes; LinkEndedError when it cannot come any more. Call it before the write."""
        future: asyncio.Future[None] = self._loop.create_future()
        if self.end is not None:
            future.set_exception(self.end)
        else:
            self._receipts[receipt] = future
        return future

    async def answered(self, futures: Sequence["asyncio.Future[Any]"], within_s: float) -> None:
        """Until all are done. LinkEndedError; a broker that is so late with the next has its connection ended."""
        try:
            for future in futures:
                async with asyncio.timeout(within_s):
                    await future
        except TimeoutError:
            self.close(f"no answer within {within_s:g} s")
            raise self.end or LinkEndedError("no answer") from None
        finally:
            for future in futures:
                # Whoever stopped waiting has no use for the others' errors.
                if future.done() and not future.cancelled():
                    future.exception()
                future.cancel()

    async def request(self, command: str, headers: dict[str, str], within_s: float) -> None:
        """One frame, until its receipt."""
        receipt = self.next_receipt()
        done = self.expect(receipt)
        self.write(encode(command, {**headers, "receipt": receipt}))
        await self.answered([done], within_s)

    async def leave(self) -> None:
        """Say goodbye once everything written before was carried out, and close."""
        if self.alive:
            with contextlib.suppress(LinkEndedError):
                await self.request("DISCONNECT", {}, _FAREWELL_S)
        self.close()

    def close(self, reason: str = "it was closed here") -> None:
        """End it at once; again is harmless."""
        if self._wire is not None:
            self._wires.close(self._wire)
        self._finish(LinkEndedError(reason))

    def came(self, frames: list[Any]) -> None:
        """In the wires' thread: translate there, and cross once."""
        others = [frame for frame in frames if isinstance(frame, Frame) and frame.command != _MESSAGE]
        messages = frames
        if others:
            messages = [frame for frame in frames if not isinstance(frame, Frame) or frame.command == _MESSAGE]
        batch = self._translate(messages) if messages and self._translate is not None else None
        self._cross(self._arrive, batch, others)

    def broke(self, reason: str) -> None:
        """In the wires' thread: it is over."""
        self._cross(self._finish, LinkEndedError(reason))

    def _cross(self, work: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # a loop that is closed already has no use for it
            self._loop.call_soon_threadsafe(work, *arguments)

    def _arrive(self, batch: Any, others: list[Frame]) -> None:
        if self.end is not None:
            return
        if batch is not None and self._deliver is not None:
            self._deliver(batch)
        for frame in others:
            if frame.command == b"RECEIPT":
                future = self._receipts.pop((header(frame.head, b"receipt-id") or b"").decode(), None)
                if future is not None and not future.done():
                    future.set_result(None)
            elif frame.command == b"ERROR":
                self._refused(frame)

    def _refused(self, frame: Frame) -> None:
        receipt = header(frame.head, b"receipt-id")
        self._finish(
            LinkEndedError(
                error_text(frame), refused=True, receipt=None if receipt is None else receipt.decode(errors="replace")
            )
        )
        self.close()

    def _finish(self, end: LinkEndedError) -> None:
        if self.end is not None:
            return
        self.end = end
        receipts, self._receipts = self._receipts, {}
        for future in receipts.values():
            if not future.done():
                future.set_exception(end)
                future.exception()  # one that nobody awaits any more is no error of its own
        if self._ended is not None:
            self._ended()


def error_text(frame: Frame) -> str:
    """What an ERROR frame says, in one line."""
    told = header(frame.head, b"message") or frame.body
    text = told.decode(errors="replace")
    with contextlib.suppress(ValueError):
        text = unescape(text)
    return " ".join(text.split())[:_MOST_TOLD]
