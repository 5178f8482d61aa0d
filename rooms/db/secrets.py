"""Encrypt secrets with AES-256-GCM under keys that are never stored in the database.

A sealed text names the key that sealed it, so several keys can be valid at a time: the first one
seals, and all of them open. Texts of versions before that name no key; each key is tried on them.
"""

import hashlib
import logging
import os
import stat
import tempfile
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from rooms.errors import SettingsError

_log = logging.getLogger(__name__)

KEY_BYTES: Final = 32
KEY_FILE: Final = "secret-key"
PRUNED_FILE: Final = "secret-key.pruned"
"""The keys of before a prune, until it is certain that none of those it removes is needed."""
PENDING_FILE: Final = "secret-key.pending"
"""The key of a rotation that has not made it the first one yet."""
KEY_VARIABLE: Final = "ROOMS_SECRET_KEY"
MARK: Final = b"rk1"
"""The first bytes of a sealed text that names its key."""
KEY_ID_BYTES: Final = 8
PREFIX_BYTES: Final = len(MARK) + KEY_ID_BYTES
MAX_KEYS: Final = 8
_NONCE_BYTES: Final = 12


def key_id(key: bytes) -> str:
    """Return a key's name: 16 hexadecimal digits that say nothing about the key."""
    return hashlib.sha256(b"rooms secret key " + key).hexdigest()[: 2 * KEY_ID_BYTES]


class Cipher:
    """Encrypt and decrypt bytes.

    A text encrypted for one `purpose` cannot be decrypted for another.
    """

    def __init__(
        self,
        *keys: bytes,
        random: Callable[[int], bytes] = os.urandom,
        changed_keys: Callable[[], Sequence[bytes] | None] = lambda: None,
    ) -> None:
        """Seal with the first key, and open with all.

        `changed_keys` returns other keys if they were replaced since the last call, else None.
        """
        self._random = random
        self._changed_keys = changed_keys
        self._set(keys)

    def _set(self, keys: Sequence[bytes]) -> None:
        self._keys = {bytes.fromhex(key_id(key)): AESGCM(key) for key in keys}
        self._current = bytes.fromhex(key_id(keys[0]))

    def reload(self) -> None:
        """Take over keys that were replaced."""
        if (keys := self._changed_keys()) is not None:
            self._set(keys)

    @property
    def key_ids(self) -> tuple[str, ...]:
        """Return the names of the keys, the one that seals first."""
        return tuple(name.hex() for name in self._keys)

    @property
    def prefix(self) -> bytes:
        """Return how every text begins that the present key sealed."""
        return MARK + self._current

    def encrypt(self, plaintext: bytes, purpose: bytes = b"") -> bytes:
        """Return the key's name, the nonce and the cipher text: 39 bytes more than `plaintext`."""
        self.reload()
        nonce = self._random(_NONCE_BYTES)
        sealed = self._keys[self._current].encrypt(nonce, plaintext, purpose)
        return self.prefix + nonce + sealed

    def decrypt(self, encrypted: bytes, purpose: bytes = b"") -> bytes:
        """Return the plain text.

        ValueError: it was not encrypted under one of the keys, for this purpose, or was changed
        since.
        """
        self.reload()
        named = self._keys.get(encrypted[len(MARK) : PREFIX_BYTES])
        if encrypted.startswith(MARK) and named is not None:
            with suppress(InvalidTag, ValueError):
                return _open(named, encrypted[PREFIX_BYTES:], purpose)
        # Older texts begin with the nonce, which is random: it may look like a mark and a name.
        for key in self._keys.values():
            with suppress(InvalidTag, ValueError):
                return _open(key, encrypted, purpose)
        raise ValueError("not encrypted under this key, or changed since")

    def opens(self, encrypted: bytes) -> bool:
        """Return whether `decrypt` opens it without a purpose."""
        try:
            self.decrypt(encrypted)
        except ValueError:
            return False
        return True


def _open(key: AESGCM, encrypted: bytes, purpose: bytes) -> bytes:
    return key.decrypt(encrypted[:_NONCE_BYTES], encrypted[_NONCE_BYTES:], purpose)


def open_cipher(text: str | None, data: Path) -> Cipher:
    """Return the cipher of the installation's keys: `text`, or the file `secret-key` in `data`.

    A change of the file takes effect at the next use. SettingsError: see `read_secret_keys`.
    """
    if text is not None:
        return Cipher(*read_secret_keys(text, data))
    _ensure_key_file(data / KEY_FILE, os.urandom)
    if (data / PRUNED_FILE).exists():
        _log.warning(
            "%s has keys that an interrupted `rooms secret-key prune` removed: run it again",
            data / PRUNED_FILE,
        )
    file = _KeyFile(data / KEY_FILE)
    return Cipher(*file.read(), changed_keys=file.changed_keys)


