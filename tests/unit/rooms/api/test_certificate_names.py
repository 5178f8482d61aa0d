"""Test which names of authorities are the same, and that OpenSSL agrees."""

import ssl
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.name import _ASN1Type
from cryptography.x509.oid import NameOID

from rooms.api.certificate_names import canonical_name
from rooms.api.client_identity import read_certificate
from rooms.domain.member_identity import DEFAULT_RULES, CertificateRules
from tests.support.client_certificates import ClientCertificateAuthority

UTF8, PRINTABLE, BMP = _ASN1Type.UTF8String, _ASN1Type.PrintableString, _ASN1Type.BMPString
COMMON, ORGANIZATION = NameOID.COMMON_NAME, NameOID.ORGANIZATION_NAME


def attribute(
    value: str, kind: x509.ObjectIdentifier = COMMON, string: _ASN1Type = UTF8
) -> x509.NameAttribute[str]:
    return x509.NameAttribute(kind, value, string)


def named(*attributes: x509.NameAttribute[str]) -> x509.Name:
    return x509.Name(attributes)


def in_one_part(*attributes: x509.NameAttribute[str]) -> x509.Name:
    return x509.Name([x509.RelativeDistinguishedName(attributes)])


NAME = named(attribute("Rooms Members"))
PAIR = attribute("Rooms"), attribute("Members", ORGANIZATION)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (NAME, named(attribute("rooms MEMBERS")), True),
        (NAME, named(attribute(" \t Rooms \n\v\f\r Members  ")), True),
        (NAME, named(attribute("Rooms Members", string=PRINTABLE)), True),
        (NAME, named(attribute("rooms  members", string=BMP)), True),
        (named(attribute("Ü")), named(attribute("Ü", string=BMP)), True),
        (named(*PAIR), named(attribute("ROOMS"), attribute("members", ORGANIZATION)), True),
        (in_one_part(*PAIR), in_one_part(*reversed(PAIR)), True),
        (NAME, named(attribute("RoomsMembers")), False),
        (NAME, named(attribute("Rooms Members", ORGANIZATION)), False),
        (NAME, named(attribute("Rooms Members"), attribute("Rooms Members")), False),
        (NAME, named(attribute("Rooms\u00a0Members")), False),
        (named(attribute("Ü")), named(attribute("ü")), False),
        (named(attribute("K")), named(attribute("\u212a")), False),
        (named(*PAIR), named(*reversed(PAIR)), False),
        (named(*PAIR), in_one_part(*PAIR), False),
    ],
)
def test_names_are_the_same_where_openssl_takes_them_for_the_same(
    tmp_path: Path, one: x509.Name, other: x509.Name, *, same: bool
) -> None:
    assert (canonical_name(one) == canonical_name(other)) is same
    key = ec.generate_private_key(ec.SECP256R1())
    trusted, issuer = (ClientCertificateAuthority(name, key=key) for name in (one, other))
    if same:
        shake_hands(trusted, issuer, tmp_path)
    else:
        with pytest.raises(ssl.SSLCertVerificationError):
            shake_hands(trusted, issuer, tmp_path)


def shake_hands(
    trusted: ClientCertificateAuthority, issuer: ClientCertificateAuthority, folder: Path
) -> None:
    """Let a client that trusts one authority meet a server with a certificate of another."""
    accepting = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    accepting.load_cert_chain(*issuer.issue().write(folder, "server"))
    connecting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    connecting.check_hostname = False
    connecting.load_verify_locations(cadata=trusted.pem.decode())
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = connecting.wrap_bio(down, up)
    server = accepting.wrap_bio(up, down, server_side=True)
    for side in (client, server):
        with pytest.raises(ssl.SSLWantReadError):
            side.do_handshake()
    client.do_handshake()


def test_a_list_that_spells_its_issuer_otherwise_revokes() -> None:
    authority = ClientCertificateAuthority("Members")
    issued = authority.issue().certificate
    found = read_certificate(
        issued.public_bytes(Encoding.DER), CertificateRules.parse(DEFAULT_RULES)
    )
    revoked = {canonical_name(named(attribute(" members"))): frozenset({issued.serial_number})}
    assert found.is_revoked(revoked)
