"""Load the files of TLS: the server's certificate and key, authorities, and revocation lists."""

import os
import re
import ssl
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm

from rooms.api.certificate_names import CanonicalName, canonical_name
from rooms.api.client_identity import Revoked
from rooms.errors import RoomsError
from rooms.settings import Settings

_CIPHERS: Final = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""With forward secrecy and authentication. TLS 1.3 has no others."""
_CRL: Final = re.compile(b"-----BEGIN X509 CRL-----.+?-----END X509 CRL-----", re.DOTALL)
Signature = tuple[tuple[int, int, int] | None, ...]
"""Of the files: it differs once one of them was replaced, changed, or made readable."""


class TlsFileError(RoomsError):
    """Say which file of TLS cannot be used, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Name the files, and whether a client must have a certificate."""

    cert: Path
    key: Path
    client_ca: Path | None = None
    client_crl: Path | None = None
    required: bool = False

    @classmethod
    def of(cls, settings: Settings) -> "TlsFiles | None":
        """Return the files of the TLS port; None: there is no such port."""
        if settings.tls_listen is None or settings.tls_cert is None or settings.tls_key is None:
            return None
        return cls(
            cert=settings.tls_cert,
            key=settings.tls_key,
            client_ca=settings.tls_client_ca,
            client_crl=settings.tls_client_crl,
            required=settings.tls_client_auth == "required",
        )

    def signature(self) -> Signature:
        """Return what changes with the files."""
        return tuple(
            _signature(path)
            for path in (self.cert, self.key, self.client_ca, self.client_crl)
            if path is not None
        )


@dataclass(frozen=True, slots=True)
class RevocationLists:
    """Hold what all lists revoke, and the earliest time at which one expires. None: none does."""

    revoked: Revoked
    end: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTls:
    """Hold everything that new connections use."""

    context: ssl.SSLContext
    not_after: datetime
    """The end of the server's certificate."""
    authorities: bytes
    """The content of the file of authorities; empty: no certificate is asked for."""
    revoked: Revoked
    lists_end: datetime | None
    """The earliest time at which a revocation list expires. None: no list does."""


def load_tls(files: TlsFiles) -> LoadedTls:
    """Load all files. TlsFileError names the first one that cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(_CIPHERS)
    context.set_alpn_protocols(["http/1.1"])
    # A resumed session would keep a certificate that is revoked meanwhile.
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    context.num_tickets = 0
    try:
        certificate = x509.load_pem_x509_certificate(_read("ROOMS_TLS_CERT", files.cert))
    except ValueError as exc:
        raise _unusable("ROOMS_TLS_CERT", files.cert, exc) from exc
    _read("ROOMS_TLS_KEY", files.key)
    try:
        # Without the callback, OpenSSL would ask for a password at the terminal.
        context.load_cert_chain(files.cert, files.key, password=lambda: b"")
    except (ssl.SSLError, OSError, ValueError) as exc:
        raise _unusable("ROOMS_TLS_KEY", files.key, exc) from exc
    authorities, lists = b"", RevocationLists({}, None)
    if files.client_ca is not None:
        authorities = _load_authorities(context, files.client_ca, required=files.required)
    if files.client_crl is not None:
        lists = _load_lists(context, files.client_crl, authorities)
    return LoadedTls(
        context=context,
        not_after=certificate.not_valid_after_utc,
        authorities=authorities,
        revoked=lists.revoked,
        lists_end=lists.end,
    )


def _load_authorities(context: ssl.SSLContext, path: Path, *, required: bool) -> bytes:
    content = _read("ROOMS_TLS_CLIENT_CA", path)
    try:
        context.load_verify_locations(cadata=content.decode("ascii"))
    except (ssl.SSLError, ValueError) as exc:
        raise _unusable("ROOMS_TLS_CLIENT_CA", path, exc) from exc
    context.verify_mode = ssl.CERT_REQUIRED if required else ssl.CERT_OPTIONAL
    # Each authority of the file is trusted, also an intermediate one.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return content


def _load_lists(context: ssl.SSLContext, path: Path, authorities: bytes) -> RevocationLists:
    """Load the lists of a file, and nothing else that it contains.

    OpenSSL would trust each certificate in it, and such files come by plain HTTP.
    """
    texts = _CRL.findall(_read("ROOMS_TLS_CLIENT_CRL", path))
    try:
        lists = [x509.load_pem_x509_crl(text) for text in texts]
        if not lists:
            raise ValueError("it contains no X509 CRL in PEM")
        _check_signatures(lists, x509.load_pem_x509_certificates(authorities))
        with _file_of(b"\n".join(texts)) as only_lists:
            context.load_verify_locations(cafile=only_lists)
        ends = [one.next_update_utc for one in lists if one.next_update_utc is not None]
        found = RevocationLists(_revoked(lists), min(ends, default=None))
    except (ssl.SSLError, OSError, ValueError) as exc:
        raise _unusable("ROOMS_TLS_CLIENT_CRL", path, exc) from exc
    context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    return found


@contextmanager
def _file_of(content: bytes) -> Iterator[str]:
    """Yield the path of a file with this content; OpenSSL takes lists from files only."""
    if sys.platform == "linux":  # in memory, as a container may have no folder that takes files
        with os.fdopen(os.memfd_create("revocation lists"), "wb") as file:
            file.write(content)
            file.flush()
            yield f"/proc/self/fd/{file.fileno()}"
    else:
        with tempfile.NamedTemporaryFile() as file:
            file.write(content)
            file.flush()
            yield file.name


def _check_signatures(
    lists: Iterable[x509.CertificateRevocationList], authorities: Sequence[x509.Certificate]
) -> None:
    """Raise ValueError for a list of one of these authorities that none of them has signed.

    Lists of others pass: an authority may be one that only clients send, with their certificates.
    OpenSSL checks the signature of such a list in the handshake.
    """
    names = [canonical_name(known.subject) for known in authorities]
    for one in lists:
        issuer = canonical_name(one.issuer)
        issuers = [known for name, known in zip(names, authorities, strict=True) if name == issuer]
        if issuers and not any(_is_signed_by(one, known) for known in issuers):
            raise ValueError(f"its list of {one.issuer.rfc4514_string()} has a wrong signature")


def _is_signed_by(found: x509.CertificateRevocationList, authority: x509.Certificate) -> bool:
    try:
        # Of another type of key it is a TypeError.
        return found.is_signature_valid(authority.public_key())  # type: ignore[arg-type]
    except (TypeError, UnsupportedAlgorithm):
        return False


def _revoked(lists: Iterable[x509.CertificateRevocationList]) -> Revoked:
    found: dict[CanonicalName, set[int]] = {}
    for one in lists:
        found.setdefault(canonical_name(one.issuer), set()).update(
            entry.serial_number for entry in one
        )
    return {issuer: frozenset(serials) for issuer, serials in found.items()}


def _signature(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_ctime_ns


def _read(name: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as exc:
        raise _unusable(name, path, exc) from exc


def _unusable(name: str, path: Path, exc: Exception) -> TlsFileError:
    why = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
    return TlsFileError(f"{name}: {path} cannot be used: {why}")
