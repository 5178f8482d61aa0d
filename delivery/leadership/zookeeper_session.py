"""Keep a ZooKeeper session on the event loop. Only this module imports kazoo.

kazoo's threads reach the loop through one bridge, which coalesces wake-ups.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, assert_never

from kazoo.client import KazooClient
from kazoo.exceptions import BadVersionError, KazooException, NodeExistsError, NoNodeError
from kazoo.protocol.states import KazooState
from kazoo.security import make_digest_acl

from delivery.leadership.kazoo_internals import ping_only_when, report_timeout
from rooms.backend_urls import ZooKeeperUrl
from rooms.errors import ElectionUnavailableError
from rooms.outages import OUTAGES, Dependency

TRUST_FRACTION: Final = 0.6
"""Part of the session timeout for which a member trusts its holds after sending a write."""
CLOSE_S: Final = 2.0
ABANDON_AFTER_SESSIONS: Final = 2.0
"""Session timeouts for which a lost connection is awaited, before its client is replaced."""
_RECONNECT: Final = {"max_tries": -1, "delay": 0.1, "backoff": 2, "max_delay": 2.0}
# kazoo logs every attempt to connect; `OUTAGES` logs an outage once.
_kazoo_log = logging.getLogger(f"{__name__}.kazoo")
_kazoo_log.setLevel(logging.CRITICAL)

ChangeKind = Literal["create", "set", "delete"]


class LoopBridge:
    """Run calls from other threads on the loop that is running when it is created."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._pending_calls: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._lock = threading.Lock()
        self._scheduled = False

    def call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function on the loop, in order, from any thread. A closed loop drops the call."""
        with self._lock:
            self._pending_calls.append((function, arguments))
            if self._scheduled:
                return
            self._scheduled = True
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._run_pending)

    async def run_in_thread(self, work: Callable[[], None]) -> None:
        """Run blocking work on a daemon thread, wait for it, and raise its error."""
        done: asyncio.Future[None] = self._loop.create_future()

        def run() -> None:
            try:
                work()
            except Exception as exc:  # noqa: BLE001 - the caller gets the error
                self.call(_complete, done, None, exc)
            else:
                self.call(_complete, done, None, None)

        threading.Thread(target=run, daemon=True).start()
        await done

    def set_result(
        self, future: asyncio.Future[Any], value: Any, error: BaseException | None
    ) -> None:
        """Set the result of a future of the loop, from any thread."""
        self.call(_complete, future, value, error)

    def _run_pending(self) -> None:
        with self._lock:
            due, self._pending_calls = self._pending_calls, deque()
            self._scheduled = False
        for function, arguments in due:
            # One handle each: the loop reports an error of one, and still calls the others.
            self._loop.call_soon(function, *arguments)


def _complete(future: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeChange:
    """Describe a change of a persistent node."""

    path: str
    kind: ChangeKind
    value: bytes = b""


class ZooKeeperSession:
    """Hold a session: requests, watches that wake `wait_event`, a callback on a lost connection.

    Requests raise ElectionUnavailableError.
    """

    def __init__(
        self,
        url: ZooKeeperUrl,
        on_lost: Callable[[], None] = lambda: None,
        *,
        keep_alive_by_requests: bool = False,
    ) -> None:
        """Create it. `keep_alive_by_requests`: an event loop that hangs loses the session."""
        self._bridge = LoopBridge()
        self._on_lost = on_lost
        self._pending_requests: deque[None] = deque()
        self._lost_at: float | None = None
        self._connected_event = asyncio.Event()
        self._ended_event = asyncio.Event()
        self._events = asyncio.Event()
        self.timeout_s = url.session_s
        """The negotiated session timeout."""
        self.was_lost = False
        """True once the connection was lost."""
        self._client = KazooClient(
            hosts=url.hosts,
            timeout=url.session_s,
            logger=_kazoo_log,
            connection_retry=_RECONNECT,
            auth_data=[("digest", f"{url.user}:{url.password}")] if url.user else None,
            default_acl=[make_digest_acl(url.user, url.password, all=True)] if url.user else None,
        )
        self._client.add_listener(self._on_state)
        report_timeout(self._client, self._set_timeout)
        if keep_alive_by_requests:
            # kazoo's thread would keep the session of a loop that hangs alive for ever, with all
            # its holds. While a request waits, the ping finds out whether the server answers.
            ping_only_when(self._client, lambda: bool(self._pending_requests))

    def start(self) -> None:
        """Connect in the background, and again whenever the connection is lost."""
        self._client.start_async()

    async def wait_connected(self, within_s: float) -> None:
        """Wait until there is a connection."""
        try:
            async with asyncio.timeout(within_s):
                await self._connected_event.wait()
        except TimeoutError as exc:
            raise ElectionUnavailableError("ZooKeeper does not answer") from exc

    async def wait_over(self) -> None:
        """Wait, after a lost connection, a limited time until it is back or the session expired."""
        if self.was_lost:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ABANDON_AFTER_SESSIONS * self.timeout_s):
                    await self._ended_event.wait()

    def is_abandoned(self) -> bool:
        """Return whether the connection was lost for so long that a new session is better."""
        return (
            self._lost_at is not None
            and time.monotonic() - self._lost_at > ABANDON_AFTER_SESSIONS * self.timeout_s
        )

    async def close(self) -> None:
        """End the session and its ephemeral nodes, at once where there is a connection."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._bridge.run_in_thread(self._stop)

    async def ensure_node(self, path: str) -> None:
        """Create a persistent node and its parents where they do not exist."""
        await self._request(self._client.ensure_path_async, path)

    async def create(
        self, path: str, value: bytes, *, sequence: bool = False
    ) -> tuple[str, int] | None:
        """Create an ephemeral node; return its path and czxid, or None if it exists."""
        try:
            path, stat = await self._request(
                self._client.create_async,
                path,
                value,
                ephemeral=True,
                sequence=sequence,
                include_data=True,
            )
        except NodeExistsError:
            return None
        return path, stat.czxid

    async def create_numbered(
        self, path: str, value: bytes, *, counter: str, next_number: Callable[[int], int]
    ) -> int | None:
        """Create an ephemeral node; return its number, or None if it exists.

        `counter`: the node that holds the last number. The same transaction writes the next one.
        """
        while True:
            try:
                last, stat = await self._request(self._client.get_async, counter)
            except NoNodeError as exc:
                raise ElectionUnavailableError(f"{counter} is gone") from exc
            number = next_number(int(last or 0))
            transaction = self._client.transaction()
            transaction.set_data(counter, str(number).encode(), version=stat.version)
            transaction.create(path, value, ephemeral=True)
            results = await self._request(transaction.commit_async)
            failed = [result for result in results if isinstance(result, Exception)]
            if not failed:
                return number
            if any(isinstance(one, NodeExistsError) for one in failed):
                return None
            # Another node has got this number; each conflict is the progress of one member.
            if not any(isinstance(one, BadVersionError) for one in failed):
                raise ElectionUnavailableError(f"ZooKeeper refused a change: {failed!r}")

    async def write(self, path: str, value: bytes) -> int:
        """Set the value of an existing node; return the time by the server's clock, in ms."""
        try:
            stat = await self._request(self._client.set_async, path, value)
        except NoNodeError as exc:
            raise ElectionUnavailableError(f"{path} is gone") from exc
        mtime: int = stat.mtime
        return mtime

    async def apply_changes(self, session_node: str, changes: Sequence[NodeChange]) -> None:
        """Apply all changes or none; none where `session_node`, an ephemeral one, is gone.

        kazoo might send the changes on a later session of the same client, which lacks that node.
        """
        transaction = self._client.transaction()
        transaction.check(session_node, -1)
        for one in changes:
            match one.kind:
                case "set":
                    transaction.set_data(one.path, one.value)
                case "create":
                    transaction.create(one.path, one.value)
                case "delete":
                    transaction.delete(one.path)
                case _:
                    assert_never(one.kind)
        results = await self._request(transaction.commit_async)
        if failed := [result for result in results if isinstance(result, Exception)]:
            raise ElectionUnavailableError(f"ZooKeeper refused a change: {failed!r}")

    async def watch(self, path: str) -> None:
        """Wake `wait_event` when this node is created, changed or deleted."""
        await self._request(self._client.exists_async, path, watch=self._on_watch)

    async def read(self, path: str, *, watch: bool = False) -> tuple[bytes, int] | None:
        """Return a node's value and czxid, or None. `watch` wakes `wait_event` on a change."""
        try:
            value, stat = await self._request(
                self._client.get_async, path, watch=self._on_watch if watch else None
            )
        except NoNodeError:
            if watch:
                await self.watch(path)
            return None
        return value, stat.czxid

    async def children(self, path: str, *, watch: bool = False) -> tuple[list[str], int]:
        """Return the names of children, and the node's mtime in ms; none and 0 for no node."""
        try:
            names, stat = await self._request(
                self._client.get_children_async,
                path,
                watch=self._on_watch if watch else None,
                include_data=True,
            )
        except NoNodeError:
            return [], 0
        return names, stat.mtime

    async def wait_event(self, within_s: float) -> None:
        """Wait for an event of a watch since the last call, a lost connection, or the timeout."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._events.wait()
        self._events.clear()

    async def _request(self, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        # An answer that is too late to be trusted is none.
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(TRUST_FRACTION * self.timeout_s):
                self._pending_requests.append(None)
                method(*arguments, **options).rawlink(
                    lambda result: self._on_response(answer, result)
                )
                value = await answer
        except TimeoutError as exc:
            raise ElectionUnavailableError("ZooKeeper does not answer") from exc
        except (NoNodeError, NodeExistsError):
            OUTAGES.record_answer(Dependency.ELECTION)
            raise
        except KazooException as exc:
            raise ElectionUnavailableError(f"ZooKeeper went away: {exc!r}") from exc
        OUTAGES.record_answer(Dependency.ELECTION)
        return value

    def _on_response(self, answer: asyncio.Future[Any], result: Any) -> None:
        # On kazoo's thread.
        self._pending_requests.pop()
        self._bridge.set_result(answer, result.value, result.exception)

    def _on_watch(self, _event: Any) -> None:
        self._bridge.call(self._events.set)

    def _stop(self) -> None:
        with contextlib.suppress(Exception):  # errors of a broken connection do not matter here
            self._client.stop()
        with contextlib.suppress(Exception):
            self._client.close()

    def _on_state(self, state: str) -> None:
        # On kazoo's thread. A server that lost its data refuses a client that has seen a later
        # transaction, for ever. After a lost connection the term has ended, and that does not
        # matter.
        if state != KazooState.CONNECTED:
            self._client.last_zxid = 0
        self._bridge.call(self._apply_state, state)

    def _apply_state(self, state: str) -> None:
        if state == KazooState.CONNECTED:
            self._lost_at = None
            self._connected_event.set()
            if self.was_lost:
                self._ended_event.set()
            return
        self._connected_event.clear()
        if state == KazooState.LOST:
            self._ended_event.set()
        if self._lost_at is None:
            self._lost_at = time.monotonic()
        self.was_lost = True
        self._on_lost()
        self._events.set()

    def _set_timeout(self, timeout_s: float) -> None:
        # On kazoo's thread.
        self.timeout_s = timeout_s
