"""Test keys, signatures and receipts: what is changed anywhere is refused with its reason."""

import json
from base64 import urlsafe_b64encode
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooms.evidence.jose import (
    ALGORITHMS,
    GRACE_S,
    EvidenceError,
    SigningKey,
    ed25519_key,
    end_of,
    generate_key,
    public_key,
    read_jws,
    sign,
    signing_key,
)
from rooms.evidence.message_signature import (
    TYPE,
    MessageIdentity,
    payload_hash,
    read_signature,
    read_statement,
    sign_message,
)
from rooms.evidence.receipt import (
    Receipt,
    ReceiptDelivery,
    ReceiptPublisher,
    ReceiptSignature,
    read_keys,
    sign_receipt,
    verify_receipt,
)

NOW: Final = datetime(2026, 11, 23, 8, 0, tzinfo=UTC)
IDENTITY: Final = MessageIdentity(
    publisher="01900000-0000-7000-8000-000000000001",
    room=1000,
    event_type="order.made",
    version=2,
    id="o-1",
    ordering_key="k",
)
PAYLOAD: Final = b'{"a": 1}'
OTHER: Final = "01900000-0000-7000-8000-000000000003"
_FIELDS: Final = ("publisher", "room", "event_type", "version", "id", "ordering_key")
INSTALLATION: Final = ed25519_key(bytes(range(32)))
OWN_KEYS: Final = {INSTALLATION.public.kid: INSTALLATION.public}
PUBLISHERS: Final = [ed25519_key(bytes(32)), generate_key("ES256")]


def check(text: str, key: SigningKey, identity: MessageIdentity, payload: bytes) -> None:
    statement = read_statement(read_signature(text), key.public)
    statement.check_identity(identity)
    statement.check_payload(payload_hash(payload))


def a_receipt(**fields: Any) -> Receipt:
    key = fields.pop("key", PUBLISHERS[0])
    jws = fields.pop("jws", None) or sign_message(key, IDENTITY, PAYLOAD)
    jwk = fields.pop("jwk", None) or replace(key.public, valid_from=NOW).to_jwk()
    organisation_id = fields.pop("organisation_id", IDENTITY.publisher)
    plain: dict[str, Any] = {
        "iss": "rooms:rooms/default",
        "iat": int(NOW.timestamp()) + 10,
        "message_id": "01900000-0000-7000-8000-000000000002",
        "room": IDENTITY.room,
        "event_type": IDENTITY.event_type,
        "version": IDENTITY.version,
        "accepted_at": NOW,
        "fanout": 1,
        "states": {"delivered": 1},
        "deliveries": [ReceiptDelivery(subscription_id="s", state="delivered", updated_at=NOW)],
        "id": IDENTITY.id,
        "ordering_key": IDENTITY.ordering_key,
        "sha256": payload_hash(PAYLOAD),
        "payload_bytes": len(PAYLOAD),
        "publisher": ReceiptPublisher(
            organisation_id=IDENTITY.publisher, organisation="health", key_id="k"
        ),
        "signature": ReceiptSignature(
            jws=jws, key=jwk, organisation_id=organisation_id, organisation="health"
        ),
    }
    return Receipt(**{**plain, **fields})


@pytest.mark.parametrize("key", PUBLISHERS, ids=ALGORITHMS)
def test_a_signature_holds_for_its_message(key: SigningKey) -> None:
    check(sign_message(key, IDENTITY, PAYLOAD), key, IDENTITY, PAYLOAD)


@given(st.binary(max_size=64))
def test_another_payload_is_refused(payload: bytes) -> None:
    signature = sign_message(PUBLISHERS[0], IDENTITY, PAYLOAD)
    if payload != PAYLOAD:
        with pytest.raises(EvidenceError, match="payload differs"):
            check(signature, PUBLISHERS[0], IDENTITY, payload)


@given(
    st.fixed_dictionaries(
        {
            "publisher": st.sampled_from([IDENTITY.publisher, "other"]),
            "room": st.integers(999, 1001),
            "event_type": st.sampled_from(["order.made", "order.paid"]),
            "version": st.sampled_from([None, 1, 2]),
            "id": st.sampled_from([None, "o-1", "o-2"]),
            "ordering_key": st.sampled_from([None, "k", "l"]),
        }
    )
)
def test_another_identity_is_refused_by_its_field(fields: dict[str, Any]) -> None:
    signature = sign_message(PUBLISHERS[0], IDENTITY, PAYLOAD)
    other = MessageIdentity(**fields)
    if other == IDENTITY:
        check(signature, PUBLISHERS[0], other, PAYLOAD)
        return
    wrong = next(name for name in _FIELDS if fields[name] != getattr(IDENTITY, name))
    with pytest.raises(EvidenceError, match=f"identity differs: it signs {wrong} "):
        check(signature, PUBLISHERS[0], other, PAYLOAD)


