"""Bound the API's connections: their number, how long each may wait, and the bytes of bodies.

A connection is *unauthenticated* until a request on it had a valid key. Connections without a key
make room for those with one. Some places are reserved for them, so that a health check always gets
in. Where all are taken, the oldest idle unauthenticated connection is closed for the new one: each
gets the time in which all others could be replaced. If none is idle, the oldest is closed whose
request only waits for the rest of its body: a client without a key could hold it back for long.
"""

import asyncio
import ipaddress
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from rooms.domain.ids import OrganisationId
from rooms.settings import IpNetwork

K = TypeVar("K")
_log = logging.getLogger(__name__)

_MAX_EXAMINED: Final = 256
"""The most connections that are examined for one that can be closed.

Between two sweeps, a number of further ones as large as `ConnectionLimits.connections` is examined.
"""
_CHECK_INTERVAL_S: Final = 1.0
_RESERVED_CONNECTIONS: Final = 64
_IPV6_PREFIX: Final = 64
"""The smallest network of one subscriber."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Bound the number of connections, and how long each may wait."""

    connections: int = 8192
    """All connections at a time."""
    unauthenticated: int = 2048
    """Of these, connections without a key."""
    per_address: int = 512
    """Connections without a key from one address (IPv6: one /64); 0: no bound."""
    trusted: tuple[IpNetwork, ...] = ()
    """Addresses that `per_address` does not bound: proxies."""
    head_timeout_s: float = 10.0
    """From the first byte of a request, or the start of the connection, to the end of its head."""
    idle_timeout_s: float = 75.0
    """From an answer to the next request.

    It exceeds the idle time of clients: a connection that closes while a client writes leaves a
    publisher in doubt.
    """
    body_bytes_per_s: int = 1024
    """The lowest average rate of a body after `grace_s`."""
    grace_s: float = 10.0
    organisation_body_bytes: int = 256 * 1024 * 1024
    """One organisation's bodies beyond `small_body_bytes` each, and its unread answers."""
    small_body_bytes: int = 64 * 1024
    write_timeout_s: float = 30.0
    """The time for which a client may read nothing while an answer waits for it."""
    linger_s: float = 2.0
    """The time for which input is read after the last answer, so that the answer is not lost."""

    @property
    def authenticated(self) -> int:
        """Return how many connections may have a key; the others are for clients without one."""
        return self.connections - max(1, min(_RESERVED_CONNECTIONS, self.connections // 8))

    @property
    def check_interval_s(self) -> float:
        """Return how often connections are checked."""
        return min(
            _CHECK_INTERVAL_S,
            self.head_timeout_s / 4,
            self.idle_timeout_s / 4,
            self.write_timeout_s / 4,
            self.linger_s / 2,
            self.grace_s / 4,
        )


class WriteStall:
    """Find a client that reads almost nothing while answers wait for it."""

    __slots__ = ("_resumes", "_since")

    def __init__(self) -> None:
        self._resumes = 0
        self._since: tuple[int, float, int] | None = None
        """Resumes of writing, time and unsent bytes at the start of the stall."""

    def note_reading(self) -> None:
        """Note that the client has read what waited, so that writing resumes."""
        self._resumes += 1

    def clear(self) -> None:
        """End the stall: nothing waits."""
        self._since = None

    def is_too_slow(self, now: float, unsent: int, limits: ConnectionLimits) -> bool:
        """Return whether it has read too little over `write_timeout_s`. `unsent`: waiting bytes."""
        if self._since is None or self._since[0] != self._resumes:
            self._since = (self._resumes, now, unsent)
            return False
        _, since, before = self._since
        if now - since < limits.write_timeout_s:
            return False
        self._since = None
        return before - unsent < limits.body_bytes_per_s * limits.write_timeout_s


class ClientConnection(Protocol):
    """Be one of the bounded connections."""

    @property
    def address(self) -> str | None:
        """Return the client's address; None: it has none."""

    @property
    def unsent_bytes(self) -> int:
        """Return how many bytes of answers wait for the client to read them."""

    @property
    def idle(self) -> bool:
        """Return whether closing it loses nothing: no request is being answered."""

    @property
    def awaits_body(self) -> bool:
        """Return whether a request without a valid key only waits for the rest of its body."""

    def check_timeouts(self, now: float) -> None:
        """Close it if it has waited too long, at this time of the event loop."""

    def drop(self) -> None:
        """Close it at once."""


class ConnectionRegistry:
    """Bound the connections of one process."""

    def __init__(
        self,
        limits: ConnectionLimits,
        *,
        count_closed: Callable[[str], None],
        set_gauges: Callable[[int, int], None] = lambda *_: None,
    ) -> None:
        """Report each closed connection to `count_closed(reason)`.

        `set_gauges` gets the number with and without a key at each change.
        """
        self.limits = limits
        self.count_closed = count_closed
        self._set_gauges = set_gauges
        self._unauthenticated: dict[ClientConnection, str | None] = {}
        """Oldest first, with the address that `per_address` counts."""
        self._by_address: dict[str, dict[ClientConnection, None]] = {}
        self._authenticated: dict[ClientConnection, OrganisationId] = {}
        self._by_organisation: dict[OrganisationId, dict[ClientConnection, None]] = {}
        self._body_bytes: dict[OrganisationId, int] = {}
        """Bytes of bodies."""
        self._timer: asyncio.TimerHandle | None = None
        self._exhausted = False
        self._further_examinations = limits.connections

    def __len__(self) -> int:
        return len(self._unauthenticated) + len(self._authenticated)

    def add(self, connection: ClientConnection) -> bool:
        """Add a new connection. False: close it, there is no place and none can be made."""
        group = self._address_group(connection.address)
        if group is not None:
            same = self._by_address.get(group, {})
            if len(same) >= self.limits.per_address and not self._drop_one(same, "per_address"):
                self.count_closed("per_address")
                return False
        full = (
            len(self._unauthenticated) >= self.limits.unauthenticated
            or len(self) >= self.limits.connections
        )
        if full and not self._drop_one(self._unauthenticated, "unauthenticated"):
            self.count_closed("unauthenticated")
            return False
        self._add(connection, group)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(
                self.limits.check_interval_s, self._sweep
            )
        return True

    def remove(self, connection: ClientConnection) -> None:
        """Remove a connection; doing it twice is harmless."""
        if connection in self._authenticated:
            self._remove_authenticated(connection)
        elif connection in self._unauthenticated:
            self._remove_unauthenticated(connection)
        self._update_gauges()

    def mark_authenticated(
        self, connection: ClientConnection, organisation: OrganisationId
    ) -> None:
        """Note a valid key.

        Beyond the bound, the largest organisation loses its oldest idle connection.
        """
        known = self._authenticated.get(connection)
        if known == organisation or (known is None and connection not in self._unauthenticated):
            return
        if known is not None:
            self._remove_authenticated(connection)
        else:
            if len(self._authenticated) >= self.limits.authenticated:
                largest = max(self._by_organisation.values(), key=len, default={})
                if not self._drop_one(largest, "organisation"):
                    return  # it keeps its place among those without a key
            self._remove_unauthenticated(connection)
        self._authenticated[connection] = organisation
        self._by_organisation.setdefault(organisation, {})[connection] = None
        self._update_gauges()

    def mark_unauthenticated(self, connection: ClientConnection) -> None:
        """Note a request without a valid key."""
        if connection in self._authenticated:
            self._remove_authenticated(connection)
            self._add(connection, self._address_group(connection.address))

    def replace(self, old: ClientConnection, new: ClientConnection) -> None:
        """Note that another protocol serves a connection."""
        organisation = self._authenticated.get(old)
        self.remove(old)
        self._add(new, self._address_group(new.address))
        if organisation is not None:
            self.mark_authenticated(new, organisation)

    def reserve_body_bytes(self, organisation: OrganisationId, count: int) -> bool:
        """Reserve bytes of a body until its request is answered.

        False: the organisation has too many.
        """
        held = self._body_bytes.get(organisation, 0) + count
        if held > self.limits.organisation_body_bytes:
            return False
        self._body_bytes[organisation] = held
        return True

    def release_body_bytes(self, organisation: OrganisationId, count: int) -> None:
        """Release reserved bytes."""
        self._body_bytes[organisation] -= count
        if not self._body_bytes[organisation]:
            del self._body_bytes[organisation]

    @property
    def body_bytes(self) -> int:
        """Return how many bytes of large bodies are held in all."""
        return sum(self._body_bytes.values())

    def check_files(self) -> None:
        """Log and count when the process cannot open files: new connections are closed unanswered.

        libuv accepts them only to close them, and reports nothing.
        """
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as exc:
            if not self._exhausted:
                _log.error("no file can be opened, so new connections are closed: %s", exc)
            self._exhausted = True
            self.count_closed("files")
        else:
            if self._exhausted:
                _log.warning("files can be opened again, and connections are answered")
            self._exhausted = False

    def _add(self, connection: ClientConnection, group: str | None) -> None:
        self._unauthenticated[connection] = group
        if group is not None:
            self._by_address.setdefault(group, {})[connection] = None
        self._update_gauges()

    def _remove_unauthenticated(self, connection: ClientConnection) -> None:
        group = self._unauthenticated.pop(connection)
        if group is not None:
            _remove_from_group(self._by_address, group, connection)

    def _remove_authenticated(self, connection: ClientConnection) -> None:
        _remove_from_group(self._by_organisation, self._authenticated.pop(connection), connection)

    def _drop_one(self, among: dict[ClientConnection, Any], reason: str) -> bool:
        connection = self._find_displaceable(among)
        if connection is None:
            return False
        self.remove(connection)
        self.count_closed(reason)
        connection.drop()
        return True

    def _find_displaceable(self, among: dict[ClientConnection, Any]) -> ClientConnection | None:
        """Return the oldest idle connection, else the oldest that awaits a body.

        Busy ones count as the youngest then, so that the next search examines others.
        """
        idle: ClientConnection | None = None
        awaiting: ClientConnection | None = None
        busy: list[ClientConnection] = []
        for number, connection in enumerate(among):
            if number >= _MAX_EXAMINED:
                if awaiting is not None or not self._further_examinations:
                    break
                self._further_examinations -= 1
            if connection.idle:
                idle = connection
                break
            if not connection.awaits_body:
                busy.append(connection)
            elif awaiting is None:
                awaiting = connection
        for connection in busy:
            among[connection] = among.pop(connection)
        return awaiting if idle is None else idle

    def _drop_slow_readers(self, connections: list[ClientConnection]) -> None:
        """Close the connections with most unread bytes, until each organisation is in its bound.

        Clients without a key share one bound.
        """
        left = (
            sum(connection.unsent_bytes for connection in connections)
            - self.limits.organisation_body_bytes
        )
        for connection in sorted(connections, key=lambda one: one.unsent_bytes, reverse=True):
            if left <= 0:
                return
            left -= connection.unsent_bytes
            self.count_closed("unread")
            connection.drop()

    def _address_group(self, address: str | None) -> str | None:
        if not self.limits.per_address or address is None:
            return None
        try:
            found = ipaddress.ip_address(address.partition("%")[0])
        except ValueError:
            return None
        if isinstance(found, ipaddress.IPv6Address):
            if found.ipv4_mapped is not None:
                found = found.ipv4_mapped
            elif not any(found in network for network in self.limits.trusted):
                return str(ipaddress.ip_network((found, _IPV6_PREFIX), strict=False))
        return None if any(found in network for network in self.limits.trusted) else str(found)

    def _update_gauges(self) -> None:
        self._set_gauges(len(self._authenticated), len(self._unauthenticated))

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._further_examinations = self.limits.connections
        unread: dict[OrganisationId | None, list[ClientConnection]] = {}
        for connection in (*self._unauthenticated, *self._authenticated):
            connection.check_timeouts(now)
            if connection.unsent_bytes:
                unread.setdefault(self._authenticated.get(connection), []).append(connection)
        for connections in unread.values():
            self._drop_slow_readers(connections)
        self._timer = (
            loop.call_later(self.limits.check_interval_s, self._sweep) if len(self) else None
        )


def _remove_from_group(
    groups: dict[K, dict[ClientConnection, None]], key: K, connection: ClientConnection
) -> None:
    members = groups[key]
    del members[connection]
    if not members:
        del groups[key]


class BodyBytes:
    """Count the bytes of one body at a time.

    Those beyond the first `small_body_bytes` are reserved for the organisation that sends them.
    """

    __slots__ = ("_received", "_registry", "_reserved", "organisation", "since_check")

    def __init__(self, registry: ConnectionRegistry) -> None:
        self._registry = registry
        self._received = self._reserved = 0
        self.organisation: OrganisationId | None = None
        """Where bytes are reserved, theirs."""
        self.since_check = 0
        """Bytes since the rate was last measured."""

    def begin(self) -> None:
        """Begin with the body of another request."""
        self.since_check = self._received = 0

    def add(self, count: int) -> None:
        """Count received bytes."""
        self.since_check += count
        self._received += count

    @property
    def unreserved(self) -> int:
        """Return how many bytes must still be reserved."""
        return max(0, self._received - self._registry.limits.small_body_bytes - self._reserved)

    def reserve(self, organisation: OrganisationId | None) -> bool:
        """Reserve the unreserved bytes. False: the organisation has too many.

        None: the key was not checked yet; they are reserved with the next part, or at the next
        check.
        """
        more = self.unreserved
        self.organisation = self.organisation or organisation
        if self.organisation is None:
            return True
        if not self._registry.reserve_body_bytes(self.organisation, more):
            return False
        self._reserved += more
        return True

    def release(self) -> None:
        """Release the reserved bytes."""
        if self.organisation is not None and self._reserved:
            self._registry.release_body_bytes(self.organisation, self._reserved)
        self.organisation, self._reserved = None, 0
