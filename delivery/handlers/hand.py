"""Threads for handlers that block, one for each consumer at work.

They are daemons: a handler that never returns must not keep its process from ending.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue


class Hand:
    """One thread that does one thing at a time."""

    def __init__(self, name: str) -> None:
        self._work: SimpleQueue[tuple[asyncio.Future[object], Callable[[], object]] | None] = SimpleQueue()
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def do(self, work: Callable[[], object]) -> "asyncio.Future[object]":
        """Its result, later. Cancelling the future does not stop the work."""
        future: asyncio.Future[object] = self._loop.create_future()
        self._work.put((future, work))
        return future

    def end(self) -> None:
        """Let the thread go when it is done."""
        self._work.put(None)

    def _run(self) -> None:
        while (given := self._work.get()) is not None:
            future, work = given
            result: object = None
            error: BaseException | None = None
            try:
                result = work()
            except BaseException as exc:  # noqa: BLE001 - whatever a handler does, it is told to whoever waits
                error = exc
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(_tell, future, result, error)


def _tell(future: "asyncio.Future[object]", result: object, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    elif isinstance(error, Exception) and not isinstance(error, StopIteration):
        future.set_exception(error)
    else:
        future.set_exception(RuntimeError(f"the handler ended with {error!r}"))
