"""Derive the network of a webhook's target from its host."""

import ipaddress
from typing import Final

_IPV4_PREFIX: Final = 24
_IPV6_PREFIX: Final = 48
_MIN_LABELS: Final = 3


def network_of(host: str) -> str | None:
    """Return the network of a target: /24 or /48 of an address, the parent domain of a name.

    The log has the name of a webhook's host and not its address, so hosts with names are of one
    network only if their names show it. Names with two labels have none.
    """
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        labels = host.rstrip(".").split(".")
        return ".".join(["*", *labels[1:]]) if len(labels) >= _MIN_LABELS else None
    prefix = _IPV4_PREFIX if address.version == 4 else _IPV6_PREFIX  # noqa: PLR2004 - of IP
    return str(ipaddress.ip_network((address, prefix), strict=False))
