"""Make an authority that issues client certificates, and revokes them."""

import ssl
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = timedelta(days=1)
_PEM = serialization.Encoding.PEM


class ClientCertificateAuthority:
    """Issue certificates of members: subject C=instance, O=class, CN=code."""

    def __init__(
        self,
        name: str | x509.Name = "rooms test members",
        *,
        key: ec.EllipticCurvePrivateKey | None = None,
    ) -> None:
        """Create an authority with this name (as a text, its CN), and this key or a new one."""
        self._key = key or ec.generate_private_key(ec.SECP256R1())
        if isinstance(name, str):
            name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._name = name
        public = self._key.public_key()
        self.certificate = (
            _builder(self._name, self._name, public)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self.pem = self.certificate.public_bytes(_PEM)

    def issue(
        self,
        subject: str | Sequence[x509.NameAttribute[str]] = "SE/GOV/1",
        *,
        uris: Sequence[str] = (),
        starts: timedelta = -DAY,
        ends: timedelta = DAY,
    ) -> "IssuedCertificate":
        """Issue a certificate, valid from `starts` to `ends` from now."""
        key = ec.generate_private_key(ec.SECP256R1())
        if isinstance(subject, str):
            kinds = (NameOID.COUNTRY_NAME, NameOID.ORGANIZATION_NAME, NameOID.COMMON_NAME)
            pairs = zip(kinds, subject.split("/"), strict=True)
            subject = [x509.NameAttribute(kind, value) for kind, value in pairs]
        builder = _builder(
            x509.Name(subject), self._name, key.public_key(), starts=starts, ends=ends
        ).add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
            critical=False,
        )
        if uris:
            names = x509.SubjectAlternativeName(
                [x509.UniformResourceIdentifier(one) for one in uris]
            )
            builder = builder.add_extension(names, critical=False)
        return IssuedCertificate(builder.sign(self._key, hashes.SHA256()), key)

    def revocation_list(self, *revoked: "IssuedCertificate", ends: timedelta = DAY) -> bytes:
        """Return a list in PEM that revokes these."""
        now = datetime.now(UTC)
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self._name)
            .last_update(now - 2 * DAY)
            .next_update(now + ends)
        )
        for one in revoked:
            builder = builder.add_revoked_certificate(
                x509.RevokedCertificateBuilder()
                .serial_number(one.certificate.serial_number)
                .revocation_date(now - DAY)
                .build()
            )
        return builder.sign(self._key, hashes.SHA256()).public_bytes(_PEM)


class IssuedCertificate:
    """Hold a certificate with its key."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self.certificate = certificate
        self.key = key
        self.pem = certificate.public_bytes(_PEM)
        self.key_pem = key.private_bytes(
            _PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )

    def write(self, folder: Path, name: str) -> tuple[Path, Path]:
        """Write NAME.pem and NAME-key.pem, and return their paths."""
        paths = folder / f"{name}.pem", folder / f"{name}-key.pem"
        for path, content in zip(paths, (self.pem, self.key_pem), strict=True):
            path.write_bytes(content)
        return paths


def client_context(
    authority: Path, folder: Path, certificate: IssuedCertificate | None = None
) -> ssl.SSLContext:
    """Return the context of a client that trusts the server's authority, with this certificate."""
    context = ssl.create_default_context(cafile=authority)
    if certificate is not None:
        context.load_cert_chain(*certificate.write(folder, f"client-{id(certificate):x}"))
    return context


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public: ec.EllipticCurvePublicKey,
    *,
    starts: timedelta = -DAY,
    ends: timedelta = DAY,
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + starts)
        .not_valid_after(now + ends)
    )
