"""Find the principal of a request: by its API key, its certificate, or its trusted proxy.

An API key always decides. A certificate beside it must not name another organisation. Without a
key, a certificate of the connection identifies, or what a trusted proxy says: its certificate
header, then `X-GovStack-Client`. A certificate by which a trusted proxy itself connects identifies
none of its clients.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

from rooms.api.certificates import ClientCertificate
from rooms.api.proxies import (
    CLIENT_CERTIFICATE,
    GOVSTACK_CLIENT,
    ForwardedClient,
    TrustedProxies,
)
from rooms.db.authentication import ApiKeyAuthenticator, AuthFailure, ClientAddress
from rooms.domain.member_identity import MemberIdentity
from rooms.domain.principal import Principal
from rooms.errors import OtherMemberError, UnauthenticatedError

_AUTHORIZATION: Final = b"authorization"


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
