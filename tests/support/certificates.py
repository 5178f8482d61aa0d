"""Create a certificate authority for TLS on loopback."""

import ssl
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Authority:
    """Signs certificates for these names; `self_signed` uses the server's own key instead."""

    def __init__(self, *names: str, self_signed: bool = False) -> None:
        now = datetime.now(UTC)
        authority_key = ec.generate_private_key(ec.SECP256R1())
        authority_name = _name("rooms test authority")
        key = ec.generate_private_key(ec.SECP256R1())
        subject = _name("rooms test endpoint")
        alternatives = x509.SubjectAlternativeName(
            [_general_name(name) for name in names or ("127.0.0.1", "localhost")]
        )

        def certificate(
            whose: x509.Name, public: ec.EllipticCurvePublicKey, issuer: x509.Name
        ) -> x509.CertificateBuilder:
            return (
                x509.CertificateBuilder()
                .subject_name(whose)
                .issuer_name(issuer)
                .public_key(public)
                .serial_number(x509.random_serial_number())
                .not_valid_before(now - timedelta(days=1))
                .not_valid_after(now + timedelta(days=1))
            )

        self._authority = (
            certificate(authority_name, authority_key.public_key(), authority_name)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key()),
                critical=False,
            )
            .sign(authority_key, hashes.SHA256())
        )
        issuer, signing_key = (subject, key) if self_signed else (authority_name, authority_key)
        self._certificate = (
            certificate(subject, key.public_key(), issuer)
            .add_extension(alternatives, critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(signing_key.public_key()),
                critical=False,
            )
            .sign(signing_key, hashes.SHA256())
        )
        self._key = key

    def write(self, folder: Path) -> None:
        """Write authority.pem, chain.pem and key.pem."""
        (folder / "authority.pem").write_bytes(
            self._authority.public_bytes(serialization.Encoding.PEM)
        )
        (folder / "chain.pem").write_bytes(
            self._certificate.public_bytes(serialization.Encoding.PEM)
        )
        (folder / "key.pem").write_bytes(
            self._key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )

    def server(self, folder: Path) -> ssl.SSLContext:
        """Return the context of a server; its files stay in `folder`."""
        self.write(folder)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "chain.pem", folder / "key.pem")
        return context

    def client(self) -> ssl.SSLContext:
        """Return the context of a client that trusts only this authority."""
        pem = self._authority.public_bytes(serialization.Encoding.PEM).decode("ascii")
        return ssl.create_default_context(cadata=pem)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)
