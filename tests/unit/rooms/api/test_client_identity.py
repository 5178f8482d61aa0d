"""Test which headers of a proxy are believed, and how addresses and certificates are read.

Certificates of clients may be strange, and still be signed by a trusted authority.
"""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from ipaddress import ip_network
from urllib.parse import quote

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtensionOID, NameOID
from hypothesis import given
from hypothesis import strategies as st

from rooms.api.client_identity import (
    MAX_HOPS,
    UNKNOWN_SOURCE,
    ForwardedClient,
    TrustedProxies,
    read_certificate,
)
from rooms.domain.member_identity import DEFAULT_RULES, CertificateRules, MemberIdentity
from rooms.errors import MalformedError, RoomsError
from rooms.settings import PROXY_HEADERS
from tests.support.client_certificates import ClientCertificateAuthority

RULES = CertificateRules.parse(DEFAULT_RULES)
PROXY = ("10.0.0.1", 4711)
NETWORKS = (ip_network("10.0.0.0/24"), ip_network("fd00::/64"))
AUTHORITY = ClientCertificateAuthority()
MEMBER = AUTHORITY.issue("SE/GOV/1")
X400_ADDRESS = bytes.fromhex("3002a300")
EDI_PARTY = bytes.fromhex("3006a504a1020c00")


def proxies(headers: str = PROXY_HEADERS) -> TrustedProxies:
    return TrustedProxies(NETWORKS, frozenset(headers.split(",")), RULES)


def read(headers: Mapping[bytes, bytes], believed: str = PROXY_HEADERS) -> ForwardedClient:
    return proxies(believed).read(headers, PROXY)


@pytest.mark.parametrize(
    ("address", "trusted"),
    [("10.0.0.1", True), ("10.0.1.1", False), ("::ffff:10.0.0.1", True), ("fd00::1", True), ("fd00:0:0:1::1", False),
     ("10.0.0.1%eth0", True), ("testclient", False), ("", False)],
)  # fmt: skip
def test_an_address_is_trusted_or_not(address: str, *, trusted: bool) -> None:
    found = proxies()
    assert [found.include((address, 1)) for _ in range(2)] == [trusted] * 2
    assert not found.include(None)
    assert not TrustedProxies((), frozenset(), RULES).include((address, 1))


@pytest.mark.parametrize(
    ("given", "source"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("192.0.2.7:55", "192.0.2.7"),
        ("2001:db8::7", "2001:db8::7"),
        ("[2001:db8::7]:55", "2001:db8::7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("1.1.1.1, 192.0.2.7", "192.0.2.7"),  # the client made up the first one
        ("1.1.1.1,192.0.2.7 , 10.0.0.9,10.0.0.8", "192.0.2.7"),
        ("10.0.0.9, 10.0.0.8", "10.0.0.9"),
        ("made up, 192.0.2.7", "192.0.2.7"),
        ("192.0.2.7, unknown", "unknown"),
        ("192.0.2.7, unknown, 10.0.0.9", "unknown"),
        ("", "unknown"),
        ("192.0.2.7," + "10.0.0.9," * MAX_HOPS + "10.0.0.9", "unknown"),
        ("9" * 60_000 + ",192.0.2.7", "192.0.2.7"),
    ],
)
def test_the_source_is_the_rightmost_address_that_is_not_trusted(given: str, source: str) -> None:
    found = proxies().source({b"x-forwarded-for": given.encode()}, PROXY)
    assert found == (source, 0)
    assert proxies("x-govstack-client").source({b"x-forwarded-for": given.encode()}, PROXY) == PROXY


def test_without_the_header_the_source_is_the_proxy() -> None:
    assert proxies().source({}, PROXY) == PROXY


@given(st.binary(max_size=300))
def test_any_bytes_name_a_source_or_none(given: bytes) -> None:
    host, _ = proxies().source({b"x-forwarded-for": given}, PROXY)
    assert host == UNKNOWN_SOURCE[0] or ip_network(host) is not None


@pytest.mark.parametrize(
    "pem", [MEMBER.pem, MEMBER.pem.strip(), MEMBER.pem.replace(b"\n", b"\r\n")]
)
def test_the_certificate_of_nginx_and_of_envoy(pem: bytes) -> None:
    escaped = quote(pem, safe="/").encode()
    for header in (
        escaped,
        b'Cert="' + escaped + b'"',
        b'By=spiffe://a/b;Hash=0f;Cert="'
        + escaped
        + b'";Subject="CN=\\";Cert=\\"x,\\"";URI=,,'.rstrip(b","),
    ):
        found = read({b"x-forwarded-client-cert": header}).certificate
        assert found is not None
        assert found.identity == MemberIdentity("SE/GOV/1")
        assert found.serial == MEMBER.certificate.serial_number
        assert read({b"x-forwarded-client-cert": header}, "x-forwarded-for").certificate is None


DER = quote(MEMBER.certificate.public_bytes(Encoding.DER)).encode()
ESCAPED = quote(MEMBER.pem).encode()


@pytest.mark.parametrize(
    "header",
    [b"x", b'Subject="C=SE,O=GOV,CN=1"', b'Cert=""', b'Cert="x"', b'Cert="' + DER + b'"', MEMBER.pem.replace(b"\n", b" "),
     b'Cert="' + ESCAPED + b'",Cert="' + ESCAPED + b'"', b'Cert="' + ESCAPED + b'";Cert="' + ESCAPED + b'"', b'Cert="' + ESCAPED,
     ESCAPED + ESCAPED, ESCAPED[:-60], b"-----BEGIN%20CERTIFICATE-----%0AAAAA%0A-----END%20CERTIFICATE-----", b"," * 16_000,
     b'"' * 16_000, b"a=b;" * 4_000, b"x" * 17_000],
)  # fmt: skip
def test_a_malformed_certificate_header_is_refused(header: bytes) -> None:
    with pytest.raises(MalformedError, match="X-Forwarded-Client-Cert"):
        read({b"x-forwarded-client-cert": header})


@given(st.binary(max_size=300))
def test_any_bytes_are_a_certificate_or_an_error(header: bytes) -> None:
    for value in (header, b'Cert="' + header + b'"', b"-----BEGIN%20" + header):
        try:
            read({b"x-forwarded-client-cert": value})
        except RoomsError:
            continue
        assert not value


def test_the_client_of_a_security_server() -> None:
    headers = {b"x-govstack-client": b"SE/GOV/1/payroll"}
    assert read(headers).govstack_client == MemberIdentity("SE/GOV/1", "payroll")
    assert read(headers, "x-forwarded-for").govstack_client is None
    for malformed in (b"", b"SE/GOV", b"SE/GOV/1/a/b", b"\xff/GOV/1", b"x" * 60_000):
        with pytest.raises(MalformedError, match="X-GovStack-Client"):
            read({b"x-govstack-client": malformed})


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
