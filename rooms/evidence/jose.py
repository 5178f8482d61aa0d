"""Read and write signing keys as JWK, and sign and verify compact JSON Web Signatures with them.

Keys are for Ed25519 (RFC 8037) and P-256 (RFC 7518). A key is named by its SHA-256 thumbprint
(RFC 7638), so a `kid` cannot name another key.

The header of a signature (RFC 7515) has `alg`, `kid` and `typ`, and nothing else: what it could say
besides, such as a key to verify with or a critical extension, is refused.
"""

import hashlib
import json
import math
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final, Literal

import msgspec
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP256R1,
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
    generate_private_key,
)
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from jwt import PyJWS
from jwt.algorithms import ECAlgorithm, OKPAlgorithm
from jwt.exceptions import InvalidSignatureError, PyJWTError

from rooms.safe_text import brief_repr

EDDSA: Final = "EdDSA"
ES256: Final = "ES256"
ALGORITHMS: Final = (EDDSA, ES256)
KID_PATTERN: Final = "[A-Za-z0-9_-]{43}"
GRACE_S: Final = 60
"""Seconds for which a key that was revoked or replaced still proves what was signed or accepted.

They cover a publish or a receipt that was on its way at that moment.
"""
_MEMBERS: Final = ("kty", "crv", "x", "y")
_COORDINATE: Final = 43
"""Characters of 32 bytes in base64url."""
_SIGN_BIT: Final = 0x7F
# A signature under such a key proves nothing, because it fits many messages. The y coordinates of
# all points of small order on edwards25519, little-endian, without the sign of x.
_SMALL_ORDER: Final = frozenset(
    bytes.fromhex(text)
    for text in (
        "0000000000000000000000000000000000000000000000000000000000000000",
        "0100000000000000000000000000000000000000000000000000000000000000",
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    )
)

Public = Ed25519PublicKey | EllipticCurvePublicKey
Private = Ed25519PrivateKey | EllipticCurvePrivateKey
_jws: Final = PyJWS(algorithms=ALGORITHMS)


class EvidenceError(ValueError):
    """Report why a signature, a receipt or a key proves nothing."""


class _OkpKey(msgspec.Struct, tag_field="kty", tag="OKP", frozen=True):
    crv: Literal["Ed25519"]
    x: str


class _EcKey(msgspec.Struct, tag_field="kty", tag="EC", frozen=True):
    crv: Literal["P-256"]
    x: str
    y: str


@dataclass(frozen=True, slots=True)
class PublicKey:
    """Hold a public key, and the time in which what it signs is valid; None: without end."""

    kid: str
    algorithm: str
    members: Mapping[str, str]
    """The required members of its JWK."""
    key: Public
    valid_from: datetime | None = None
    valid_until: datetime | None = None

    def check_time(self, at: datetime, what: str) -> None:
        """Raise EvidenceError if the key was not valid at a time; `what` happened then."""
        if self.valid_until is not None and at >= self.valid_until:
            raise EvidenceError(
                f"{what} {_time(at)}, after the key {self.kid} had ended {_time(self.valid_until)}"
            )
        if self.valid_from is not None and at < self.valid_from:
            raise EvidenceError(
                f"{what} {_time(at)}, before the key {self.kid} was valid"
                f" ({_time(self.valid_from)})"
            )

    def to_jwk(self) -> dict[str, Any]:
        """Return it as a JWK with `kid`, `alg`, `use`, and `nbf` and `exp` where they are set."""
        found: dict[str, Any] = {**self.members, "kid": self.kid, "alg": self.algorithm}
        found["use"] = "sig"
        if self.valid_from is not None:
            found["nbf"] = math.floor(self.valid_from.timestamp())
        if self.valid_until is not None:
            found["exp"] = math.ceil(self.valid_until.timestamp())
        return found


def public_key(
    jwk: Mapping[str, Any],
    *,
    valid_from: datetime | None = None,
    valid_until: datetime | None = None,
) -> PublicKey:
    """Return the public key of a JWK. Its `nbf` and `exp` count where no times are given.

    EvidenceError: it is no public key for EdDSA with Ed25519 or ES256, or proves nothing.
    """
    if "d" in jwk:
        raise EvidenceError("it has the member d, so it is a private key: leave d out")
    try:
        given = {name: jwk[name] for name in _MEMBERS if name in jwk}
        shape = msgspec.convert(given, _OkpKey | _EcKey)
    except (msgspec.ValidationError, UnicodeEncodeError) as exc:
        raise EvidenceError(
            "it is no public key of kty OKP with crv Ed25519 (x), or kty EC with crv P-256 (x, y)"
        ) from exc
    members: dict[str, str] = msgspec.to_builtins(shape)
    for name in members.keys() & {"x", "y"}:
        if len(members[name]) != _COORDINATE or not _is_base64url(members[name]):
            raise EvidenceError(f"its member {name} is not 32 bytes in base64url without padding")
    algorithm = EDDSA if isinstance(shape, _OkpKey) else ES256
    try:
        loader = OKPAlgorithm if algorithm == EDDSA else ECAlgorithm
        key = loader.from_jwk(members)
    except (PyJWTError, ValueError) as exc:
        raise EvidenceError(f"it is no key: {exc}") from exc
    assert isinstance(key, Ed25519PublicKey | EllipticCurvePublicKey)
    if isinstance(key, Ed25519PublicKey):
        _check_order(key)
    named = jwk.get("alg", algorithm)
    if named != algorithm:
        raise EvidenceError(
            f"its alg is {brief_repr(named)}; a key of this kind is for {algorithm}"
        )
    kid = thumbprint(members)
    if jwk.get("kid", kid) != kid:
        raise EvidenceError(f"its kid is not its thumbprint by RFC 7638, which is {kid}")
    return PublicKey(
        kid=kid,
        algorithm=algorithm,
        members=members,
        key=key,
        valid_from=valid_from or _numeric_date(jwk, "nbf"),
        valid_until=valid_until or _numeric_date(jwk, "exp"),
    )


