"""Secrets at rest, and the key they are sealed with."""

import stat
from base64 import b64encode
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooms.db.secrets import KEY_BYTES, KEY_FILE, Cipher, read_secret_key
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
        keys = set(pool.map(lambda _: read_secret_key(None, tmp_path / "data"), range(32)))
    assert len(keys) == 1
    path = tmp_path / "data" / KEY_FILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [found.name for found in path.parent.iterdir()] == [KEY_FILE]
    assert read_secret_key(None, path.parent) in keys


def test_the_environment_comes_first(tmp_path: Path) -> None:
    assert read_secret_key(b64encode(KEY).decode(), tmp_path) == KEY
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text", ["", "x", "äöü", b64encode(KEY[:-1]).decode(), b64encode(KEY + b"x").decode()]
)
def test_an_invalid_key_is_reported(text: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError):
        read_secret_key(text, tmp_path)
    (tmp_path / KEY_FILE).write_text(text, encoding="utf-8")
    with pytest.raises(SettingsError):
        read_secret_key(None, tmp_path)
