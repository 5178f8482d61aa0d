"""Resolve webhook names by c-ares or libc, with bounded lookups and a bounded cache of results.

    DnsResolver      asks name servers by c-ares: any number of lookups on one thread
    SystemResolver   asks libc on threads of its own
    DnsLookups       bounds lookups in progress, per organisation and in all, and their time
    DnsCache         keeps vetted addresses or refusals, per organisation and in all

Neither resolver uses the event loop's `getaddrinfo`. Under uvloop that has two threads for the
whole process, PostgreSQL's reconnects included, and a silent name server blocks each for many
seconds.
"""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol

import pycares

from delivery.push.errors import LookupsBusyError, TargetRefusedError
from delivery.push.http.bulkhead import LimitScope
from rooms.domain.ids import OrganisationId

_log = logging.getLogger(__name__)

ORGANISATION_LOOKUPS: Final = 32
_FIRST_TRY_S: Final = 1.5
"""The time limit of the first try at a name server; each further one takes twice as long."""
_TRIES: Final = 4
_CACHE_S: Final = 1.0
"""The interval of flushing the cache of c-ares, which has no bound of its own."""
_THREADS: Final = 64
_NO_ADDRESS_CODES: Final = frozenset(
    (pycares.errno.ARES_ENOTFOUND, pycares.errno.ARES_ENODATA, pycares.errno.ARES_EBADNAME)
)


class Resolver(Protocol):
    """Resolve names to addresses."""

    async def __call__(self, host: str) -> Sequence[str]:
        """Return the addresses of `host`, best first; none if its zone has none.

        OSError: no answer, so nothing is known about the name.
        """
        ...


class DnsResolver:
    """Ask the name servers of /etc/resolv.conf by c-ares, and /etc/hosts, as nsswitch.conf orders.

    Any number of lookups share one thread, and each of them ends. Call `close` at the end.
    """

    def __init__(
        self,
        *,
        servers: Sequence[str] | None = None,
        first_try_s: float = _FIRST_TRY_S,
        cache_s: float = _CACHE_S,
    ) -> None:
        """Configure the resolver. `servers` (HOST:PORT) are asked instead of the system's."""
        self._servers = servers
        self._first_try_s = first_try_s
        self._cache_s = cache_s
        self._channel: pycares.Channel | None = None
        self._fallback: SystemResolver | None = None
        self._flush_timer: asyncio.TimerHandle | None = None

    async def __call__(self, host: str) -> Sequence[str]:
        loop = asyncio.get_running_loop()
        if self._channel is None:
            if self._fallback is not None:
                return await self._fallback(host)
            try:
                self._channel = pycares.Channel(
                    servers=self._servers, timeout=self._first_try_s, tries=_TRIES
                )
            except pycares.AresError:
                # It watches resolv.conf with inotify, of which the system has a limited number.
                _log.warning("c-ares cannot be used; libc resolves names instead", exc_info=True)
                self._fallback = SystemResolver()
                return await self._fallback(host)
        answer: asyncio.Future[pycares.AddrInfoResult] = loop.create_future()

        def on_result(result: pycares.AddrInfoResult | None, error: int | None) -> None:
            # Called on the thread of c-ares, possibly after the loop has ended.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(_complete_lookup, answer, result, error)

        try:
            self._channel.getaddrinfo(host, None, type=socket.SOCK_STREAM, callback=on_result)
        except (pycares.AresError, ValueError) as exc:
            raise OSError(f"the name cannot be looked up: {exc}") from exc
        if self._flush_timer is None:
            self._flush_timer = loop.call_later(self._cache_s, self._flush_cache)
        try:
            found = await answer
        except _NoAddressError:
            return ()
        return tuple(dict.fromkeys(_address_text(node.addr) for node in found.nodes))

    def close(self) -> None:
        """End the lookups in progress. A second call has no effect."""
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._fallback is not None:
            self._fallback.close()

    def _flush_cache(self) -> None:
        self._flush_timer = None
        if self._channel is not None:
            try:
                # This empties the cache, and reads the configuration again.
                self._channel.reinit()
            except pycares.AresError:
                _log.exception(
                    "cannot read the resolver's configuration; a new resolver takes over"
                )
                self.close()


