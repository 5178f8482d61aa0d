"""The one point at which another library's threads cross into our loop: many calls, one wake-up."""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import Any


class Crossing:
    """Made inside of a running loop; `call` is for any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._due: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._lock = threading.Lock()
        self._awake = False

    def call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call it on the loop, soon and in order. A loop that is closed has nobody left to tell."""
        with self._lock:
            self._due.append((function, arguments))
            if self._awake:
                return
            self._awake = True
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._run)

    async def in_thread(self, work: Callable[[], None]) -> None:
        """Let blocking work end on a thread that keeps no process alive. What it raises is raised here."""
        done: asyncio.Future[None] = self._loop.create_future()

        def run() -> None:
            try:
                work()
            except Exception as exc:  # noqa: BLE001 - whatever it is, it is the caller's
                self.call(_settle, done, None, exc)
            else:
                self.call(_settle, done, None, None)

        threading.Thread(target=run, daemon=True).start()
        await done

    def settle(self, future: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
        """Give a future of the loop its result, from any thread."""
        self.call(_settle, future, value, error)

    def _run(self) -> None:
        with self._lock:
            due, self._due = self._due, deque()
            self._awake = False
        for function, arguments in due:
            # One handle each: an error of one is reported by the loop, and those behind it are called all the same.
            self._loop.call_soon(function, *arguments)


def _settle(future: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)
