"""Decide which headers a publisher may add to the webhooks of a message.

An endpoint may trust what its proxy or security server says about a caller. A publisher of another
organisation must not be able to say it.
"""

import re
from typing import Final

_OWN: Final = re.compile(
    r"content-.*|webhook-.*|rooms-.*|ce-.*|proxy-.*|host|connection|keep-alive|transfer-encoding"
    r"|te|trailer|upgrade|authorization|expect|accept-encoding|cookie|date|user-agent",
)
"""Names that HTTP, the signature or Rooms gives a meaning."""
_IDENTITY: Final = re.compile(
    # Security servers of GovStack and X-Road.
    r"x-govstack-client|x-road-.*"
    # Proxies: the client's address, certificate and request.
    r"|forwarded|via|x-forwarded(-.*)?|x-real-ip|x-client-ip|x-cluster-client-ip|true-client-ip"
    r"|cf-connecting-ip|fastly-client-ip|x-original-.*|x-rewrite-url|x-envoy-.*"
    r"|client-cert(-chain)?|x-client-cert.*|(x-)?ssl-.*|x-amzn-(oidc|mtls)-.*"
    # Proxies that sign users in.
    r"|(x-)?remote-(user|group|groups|name|email|addr)|x-auth-request-.*"
    r"|x-authenticated-.*|x-webauth-.*|x-goog-(authenticated-user|iap)-.*",
)
"""Names by which proxies and security servers say who calls, as RFC 7239, RFC 9440 and others."""


def header_key(name: str) -> str:
    """Return what names of one header have in common.

    Names ignore case, and servers that follow CGI take `_` for `-`.
    """
    return name.lower().replace("_", "-")


def is_reserved(key: str) -> bool:
    """Return whether publishers cannot set the header."""
    return _OWN.fullmatch(key) is not None or _IDENTITY.fullmatch(key) is not None


def is_withheld(name: str) -> bool:
    """Return whether a header that a version before accepted from a publisher is not sent.

    Names of Rooms as they are written pass: the publisher's signature is stored with them.
    """
    key = header_key(name)
    return _IDENTITY.fullmatch(key) is not None or ("_" in name and _OWN.fullmatch(key) is not None)
