"""Which addresses a webhook may reach: names are resolved here, and only what is vetted here is dialled."""

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

from delivery.errors import BlockedError, TargetRefusedError, UnresolvableError
from rooms.domain.target import Target, ends_in_number

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network
Resolver = Callable[[str, int], Awaitable[Sequence[str]]]

FIX = "ROOMS_ALLOW_TARGETS=<cidr>,… opens what is meant to be reached"

# The special-purpose registries of IANA, and what reaches IPv4 through IPv6.
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
_LOOPBACK_NAMES = frozenset({"localhost", "localhost.localdomain", "localhost6", "ip6-localhost", "ip6-loopback"})
_LOOPBACKS = (IPv4Address("127.0.0.1"), IPv6Address("::1"))


async def resolve(host: str, port: int) -> Sequence[str]:
    """The addresses of `host` by the system's resolver, in its order of preference. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(info[4][0]) for info in found))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verdict:
    addresses: tuple[str, ...] = ()
    refusal: type[TargetRefusedError] | None = None
    detail: str = ""
    until: float


class Guard:
    """Resolves targets and keeps webhooks from addresses that are not for the outside, unless `allow` holds them.

    A verdict, refusals included, is kept for `ttl_s` of `clock` (seconds that never go back), `max_names` at most.
    An allowed IPv4 network does not open IPv6 forms of its addresses: those need both forms allowed.
    """

    def __init__(
        self,
        allow: Sequence[Network] = (),
        *,
        resolver: Resolver = resolve,
        clock: Callable[[], float] = time.monotonic,
        ttl_s: float = 5.0,
        max_names: int = 10_000,
    ) -> None:
        self._allow = tuple(allow)
        self._resolver = resolver
        self._clock = clock
        self._ttl_s = ttl_s
        self._max_names = max_names
        self._verdicts: dict[tuple[str, int], _Verdict] = {}
        self._pending: dict[tuple[str, int], asyncio.Task[_Verdict]] = {}

    def known(self, host: str, port: int) -> tuple[str, ...] | None:
        """The vetted addresses, if they are fresh in memory: what `vet` would return without waiting."""
        verdict = self._verdicts.get((host, port))
        if verdict is None or verdict.refusal is not None or verdict.until <= self._clock():
            return None
        return verdict.addresses

    async def vet(self, host: str, port: int) -> tuple[str, ...]:
        """The addresses to dial for `host`, best first, at least one. Raises BlockedError, UnresolvableError."""
        key = (host, port)
        verdict = self._verdicts.get(key)
        if verdict is None or verdict.until <= self._clock():
            # One look-up a name at a time, so that a name server that hangs holds one thread and not all.
            task = self._pending.get(key)
            if task is None:
                task = self._pending[key] = asyncio.create_task(self._look_up(key))
                task.add_done_callback(lambda _: self._pending.pop(key, None))
            verdict = await asyncio.shield(task)
        if verdict.refusal is not None:
            raise verdict.refusal(verdict.detail)
        return verdict.addresses

    def check_literal(self, target: Target) -> None:
        """Refuse at once what needs no look-up to refuse. Raises BlockedError naming the fix."""
        host = target.host.removesuffix(".")
        literal = self._literal(host)
        if literal is not None:
            kind = self.refusal(literal)
            if kind is not None:
                raise BlockedError(f"{host} is {kind} address, which webhooks may not reach; {FIX}")
        elif (host in _LOOPBACK_NAMES or host.endswith(".localhost")) and all(
            self.refusal(address) for address in _LOOPBACKS
        ):
            raise BlockedError(f"{host} is a name of the machine itself, which webhooks may not reach; {FIX}")

    def refusal(self, address: Address) -> str | None:
        """What kind of address (with its article) it is that may not be reached; None where it may."""
        if not any(address in network for network in self._allow):
            refused = _REFUSED_V4 if isinstance(address, IPv4Address) else _REFUSED_V6
            for network, kind in refused:
                if address in network:
                    return kind
            if isinstance(address, IPv6Address) and address not in _GLOBAL_UNICAST:
                return "an unassigned"
        if isinstance(address, IPv6Address):
            if address.scope_id is not None:
                return "a zoned"
            return next((kind for kind in map(self.refusal, _embedded(address)) if kind), None)
        return None

    async def _look_up(self, key: tuple[str, int]) -> _Verdict:
        addresses: list[str] = []
        kinds: dict[str, None] = {}
        refusal: type[TargetRefusedError] | None = None
        detail = ""
        host, port = key
        try:
            literal = self._literal(host)
            found = (str(literal),) if literal else await self._resolver(host, port)
            for text in found:
                address = ip_address(text)
                refused = self.refusal(address)
                if refused is None:
                    addresses.append(str(address))
                else:
                    kinds[refused] = None
            if not addresses:
                refusal = BlockedError if kinds else UnresolvableError
                # The addresses themselves stay unsaid: a tenant could read internal names out of its log.
                why = (
                    f"only {' or '.join(kinds)} address, which webhooks may not reach; {FIX}" if kinds else "no address"
                )
                detail = f"{host} has {why}"
        except BlockedError as exc:
            refusal, detail = BlockedError, str(exc)
        except (OSError, ValueError) as exc:
            refusal, detail = UnresolvableError, f"{host} cannot be resolved: {exc}"
        verdict = _Verdict(
            addresses=tuple(addresses), refusal=refusal, detail=detail, until=self._clock() + self._ttl_s
        )
        # Taken out first, so that the dict's order is that of age.
        self._verdicts.pop(key, None)
        if len(self._verdicts) >= self._max_names:
            del self._verdicts[next(iter(self._verdicts))]
        self._verdicts[key] = verdict
        return verdict

    @staticmethod
    def _literal(host: str) -> Address | None:
        """The address that `host` is; None where it is a name. Raises BlockedError for what could be read as either."""
        bare = host.removesuffix(".")
        try:
            return ip_address(bare)
        except ValueError:
            if ends_in_number(bare) or ":" in bare or "%" in bare:
                raise BlockedError(
                    f"{host} is no plain IP address: write four decimal numbers, or IPv6 without zone"
                ) from None
        return None


def _embedded(address: IPv6Address) -> Iterator[IPv4Address]:
    """The IPv4 addresses that a packet to this IPv6 address may end at."""
    bits = int(address)
    low = bits & 0xFFFF_FFFF
    if any(address in network for network in (_MAPPED, _TRANSLATED, _NAT64)) or (address in _COMPATIBLE and low > 1):
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