class SystemResolver:
    """Ask libc on own threads, for names that only a module of nsswitch.conf knows (mDNS, LDAP).

    libc cannot be interrupted: a silent name server blocks a thread for as long as resolv.conf
    allows, and delays the end of the process by as much.
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
        """End as soon as the lookups in progress allow. A second call has no effect."""
        self._executor.shutdown(wait=False, cancel_futures=True)


class _NoAddressError(Exception):
    pass


def _getaddrinfo(host: str) -> list[Any]:
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)


def _complete_lookup(
    answer: "asyncio.Future[pycares.AddrInfoResult]",
    result: pycares.AddrInfoResult | None,
    error: int | None,
) -> None:
    if answer.done():
        return
    if result is not None and error is None:
        answer.set_result(result)
    elif error in _NO_ADDRESS_CODES:
        answer.set_exception(_NoAddressError())
    else:
        answer.set_exception(OSError(pycares.errno.strerror(error or pycares.errno.ARES_EFORMERR)))


def _address_text(address: tuple[Any, ...]) -> str:
    host, *more = address
    text = host.decode("ascii") if isinstance(host, bytes) else str(host)
    zone = more[2] if len(more) > 2 else 0  # noqa: PLR2004 port, flow and zone of IPv6
    return f"{text}%{zone}" if zone else text


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupLimits:
    """Bound lookups, in number and seconds.

    `deadline_s`: of one lookup. `wait_s`: of the wait for a slot, first of the organisation, then
    of all.
    """

    total: int = 256
    per_organisation: int = ORGANISATION_LOOKUPS
    deadline_s: float = 5.0
    wait_s: float = 5.0


class _OrganisationSlots:
    __slots__ = ("semaphore", "users")

    def __init__(self, limit: int) -> None:
        self.semaphore = asyncio.Semaphore(limit)
        self.users = 0


class DnsLookups:
    """Run lookups. One that waits for a slot of its organisation takes no shared slot."""

    def __init__(
        self, resolver: Resolver, limits: LookupLimits, on_wait: Callable[[LimitScope], None]
    ) -> None:
        self._resolver = resolver
        self._limits = limits
        self._on_wait = on_wait
        self._total_slots = asyncio.Semaphore(limits.total)
        self._slots: dict[OrganisationId, _OrganisationSlots] = {}

    @property
    def active_organisations(self) -> int:
        """Return how many organisations have a lookup in progress or waiting."""
        return len(self._slots)

    async def run(self, host: str, organisation: OrganisationId) -> Sequence[str]:
        """Return the resolver's addresses.

        OSError: no answer; as a TimeoutError, not in time. LookupsBusyError: the resolver was not
        asked.
        """
        with self._organisation_slot(organisation) as slots:
            async with (
                self._acquire(slots, LimitScope.ORGANISATION),
                self._acquire(self._total_slots, LimitScope.ALL),
            ):
                async with asyncio.timeout(self._limits.deadline_s):
                    return await self._resolver(host)

    @contextmanager
    def _organisation_slot(self, organisation: OrganisationId) -> Iterator[asyncio.Semaphore]:
        slots = self._slots.get(organisation)
        if slots is None:
            slots = self._slots[organisation] = _OrganisationSlots(self._limits.per_organisation)
        slots.users += 1
        try:
            yield slots.semaphore
        finally:
            slots.users -= 1
            if not slots.users:
                del self._slots[organisation]

    @asynccontextmanager
    async def _acquire(
        self, semaphore: asyncio.Semaphore, scope: LimitScope
    ) -> AsyncIterator[None]:
        if semaphore.locked():
            self._on_wait(scope)
        try:
            async with asyncio.timeout(self._limits.wait_s):
                await semaphore.acquire()
        except TimeoutError as exc:
            raise LookupsBusyError(f"too many names are looked up at a time ({scope})") from exc
        try:
            yield
        finally:
            semaphore.release()


@dataclass(slots=True, kw_only=True)
class DnsResult:
    """Hold addresses, or a refusal, or a shortage of the look-up. Times are monotonic seconds."""

    addresses: tuple[str, ...] = ()
    refusal: type[TargetRefusedError] | None = None
    shortage: OSError | None = None
    """The system's error for which the name was not looked up."""
    detail: str = ""
    fresh_until: float
    """The name is looked up again after this."""
    usable_until: float
    """The addresses are not used after this, even if no lookup succeeds."""
    failures: int = 0
    """Lookups since the last one that returned addresses."""


class DnsCache:
    """Keep results by organisation, so that no organisation can evict those of another."""

    def __init__(self, *, total: int, per_organisation: int) -> None:
        self._total = total
        self._per_organisation = per_organisation
        self.results: dict[OrganisationId, dict[str, DnsResult]] = {}
        """Results by organisation and host, read by each delivery. Only this class changes it."""
        self._size = 0

    @property
    def size(self) -> int:
        """Return how many names are cached."""
        return self._size

    def get(self, organisation: OrganisationId, host: str) -> DnsResult | None:
        """Return the result for a host, however old."""
        names = self.results.get(organisation)
        return None if names is None else names.get(host)

    def put(self, organisation: OrganisationId, host: str, result: DnsResult) -> None:
        """Keep a result, and drop the oldest if there are too many."""
        self._drop(organisation, host)
        if self._size >= self._total:
            # The organisation with most names loses one: those with a few keep them.
            largest = max(self.results, key=lambda owner: len(self.results[owner]))
            self._drop(largest, next(iter(self.results[largest])))
        names = self.results.setdefault(organisation, {})
        names[host] = result
        self._size += 1
        if len(names) > self._per_organisation:
            self._drop(organisation, next(iter(names)))

    def _drop(self, organisation: OrganisationId, host: str) -> None:
        names = self.results.get(organisation)
        if names is not None and names.pop(host, None) is not None:
            self._size -= 1
            if not names:
                del self.results[organisation]
