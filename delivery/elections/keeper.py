"""A session with ZooKeeper on our loop. kazoo is used here alone; its threads cross over at one point."""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, assert_never

from kazoo.client import KazooClient
from kazoo.exceptions import KazooException, NodeExistsError, NoNodeError
from kazoo.protocol.states import KazooState
from kazoo.security import make_digest_acl

from delivery.elections.address import Address
from delivery.elections.crossing import Crossing
from rooms.errors import ElectionUnavailableError

TRUST: Final = 0.6
"""How much of a session its owner believes in, from the sending of its last write."""
CLOSE_S: Final = 2.0
ABANDON_AFTER: Final = 2.0
"""How many sessions long a lost connection is waited for, before its client is replaced."""
_RECONNECT: Final = {"max_tries": -1, "delay": 0.1, "backoff": 2, "max_delay": 2.0}
# kazoo tells of every try to connect; we tell once, in our words.
_quiet = logging.getLogger(f"{__name__}.kazoo")
_quiet.setLevel(logging.CRITICAL)

Kind = Literal["create", "set", "delete"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A lasting node to be made, set or deleted."""

    path: str
    kind: Kind
    value: bytes = b""


class Session:
    """One session on our loop: requests to await, watches that wake, and the loss of the connection told at once.

    Requests raise ElectionUnavailableError.
    """

    def __init__(
        self, address: Address, on_lost: Callable[[], None] = lambda: None, *, proven_by_loop: bool = False
    ) -> None:
        """`proven_by_loop`: only requests keep the session alive, so that an event loop that hangs loses it."""
        self._crossing = Crossing()
        self._on_lost = on_lost
        self._unanswered: deque[None] = deque()
        self._lost_at: float | None = None
        self._live = asyncio.Event()
        self._over = asyncio.Event()
        self._news = asyncio.Event()
        self.timeout_s = address.session_s
        """The silence after which the server ends the session, as it was agreed on."""
        self.lost = False
        """Whether the connection was lost at any time."""
        self._client = KazooClient(
            hosts=address.hosts,
            timeout=address.session_s,
            logger=_quiet,
            connection_retry=_RECONNECT,
            auth_data=[("digest", f"{address.user}:{address.password}")] if address.user else None,
            default_acl=[make_digest_acl(address.user, address.password, all=True)] if address.user else None,
        )
        self._client.add_listener(self._state_changed)
        self._hear_agreement()
        if proven_by_loop:
            self._ping_for_requests_only()

    def start(self) -> None:
        """Begin to connect, and to connect again whenever the connection is lost."""
        self._client.start_async()

    async def connected(self, within_s: float) -> None:
        """Until there is a connection."""
        try:
            async with asyncio.timeout(within_s):
                await self._live.wait()
        except TimeoutError as exc:
            raise ElectionUnavailableError("ZooKeeper does not answer") from exc

    async def over(self) -> None:
        """Where the connection was lost: until it is back, the session has run out, or both took too long."""
        if self.lost:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ABANDON_AFTER * self.timeout_s):
                    await self._over.wait()

    def abandoned(self) -> bool:
        """Return whether the connection has been lost for so long that a new session is the better way."""
        return self._lost_at is not None and time.monotonic() - self._lost_at > ABANDON_AFTER * self.timeout_s

    async def close(self) -> None:
        """End the session, and with it all that it holds, at once where there is a connection."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._crossing.in_thread(self._stop)

    async def ensure(self, path: str) -> None:
        """Make a lasting node and those above it, where they are not there."""
        await self._ask(self._client.ensure_path_async, path)

    async def create(self, path: str, value: bytes, *, sequence: bool = False) -> tuple[str, int] | None:
        """Make a node that lives as long as the session; its path and czxid. None: there is one."""
        try:
            path, stat = await self._ask(
                self._client.create_async, path, value, ephemeral=True, sequence=sequence, include_data=True
            )
        except NodeExistsError:
            return None
        return path, stat.czxid

    async def write(self, path: str, value: bytes) -> None:
        """Set a node that is there."""
        try:
            await self._ask(self._client.set_async, path, value)
        except NoNodeError as exc:
            raise ElectionUnavailableError(f"{path} is gone") from exc

    async def change(self, proof: str, changes: Sequence[Change]) -> None:
        """All of it or nothing, and nothing where `proof` is gone: a node of this session, which a later one of the same
        client, that kazoo would send this on, does not have.
        """
        transaction = self._client.transaction()
        transaction.check(proof, -1)
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
        results = await self._ask(transaction.commit_async)
        if failed := [result for result in results if isinstance(result, Exception)]:
            raise ElectionUnavailableError(f"ZooKeeper refused a change: {failed!r}")

    async def heed(self, path: str) -> None:
        """`news` tells when this node comes, changes or goes."""
        await self._ask(self._client.exists_async, path, watch=self._heard)

    async def read(self, path: str, *, heed: bool = False) -> tuple[bytes, int] | None:
        """A node's value and czxid; None where it is not. With `heed`, `news` tells when that changes."""
        try:
            value, stat = await self._ask(self._client.get_async, path, watch=self._heard if heed else None)
        except NoNodeError:
            if heed:
                await self.heed(path)
            return None
        return value, stat.czxid

    async def children(self, path: str, *, heed: bool = False) -> tuple[list[str], int]:
        """The names below a node, and when it was set last, in epoch milliseconds; nothing and 0 where it is not."""
        try:
            names, stat = await self._ask(
                self._client.get_children_async, path, watch=self._heard if heed else None, include_data=True
            )
        except NoNodeError:
            return [], 0
        return names, stat.mtime

    async def made(self, path: str) -> tuple[int, int]:
        """Return a node's czxid, and when it was made in epoch milliseconds."""
        stat = await self._ask(self._client.exists_async, path)
        if stat is None:
            raise ElectionUnavailableError(f"{path} is gone")
        return stat.czxid, stat.ctime

    async def news(self, within_s: float) -> None:
        """Until a watch told something since the last call, or the connection was lost, or so many seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._news.wait()
        self._news.clear()

    async def _ask(self, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        # An answer that comes too late to be believed is none.
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(TRUST * self.timeout_s):
                self._unanswered.append(None)
                method(*arguments, **options).rawlink(lambda result: self._answered(answer, result))
                return await answer
        except TimeoutError as exc:
            raise ElectionUnavailableError("ZooKeeper does not answer") from exc
        except (NoNodeError, NodeExistsError):
            raise
        except KazooException as exc:
            raise ElectionUnavailableError(f"ZooKeeper went away: {exc!r}") from exc

    def _answered(self, answer: asyncio.Future[Any], result: Any) -> None:
        # On kazoo's thread.
        self._unanswered.pop()
        self._crossing.settle(answer, result.value, result.exception)

    def _heard(self, _event: Any) -> None:
        self._crossing.call(self._news.set)

    def _stop(self) -> None:
        with contextlib.suppress(Exception):  # what it says of a broken connection helps nobody
            self._client.stop()
        with contextlib.suppress(Exception):
            self._client.close()

    def _state_changed(self, state: str) -> None:
        # On kazoo's thread. A server that lost its data refuses, for ever, a client that has seen more than it has.
        # What this client saw counts for nothing once the connection is lost: the term has ended.
        if state != KazooState.CONNECTED:
            self._client.last_zxid = 0
        self._crossing.call(self._turned, state)

    def _turned(self, state: str) -> None:
        if state == KazooState.CONNECTED:
            self._lost_at = None
            self._live.set()
            if self.lost:
                self._over.set()
            return
        self._live.clear()
        if state == KazooState.LOST:
            self._over.set()
        if self._lost_at is None:
            self._lost_at = time.monotonic()
        self.lost = True
        self._on_lost()
        self._news.set()

    def _hear_agreement(self) -> None:
        # kazoo keeps to itself what the server agreed to; what it returns here is two thirds of it, in milliseconds.
        connection = self._client._connection  # noqa: SLF001 - see above; a test holds it against a server's limit
        connect = connection._connect  # noqa: SLF001

        def agreed(*arguments: Any) -> Any:
            read_ms, connect_ms = connect(*arguments)
            self.timeout_s = read_ms * 1.5 / 1000
            return read_ms, connect_ms

        connection._connect = agreed  # noqa: SLF001

    def _ping_for_requests_only(self) -> None:
        # kazoo's thread would keep the session of a loop that hangs alive for ever, and with it all that it holds.
        # While a request waits, the ping finds out whether the server answers at all.
        connection = self._client._connection  # noqa: SLF001 - see above; a test hangs a loop
        ping = connection._send_ping  # noqa: SLF001

        def send(*arguments: Any) -> None:
            if self._unanswered:
                ping(*arguments)

        connection._send_ping = send  # noqa: SLF001
