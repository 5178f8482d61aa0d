"""Which IP addresses webhooks may reach: the public ones, and those that the operator allows."""

from collections.abc import Iterator, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

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


def refused_kind(address: Address, allow: Sequence[Network]) -> str | None:
    """Return the kind (with its article) of an address that may not be reached; None where it may."""
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
        return next((found for inner in _embedded(address) if (found := refused_kind(inner, allow))), None)
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
