"""Sign and verify messages: a publisher's statement about a message's identity and payload.

The signed statement is a small JSON object with the hash of the payload, and not the payload. So
the payload keeps its bytes on the way, and the signature can be verified without it.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Final

import msgspec

from rooms.domain.message_headers import MAX_SIGNATURE
from rooms.evidence.jose import EvidenceError, Jws, PublicKey, SigningKey, read_jws, sign
from rooms.safe_text import brief_repr

TYPE: Final = "rooms-message+jws"
_IDENTITY: Final = ("publisher", "room", "event_type", "version", "id", "ordering_key")


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageIdentity:
    """Hold what a signature says of a message besides its payload.

    `publisher`: the id of its organisation, so that no other can claim the signature, here or in
    another installation. `id`: the publisher's own, so that a signature is for one message.
    """

    publisher: str
    room: int
    event_type: str
    version: int | None
    id: str | None
    ordering_key: str | None = None


class SignedStatement(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Describe what a publisher signs. `sha256`: of the payload's bytes, in hexadecimal.

    `iat`: the publisher's own time of signing, in epoch seconds. Nothing relies on it.
    """

    publisher: str
    room: int
    event_type: str
    version: int
    id: str
    sha256: str
    ordering_key: str | None = None
    iat: int | None = None

    def check_identity(self, identity: MessageIdentity) -> None:
        """Raise EvidenceError where it is about another message."""
        for name in _IDENTITY:
            signed, given = getattr(self, name), getattr(identity, name)
            if given is None and signed is not None:
                raise EvidenceError(
                    f"identity differs: it signs {name} {brief_repr(signed)}, and the message"
                    " names none"
                )
            if signed != given:
                raise EvidenceError(
                    f"identity differs: it signs {name} {brief_repr(signed)}, and the message has"
                    f" {brief_repr(given)}"
                )

    def check_payload(self, sha256: str) -> None:
        """Raise EvidenceError where it is about a payload with another hash."""
        if self.sha256 != sha256:
            raise EvidenceError(
                f"payload differs: it signs SHA-256 {self.sha256[:64]}, and the payload has"
                f" {sha256[:64]}"
            )


_statements: Final = msgspec.json.Decoder(SignedStatement)


def payload_hash(payload: bytes | msgspec.Raw) -> str:
    """Return the SHA-256 of a payload's bytes, in hexadecimal."""
    return hashlib.sha256(payload).hexdigest()


def sign_message(
    key: SigningKey, identity: MessageIdentity, payload: bytes, iat: int | None = None
) -> str:
    """Return a publisher's signature. EvidenceError: the identity lacks a version or an id."""
    if identity.version is None or identity.id is None:
        raise EvidenceError("a signed message names its version and an id")
    fields = {
        "publisher": identity.publisher,
        "room": identity.room,
        "event_type": identity.event_type,
        "version": identity.version,
        "id": identity.id,
        "ordering_key": identity.ordering_key,
        "sha256": payload_hash(payload),
        "iat": iat,
    }
    given = {name: value for name, value in fields.items() if value is not None}
    return sign(msgspec.json.encode(given), key, TYPE)


def read_signature(text: str) -> Jws:
    """Return a signature that is not verified yet. EvidenceError: it is none."""
    if len(text) > MAX_SIGNATURE:
        raise EvidenceError(f"it is longer than {MAX_SIGNATURE} characters")
    return read_jws(text, TYPE)


def read_statement(signature: Jws, key: PublicKey) -> SignedStatement:
    """Return what a key signed. EvidenceError: it did not sign this, or it is no statement."""
    signed = signature.verify(key)
    try:
        statement = _statements.decode(signed)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise EvidenceError(
            f"it does not sign publisher, room, event_type, version, id and sha256: {exc}"
        ) from exc
    _check_unique(signed)
    return statement


def _check_unique(statement: bytes) -> None:
    """Raise EvidenceError where a statement has a member twice.

    Some readers take the first value and others the last, so it would be for two messages.
    """
    seen: set[str] = set()
    for name, _ in json.loads(statement, object_pairs_hook=list):
        if name in seen:
            raise EvidenceError(f"it signs {name} twice, and readers differ on which one counts")
        seen.add(name)
