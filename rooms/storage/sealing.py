"""Secrets at rest: sealed with AES-256-GCM under a key that is never in the database."""

import os
import tempfile
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from rooms.errors import SettingsError

KEY_BYTES: Final = 32
KEY_FILE: Final = "secret-key"
_NONCE_BYTES: Final = 12


class Seal:
    """Seals and opens bytes. `purpose` keeps what was sealed for one use from being opened for another."""

    def __init__(self, key: bytes, random: Callable[[int], bytes] = os.urandom) -> None:
        self._cipher = AESGCM(key)
        self._random = random

    def seal(self, clear: bytes, purpose: bytes = b"") -> bytes:
        """Nonce and cipher text: 28 bytes longer than `clear`."""
        nonce = self._random(_NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, clear, purpose)

    def open(self, sealed: bytes, purpose: bytes = b"") -> bytes:
        """What was sealed. ValueError where it was not sealed under this key, for this purpose, or was changed since."""
        try:
            return self._cipher.decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], purpose)
        except (InvalidTag, ValueError) as exc:
            raise ValueError("not sealed under this key, or changed since") from exc


def read_key(text: str | None, data: Path, random: Callable[[int], bytes] = os.urandom) -> bytes:
    """The installation's key: `text` (base64 of 32 bytes), or the file `secret-key` in `data`, made on first use.

    SettingsError where either is no such key, or the file cannot be read.
    """
    if text is not None:
        return _parse(text, "ROOMS_SECRET_KEY")
    path = data / KEY_FILE
    try:
        if not path.exists():
            _make(path, random)
        return _parse(path.read_text(encoding="ascii").strip(), str(path))
    except (OSError, UnicodeDecodeError) as exc:
        raise SettingsError([f"{path}: {exc}"]) from exc


def _make(path: Path, random: Callable[[int], bytes]) -> None:
    # Several processes start at once: each writes a file of its own, and the first link wins for all.
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{KEY_FILE}-", dir=path.parent)
    own = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(b64encode(random(KEY_BYTES)) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(own, path)
    finally:
        own.unlink(missing_ok=True)


def _parse(text: str, source: str) -> bytes:
    try:
        key = b64decode(text, validate=True)
    except (Base64Error, ValueError) as exc:
        raise SettingsError([f"{source} is not base64"]) from exc
    if len(key) != KEY_BYTES:
        raise SettingsError([f"{source} holds {len(key)} bytes; it takes the base64 of {KEY_BYTES} random ones"])
    return key
