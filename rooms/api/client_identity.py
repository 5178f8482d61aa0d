"""Find the principal of a request: by its API key, its certificate, or its trusted proxy.

An API key always decides. A certificate beside it must not name another organisation. Without a
key, a certificate of the connection identifies, or what a trusted proxy says: its certificate
header, then `X-GovStack-Client`. A certificate by which a trusted proxy itself connects identifies
none of its clients.

A header that names a client is believed from a trusted address only. From any other address it is
a claim of the sender, and identifies no client.
"""

import re
from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final
from urllib.parse import unquote_to_bytes

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm

from rooms.api.certificate_names import CanonicalName, canonical_name
from rooms.db.authentication import ApiKeyAuthenticator, AuthFailure, ClientAddress
from rooms.domain.member_identity import CertificateNames, CertificateRules, MemberIdentity
from rooms.domain.principal import Principal
from rooms.errors import MalformedError, OtherMemberError, UnauthenticatedError
from rooms.settings import IpNetwork

STATE_KEY: Final = "client_certificate"
"""The key of a connection's certificate in the `state` of each ASGI scope."""

Revoked = Mapping[CanonicalName, frozenset[int]]
"""Serial numbers of revoked certificates by their issuer."""
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
_AUTHORIZATION: Final = b"authorization"


@dataclass(frozen=True, slots=True)
class ClientCertificate:
    """Hold what a verified certificate says of the client.

    `identity` is None where it names no member; `problem` says why.
    """

    identity: MemberIdentity | None
    problem: str
    serial: int
    issuer: CanonicalName
    not_after: datetime

    def is_over(self, now: datetime) -> bool:
        """Return whether it has expired, which TLS only checks at the start of a connection."""
        return self.not_after < now

    def is_revoked(self, revoked: Revoked) -> bool:
        """Return whether a revocation list names it."""
        serials = revoked.get(self.issuer)
        return serials is not None and self.serial in serials


def read_certificate(content: bytes, rules: CertificateRules) -> ClientCertificate:
    """Read a certificate in DER. ValueError: it is none."""
    certificate = x509.load_der_x509_certificate(content)
    identity, problem = None, ""
    try:
        identity = rules.identify(_names(certificate))
    except (
        ValueError,
        UnsupportedAlgorithm,
        x509.DuplicateExtension,
        x509.UnsupportedGeneralNameType,
    ) as exc:
        problem = str(exc)
    return ClientCertificate(
        identity=identity,
        problem=problem,
        serial=certificate.serial_number,
        issuer=canonical_name(certificate.issuer),
        not_after=certificate.not_valid_after_utc,
    )


def _names(certificate: x509.Certificate) -> CertificateNames:
    subject: dict[str, list[str]] = {}
    for attribute in certificate.subject:
        if isinstance(attribute.value, str):
            subject.setdefault(attribute.oid.dotted_string, []).append(attribute.value)
    try:
        alternatives = certificate.extensions.get_extension_for_class(
            x509.SubjectAlternativeName
        ).value
    except x509.ExtensionNotFound:
        return CertificateNames(subject, [])
    return CertificateNames(
        subject, alternatives.get_values_for_type(x509.UniformResourceIdentifier)
    )


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


