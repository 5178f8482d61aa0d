"""Array literals for the hot statements: PostgreSQL reads text arrays faster than any driver builds binary ones."""

from collections.abc import Iterable
from typing import Final

_SPECIAL: Final = str.maketrans({"\\": "\\\\", '"': '\\"', "\x00": "\ufffd"})


def array(items: Iterable[object]) -> str:
    """Numbers, ids, times and words of our own; None is null."""
    return "{" + ",".join(["NULL" if item is None else str(item) for item in items]) + "}"


def text_array(items: Iterable[str | None]) -> str:
    """Text that others wrote, quoted; a NUL, which PostgreSQL cannot keep, becomes U+FFFD."""
    return "{" + ",".join(["NULL" if item is None else f'"{item.translate(_SPECIAL)}"' for item in items]) + "}"


def bytes_array(items: Iterable[bytes | None]) -> str:
    """Bytes; empty ones are null."""
    return "{" + ",".join(["NULL" if not item else f'"\\\\x{item.hex()}"' for item in items]) + "}"