@pytest.mark.parametrize("key", PUBLISHERS, ids=ALGORITHMS)
@given(data=st.data())
def test_every_changed_character_is_refused(key: SigningKey, data: st.DataObject) -> None:
    text = sign_message(key, IDENTITY, PAYLOAD)
    place = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.sampled_from("ABCXYZabcxyz0189-_.= \n"))
    changed = text[:place] + other + text[place + 1 :]
    if changed != text:
        with pytest.raises(EvidenceError):
            check(changed, key, IDENTITY, PAYLOAD)


@pytest.mark.parametrize("key", PUBLISHERS, ids=ALGORITHMS)
@pytest.mark.parametrize("added", ["=", "==", "===", "A", "."])
def test_what_has_more_characters_is_refused(key: SigningKey, added: str) -> None:
    """Padding, too: a strict reader would refuse what is delivered."""
    text = sign_message(key, IDENTITY, PAYLOAD)
    for changed in (text + added, text.replace(".", f"{added}.", 1)):
        with pytest.raises(EvidenceError):
            check(changed, key, IDENTITY, PAYLOAD)


@given(st.text(max_size=200))
def test_text_that_is_no_signature_is_refused(text: str) -> None:
    with pytest.raises(EvidenceError):
        check(text, PUBLISHERS[0], IDENTITY, PAYLOAD)


def with_header(text: str, **members: Any) -> str:
    """Return a JWS with another header, for keys that would not mind."""
    header = {"alg": "EdDSA", "kid": PUBLISHERS[0].public.kid, "typ": TYPE, **members}
    kept = {name: value for name, value in header.items() if value is not None}
    encoded = urlsafe_b64encode(json.dumps(kept).encode()).rstrip(b"=").decode()
    return ".".join([encoded, *text.split(".")[1:]])


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({"alg": "none"}, "its algorithm is 'none'"),
        ({"alg": "HS256"}, "its algorithm is 'HS256'"),
        ({"alg": "ES256"}, "its algorithm is 'ES256'"),
        ({"jwk": PUBLISHERS[0].public.to_jwk()}, "and typ, and no more"),
        ({"b64": False, "crit": ["b64"]}, "no compact JWS"),
        ({"crit": ["x"], "x": 1}, "no compact JWS"),
        ({"kid": None}, "alg, kid"),
        ({"kid": "\x00"}, "alg, kid"),
        ({"kid": "\ud800"}, "no compact JWS"),
        ({"crit": ["\ud800"]}, "no compact JWS"),
        ({"kid": INSTALLATION.public.kid}, "it names the key"),
        ({"typ": "JWT"}, "its typ is 'JWT'"),
    ],
)
def test_a_header_that_says_more_or_else_is_refused(members: dict[str, Any], reason: str) -> None:
    text = sign_message(PUBLISHERS[0], IDENTITY, PAYLOAD)
    with pytest.raises(EvidenceError, match=reason) as caught:
        check(with_header(text, **members), PUBLISHERS[0], IDENTITY, PAYLOAD)
    assert str(caught.value).encode()


def test_a_member_that_is_signed_twice_is_refused() -> None:
    """Other libraries take the first of two values: the signature would be for both payloads."""
    key = PUBLISHERS[0]
    payload = read_signature(sign_message(key, IDENTITY, PAYLOAD)).verify(key.public)
    twice = payload.replace(b'"sha256":', b'"sha256":"%b","sha256":' % payload_hash(b"2").encode())
    with pytest.raises(EvidenceError, match="sha256 twice"):
        check(sign(twice, key, TYPE), key, IDENTITY, PAYLOAD)


