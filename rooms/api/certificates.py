"""Read client certificates that TLS or a trusted proxy has verified."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm

from rooms.domain.member_identity import CertificateNames, CertificateRules, MemberIdentity

STATE_KEY: Final = "client_certificate"
"""The key of a connection's certificate in the `state` of each ASGI scope."""

Revoked = Mapping[x509.Name, frozenset[int]]
"""Serial numbers of revoked certificates by their issuer."""


@dataclass(frozen=True, slots=True)
class ClientCertificate:
    """Hold what a verified certificate says of the client.

    `identity` is None where it names no member; `problem` says why.
    """

    identity: MemberIdentity | None
    problem: str
    serial: int
    issuer: x509.Name
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
        issuer=certificate.issuer,
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