def _check_order(key: Ed25519PublicKey) -> None:
    octets = key.public_bytes_raw()
    if octets[:-1] + bytes([octets[-1] & _SIGN_BIT]) in _SMALL_ORDER:
        raise EvidenceError("its point has a small order, so it would fit many messages")


def _numeric_date(jwk: Mapping[str, Any], name: str) -> datetime | None:
    value = jwk.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise EvidenceError(f"its member {name} is no time in epoch seconds")
    try:
        return datetime.fromtimestamp(value, UTC)
    except (ValueError, OverflowError, OSError) as exc:
        raise EvidenceError(f"its member {name} is no time in epoch seconds") from exc


def end_of(ended_at: datetime | None) -> datetime | None:
    """Return the time until which a key that was revoked or replaced proves anything."""
    return None if ended_at is None else ended_at + timedelta(seconds=GRACE_S)


def _is_base64url(text: str) -> bool:
    try:
        return encode_bytes(decode_bytes(text)) == text
    except ValueError:
        return False


def thumbprint(members: Mapping[str, str]) -> str:
    """Return the thumbprint of the required members of a JWK (RFC 7638, SHA-256)."""
    text = json.dumps(dict(members), separators=(",", ":"), sort_keys=True)
    return encode_bytes(hashlib.sha256(text.encode()).digest())


@dataclass(frozen=True, slots=True)
class SigningKey:
    """Hold a private key with its public one."""

    public: PublicKey
    key: Private

    def to_jwk(self) -> dict[str, Any]:
        """Return it as a private JWK."""
        if isinstance(self.key, Ed25519PrivateKey):
            secret = self.key.private_bytes_raw()
        else:
            secret = self.key.private_numbers().private_value.to_bytes(32, "big")
        return {**self.public.to_jwk(), "d": encode_bytes(secret)}


def signing_key_from(key: Private) -> SigningKey:
    """Return a signing key."""
    if isinstance(key, Ed25519PrivateKey):
        members = dict(OKPAlgorithm.to_jwk(key.public_key(), as_dict=True))
    else:
        members = ECAlgorithm.to_jwk(key.public_key(), as_dict=True)
    return SigningKey(public_key(members), key)


def ed25519_key(seed: bytes) -> SigningKey:
    """Return the Ed25519 key of 32 random bytes."""
    return signing_key_from(Ed25519PrivateKey.from_private_bytes(seed))


def generate_key(algorithm: str) -> SigningKey:
    """Return a new key for an algorithm of ALGORITHMS.

    Its `kid` does not begin with a hyphen, which command lines would take for an option.
    """
    while True:
        key = signing_key_from(
            Ed25519PrivateKey.generate()
            if algorithm == EDDSA
            else generate_private_key(SECP256R1())
        )
        if not key.public.kid.startswith("-"):
            return key


def signing_key(jwk: Mapping[str, Any]) -> SigningKey:
    """Return the private key of a JWK. EvidenceError: it is none."""
    public = public_key({name: value for name, value in jwk.items() if name != "d"})
    if not isinstance(jwk.get("d"), str):
        raise EvidenceError("it has no member d, so it is no private key")
    loader = OKPAlgorithm if public.algorithm == EDDSA else ECAlgorithm
    try:
        key = loader.from_jwk({**public.members, "d": jwk["d"]})
    except (PyJWTError, ValueError) as exc:
        raise EvidenceError(f"it is no key: {exc}") from exc
    assert isinstance(key, Ed25519PrivateKey | EllipticCurvePrivateKey)
    return SigningKey(public, key)


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
    # PyJWT takes padding, and a stricter reader of what is delivered does not (RFC 7515, 2).
    if "=" in text:
        raise EvidenceError("it is no compact JWS: its parts are base64url without padding")
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


def encode_bytes(value: bytes) -> str:
    """Return base64url without padding."""
    return urlsafe_b64encode(value).rstrip(b"=").decode()


def decode_bytes(text: str) -> bytes:
    """Return the bytes of base64url without padding. ValueError."""
    return urlsafe_b64decode(text + "=" * (-len(text) % 4))


def _time(at: datetime) -> str:
    # In its own time zone, since the first and last times that there are have none in UTC.
    return at.isoformat(timespec="seconds").replace("+00:00", "Z")
