"""Bound the connections of the API: how many there may be, and how long each may wait for its client.

A connection is *unauthenticated* until a request on it had a valid key. Those without a key make room for those with one, and
some places are theirs only, so that a health check always gets in. Where all are taken, the oldest unauthenticated connection
that has no request under way is closed for the new one: each gets the time in which all others could be replaced.
"""

import asyncio
import ipaddress
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from rooms.domain.ids import OrganisationId
from rooms.settings import IpNetwork

K = TypeVar("K")
_log = logging.getLogger(__name__)

_LOOKED_AT: Final = 256
"""So many connections at most are asked whether they can go."""
_SWEEP_S: Final = 1.0
_RESERVED: Final = 64
_IPV6_PREFIX: Final = 64
"""What one subscriber of a network has at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Bound how many connections there are, and how long each may wait."""

    connections: int = 8192
    """In all, at a time."""
    unauthenticated: int = 2048
    """Of these, without a key."""
    per_address: int = 512
    """Of those without a key, from one address (IPv6: one /64); 0: no bound."""
    trusted: tuple[IpNetwork, ...] = ()
    """Addresses that `per_address` is not for: proxies."""
    head_s: float = 10.0
    """From the first byte of a request, or the beginning of the connection, to the end of its head."""
    idle_s: float = 75.0
    """From an answer to the next request. Longer than clients keep their connections: one that is closed in the moment it is
    written to leaves a publisher in doubt.
    """
    body_bytes_per_s: int = 1024
    """How fast a body must come at least, on average, after `grace_s`."""
    grace_s: float = 10.0
    organisation_body_bytes: int = 256 * 1024 * 1024
    """Of the bodies of one organisation that are held, beyond `small_body_bytes` of each; and of its unread answers."""
    small_body_bytes: int = 64 * 1024
    write_s: float = 30.0
    """How long a client may read nothing while an answer waits for it."""
    linger_s: float = 2.0
    """How long what a client still sends is read behind the last answer, so that the answer is not lost with it."""

    @property
    def authenticated(self) -> int:
        """Return how many may have a key: the others are for health checks, and for clients that have not sent theirs yet."""
        return self.connections - max(1, min(_RESERVED, self.connections // 8))

    @property
    def sweep_s(self) -> float:
        """Return how often connections are checked."""
        return min(_SWEEP_S, self.head_s / 4, self.idle_s / 4, self.write_s / 4, self.linger_s / 2, self.grace_s / 4)


class Connection(Protocol):
    """Be one of the connections that are bounded."""

    @property
    def address(self) -> str | None:
        """Return the client's; None: it has none."""

    @property
    def unread(self) -> int:
        """Return how many bytes of answers wait for the client to read them."""

    @property
    def idle(self) -> bool:
        """Return whether closing it loses nothing: no request of it is being answered."""

    def check(self, now: float) -> None:
        """End what has waited for too long, at this time of the event loop."""

    def drop(self) -> None:
        """Close at once."""


class Connections:
    """Bound the connections of one process. `count(reason)` is called for each that is closed for a bound."""

    def __init__(
        self, bounds: Bounds, *, count: Callable[[str], None], gauge: Callable[[int, int], None] = lambda *_: None
    ) -> None:
        """Take `gauge` too: it is given how many there are, with and without a key, at each change."""
        self.bounds = bounds
        self.count = count
        self._gauge = gauge
        self._unauthenticated: dict[Connection, str | None] = {}
        """Oldest first, with what `per_address` counts."""
        self._by_address: dict[str, dict[Connection, None]] = {}
        self._authenticated: dict[Connection, OrganisationId] = {}
        self._by_organisation: dict[OrganisationId, dict[Connection, None]] = {}
        self._held: dict[OrganisationId, int] = {}
        """Bytes of bodies."""
        self._timer: asyncio.TimerHandle | None = None
        self._exhausted = False

    def __len__(self) -> int:
        return len(self._unauthenticated) + len(self._authenticated)

    def opened(self, connection: Connection) -> bool:
        """Add a new connection. False: there is no place for it, nor one that could be made; close it."""
        group = self._group(connection.address)
        if group is not None:
            same = self._by_address.get(group, {})
            if len(same) >= self.bounds.per_address and not self._drop_one(same, "per_address"):
                self.count("per_address")
                return False
        full = len(self._unauthenticated) >= self.bounds.unauthenticated or len(self) >= self.bounds.connections
        if full and not self._drop_one(self._unauthenticated, "unauthenticated"):
            self.count("unauthenticated")
            return False
        self._add(connection, group)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.bounds.sweep_s, self._sweep)
        return True

    def closed(self, connection: Connection) -> None:
        """Forget a connection; twice is harmless."""
        if connection in self._authenticated:
            self._forget_authenticated(connection)
        elif connection in self._unauthenticated:
            self._forget_unauthenticated(connection)
        self._changed()

    def signed_in(self, connection: Connection, organisation: OrganisationId) -> None:
        """Note a valid key. Beyond the bound, the organisation with most connections loses its oldest idle one."""
        known = self._authenticated.get(connection)
        if known == organisation or (known is None and connection not in self._unauthenticated):
            return
        if known is not None:
            self._forget_authenticated(connection)
        else:
            if len(self._authenticated) >= self.bounds.authenticated:
                largest = max(self._by_organisation.values(), key=len, default={})
                if not self._drop_one(largest, "organisation"):
                    return  # it keeps its place among those without a key
            self._forget_unauthenticated(connection)
        self._authenticated[connection] = organisation
        self._by_organisation.setdefault(organisation, {})[connection] = None
        self._changed()

    def signed_out(self, connection: Connection) -> None:
        """Note a request without a valid key."""
        if connection in self._authenticated:
            self._forget_authenticated(connection)
            self._add(connection, self._group(connection.address))

    def replaced(self, old: Connection, new: Connection) -> None:
        """Note that another protocol serves a connection."""
        organisation = self._authenticated.get(old)
        self.closed(old)
        self._add(new, self._group(new.address))
        if organisation is not None:
            self.signed_in(new, organisation)

    def hold(self, organisation: OrganisationId, count: int) -> bool:
        """Count bytes of a body that is held until its request is answered. False: the organisation has too many already."""
        held = self._held.get(organisation, 0) + count
        if held > self.bounds.organisation_body_bytes:
            return False
        self._held[organisation] = held
        return True

    def release(self, organisation: OrganisationId, count: int) -> None:
        """Count them no longer."""
        self._held[organisation] -= count
        if not self._held[organisation]:
            del self._held[organisation]

    @property
    def held(self) -> int:
        """Return how many bytes of large bodies are held in all."""
        return sum(self._held.values())

    def check_files(self) -> None:
        """Log and count, where the process can open no file: connections that come now are closed unanswered.

        libuv accepts them only to close them, and says nothing of it.
        """
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as exc:
            if not self._exhausted:
                _log.error("no file can be opened, so new connections are closed: %s", exc)
            self._exhausted = True
            self.count("files")
        else:
            if self._exhausted:
                _log.warning("files can be opened again, and connections are answered")
            self._exhausted = False

    def _add(self, connection: Connection, group: str | None) -> None:
        self._unauthenticated[connection] = group
        if group is not None:
            self._by_address.setdefault(group, {})[connection] = None
        self._changed()

    def _forget_unauthenticated(self, connection: Connection) -> None:
        group = self._unauthenticated.pop(connection)
        if group is not None:
            _remove(self._by_address, group, connection)

    def _forget_authenticated(self, connection: Connection) -> None:
        _remove(self._by_organisation, self._authenticated.pop(connection), connection)

    def _drop_one(self, among: Iterable[Connection], reason: str) -> bool:
        for connection, _ in zip(among, range(_LOOKED_AT), strict=False):
            if connection.idle:
                self.closed(connection)
                self.count(reason)
                connection.drop()
                return True
        return False

    def _drop_unread(self, connections: list[Connection]) -> None:
        """Close those with most unread bytes, until one organisation (or all strangers) is within its bound."""
        left = sum(connection.unread for connection in connections) - self.bounds.organisation_body_bytes
        for connection in sorted(connections, key=lambda one: one.unread, reverse=True):
            if left <= 0:
                return
            left -= connection.unread
            self.count("unread")
            connection.drop()

    def _group(self, address: str | None) -> str | None:
        if not self.bounds.per_address or address is None:
            return None
        try:
            found = ipaddress.ip_address(address.partition("%")[0])
        except ValueError:
            return None
        if isinstance(found, ipaddress.IPv6Address):
            if found.ipv4_mapped is not None:
                found = found.ipv4_mapped
            elif not any(found in network for network in self.bounds.trusted):
                return str(ipaddress.ip_network((found, _IPV6_PREFIX), strict=False))
        return None if any(found in network for network in self.bounds.trusted) else str(found)

    def _changed(self) -> None:
        self._gauge(len(self._authenticated), len(self._unauthenticated))

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        unread: dict[OrganisationId | None, list[Connection]] = {}
        for connection in (*self._unauthenticated, *self._authenticated):
            connection.check(now)
            if connection.unread:
                unread.setdefault(self._authenticated.get(connection), []).append(connection)
        for connections in unread.values():
            self._drop_unread(connections)
        self._timer = loop.call_later(self.bounds.sweep_s, self._sweep) if len(self) else None


def _remove(groups: dict[K, dict[Connection, None]], key: K, connection: Connection) -> None:
    members = groups[key]
    del members[connection]
    if not members:
        del groups[key]