class _KeyFile:
    """Read the file of the keys, and notice when it was replaced or its permissions were changed.

    A file that cannot be read is read again at each use: its owner may be mended, and a process
    that is short of files may have some again. Each version that cannot be read is logged once.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, ...] | None = None
        """The version whose keys were read."""
        self._reported: tuple[tuple[int, ...] | None, str] | None = None

    def _version(self) -> tuple[int, ...]:
        found = self._path.stat()
        return found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size

    def read(self) -> Sequence[bytes]:
        """Return the keys. SettingsError: the file cannot be read."""
        try:
            # Before reading: a file that is replaced meanwhile is read once more, and not missed.
            version = self._version()
        except OSError as exc:
            raise SettingsError([f"{self._path}: {exc}"]) from exc
        keys = _read_key_file(self._path)
        self._seen = version
        return keys

    def changed_keys(self) -> Sequence[bytes] | None:
        version: tuple[int, ...] | None = None
        try:
            version = self._version()
            if version == self._seen:
                return None
            keys = self.read()
        except (OSError, SettingsError) as exc:
            if (version, str(exc)) != self._reported:
                self._reported = version, str(exc)
                _log.error("the secret keys stay as they were: %s", exc)
            return None
        self._reported = None
        return keys


def read_secret_keys(
    text: str | None, data: Path, random: Callable[[int], bytes] = os.urandom
) -> Sequence[bytes]:
    """Return the installation's keys: `text`, or the content of the file `secret-key` in `data`.

    Each is the base64 of 32 bytes; the first one seals. `text` has commas between them, the file
    has one a line, and is made on first use.

    SettingsError: these are no such keys, or the file cannot be read.
    """
    if text is not None:
        return _parse_keys(text.split(","), KEY_VARIABLE)
    _ensure_key_file(data / KEY_FILE, random)
    return _read_key_file(data / KEY_FILE)


def _read_key_file(path: Path) -> Sequence[bytes]:
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise SettingsError([f"{path}: {exc}"]) from exc
    return _parse_keys(text.split("\n"), str(path))


def new_secret_key() -> bytes:
    """Return a new key."""
    return os.urandom(KEY_BYTES)


def read_kept_keys(data: Path, name: str) -> Sequence[bytes]:
    """Return the keys of the file `name` beside `secret-key`; none if there is no such file."""
    return _read_key_file(data / name) if (data / name).exists() else []


def remove_kept_keys(data: Path, name: str) -> None:
    """Remove the file `name` beside `secret-key`, if it is there. SettingsError."""
    try:
        (data / name).unlink(missing_ok=True)
        _sync_folder(data)
    except OSError as exc:
        raise SettingsError([f"{data / name}: {exc}"]) from exc


def replace_key_file(data: Path, keys: Sequence[bytes], *, name: str = KEY_FILE) -> None:
    """Write these keys, the one that seals first, as the file that only its owner reads.

    Owner, group and mode of a former file stay: the processes that read it must read this one. A
    file with another `name` gets those of `secret-key`.
    Other processes see the former keys or these, and nothing in between, also after a crash.
    SettingsError: it cannot be written, or not with the former owner.
    """
    path = data / name
    try:
        own = _write_private(path, keys)
        try:
            _keep_access(data / KEY_FILE, own)
            own.replace(path)
        finally:
            own.unlink(missing_ok=True)
        _sync_folder(path.parent)
    except OSError as exc:
        raise SettingsError([f"{path}: {exc}"]) from exc


def _keep_access(former: Path, own: Path) -> None:
    """Give `own` the owner, group and mode of the former file, if there is one."""
    try:
        found = former.stat()
    except FileNotFoundError:
        return
    descriptor = os.open(own, os.O_RDONLY)
    try:
        present = os.fstat(descriptor)
        if (present.st_uid, present.st_gid) != (found.st_uid, found.st_gid):
            os.fchown(descriptor, found.st_uid, found.st_gid)
        os.fchmod(descriptor, stat.S_IMODE(found.st_mode))
        os.fsync(descriptor)
    except PermissionError as exc:
        problem = (
            f"{former}: a new file cannot keep its owner and group ({found.st_uid}:"
            f"{found.st_gid}), whose processes read it: run this as that user, or as root"
        )
        raise SettingsError([problem]) from exc
    finally:
        os.close(descriptor)


def _ensure_key_file(path: Path, random: Callable[[int], bytes]) -> None:
    try:
        if not path.exists():
            _create_key_file(path, random)
    except OSError as exc:
        raise SettingsError([f"{path}: {exc}"]) from exc


def _create_key_file(path: Path, random: Callable[[int], bytes]) -> None:
    # Several processes may start at once: each writes a file of its own, and the first link wins
    # for all.
    path.parent.mkdir(parents=True, exist_ok=True)
    own = _write_private(path, [random(KEY_BYTES)])
    try:
        with suppress(FileExistsError):
            os.link(own, path)
    finally:
        own.unlink(missing_ok=True)
    # Also where another process made the link: something may be sealed with the key from now on.
    _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _write_private(path: Path, keys: Sequence[bytes]) -> Path:
    """Write keys to a new file beside `path`, with mode 0600, and return its path."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    own = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(b"".join(b64encode(key) + b"\n" for key in keys))
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        own.unlink(missing_ok=True)
        raise
    return own


def _parse_keys(parts: Sequence[str], source: str) -> Sequence[bytes]:
    keys = [_parse_key(part.strip(), source) for part in parts]
    if len(set(keys)) != len(keys) or len(keys) > MAX_KEYS:
        raise SettingsError([f"{source} takes at most {MAX_KEYS} keys, each of them once"])
    return keys


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
