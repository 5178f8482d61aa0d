"""Encrypt secrets with AES-256-GCM under a key that is never stored in the database."""

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


class Cipher:
    """Encrypt and decrypt bytes.

    A text encrypted for one `purpose` cannot be decrypted for another.
    """

    def __init__(self, key: bytes, random: Callable[[int], bytes] = os.urandom) -> None:
        self._aead = AESGCM(key)
        self._random = random

    def encrypt(self, plaintext: bytes, purpose: bytes = b"") -> bytes:
        """Return the nonce and the cipher text: 28 bytes more than `plaintext`."""
        nonce = self._random(_NONCE_BYTES)
        return nonce + self._aead.encrypt(nonce, plaintext, purpose)

    def decrypt(self, encrypted: bytes, purpose: bytes = b"") -> bytes:
        """Return the plain text.

        ValueError: it was not encrypted under this key, for this purpose, or was changed since.
        """
        try:
            return self._aead.decrypt(encrypted[:_NONCE_BYTES], encrypted[_NONCE_BYTES:], purpose)
        except (InvalidTag, ValueError) as exc:
            raise ValueError("not encrypted under this key, or changed since") from exc


def read_secret_key(
    text: str | None, data: Path, random: Callable[[int], bytes] = os.urandom
) -> bytes:
    """Return the installation's key: `text`, or the content of the file `secret-key` in `data`.

    Both are the base64 of 32 bytes. The file is made on first use.

    SettingsError: it is no such key, or the file cannot be read.
    """
    if text is not None:
        return _parse_key(text, "ROOMS_SECRET_KEY")
    path = data / KEY_FILE
    try:
        if not path.exists():
            _create_key_file(path, random)
        return _parse_key(path.read_text(encoding="ascii").strip(), str(path))
    except (OSError, UnicodeDecodeError) as exc:
        raise SettingsError([f"{path}: {exc}"]) from exc


def _create_key_file(path: Path, random: Callable[[int], bytes]) -> None:
    # Several processes may start at once: each writes a file of its own, and the first link wins
    # for all.
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


def _parse_key(text: str, source: str) -> bytes:
    try:
        key = b64decode(text, validate=True)
    except (Base64Error, ValueError) as exc:
        raise SettingsError([f"{source} is not base64"]) from exc
    if len(key) != KEY_BYTES:
        raise SettingsError(
            [f"{source} holds {len(key)} bytes; it takes the base64 of {KEY_BYTES} random ones"]
        )
    return key