def test_keys_are_named_by_the_thumbprint_of_rfc_8037() -> None:
    """Check it with the example of RFC 8037, appendix A."""
    jwk = {
        "kty": "OKP",
        "crv": "Ed25519",
        "d": "nWGxne_9WmC6hEr0kuwsxERJxWl7MmkZcDusAxyuf2A",
        "x": "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo",
    }
    key = signing_key(jwk)
    assert key.public.kid == "kPrK_qmxVWaYVA9wwBF6Iuo3vVzz7TxHCTwXBygrS4k"
    assert key.to_jwk()["d"] == jwk["d"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_private_key_must_belong_to_its_public_one(algorithm: str) -> None:
    made, other = generate_key(algorithm), generate_key(algorithm)
    with pytest.raises(EvidenceError, match="it is no key"):
        signing_key({**other.public.to_jwk(), "d": made.to_jwk()["d"]})


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_keys_survive_writing_and_reading(algorithm: str) -> None:
    made = generate_key(algorithm)
    read = signing_key(json.loads(json.dumps(made.to_jwk())))
    check(sign_message(read, IDENTITY, PAYLOAD), made, IDENTITY, PAYLOAD)
    assert "d" not in made.public.to_jwk()
    with pytest.raises(EvidenceError, match="private key"):
        public_key(made.to_jwk())
    with pytest.raises(EvidenceError, match="no private key"):
        signing_key(made.public.to_jwk())


@pytest.mark.parametrize("key", PUBLISHERS, ids=ALGORITHMS)
def test_a_receipt_proves_what_it_says(key: SigningKey) -> None:
    receipt = a_receipt(key=key)
    found = verify_receipt(
        sign_receipt(receipt, INSTALLATION) + "\n",
        OWN_KEYS,
        payload=PAYLOAD,
        publisher_keys={key.public.kid: key.public},
    )
    assert found.receipt == receipt
    assert found.statement is not None
    assert (found.kid, found.publisher_kid) == (INSTALLATION.public.kid, key.public.kid)


@given(data=st.data())
def test_every_changed_character_of_a_receipt_is_refused(data: st.DataObject) -> None:
    text = sign_receipt(a_receipt(), INSTALLATION)
    place = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.sampled_from("ABCXYZabcxyz0189-_."))
    changed = text[:place] + other + text[place + 1 :]
    if changed != text:
        with pytest.raises(EvidenceError):
            verify_receipt(changed, OWN_KEYS)


def late(seconds: int) -> int:
    return int(NOW.timestamp()) + seconds


def publisher(organisation_id: str | None, organisation: str = "health") -> ReceiptPublisher:
    return ReceiptPublisher(organisation_id=organisation_id, organisation=organisation)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"sha256": payload_hash(b"x")}, "payload differs"),
        ({"room": 1}, "identity differs: it signs room"),
        ({"event_type": "order.paid"}, "identity differs: it signs event_type"),
        ({"version": 3}, "identity differs: it signs version"),
        (
            {"organisation_id": OTHER, "publisher": publisher(OTHER)},
            "identity differs: it signs publisher",
        ),
        ({"publisher": publisher(OTHER)}, "the receipt names the publisher .*'health'"),
        ({"publisher": publisher(None)}, "the receipt names the publisher None"),
        (
            {"publisher": publisher(IDENTITY.publisher, "police")},
            "the receipt names the publisher .*'police'.*signature is of .*'health'",
        ),
        ({"id": "o-2"}, "identity differs: it signs id"),
        ({"ordering_key": None}, "identity differs: it signs ordering_key"),
        ({"jwk": PUBLISHERS[1].public.to_jwk()}, "another key made it"),
        ({"key": INSTALLATION}, "another key made it"),
        (
            {"jwk": replace(PUBLISHERS[0].public, valid_until=NOW).to_jwk()},
            "the message was accepted .* after the key .* had ended",
        ),
        (
            {"jwk": replace(PUBLISHERS[0].public, valid_from=NOW + timedelta(1)).to_jwk()},
            "before the key .* was valid",
        ),
        ({"jwk": {"kty": "RSA"}}, "no public key"),
        ({"jws": "a.b.c"}, "no compact JWS"),
    ],
)
def test_a_receipt_with_another_signature_is_refused(fields: dict[str, Any], reason: str) -> None:
    """Check what the installation would sign if it were wrong or dishonest."""
    text = sign_receipt(a_receipt(**fields), INSTALLATION)
    trusted = {PUBLISHERS[0].public.kid: PUBLISHERS[0].public}
    with pytest.raises(EvidenceError, match=f"(?s)the publisher's signature: .*{reason}"):
        verify_receipt(text, OWN_KEYS, publisher_keys=trusted)


