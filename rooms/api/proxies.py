"""Read what trusted proxies and security servers say about their clients.

A header that names a client is believed from a trusted address only. From any other address it is
a claim of the sender, and identifies no client.
"""

import re
from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final
from urllib.parse import unquote_to_bytes

from rooms.api.certificates import ClientCertificate, read_certificate
from rooms.db.authentication import ClientAddress
from rooms.domain.member_identity import CertificateRules, MemberIdentity
from rooms.errors import MalformedError
from rooms.settings import IpNetwork

FORWARDED_FOR: Final = b"x-forwarded-for"
CLIENT_CERTIFICATE: Final = b"x-forwarded-client-cert"
GOVSTACK_CLIENT: Final = b"x-govstack-client"
MAX_HOPS: Final = 32
"""Addresses of X-Forwarded-For that are read, from the right."""
MAX_CERTIFICATE_BYTES: Final = 16 * 1024
"""The longest X-Forwarded-Client-Cert."""
UNKNOWN_SOURCE: Final[ClientAddress] = ("unknown", 0)
"""The address of a client that a proxy does not name: no network contains it."""
_MAX_KNOWN: Final = 10_000
_PEM: Final = re.compile(
    rb"\s*-----BEGIN CERTIFICATE-----([A-Za-z0-9+/=\s]+)-----END CERTIFICATE-----\s*"
)
_PEM_BEGIN: Final = b"-----BEGIN%20"
_ENVOY_FIELD: Final = re.compile(
    rb'\s*([A-Za-z]+)=(?:"((?:[^"\\]|\\.)*)"|([^",;]*))\s*(;|,|$)', re.DOTALL
)
"""A field of Envoy's header: name, quoted value, plain value, and what ends it."""


@dataclass(frozen=True, slots=True)
class ForwardedClient:
    """Hold what a trusted proxy says about the client of a request."""

    source: ClientAddress | None
    certificate: ClientCertificate | None = None
    govstack_client: MemberIdentity | None = None


class TrustedProxies:
    """Believe the `headers` of requests from `networks`."""

    def __init__(
        self,
        networks: Sequence[IpNetwork],
        headers: frozenset[str],
        rules: CertificateRules,
    ) -> None:
        self._networks = tuple(networks)
        self._headers = frozenset(name.encode() for name in headers)
        self._rules = rules
        self._known: dict[str, bool] = {}

    def include(self, client: ClientAddress | None) -> bool:
        """Return whether the peer of a connection is a trusted proxy."""
        if not self._networks or client is None:
            return False
        found = self._known.get(client[0])
        if found is None:
            found = self._contains(_parse_address(client[0]))
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[client[0]] = found
        return found

    def source(self, headers: Mapping[bytes, bytes], client: ClientAddress) -> ClientAddress:
        """Return the address of the client behind a trusted proxy.

        It is the rightmost address that is no trusted proxy, because everything left of it comes
        from that client. Without the header it is the proxy itself.
        """
        given = headers.get(FORWARDED_FOR)
        if given is None or FORWARDED_FOR not in self._headers:
            return client
        hops = given.decode("latin-1").rsplit(",", MAX_HOPS)
        complete = len(hops) <= MAX_HOPS
        source = client
        for hop in reversed(hops if complete else hops[1:]):
            address = _parse_hop(hop)
            if address is None:
                return UNKNOWN_SOURCE
            source = (str(address), 0)
            if not self._contains(address):
                return source
        return source if complete else UNKNOWN_SOURCE

    def read(self, headers: Mapping[bytes, bytes], client: ClientAddress) -> ForwardedClient:
        """Return what a trusted proxy says. MalformedError."""
        return ForwardedClient(
            self.source(headers, client), self._certificate(headers), self._member(headers)
        )

    def _certificate(self, headers: Mapping[bytes, bytes]) -> ClientCertificate | None:
        given = headers.get(CLIENT_CERTIFICATE)
        if not given or CLIENT_CERTIFICATE not in self._headers:
            return None
        try:
            return read_certificate(_certificate_bytes(given), self._rules)
        except ValueError as exc:
            raise MalformedError(f"the header X-Forwarded-Client-Cert: {exc}") from exc

    def _member(self, headers: Mapping[bytes, bytes]) -> MemberIdentity | None:
        given = headers.get(GOVSTACK_CLIENT)
        if given is None or GOVSTACK_CLIENT not in self._headers:
            return None
        try:
            return MemberIdentity.parse(given.decode("latin-1"))
        except ValueError as exc:
            raise MalformedError(f"the header X-GovStack-Client: {exc}") from exc

    def _contains(self, address: IPv4Address | IPv6Address | None) -> bool:
        return address is not None and any(
            address.version == network.version and address in network for network in self._networks
        )


def _certificate_bytes(header: bytes) -> bytes:
    """Return the certificate of Envoy's field `Cert`, or as nginx escapes it. ValueError."""
    if len(header) > MAX_CERTIFICATE_BYTES:
        raise ValueError(f"it may have {MAX_CERTIFICATE_BYTES} bytes")
    pem = header
    if not header.startswith(_PEM_BEGIN):
        found = [value for name, value in _envoy_fields(header) if name.lower() == b"cert"]
        if len(found) != 1:
            raise ValueError(
                "it must have one field Cert, as Envoy sends it, or be a certificate in PEM with"
                " percent-encoding, as nginx sends it ($ssl_client_escaped_cert)"
            )
        pem = found[0]
    content = _PEM.fullmatch(unquote_to_bytes(pem))
    if content is None:
        raise ValueError("it contains no certificate in PEM with percent-encoding")
    try:
        return b64decode(b"".join(content[1].split()), validate=True)
    except Base64Error as exc:
        raise ValueError(f"its certificate is no base64: {exc}") from exc


def _envoy_fields(header: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield names and values. ValueError: it is malformed, or describes several clients."""
    position, end = 0, b";"
    while end == b";":
        found = _ENVOY_FIELD.match(header, position)
        if found is None:
            raise ValueError("it is neither Envoy's header nor nginx's escaped certificate")
        name, quoted, plain, end = found.groups()
        if end == b",":
            raise ValueError("it must describe one client: let the last proxy replace it")
        yield name, plain if quoted is None else quoted
        position = found.end()


def _parse_hop(hop: str) -> IPv4Address | IPv6Address | None:
    """Return the address of one element: `192.0.2.1`, `192.0.2.1:80`, `2001:db8::1`, `[…]:80`."""
    text = hop.strip()
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    return _parse_address(text)


def _parse_address(text: str) -> IPv4Address | IPv6Address | None:
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address
