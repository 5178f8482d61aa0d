"""Sign webhooks by Standard Webhooks v1: HMAC-SHA256 over `id.timestamp.body`."""

import hashlib
from base64 import b64decode, b64encode
from binascii import b2a_base64
from collections.abc import Callable

PREFIX = "whsec_"
SECRET_BYTES = 32
_ALLOWED_BYTES = range(24, 65)

_BLOCK = 64
_INNER = bytes(byte ^ 0x36 for byte in range(256))
_OUTER = bytes(byte ^ 0x5C for byte in range(256))


def new_secret(random: Callable[[int], bytes]) -> str:
    """Return a new secret as text. `random(n)` returns n unpredictable bytes."""
    return PREFIX + b64encode(random(SECRET_BYTES)).decode("ascii")


def parse_secret(text: str) -> bytes:
    """Return the key of `whsec_…`. Raises ValueError with the fault, without the secret in it."""
    if not text.startswith(PREFIX):
        raise ValueError(f"a signing secret begins with {PREFIX}")
    try:
        key = b64decode(text[len(PREFIX) :], validate=True)
    except ValueError as exc:
        raise ValueError(f"a signing secret is base64 after {PREFIX}") from exc
    if len(key) not in _ALLOWED_BYTES:
        raise ValueError(
            f"a signing secret holds {_ALLOWED_BYTES[0]} to {_ALLOWED_BYTES[-1]} bytes"
        )
    return key


class Signer:
    """Sign with every key, the newest first, so that receivers find theirs during a rotation."""

    __slots__ = ("_keys",)

    def __init__(self, secrets: tuple[bytes, ...]) -> None:
        if not secrets:
            raise ValueError("signing needs at least one secret")
        # Copying the state after both pads costs less than an HMAC from the key each time.
        self._keys = tuple((inner.copy, outer.copy) for inner, outer in map(_hmac_pads, secrets))

    def sign(self, webhook_id: str, timestamp: int, body: bytes) -> str:
        """Return the value of `webhook-signature`. `timestamp`: epoch seconds."""
        prefix = f"{webhook_id}.{timestamp}.".encode()
        signatures = ""
        for copy_inner, copy_outer in self._keys:
            digest = copy_inner()
            digest.update(prefix)
            digest.update(body)
            signature = copy_outer()
            signature.update(digest.digest())
            value = "v1," + b2a_base64(signature.digest(), newline=False).decode("ascii")
            signatures = f"{signatures} {value}" if signatures else value
        return signatures


def _hmac_pads(secret: bytes) -> "tuple[hashlib._Hash, hashlib._Hash]":
    key = (hashlib.sha256(secret).digest() if len(secret) > _BLOCK else secret).ljust(_BLOCK, b"\0")
    return hashlib.sha256(key.translate(_INNER)), hashlib.sha256(key.translate(_OUTER))