def test_a_receipt_needs_its_key_and_its_time() -> None:
    text = sign_receipt(a_receipt(), INSTALLATION)
    other = ed25519_key(bytes([7]) * 32)
    with pytest.raises(EvidenceError, match="not among the installation's keys"):
        verify_receipt(text, {other.public.kid: other.public})
    forged = sign_receipt(a_receipt(), SigningKey(INSTALLATION.public, other.key))
    with pytest.raises(EvidenceError, match="was not made by the key"):
        verify_receipt(forged, OWN_KEYS)
    with pytest.raises(EvidenceError, match="payload differs"):
        verify_receipt(text, OWN_KEYS, payload=b"other")
    longer = sign_receipt(a_receipt(payload_bytes=999), INSTALLATION)
    with pytest.raises(EvidenceError, match=r"payload differs: .* 999 bytes, .* has 8"):
        verify_receipt(longer, OWN_KEYS, payload=PAYLOAD)
    ended = replace(INSTALLATION.public, valid_until=end_of(NOW))
    with pytest.raises(EvidenceError, match="had ended"):
        verify_receipt(sign_receipt(a_receipt(iat=late(GRACE_S)), INSTALLATION), {ended.kid: ended})
    in_time = sign_receipt(a_receipt(iat=late(GRACE_S - 1)), INSTALLATION)
    assert verify_receipt(in_time, {ended.kid: ended}).kid == ended.kid
    with pytest.raises(EvidenceError, match="its typ is"):
        verify_receipt(sign_message(INSTALLATION, IDENTITY, PAYLOAD), OWN_KEYS)
    unsigned = sign_receipt(a_receipt(signature=None), INSTALLATION)
    assert verify_receipt(unsigned, OWN_KEYS).statement is None
    with pytest.raises(EvidenceError, match="no signature of the publisher"):
        verify_receipt(unsigned, OWN_KEYS, publisher_keys=OWN_KEYS)
    hidden = sign_receipt(a_receipt(signature=None, sha256=None), INSTALLATION)
    with pytest.raises(EvidenceError, match="could not read it"):
        verify_receipt(hidden, OWN_KEYS, payload=PAYLOAD)


@pytest.mark.parametrize("claims", [b"{}", b"[]", b"x", b'{"iss": 1}', b"\xff"])
def test_signed_bytes_that_are_no_receipt_are_refused(claims: bytes) -> None:
    with pytest.raises(EvidenceError, match="has another form"):
        verify_receipt(sign(claims, INSTALLATION, "rooms-receipt+jws"), OWN_KEYS)


def test_a_receipt_that_hides_its_publisher_holds() -> None:
    """Earlier versions named no publisher to subscribers."""
    text = sign_receipt(a_receipt(publisher=None, id=None), INSTALLATION)
    assert verify_receipt(text, OWN_KEYS).statement is not None


def test_a_receipt_of_a_later_version_may_say_more() -> None:
    claims = msgspec.to_builtins(a_receipt(signature=None)) | {"more": True}
    text = sign(json.dumps(claims).encode(), INSTALLATION, "rooms-receipt+jws")
    assert verify_receipt(text, OWN_KEYS).receipt.room == IDENTITY.room
    assert read_jws(text, "rooms-receipt+jws").header.kid == INSTALLATION.public.kid


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ("x", "no JSON"),
        ("[]", "neither a JWK nor a JWK Set"),
        ('{"keys": 1}', "no list"),
        ('{"keys": []}', "no key of kty"),
        ('{"keys": [1]}', "no JSON object"),
        ('{"keys": [{"kty": "RSA"}]}', "no key of kty"),
        ('{"kty": "OKP", "crv": "Ed25519", "x": "short"}', "32 bytes"),
        ('{"kty": "OKP", "crv": "Ed25519", "x": "%s"}' % ("!" * 43), "32 bytes"),
    ],
)
def test_files_without_keys_are_refused(document: str, reason: str) -> None:
    with pytest.raises(EvidenceError, match=reason):
        read_keys(document)


@pytest.mark.parametrize("name", ["nbf", "exp"])
@pytest.mark.parametrize("value", ["x", True, 1e300, {}])
def test_a_time_that_is_none_is_refused(name: str, value: object) -> None:
    with pytest.raises(EvidenceError, match=f"its member {name}"):
        public_key({**INSTALLATION.public.to_jwk(), name: value})


def test_keys_are_read_from_every_document_that_names_them() -> None:
    jwk = INSTALLATION.public.to_jwk()
    for document in (jwk, {"keys": [jwk]}, {"jwk": jwk, "name": "x"}, {"items": [{"jwk": jwk}]}):
        assert read_keys(json.dumps(document)) == OWN_KEYS
