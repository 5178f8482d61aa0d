"""The receiver's side of Standard Webhooks: whether a webhook carries the signature of a secret that we know."""

import hmac
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

PREFIX: Final = "whsec_"
TOLERANCE_S: Final = 300


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a webhook may be believed, and why not."""

    genuine: bool
    reason: str = ""


def secret_key(text: str) -> bytes:
    """The key of `whsec_…`; ValueError (without the secret in it) where it is none."""
    if not text.startswith(PREFIX):
        raise ValueError(f"a signing secret begins with {PREFIX}")
    try:
        return b64decode(text.removeprefix(PREFIX), validate=True)
    except ValueError as exc:
        raise ValueError(f"a signing secret is base64 behind {PREFIX}") from exc


def verify(keys: Sequence[bytes], headers: Mapping[str, str], body: bytes, *, now_s: float) -> Verdict:
    """Judge a webhook by its headers (names in lower case) and the exact bytes of its body."""
    missing = [name for name in ("webhook-id", "webhook-timestamp", "webhook-signature") if not headers.get(name)]
    if missing:
        return Verdict(False, f"no {', '.join(missing)}")
    identity, timestamp = headers["webhook-id"], headers["webhook-timestamp"]
    if not timestamp.isascii() or not timestamp.isdigit():
        return Verdict(False, "webhook-timestamp is no number of seconds")
    if abs(now_s - int(timestamp)) > TOLERANCE_S:
        return Verdict(False, f"webhook-timestamp is more than {TOLERANCE_S} s from now")
    signed = f"{identity}.{timestamp}.".encode() + body
    expected = [b64encode(hmac.digest(key, signed, "sha256")) for key in keys]
    found = [value.encode() for version, _, value in _signatures(headers["webhook-signature"]) if version == "v1"]
    # Every pair is compared, so that the time taken says nothing about which one fits.
    fits = [hmac.compare_digest(one, other) for one in expected for other in found]
    return Verdict(True) if any(fits) else Verdict(False, "no signature fits the secret")


def _signatures(value: str) -> list[tuple[str, str, str]]:
    return [part.partition(",") for part in value.split()]
