"""Name resolution for webhooks: c-ares, or the system's resolver on threads of its own.

Neither uses the event loop's `getaddrinfo`: under uvloop that has two threads for the whole process, PostgreSQL's
reconnects included, and a name server that stays silent holds each of them for many seconds.
"""

import asyncio
import logging
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final, Protocol

import pycares

_log = logging.getLogger(__name__)

_TRY_S: Final = 1.5
"""How long the first try at a name server may take; each further one takes twice as long."""
_TRIES: Final = 4
_CACHE_S: Final = 1.0
"""How long c-ares may keep answers. Its cache holds any number of them, for as long as their owner says."""
_THREADS: Final = 64
_ABSENT: Final = frozenset((pycares.errno.ARES_ENOTFOUND, pycares.errno.ARES_ENODATA, pycares.errno.ARES_EBADNAME))


class Resolver(Protocol):
    """Look names up."""

    async def __call__(self, host: str) -> Sequence[str]:
        """Return the addresses of `host`, best first; none where its zone says that there are none.

        OSError: no answer, which says nothing about the name.
        """
        ...


class DnsResolver:
    """Ask the name servers of /etc/resolv.conf by c-ares, after /etc/hosts, in the order that nsswitch.conf gives.

    Any number of look-ups share one thread, and each of them ends. Call `close` at the end.
    """

    def __init__(
        self, *, servers: Sequence[str] | None = None, try_s: float = _TRY_S, cache_s: float = _CACHE_S
    ) -> None:
        """`servers` (HOST:PORT): ask these instead of the system's."""
        self._servers = servers
        self._try_s = try_s
        self._cache_s = cache_s
        self._channel: pycares.Channel | None = None
        self._instead: SystemResolver | None = None
        self._flush: asyncio.TimerHandle | None = None

    async def __call__(self, host: str) -> Sequence[str]:
        loop = asyncio.get_running_loop()
        if self._channel is None:
            if self._instead is not None:
                return await self._instead(host)
            try:
                self._channel = pycares.Channel(servers=self._servers, timeout=self._try_s, tries=_TRIES)
            except pycares.AresError:
                # It watches resolv.conf, for which the system gives out a limited number of inotify instances.
                _log.warning("c-ares cannot be used, names are looked up by libc", exc_info=True)
                self._instead = SystemResolver()
                return await self._instead(host)
        answer: asyncio.Future[pycares.AddrInfoResult] = loop.create_future()

        def answered(result: pycares.AddrInfoResult | None, error: int | None) -> None:
            # Called on the thread of c-ares, possibly after the loop has ended.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(_settle, answer, result, error)

        try:
            self._channel.getaddrinfo(host, None, type=socket.SOCK_STREAM, callback=answered)
        except (pycares.AresError, ValueError) as exc:
            raise OSError(f"the name cannot be looked up: {exc}") from exc
        if self._flush is None:
            self._flush = loop.call_later(self._cache_s, self._forget)
        try:
            found = await answer
        except _NoAddressError:
            return ()
        return tuple(dict.fromkeys(_text(node.addr) for node in found.nodes))

    def close(self) -> None:
        """End the look-ups under way. Again is harmless."""
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._instead is not None:
            self._instead.close()

    def _forget(self) -> None:
        self._flush = None
        if self._channel is not None:
            try:
                # This reads the configuration again as well, and empties the cache.
                self._channel.reinit()
            except pycares.AresError:
                _log.exception("the resolver's configuration cannot be read; a new resolver takes over")
                self.close()


class SystemResolver:
    """Ask libc on threads of its own, for names that only a module of nsswitch.conf knows (mDNS, LDAP, machines).

    libc cannot be interrupted: a name server that stays silent holds a thread for as long as resolv.conf says, and the
    process ends that much later.
    """

    def __init__(self, *, threads: int = _THREADS) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="rooms-names")

    async def __call__(self, host: str) -> Sequence[str]:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(self._executor, _getaddrinfo, host)
        except socket.gaierror as exc:
            if exc.errno in {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}:
                return ()
            raise
        return tuple(dict.fromkeys(str(info[4][0]) for info in found))

    def close(self) -> None:
        """End as soon as the look-ups under way allow it. Again is harmless."""
        self._executor.shutdown(wait=False, cancel_futures=True)


class _NoAddressError(Exception):
    pass


def _getaddrinfo(host: str) -> list[Any]:
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)


def _settle(
    answer: "asyncio.Future[pycares.AddrInfoResult]", result: pycares.AddrInfoResult | None, error: int | None
) -> None:
    if answer.done():
        return
    if result is not None and error is None:
        answer.set_result(result)
    elif error in _ABSENT:
        answer.set_exception(_NoAddressError())
    else:
        answer.set_exception(OSError(pycares.errno.strerror(error or pycares.errno.ARES_EFORMERR)))


def _text(address: tuple[Any, ...]) -> str:
    host, *more = address
    text = host.decode("ascii") if isinstance(host, bytes) else str(host)
    zone = more[2] if len(more) > 2 else 0  # noqa: PLR2004 port, flow and zone of IPv6
    return f"{text}%{zone}" if zone else text
