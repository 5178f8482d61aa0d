"""Guard against server-side request forgery: webhooks reach public and allowed addresses only.

Names are resolved here, and the client dials only addresses that were vetted here. The operator's
settings for that are a `TargetPolicy`, which can be passed to another process as text.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final, Self

from delivery.push.errors import (
    BlockedError,
    LookupsBusyError,
    LookupShortageError,
    TargetRefusedError,
    UnresolvableError,
)
from delivery.push.http.bulkhead import LimitScope
from delivery.push.http.dns import (
    ORGANISATION_LOOKUPS,
    DnsCache,
    DnsLookups,
    DnsResolver,
    DnsResult,
    LookupLimits,
    Resolver,
    SystemResolver,
)
from delivery.push.http.shortage import find_lookup_shortage
from rooms.domain.ids import OrganisationId
from rooms.domain.push_url import REFUSED_PORTS, PushUrl, ends_in_number
from rooms.settings import Settings

IpAddress = IPv4Address | IPv6Address
IpNetwork = IPv4Network | IPv6Network

_log = logging.getLogger(__name__)

ALLOW_HINT = "ROOMS_ALLOW_TARGETS=<cidr>,… allows the networks that webhooks should reach"
PORT_HINT = "ROOMS_REFUSE_PORTS lists the ports that are refused"
_FRESH_S: Final = 5.0
_STALE_S: Final = 300.0
_BACKOFF_S: Final = 30.0
_REFRESH_WAIT_S: Final = 0.5
_MAX_NAMES: Final = 10_000
_MAX_NAMES_PER_ORGANISATION: Final = 2_000
_MAX_ADDRESSES: Final = 32
_LOOPBACK_NAMES: Final = frozenset(
    {"localhost", "localhost.localdomain", "localhost6", "ip6-localhost", "ip6-loopback"}
)
_LOOPBACKS: Final = (IPv4Address("127.0.0.1"), IPv6Address("::1"))

# The special-purpose registries of IANA, and networks that reach IPv4 through IPv6.
_REFUSED_V4 = tuple(
    (IPv4Network(cidr), kind)
    for cidr, kind in (
        ("0.0.0.0/8", "an unspecified"),
        ("10.0.0.0/8", "a private"),
        ("100.64.0.0/10", "a carrier-grade NAT"),
        ("127.0.0.0/8", "a loopback"),
        ("169.254.0.0/16", "a link-local"),
        ("172.16.0.0/12", "a private"),
        ("192.0.0.0/24", "a reserved"),
        ("192.0.2.0/24", "a documentation"),
        ("192.31.196.0/24", "a reserved"),
        ("192.52.193.0/24", "a reserved"),
        ("192.88.99.0/24", "a 6to4 relay"),
        ("192.168.0.0/16", "a private"),
        ("192.175.48.0/24", "a reserved"),
        ("198.18.0.0/15", "a benchmark"),
        ("198.51.100.0/24", "a documentation"),
        ("203.0.113.0/24", "a documentation"),
        ("224.0.0.0/4", "a multicast"),
        ("255.255.255.255/32", "a broadcast"),
        ("240.0.0.0/4", "a reserved"),
    )
)
_MAPPED = IPv6Network("::ffff:0:0/96")
_TRANSLATED = IPv6Network("::ffff:0:0:0/96")
_COMPATIBLE = IPv6Network("::/96")
_NAT64 = IPv6Network("64:ff9b::/96")
_NAT64_LOCAL = IPv6Network("64:ff9b:1::/48")
_6TO4 = IPv6Network("2002::/16")
_TEREDO = IPv6Network("2001::/32")
_GLOBAL_UNICAST = IPv6Network("2000::/3")
_REFUSED_V6 = (
    (IPv6Network("::/128"), "an unspecified"),
    (IPv6Network("::1/128"), "a loopback"),
    (_MAPPED, "an IPv4-mapped"),
    (_TRANSLATED, "an IPv4-translated"),
    (_COMPATIBLE, "an IPv4-compatible"),
    (_NAT64, "a NAT64"),
    (_NAT64_LOCAL, "a NAT64"),
    (IPv6Network("100::/64"), "a discard"),
    (_TEREDO, "a Teredo"),
    (IPv6Network("2001::/23"), "a reserved"),
    (IPv6Network("2001:db8::/32"), "a documentation"),
    (_6TO4, "a 6to4"),
    (IPv6Network("3fff::/20"), "a documentation"),
    (IPv6Network("fc00::/7"), "a unique-local"),
    (IPv6Network("fe80::/10"), "a link-local"),
    (IPv6Network("fec0::/10"), "a site-local"),
    (IPv6Network("ff00::/8"), "a multicast"),
)


def refused_kind(address: IpAddress, allow: Sequence[IpNetwork]) -> str | None:
    """Return the kind (with its article) of a refused address; None for an allowed one."""
    if not any(address in network for network in allow):
        refused = _REFUSED_V4 if isinstance(address, IPv4Address) else _REFUSED_V6
        for network, kind in refused:
            if address in network:
                return kind
        if isinstance(address, IPv6Address) and address not in _GLOBAL_UNICAST:
            return "an unassigned"
    if isinstance(address, IPv6Address):
        if address.scope_id is not None:
            return "a zoned"
        return next(
            (found for inner in _embedded_ipv4(address) if (found := refused_kind(inner, allow))),
            None,
        )
    return None


def _embedded_ipv4(address: IPv6Address) -> Iterator[IPv4Address]:
    """Yield the IPv4 addresses at which a packet to this IPv6 address may end."""
    bits = int(address)
    low = bits & 0xFFFF_FFFF
    if any(address in network for network in (_MAPPED, _TRANSLATED, _NAT64)) or (
        address in _COMPATIBLE and low > 1
    ):
        yield IPv4Address(low)
    elif address in _NAT64_LOCAL:
        # RFC 6052: in the last 32 bits, or (prefix of 48 bits) on both sides of bits 64 to 71.
        yield IPv4Address(low or (bits >> 64 & 0xFFFF) << 16 | bits >> 40 & 0xFFFF)
    elif address.sixtofour is not None:
        yield address.sixtofour
    elif address.teredo is not None:
        yield from address.teredo
    elif bits >> 32 & 0xFDFF_FFFF == 0x5EFE:  # noqa: PLR2004 ISATAP's mark in the interface part
        yield IPv4Address(low)


class SsrfGuard:
    """Resolve targets, and refuse ports and addresses that are not public unless `allow` has them.

    Vetted addresses are used for `fresh_s` seconds of `clock`, which is monotonic. Then the name
    is looked up again, and an attempt waits at most `refresh_wait_s` for the answer. Without an
    answer the old addresses are used until they are `stale_s` old (RFC 8767). An answer that has
    no allowed address counts at once. A failed lookup is repeated after `fresh_s`, then after
    twice that, and so on until `backoff_s` (RFC 9520).

    An allowed IPv4 network does not allow IPv6 forms of its addresses: those need both forms
    allowed.
    """

    def __init__(
        self,
        allow: Sequence[IpNetwork] = (),
        *,
        refuse_ports: Collection[int] = REFUSED_PORTS,
        resolver: Resolver | None = None,
        clock: Callable[[], float] = time.monotonic,
        limits: LookupLimits | None = None,
        fresh_s: float = _FRESH_S,
        stale_s: float = _STALE_S,
        backoff_s: float = _BACKOFF_S,
        refresh_wait_s: float = _REFRESH_WAIT_S,
        max_names: int = _MAX_NAMES,
        max_names_per_organisation: int = _MAX_NAMES_PER_ORGANISATION,
        observe: Callable[[str], None] = lambda _outcome: None,
        on_wait: Callable[[LimitScope], None] = lambda _scope: None,
    ) -> None:
        """Configure the guard.

        `observe` gets the outcome of each lookup, `on_wait` the limit at which a lookup waits.
        """
        self._allow = tuple(allow)
        self._refuse_ports = frozenset(refuse_ports)
        self._lookups = DnsLookups(resolver or DnsResolver(), limits or LookupLimits(), on_wait)
        self._clock = clock
        self._fresh_s = fresh_s
        self._stale_s = stale_s
        self._backoff_s = backoff_s
        self._refresh_wait_s = refresh_wait_s
        self._observe = observe
        self._cache = DnsCache(total=max_names, per_organisation=max_names_per_organisation)
        self._pending: dict[tuple[OrganisationId, str], asyncio.Task[DnsResult]] = {}

    def cached(self, host: str, organisation: OrganisationId) -> tuple[str, ...] | None:
        """Return vetted addresses that need no lookup, or None. The port is not checked."""
        names = self._cache.results.get(organisation)
        result = None if names is None else names.get(host)
        if result is None or result.fresh_until <= self._clock():
            return None
        return result.addresses or None

    async def resolve(self, host: str, port: int, organisation: OrganisationId) -> tuple[str, ...]:
        """Return one or more addresses, best first.

        BlockedError, UnresolvableError. LookupShortageError: this process or machine lacks files.
        """
        self._check_port(port)
        result = self._cache.get(organisation, host)
        if result is None or result.fresh_until <= self._clock():
            result = await self._refresh(host, organisation, result)
        if result.shortage is not None:
            raise LookupShortageError(result.shortage)
        if result.refusal is not None:
            raise result.refusal(result.detail)
        return result.addresses

    def check_literal(self, target: PushUrl) -> None:
        """Refuse a target if that needs no lookup. Raises BlockedError, which names the fix."""
        self._check_port(target.port)
        host = target.host.removesuffix(".")
        literal = _parse_literal(host)
        if literal is not None:
            kind = self.refused_kind(literal)
            if kind is not None:
                raise BlockedError(
                    f"{host} is {kind} address, which webhooks may not reach; {ALLOW_HINT}"
                )
        elif (host in _LOOPBACK_NAMES or host.endswith(".localhost")) and all(
            self.refused_kind(address) for address in _LOOPBACKS
        ):
            raise BlockedError(
                f"{host} names the machine itself, which webhooks may not reach; {ALLOW_HINT}"
            )

    def refused_kind(self, address: IpAddress) -> str | None:
        """Return the kind (with its article) of a refused address; None for an allowed one."""
        return refused_kind(address, self._allow)

    @property
    def active_organisations(self) -> int:
        """Return how many organisations have a lookup in progress or waiting."""
        return self._lookups.active_organisations

    def _check_port(self, port: int) -> None:
        if port in self._refuse_ports:
            raise BlockedError(f"port {port} is not allowed for webhooks; {PORT_HINT}")

    async def _refresh(
        self, host: str, organisation: OrganisationId, old: DnsResult | None
    ) -> DnsResult:
        # One lookup of a name at a time for each organisation, so that none waits for another's
        # slots.
        key = (organisation, host)
        task = self._pending.get(key)
        if task is None:
            task = self._pending[key] = asyncio.create_task(self._lookup(host, organisation))
            task.add_done_callback(lambda _: self._pending.pop(key, None))
        if old is None or not old.addresses or old.usable_until <= self._clock():
            return await asyncio.shield(task)
        await asyncio.wait((task,), timeout=self._refresh_wait_s)
        if task.done():
            return task.result()
        self._observe("stale")
        # No other attempt waits for this lookup; its result replaces this one.
        old.fresh_until = old.usable_until
        return old

    async def _lookup(self, host: str, organisation: OrganisationId) -> DnsResult:
        try:
            literal = _parse_literal(host)
            found = (str(literal),) if literal else await self._lookups.run(host, organisation)
        except BlockedError as exc:
            return self._refuse(host, organisation, BlockedError, str(exc))
        except LookupsBusyError as exc:
            self._observe("busy")
            unknown = DnsResult(
                refusal=UnresolvableError,
                detail=f"{host}: {exc}",
                fresh_until=0.0,
                usable_until=0.0,
            )
            return self._old_or(host, organisation, unknown)
        except Exception as exc:  # noqa: BLE001 - any error of a resolver concerns one name only
            if (shortage := find_lookup_shortage(exc)) is not None:
                return self._on_shortage(host, organisation, shortage)
            if not isinstance(exc, OSError):
                _log.exception("the resolver failed at %s", host)
            reason = "no answer in time" if isinstance(exc, TimeoutError) else exc
            return self._on_failure(host, organisation, f"{host} cannot be resolved: {reason}")
        if not found and (shortage := find_lookup_shortage()) is not None:
            # Without files, /etc/hosts cannot be read: the name may be there.
            return self._on_shortage(host, organisation, shortage)
        return self._accept(host, organisation, found)

    def _on_shortage(self, host: str, organisation: OrganisationId, shortage: OSError) -> DnsResult:
        self._observe("failed")
        unknown = DnsResult(shortage=shortage, fresh_until=0.0, usable_until=0.0)
        return self._old_or(host, organisation, unknown)

    def _old_or(self, host: str, organisation: OrganisationId, unknown: DnsResult) -> DnsResult:
        """Return the old addresses while they are usable, else `unknown`, which is not cached."""
        now = self._clock()
        old = self._cache.get(organisation, host)
        if old is None or not old.addresses or now >= old.usable_until:
            return unknown
        old.fresh_until = min(now + self._fresh_s, old.usable_until)
        return old

    def _accept(
        self, host: str, organisation: OrganisationId, addresses_found: Sequence[str]
    ) -> DnsResult:
        addresses: list[str] = []
        kinds: dict[str, None] = {}
        for text in addresses_found[:_MAX_ADDRESSES]:
            with suppress(ValueError):
                address = ip_address(text)
                refused = self.refused_kind(address)
                if refused is None:
                    addresses.append(str(address))
                else:
                    kinds[refused] = None
        if kinds and not addresses:
            # The text has no addresses: a tenant could use its log to resolve internal names.
            detail = (
                f"{host} has only {' or '.join(kinds)} address, which webhooks may not reach; "
                f"{ALLOW_HINT}"
            )
            return self._refuse(host, organisation, BlockedError, detail)
        if not addresses:
            return self._refuse(host, organisation, UnresolvableError, f"{host} has no address")
        self._observe("answered")
        now = self._clock()
        result = DnsResult(
            addresses=tuple(addresses),
            fresh_until=now + self._fresh_s,
            usable_until=now + self._stale_s,
        )
        self._cache.put(organisation, host, result)
        return result

    def _refuse(
        self,
        host: str,
        organisation: OrganisationId,
        refusal: type[TargetRefusedError],
        detail: str,
    ) -> DnsResult:
        self._observe("refused" if refusal is BlockedError else "absent")
        return self._cache_negative(host, organisation, refusal, detail)

    def _on_failure(self, host: str, organisation: OrganisationId, detail: str) -> DnsResult:
        self._observe("failed")
        old = self._cache.get(organisation, host)
        now = self._clock()
        if old is None or not old.addresses or old.usable_until <= now:
            return self._cache_negative(host, organisation, UnresolvableError, detail)
        old.failures += 1
        old.fresh_until = min(now + self._retry_delay_s(old.failures), old.usable_until)
        return old

    def _cache_negative(
        self,
        host: str,
        organisation: OrganisationId,
        refusal: type[TargetRefusedError],
        detail: str,
    ) -> DnsResult:
        old = self._cache.get(organisation, host)
        failures = 1 if old is None else old.failures + 1
        until = self._clock() + self._retry_delay_s(failures)
        result = DnsResult(
            refusal=refusal, detail=detail, fresh_until=until, usable_until=until, failures=failures
        )
        self._cache.put(organisation, host, result)
        return result

    def _retry_delay_s(self, failures: int) -> float:
        return min(self._fresh_s * 2.0 ** min(failures - 1, 10), self._backoff_s)


def _parse_literal(host: str) -> IpAddress | None:
    """Return `host` as an address, or None for a name. Raises BlockedError if it could be both."""
    bare = host.removesuffix(".")
    try:
        return ip_address(bare)
    except ValueError:
        if ends_in_number(bare) or ":" in bare or "%" in bare:
            raise BlockedError(
                f"{host} is no plain IP address: write four decimal numbers, or IPv6 without zone"
            ) from None
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetPolicy:
    """Define which targets webhooks may reach, and how names are resolved."""

    allow: tuple[IpNetwork, ...] = ()
    """Networks that webhooks may reach in addition to the public ones."""
    refuse_ports: frozenset[int] = REFUSED_PORTS
    system_resolver: bool = False
    """Resolve names with libc in place of c-ares."""
    organisation_lookups: int = ORGANISATION_LOOKUPS
    """Concurrent lookups per organisation."""

    @contextmanager
    def open_guard(
        self,
        *,
        observe: Callable[[str], None] = lambda _outcome: None,
        on_wait: Callable[[LimitScope], None] = lambda _scope: None,
    ) -> Iterator[SsrfGuard]:
        """Open a guard with a resolver of its own."""
        resolver = SystemResolver() if self.system_resolver else DnsResolver()
        limits = LookupLimits(per_organisation=self.organisation_lookups)
        try:
            yield SsrfGuard(
                self.allow,
                refuse_ports=self.refuse_ports,
                resolver=resolver,
                limits=limits,
                observe=observe,
                on_wait=on_wait,
            )
        finally:
            resolver.close()

    def to_text(self) -> str:
        """Return the policy as one command-line argument."""
        return json.dumps(
            {
                "allow": [str(network) for network in self.allow],
                "refuse_ports": sorted(self.refuse_ports),
                "system_resolver": self.system_resolver,
                "organisation_lookups": self.organisation_lookups,
            }
        )

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Parse the output of `to_text`."""
        fields = json.loads(text)
        return cls(
            allow=tuple(ip_network(network) for network in fields["allow"]),
            refuse_ports=frozenset(fields["refuse_ports"]),
            system_resolver=fields["system_resolver"],
            organisation_lookups=fields["organisation_lookups"],
        )


def target_policy(settings: Settings) -> TargetPolicy:
    """Return the policy of the settings, which the API and the worker share."""
    return TargetPolicy(
        allow=settings.allow_targets,
        refuse_ports=settings.refuse_ports,
        system_resolver=settings.resolver == "system",
        organisation_lookups=settings.organisation_lookups,
    )
