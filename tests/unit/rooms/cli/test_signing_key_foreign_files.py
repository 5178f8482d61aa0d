"""Test what `rooms signing-key register` reads: files that are no key, and parts that are secret."""

import json
from pathlib import Path
from typing import Any

import pytest

from rooms.evidence.jose import ed25519_key
from tests.support.cli_runner import Terminal
from tests.support.fake_api import FakeRooms
from tests.support.foreign_files import (
    CONTENTS,
    PLACES,
    assert_refused,
    bounded_memory,
    make_foreign_file,
)
from tests.unit.rooms.test_safe_text import HOSTILE

KEY = ed25519_key(bytes(range(32)))


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rooms.cli.input_files.WRITER_S", 0.01)


@pytest.mark.parametrize("kind", [*CONTENTS, *PLACES])
def test_any_file_is_refused_and_nothing_is_sent(
    terminal: Terminal, fake: FakeRooms, tmp_path: Path, kind: str
) -> None:
    fake.rooms.append({"id": 1000, "name": "a"})
    path = make_foreign_file(tmp_path, kind)
    for command in (
        ("signing-key", "register", "main", str(path)),
        ("publish", "1000", "paid", "1", "--id", "a", "--version", "1", "--signing-key", str(path)),
    ):
        with bounded_memory():
            result = terminal.run(*command)
        assert_refused(result, "evil\\x1b[2J")
    assert not any(seen.method == "POST" for seen in fake.requests)


@pytest.mark.parametrize(
    "jwk",
    [
        {"kty": "RSA", "n": "AQAB", "e": "AQAB", "p": "c2VjcmV0", "q": "c2VjcmV0"},
        {"kty": "oct", "k": "c2VjcmV0"},
        {"kty": []},
        {**KEY.public.to_jwk(), "alg": HOSTILE},
        {**KEY.public.to_jwk(), "kid": HOSTILE},
        {**KEY.public.to_jwk(), "nbf": HOSTILE},
        {**KEY.public.to_jwk(), "x": "\ud800"},
        {**KEY.public.to_jwk(), "x": 1e300},
        {"keys": [KEY.public.to_jwk()]},
    ],
    ids=range(9),
)
def test_what_is_no_key_for_signatures_is_refused_and_not_sent(
    terminal: Terminal, fake: FakeRooms, tmp_path: Path, jwk: dict[str, Any]
) -> None:
    path = tmp_path / "evil"
    path.write_text(json.dumps(jwk))
    assert_refused(terminal.run("signing-key", "register", "main", str(path)), f"{path}: it")
    assert fake.requests == []


def test_only_the_public_key_is_sent(terminal: Terminal, fake: FakeRooms, tmp_path: Path) -> None:
    fake.interfere = lambda seen: (201, seen.body)
    path = tmp_path / "key"
    path.write_text(json.dumps({**KEY.to_jwk(), "note": "\ud800", "oth": [{"r": "c2VjcmV0"}]}))
    terminal.done("signing-key", "register", "main", str(path))
    assert fake.requests[-1].body == {"name": "main", "jwk": KEY.public.to_jwk()}


def test_a_key_is_not_cut_to_the_part_that_is_read(
    terminal: Terminal, fake: FakeRooms, tmp_path: Path
) -> None:
    path = tmp_path / "key"
    path.write_text(json.dumps(KEY.public.to_jwk()) + " " * (1 << 16) + "more")
    result = terminal.run("signing-key", "register", "main", str(path))
    assert_refused(result, f"{path} has more than 65536 bytes")
    assert fake.requests == []
