"""Decide which headers a publisher may add to the webhooks of a message, and how many bytes.

An endpoint may trust what its proxy or security server says about a caller. A publisher of another
organisation must not be able to say it. Only known names are refused: an endpoint that believes
another one must have its proxy remove it.
"""

import re
from typing import Final

MAX_HEADERS: Final = 20
"""Most headers of a publisher."""
MAX_NAME: Final = 128
MAX_VALUE: Final = 1024
SIGNATURE_HEADER: Final = "Rooms-Publisher-Signature"
"""The header by which subscribers get the publisher's signature."""
MAX_SIGNATURE: Final = 4096
"""The longest signature; it fits into the headers of a webhook."""
MAX_DELIVERED_HEADERS: Final = MAX_HEADERS + 1
HEADER_OVERHEAD: Final = 8
"""Bytes that a header takes beside its name and value, where all are counted."""
MAX_DELIVERED_BYTES: Final = (
    MAX_HEADERS * (MAX_NAME + MAX_VALUE)
    + len(SIGNATURE_HEADER)
    + MAX_SIGNATURE
    + MAX_DELIVERED_HEADERS * HEADER_OVERHEAD
)
"""Most bytes of all headers that filters and subscribers get."""
_SEPARATOR: Final = re.compile("[^a-z0-9]")
_OWN: Final = re.compile(
    r"content-.*|webhook-.*|rooms-.*|ce-.*|proxy-.*|host|connection|keep-alive|transfer-encoding"
    r"|te|trailer|upgrade|authorization|expect|accept-encoding|cookie|set-cookie|date|user-agent",
)
"""Names that HTTP, the signature or Rooms gives a meaning."""
_IDENTITY: Final = re.compile(
    # Security servers of GovStack and X-Road.
    r"x-govstack-client|x-road-.*"
    # Proxies: the client's address, certificate and request.
    r"|forwarded|via|x-forwarded(-.*)?|x-real-ip|x-client-ip|x-cluster-client-ip|true-client-ip"
    r"|cf-(connecting|client-cert)-.*|fastly-client-ip|x-original-.*|x-rewrite-url|x-envoy-.*"
    r"|client-cert(-chain)?|x-client-cert.*|(x-)?ssl-.*|x-amzn-(oidc|mtls)-.*"
    r"|x-tls-client-.*|x-client-(verify|dn)|x-http-method(-override)?|x-method-override"
    r"|x-appengine-.*|x-azure-.*|x-arr-.*"
    # Proxies that sign users in.
    r"|(x-)?remote-(user|group|groups|name|email|addr)|x-auth-request-.*"
    r"|x-authenticated-.*|x-webauth-.*|x-goog-(authenticated-user|iap)-.*"
    r"|cf-access-.*|x-ms-client-principal(-.*)?|x-ms-token-.*|oidc-.*|x-pomerium-.*|tailscale-.*"
    r"|x-authentik-.*|x-vouch-.*|x-userinfo"
    # Kong: its names only, as publishers may well have headers about consumers and credentials.
    r"|x-consumer-(id|custom-id|username|groups)|x-credential-(identifier|username)"
    r"|x-anonymous-consumer",
)
"""Known names by which proxies and security servers say who calls, or rewrite the request.

Those of RFC 7239 and RFC 9440, and of products as far as they are known.
"""


def header_key(name: str) -> str:
    """Return what names of one header have in common.

    Names ignore case. Servers that follow CGI take `_` for `-`, and some of them every character
    that is no letter or digit.
    """
    return _SEPARATOR.sub("-", name.lower())


def is_reserved(key: str) -> bool:
    """Return whether publishers cannot set the header."""
    return _OWN.fullmatch(key) is not None or _IDENTITY.fullmatch(key) is not None


def is_withheld(name: str) -> bool:
    """Return whether a header that a version before accepted from a publisher is not sent.

    Names of Rooms as they are written pass: the publisher's signature is stored with them.
    """
    key = header_key(name)
    is_own = _OWN.fullmatch(key) is not None and key != name.lower()
    return is_own or _IDENTITY.fullmatch(key) is not None
