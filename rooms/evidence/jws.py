"""Sign and verify compact JSON Web Signatures (RFC 7515).

The header has `alg`, `kid` and `typ`, and nothing else: what it could say besides, such as a key to
verify with or a critical extension, is refused.
"""

from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
from jwt import PyJWS
from jwt.exceptions import InvalidSignatureError, PyJWTError

from rooms.evidence.keys import (
    ALGORITHMS,
    KID_PATTERN,
    EvidenceError,
    PublicKey,
    SigningKey,
    decode_bytes,
)

_jws: Final = PyJWS(algorithms=ALGORITHMS)


class JwsHeader(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Describe the protected header of a JWS."""

    alg: str
    kid: Annotated[str, msgspec.Meta(pattern=rf"\A{KID_PATTERN}\Z")]
    typ: str


_headers: Final = msgspec.json.Decoder(JwsHeader)


@dataclass(frozen=True, slots=True)
class Jws:
    """Hold a JWS whose header was read, and that is not verified yet."""

    text: str
    header: JwsHeader

    def verify(self, key: PublicKey) -> bytes:
        """Return the signed bytes. EvidenceError: the key did not sign them."""
        if self.header.kid != key.kid:
            raise EvidenceError(f"it names the key {self.header.kid}, and not {key.kid}")
        if self.header.alg != key.algorithm:
            raise EvidenceError(
                f"its algorithm is {self.header.alg!r}; the key {key.kid} is for {key.algorithm}"
            )
        try:
            payload = _jws.decode_complete(self.text, key.key, algorithms=[key.algorithm])
        except InvalidSignatureError as exc:
            raise EvidenceError(
                f"it was not made by the key {key.kid}, or was changed since"
            ) from exc
        except PyJWTError as exc:
            raise EvidenceError(f"it is no JWS: {ascii(str(exc))[1:-1]}") from exc
        found: bytes = payload["payload"]
        return found


def read_jws(text: str, kind: str) -> Jws:
    """Return a JWS of a type. EvidenceError: it is malformed, or of another type or algorithm."""
    try:
        _jws.get_unverified_header(text)
        header = _headers.decode(decode_bytes(text.partition(".")[0]))
    except msgspec.ValidationError as exc:
        raise EvidenceError(
            f"its header must have alg, kid (a thumbprint by RFC 7638) and typ, and no more: {exc}"
        ) from exc
    except (PyJWTError, msgspec.DecodeError, ValueError, RecursionError) as exc:
        raise EvidenceError(f"it is no compact JWS: {ascii(str(exc))[1:-1]}") from exc
    if header.alg not in ALGORITHMS:
        raise EvidenceError(f"its algorithm is {header.alg[:40]!r}; use {' or '.join(ALGORITHMS)}")
    if header.typ != kind:
        raise EvidenceError(f"its typ is {header.typ[:40]!r}; it must be {kind!r}")
    return Jws(text, header)


def sign(payload: bytes, key: SigningKey, kind: str) -> str:
    """Return a JWS of a type over `payload`."""
    headers = {"kid": key.public.kid, "typ": kind}
    return _jws.encode(payload, key.key, algorithm=key.public.algorithm, headers=headers)
