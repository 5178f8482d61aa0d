"""Sign and verify receipts: the installation's statement about a message that it accepted."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import msgspec

from rooms.evidence.jose import EvidenceError, PublicKey, SigningKey, public_key, read_jws, sign
from rooms.evidence.message_signature import (
    MessageIdentity,
    SignedStatement,
    payload_hash,
    read_signature,
    read_statement,
)
from rooms.safe_text import brief_repr

TYPE: Final = "rooms-receipt+jws"
MAX_RECEIPT_BYTES: Final = 4 << 20
MAX_KEYS: Final = 1000
_LAST_TIME: Final = 253_402_300_799
"""The last second of the year 9999, in epoch seconds."""
_Time = Annotated[datetime, msgspec.Meta(tz=True)]


class ReceiptPublisher(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Name who published: organisation and application; the API key to owner and publisher only."""

    organisation_id: str | None = None
    organisation: str | None = None
    application: str | None = None
    key_id: str | None = None


class ReceiptSignature(msgspec.Struct, kw_only=True):
    """Hold a publisher's signature as it was verified when the message was accepted.

    `key`: the public JWK as the organisation registered it; `nbf` and `exp` say from when until
    when.
    """

    jws: str
    key: dict[str, Any]
    organisation_id: str
    organisation: str | None


