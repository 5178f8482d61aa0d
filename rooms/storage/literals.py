"""Array literals for the hot statements: PostgreSQL reads text arrays faster than any driver builds binary ones.

An array of nothing but nulls is written as an empty one: `unnest` of several arrays fills up the shorter ones with
null, and most batches have nothing to say in most columns.
"""

from collections.abc import Iterable
from typing import Final

_SPECIAL: Final = str.maketrans({"\\": "\\\\", '"': '\\"', "\x00": "\ufffd"})


def plain(items: Iterable[str]) -> str:
    """Ids and words of our own."""
    return "{" + ",".join(items) + "}"


def numbers(items: Iterable[float]) -> str:
    """Numbers and truths. Most columns of a batch hold one value."""
    values = list(items)
    if values and values.count(values[0]) == len(values):
        return "{" + ",".join([str(values[0])] * len(values)) + "}"
    return "{" + ",".join(map(str, values)) + "}"


def array(items: Iterable[object]) -> str:
    """Numbers, ids, times and words of our own; None is null."""
    values = list(items)
    first = values[0] if values else None
    if values.count(first) == len(values):
        return "{}" if first is None else "{" + ",".join([str(first)] * len(values)) + "}"
    return "{" + ",".join(["NULL" if item is None else str(item) for item in values]) + "}"


def text_array(items: Iterable[str | None]) -> str:
    """Text that others wrote, quoted; a NUL, which PostgreSQL cannot keep, becomes U+FFFD."""
    values = list(items)
    if values.count(None) == len(values):
        return "{}"
    quoted: dict[str | None, str] = {None: "NULL"}
    for item in set(values):
        if item is not None:
            quoted[item] = f'"{item.translate(_SPECIAL)}"'
    return "{" + ",".join([quoted[item] for item in values]) + "}"


def bytes_array(items: Iterable[bytes | None]) -> str:
    """Bytes; empty ones are null."""
    values = list(items)
    if not any(values):
        return "{}"
    return "{" + ",".join(["NULL" if not item else f'"\\\\x{item.hex()}"' for item in values]) + "}"
