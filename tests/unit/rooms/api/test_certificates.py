"""Test how certificates of clients are read that an authority has signed, however strange."""

from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtensionOID, NameOID

from rooms.api.certificates import read_certificate
from rooms.domain.member_identity import DEFAULT_RULES, CertificateRules

RULES = CertificateRules.parse(DEFAULT_RULES)
X400_ADDRESS = bytes.fromhex("3002a300")
EDI_PARTY = bytes.fromhex("3006a504a1020c00")


def certificate(alternatives: bytes) -> bytes:
    """Return a certificate in DER whose subject alternative names are these bytes."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a client")])
    now = datetime.now(UTC)
    oid = ExtensionOID.SUBJECT_ALTERNATIVE_NAME
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now)
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.UnrecognizedExtension(oid, alternatives), critical=False)
        .sign(key, hashes.SHA256())
        .public_bytes(Encoding.DER)
    )


@pytest.mark.parametrize("alternatives", [X400_ADDRESS, EDI_PARTY, b"", b"\x30\x02\x86\x00", b"x"])
def test_names_that_cannot_be_read_name_no_member(alternatives: bytes) -> None:
    found = read_certificate(certificate(alternatives), RULES)
    assert found.identity is None
    assert found.problem
