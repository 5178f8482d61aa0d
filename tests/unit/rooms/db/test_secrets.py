"""Secrets at rest, and the key they are sealed with."""

import errno
import os
import stat
from base64 import b64encode
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooms.db.secrets import (
    KEY_BYTES,
    KEY_FILE,
    MAX_KEYS,
    PREFIX_BYTES,
    Cipher,
    key_id,
    open_cipher,
    read_secret_keys,
    replace_key_file,
)
from rooms.errors import SettingsError

KEY = bytes(range(KEY_BYTES))


@given(st.binary(max_size=200), st.binary(max_size=20))
def test_what_is_sealed_opens_for_its_purpose_alone(clear: bytes, purpose: bytes) -> None:
    seal = Cipher(KEY)
    sealed = seal.encrypt(clear, purpose)
    assert seal.decrypt(sealed, purpose) == clear
    for other, use in ((Cipher(KEY[::-1]), purpose), (seal, purpose + b"x")):
        with pytest.raises(ValueError):
            other.decrypt(sealed, use)


@given(st.binary(min_size=1, max_size=50), st.data())
def test_no_changed_bit_goes_unnoticed(clear: bytes, data: st.DataObject) -> None:
    sealed = bytearray(Cipher(KEY).encrypt(clear))
    sealed[data.draw(st.integers(0, len(sealed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(ValueError):
        Cipher(KEY).decrypt(bytes(sealed))


@pytest.mark.parametrize("sealed", [b"", b"short", bytes(12), bytes(28)])
def test_what_was_never_sealed_does_not_open(sealed: bytes) -> None:
    with pytest.raises(ValueError):
        Cipher(KEY).decrypt(sealed)


def test_the_same_text_is_sealed_differently_each_time() -> None:
    seal = Cipher(KEY)
    assert len({seal.encrypt(b"secret") for _ in range(100)}) == 100


def test_the_key_is_made_once_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        keys = set(pool.map(lambda _: tuple(read_secret_keys(None, tmp_path / "data")), range(32)))
    assert len(keys) == 1
    path = tmp_path / "data" / KEY_FILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [found.name for found in path.parent.iterdir()] == [KEY_FILE]
    assert tuple(read_secret_keys(None, path.parent)) in keys


def test_the_environment_comes_first(tmp_path: Path) -> None:
    assert read_secret_keys(b64encode(KEY).decode(), tmp_path) == [KEY]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "äöü",
        b64encode(KEY[:-1]).decode(),
        b64encode(KEY + b"x").decode(),
        f"{b64encode(KEY).decode()},",
        f"{b64encode(KEY).decode()},{b64encode(KEY).decode()}",
        ",".join(b64encode(bytes([n]) * KEY_BYTES).decode() for n in range(MAX_KEYS + 1)),
    ],
)
def test_an_invalid_key_is_reported(text: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError):
        read_secret_keys(text, tmp_path)
    (tmp_path / KEY_FILE).write_text(text.replace(",", "\n") + "\n,", encoding="utf-8")
    with pytest.raises(SettingsError):
        read_secret_keys(None, tmp_path)


OLD, NEW = (bytes([number]) * KEY_BYTES for number in (1, 2))


def as_of_an_earlier_version(key: bytes, clear: bytes) -> bytes:
    """Return a text without the name of its key."""
    return Cipher(key).encrypt(clear)[PREFIX_BYTES:]


def test_the_first_key_seals_and_all_of_them_open() -> None:
    before, during, after = Cipher(OLD), Cipher(NEW, OLD), Cipher(NEW)
    old, new = before.encrypt(b"a", b"p"), during.encrypt(b"b", b"p")
    assert (during.decrypt(old, b"p"), during.decrypt(new, b"p")) == (b"a", b"b")
    assert after.decrypt(new, b"p") == b"b"
    assert (old[:PREFIX_BYTES], new[:PREFIX_BYTES]) == (before.prefix, after.prefix)
    for cipher, sealed in ((after, old), (before, new)):
        with pytest.raises(ValueError):
            cipher.decrypt(sealed, b"p")


def test_a_text_of_an_earlier_version_opens_with_any_of_the_keys() -> None:
    sealed = as_of_an_earlier_version(OLD, b"secret")
    assert Cipher(NEW, OLD).decrypt(sealed) == b"secret"
    with pytest.raises(ValueError):
        Cipher(NEW).decrypt(sealed)


def test_the_nonce_of_an_earlier_version_may_look_like_the_name_of_a_key() -> None:
    looks_named = Cipher(NEW).prefix + b"x"
    sealed = Cipher(OLD, random=lambda _: looks_named).encrypt(b"secret")[PREFIX_BYTES:]
    assert sealed.startswith(Cipher(NEW).prefix)
    assert Cipher(NEW, OLD).decrypt(sealed) == b"secret"


def test_the_name_of_a_key_is_no_part_of_it() -> None:
    assert key_id(OLD) == key_id(bytes(OLD)) != key_id(NEW)
    assert bytes.fromhex(key_id(KEY)) not in KEY


def test_a_running_process_takes_over_a_replaced_file(tmp_path: Path) -> None:
    replace_key_file(tmp_path, [OLD])
    running = open_cipher(None, tmp_path)
    old = running.encrypt(b"a")
    replace_key_file(tmp_path, [NEW, OLD])
    assert stat.S_IMODE((tmp_path / KEY_FILE).stat().st_mode) == 0o600
    assert [found.name for found in tmp_path.iterdir()] == [KEY_FILE]
    assert running.decrypt(Cipher(NEW).encrypt(b"b")) == b"b"
    assert running.encrypt(b"c").startswith(Cipher(NEW).prefix)
    assert running.decrypt(old) == b"a"
    replace_key_file(tmp_path, [NEW])
    assert running.encrypt(b"d").startswith(Cipher(NEW).prefix)
    with pytest.raises(ValueError):
        running.decrypt(old)


@pytest.mark.parametrize("content", [b"", b"no key", b"\xff"])
def test_a_process_keeps_its_keys_when_the_file_is_spoilt_or_gone(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    replace_key_file(tmp_path, [OLD])
    running = open_cipher(None, tmp_path)
    sealed = running.encrypt(b"a")
    (tmp_path / KEY_FILE).write_bytes(content)
    assert running.encrypt(b"b").startswith(Cipher(OLD).prefix)
    assert "stay as they were" in caplog.text
    (tmp_path / KEY_FILE).unlink()
    assert running.encrypt(b"c").startswith(Cipher(OLD).prefix)
    assert running.decrypt(sealed) == b"a"


def unreadable(monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    """Let each read of a file fail until the patches are undone."""

    def fail(*_: Any, **__: Any) -> str:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(Path, "read_text", fail)


@pytest.mark.parametrize("error", [errno.EACCES, errno.EMFILE])
def test_a_replaced_file_that_cannot_be_read_is_read_again(
    error: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    replace_key_file(tmp_path, [OLD])
    running = open_cipher(None, tmp_path)
    replace_key_file(tmp_path, [NEW, OLD])
    with pytest.MonkeyPatch.context() as patch:
        unreadable(patch, error)
        for _ in range(3):
            assert running.encrypt(b"a").startswith(Cipher(OLD).prefix)
    assert caplog.text.count("stay as they were") == 1, "it is logged once"
    assert running.encrypt(b"b").startswith(Cipher(NEW).prefix)


def test_a_file_that_is_replaced_while_a_process_starts_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_key_file(tmp_path, [OLD])
    read = Path.read_text

    def read_and_replace(path: Path, *args: Any, **kwargs: Any) -> str:
        text = read(path, *args, **kwargs)
        monkeypatch.undo()
        replace_key_file(tmp_path, [NEW, OLD])
        return text

    monkeypatch.setattr(Path, "read_text", read_and_replace)
    running = open_cipher(None, tmp_path)
    assert running.encrypt(b"a").startswith(Cipher(NEW).prefix)


def test_a_file_whose_owner_is_mended_is_noticed(tmp_path: Path) -> None:
    """Neither the time of its content nor its size shows that; the time of its change does."""
    replace_key_file(tmp_path, [OLD])
    path = tmp_path / KEY_FILE
    running = open_cipher(None, tmp_path)
    before = path.stat()
    path.write_bytes(b64encode(NEW) + b"\n")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_ino, after.st_mtime_ns, after.st_size) == (
        before.st_ino, before.st_mtime_ns, before.st_size
    )  # fmt: skip
    assert running.encrypt(b"a").startswith(Cipher(NEW).prefix)


def test_a_replaced_file_keeps_its_owner_and_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_key_file(tmp_path, [OLD])
    path = tmp_path / KEY_FILE
    path.chmod(0o640)
    service = 65_534 if os.geteuid() == 0 else os.geteuid()
    os.chown(path, service, -1)
    replace_key_file(tmp_path, [NEW, OLD])
    found = path.stat()
    assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (service, 0o640)

    def refuse(*_: int) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "fchmod", refuse)
    with pytest.raises(SettingsError, match="keep its owner"):
        replace_key_file(tmp_path, [NEW])
    assert read_secret_keys(None, tmp_path) == [NEW, OLD]
    assert [one.name for one in tmp_path.iterdir()] == [KEY_FILE]


def test_a_new_file_survives_a_crash_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_ino))
    read_secret_keys(None, tmp_path)
    assert synced == [(tmp_path / KEY_FILE).stat().st_ino, tmp_path.stat().st_ino]