class ReceiptDelivery(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Describe what became of the message for one subscription."""

    subscription_id: str
    subscription: str | None = None
    organisation_id: str | None = None
    state: str
    reason: str | None = None
    attempts: int | None = None
    updated_at: _Time


class Receipt(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Describe a message as the installation `iss` knew it at `iat` (epoch seconds).

    What the asker may not see is left out: `id` (the publisher's own), `publisher` until the
    message may be sent to it, and `sha256`, `payload_bytes` and `signature` while it may not read
    the payload. `states` counts deliveries by state; `more_deliveries`: not all of them are listed.
    """

    iss: str
    iat: Annotated[int, msgspec.Meta(ge=0, le=_LAST_TIME)]
    message_id: str
    room: int
    event_type: str
    version: int
    accepted_at: _Time
    fanout: int
    states: dict[str, int]
    deliveries: Sequence[ReceiptDelivery]
    more_deliveries: bool = False
    id: str | None = None
    ordering_key: str | None = None
    correlation_id: str | None = None
    publisher: ReceiptPublisher | None = None
    sha256: str | None = None
    payload_bytes: int | None = None
    signature: ReceiptSignature | None = None

    @property
    def signed_at(self) -> datetime:
        """Return the time at which the installation signed."""
        return datetime.fromtimestamp(self.iat, UTC)


@dataclass(frozen=True, slots=True)
class VerifiedReceipt:
    """Hold a receipt that is proved, and what it proves besides."""

    receipt: Receipt
    kid: str
    statement: SignedStatement | None
    """The publisher's statement; None: it signed nothing."""
    publisher_kid: str | None = None


_receipts: Final = msgspec.json.Decoder(Receipt)


def sign_receipt(receipt: Receipt, key: SigningKey) -> str:
    """Return the receipt as a compact JWS."""
    return sign(msgspec.json.encode(receipt), key, TYPE)


def verify_receipt(
    text: str,
    keys: Mapping[str, PublicKey],
    *,
    payload: bytes | None = None,
    publisher_keys: Mapping[str, PublicKey] | None = None,
) -> VerifiedReceipt:
    """Return a receipt that is proved by the installation's keys.

    A publisher's signature in it is verified too: by its registered key, which the installation
    vouches for, and by `publisher_keys` where they are given. EvidenceError: the reason why it is
    not proved.
    """
    if len(text) > MAX_RECEIPT_BYTES:
        raise EvidenceError(f"the receipt is larger than {MAX_RECEIPT_BYTES} bytes")
    receipt, kid = _verify_own(text.strip(), keys)
    if payload is not None:
        _check_payload(receipt, payload)
    if receipt.signature is None:
        if publisher_keys is not None:
            raise EvidenceError("the receipt has no signature of the publisher")
        return VerifiedReceipt(receipt, kid, None)
    try:
        statement, publisher_kid = _verify_publisher(receipt, receipt.signature, publisher_keys)
    except EvidenceError as exc:
        raise EvidenceError(f"the publisher's signature: {exc}") from exc
    return VerifiedReceipt(receipt, kid, statement, publisher_kid)


def _verify_own(text: str, keys: Mapping[str, PublicKey]) -> tuple[Receipt, str]:
    try:
        jws = read_jws(text, TYPE)
        key = keys.get(jws.header.kid)
        if key is None:
            raise EvidenceError(
                f"the key {jws.header.kid[:64]} that it names is not among the installation's keys"
            )
        receipt = _receipts.decode(jws.verify(key))
        key.check_time(receipt.signed_at, "it says that it was signed")
    except EvidenceError as exc:
        raise EvidenceError(f"the receipt: {exc}") from exc
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise EvidenceError(f"the receipt has another form: {exc}") from exc
    return receipt, key.kid


def _check_payload(receipt: Receipt, payload: bytes) -> None:
    if receipt.sha256 is None:
        raise EvidenceError("the receipt does not name the payload: its asker could not read it")
    found = payload_hash(payload)
    if found != receipt.sha256:
        raise EvidenceError(
            f"payload differs: the receipt is about SHA-256 {receipt.sha256[:64]}, and the payload"
            f" has {found}"
        )
    if receipt.payload_bytes != len(payload):
        raise EvidenceError(
            f"payload differs: the receipt is about {receipt.payload_bytes} bytes, and the payload"
            f" has {len(payload)}"
        )


def _check_publisher(receipt: Receipt, given: ReceiptSignature) -> None:
    """Refuse a receipt that names one publisher, and another one as the signature's."""
    named = receipt.publisher
    if named is None:
        return
    found = named.organisation_id, named.organisation
    if found != (given.organisation_id, given.organisation):
        raise EvidenceError(
            f"identity differs: the receipt names the publisher {brief_repr(found[0])}"
            f" ({brief_repr(found[1])}), and the signature is of"
            f" {brief_repr(given.organisation_id)} ({brief_repr(given.organisation)})"
        )


def _verify_publisher(
    receipt: Receipt, given: ReceiptSignature, trusted: Mapping[str, PublicKey] | None
) -> tuple[SignedStatement, str]:
    _check_publisher(receipt, given)
    signature = read_signature(given.jws)
    key = public_key(given.key)
    if trusted is not None:
        found = trusted.get(key.kid)
        if found is None:
            raise EvidenceError(f"another key made it: {key.kid}")
        found.check_time(receipt.accepted_at, "the message was accepted")
    key.check_time(receipt.accepted_at, "the message was accepted")
    statement = read_statement(signature, key)
    statement.check_identity(
        MessageIdentity(
            publisher=given.organisation_id,
            room=receipt.room,
            event_type=receipt.event_type,
            version=receipt.version,
            id=receipt.id or statement.id,
            ordering_key=receipt.ordering_key,
        )
    )
    statement.check_payload(receipt.sha256 or "")
    return statement, key.kid


def read_keys(text: bytes | str) -> dict[str, PublicKey]:
    """Return the keys of a JWK, a JWK Set, or a list of the API, by their `kid`.

    Keys of other kinds in a set are left out. EvidenceError: it has none, or a wrong one.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise EvidenceError(f"it is no JSON: {exc}") from exc
    keys = [public_key(one) for one in _jwks(found)]
    if not keys:
        raise EvidenceError("it has no key of kty OKP or EC")
    return {key.kid: key for key in keys}


def _jwks(found: Any) -> Iterable[Mapping[str, Any]]:
    if not isinstance(found, dict):
        raise EvidenceError("it is neither a JWK nor a JWK Set")
    listed = found.get("keys", found.get("items", [found]))
    if not isinstance(listed, list) or len(listed) > MAX_KEYS:
        raise EvidenceError(f"it is no list of at most {MAX_KEYS} keys")
    for one in listed:
        jwk = one.get("jwk", one) if isinstance(one, dict) else one
        if not isinstance(jwk, dict):
            raise EvidenceError("one of its keys is no JSON object")
        if jwk.get("kty") in ("OKP", "EC"):  # a list or an object has no hash
            yield jwk
