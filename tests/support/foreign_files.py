"""Files that a command reads and came from elsewhere: broken content, and what is no file at all."""

import json
import os
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from click.testing import Result

from tests.unit.rooms.test_safe_text import HOSTILE, assert_harmless

_MAX_ERROR: Final = 1_500
"""Characters of an error that a person can read; a path of a test has up to some hundred of them."""
_MAX_BYTES: Final = 48 << 20
HUGE_BYTES: Final = 200 << 20


def _quoted(text: str) -> bytes:
    return json.dumps(text, ensure_ascii=False).encode()


CONTENTS: Final[Mapping[str, bytes]] = {
    "empty": b"",
    "zeros": bytes(5_000),
    "no UTF-8": b'{"kty": "\xff\xfe\x1b[2J"}',
    "another encoding": '{"kty": "\x9b2J"}'.encode("utf-16"),
    "text": HOSTILE.encode(),
    "a text of JSON": _quoted(HOSTILE),
    "a field": b"{%b: %b}" % (_quoted(HOSTILE), _quoted(HOSTILE)),
    "half a pair": b'{"kty": "\\ud800", "\\udfff": 1}',
    "deep lists": b"[" * 40_000,
    "deep objects": b'{"keys":' * 40_000,
    "closed deep lists": b"[" * 20_000 + b"]" * 20_000,
    "a million digits": b'{"kty":' + b"9" * 1_000_000 + b"}",
    "a large exponent": b'{"kty": 1e999999999, "keys": -1e999999999}',
    "no number": b'{"kty": NaN, "keys": Infinity}',
    "a long line": b'{"kty": "' + b"a" * 3_000_000 + b'"}',
    "a PEM": b"-----BEGIN PUBLIC KEY-----\n\x1b[2J\n-----END PUBLIC KEY-----\n",
}


def _folder(path: Path) -> None:
    path.mkdir()


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(HUGE_BYTES)


def _endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


PLACES: Final[Mapping[str, Callable[[Path], object]]] = {
    "nothing": lambda _: None,
    "folder": _folder,
    "FIFO without a writer": os.mkfifo,
    "circular link": lambda path: path.symlink_to(path),
    "huge": _huge,
    "endless": _endless,
}
"""Contents of a path other than a file of a proper size."""


def make_foreign_file(folder: Path, kind: str) -> Path:
    """Make what `kind` names in CONTENTS or PLACES, under a name that attacks the terminal."""
    path = folder / "evil\x1b[2J\x9b31m\u202ename"
    if kind in CONTENTS:
        path.write_bytes(CONTENTS[kind])
    else:
        PLACES[kind](path)
    return path


def assert_refused(result: Result, *named: str) -> None:
    """Check that a command failed with an error of a readable length that names these."""
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code != 0
    assert_harmless(result.stdout)
    assert_harmless(result.stderr)
    assert "Traceback" not in result.output
    assert len(result.stderr) < _MAX_ERROR, result.stderr[:2_000]
    for text in named:
        assert text in result.stderr


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Check that what runs in here allocates a bounded number of bytes."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < _MAX_BYTES
    finally:
        tracemalloc.stop()