class CallerAuthenticator:
    """Find principals by `keys`, and believe `proxies`."""

    def __init__(self, keys: ApiKeyAuthenticator, proxies: TrustedProxies) -> None:
        self._keys = keys
        self._proxies = proxies

    def source(
        self, headers: Mapping[bytes, bytes], client: ClientAddress | None
    ) -> ClientAddress | None:
        """Return where a request comes from: behind a trusted proxy, the address that it names."""
        if client is None or not self._proxies.include(client):
            return client
        return self._proxies.source(headers, client)

    def is_proxy(self, client: ClientAddress | None) -> bool:
        """Return whether an address is that of a trusted proxy: it stands for many clients."""
        return self._proxies.include(client)

    async def authenticate(
        self,
        headers: Mapping[bytes, bytes],
        client: ClientAddress | None,
        certificate: ClientCertificate | None,
    ) -> Principal:
        """Return the principal of a request with these headers, whose names are in lower case.

        `client`: the peer of the connection. UnauthenticatedError, RateLimitedError,
        MalformedError. ForbiddenError: key and certificate, or certificate and
        `X-GovStack-Client`, name two organisations.
        """
        header = headers.get(_AUTHORIZATION)
        is_proxied = client is not None and self._proxies.include(client)
        if header is not None and certificate is None and not is_proxied:
            return await self._keys.authenticate(header, client)
        if client is not None and is_proxied:
            found = self._proxies.read(headers, client)
        else:
            found = ForwardedClient(client, certificate)
        if found.certificate is not None and found.certificate.is_over(datetime.now(UTC)):
            raise self._refusal(AuthFailure.CERTIFICATE, "the client certificate has expired")
        if header is not None:
            principal = await self._keys.authenticate(header, found.source)
            self._check_same(principal, found.certificate)
            return principal
        identity = self._identity(found)
        if identity is not None:
            principal = await self._keys.authenticate_member(identity, found.source)
            named = found.govstack_client
            if named is not None and not _is_same(identity, named):
                raise CertificateMismatchError(
                    principal, "X-GovStack-Client names another client than the certificate"
                )
            return principal
        if not is_proxied and (GOVSTACK_CLIENT in headers or CLIENT_CERTIFICATE in headers):
            raise self._refusal(
                AuthFailure.FORWARDED,
                "X-GovStack-Client and X-Forwarded-Client-Cert are believed from trusted proxies"
                " only (ROOMS_TRUSTED_PROXIES); this address is none",
            )
        return await self._keys.authenticate(None, found.source)

    def find_cached(
        self,
        headers: Mapping[bytes, bytes],
        client: ClientAddress | None,
        certificate: ClientCertificate | None,
    ) -> Principal | None:
        """Return the principal where only a key says who it is, and the key was looked up lately.

        None: `authenticate` knows. UnauthenticatedError: as of `ApiKeyAuthenticator.find_cached`.
        """
        header = headers.get(_AUTHORIZATION)
        if header is None or certificate is not None:
            return None
        if client is not None and self._proxies.include(client):
            return None
        return self._keys.find_cached(header, client)

    def _identity(self, found: ForwardedClient) -> MemberIdentity | None:
        """Return the member that a request without a key comes from; None: it names none."""
        certificate, named = found.certificate, found.govstack_client
        if certificate is None:
            return named
        identity = certificate.identity
        if identity is None:
            raise self._refusal(
                AuthFailure.CERTIFICATE,
                f"the client certificate is valid, but {certificate.problem}"
                " (ROOMS_CERTIFICATE_IDENTITY)",
            )
        return named if named is not None and _is_same(identity, named) else identity

    def _check_same(self, principal: Principal, certificate: ClientCertificate | None) -> None:
        if certificate is None or certificate.identity is None:
            return
        if certificate.identity.member_id != principal.member_id:
            raise CertificateMismatchError(
                principal,
                "the client certificate names another organisation than the API key; send the key"
                " of the organisation in the certificate, or no key",
            )

    def _refusal(self, reason: AuthFailure, message: str) -> UnauthenticatedError:
        return self._keys.failure(reason, message)


class CertificateMismatchError(OtherMemberError):
    """Report that a request names two members, one of them by a certificate."""

    def __init__(self, principal: Principal, message: str) -> None:
        super().__init__(message)
        self.principal = principal
        """The one in whose organisation's journal the attempt is."""


def _is_same(certificate: MemberIdentity, named: MemberIdentity) -> bool:
    """Return whether a certificate may be that of a named client."""
    return certificate.member_id == named.member_id and certificate.application in {
        None,
        named.application,
    }
