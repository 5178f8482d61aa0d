"""Write PostgreSQL arrays, in binary or as text, faster than a driver adapts them.

Publishing uses the binary form, other hot statements use text.

In binary, an element is its length and its bytes, and an array is a header and its elements.
Elements that repeat (a room, a type) are packed once and joined many times.

As text, an array of nulls only is written as an empty one. `unnest` of several arrays fills the
shorter ones with null, and most batches have no value in most columns.
"""

import struct
from collections.abc import Iterable, Sequence
from typing import Final

from msgspec import Raw

from rooms.domain.ids import RoomId

NULL_ELEMENT: Final = b"\xff\xff\xff\xff"
"""The null element, of any type."""
TRUE_ELEMENT: Final = b"\x00\x00\x00\x01\x01"
FALSE_ELEMENT: Final = b"\x00\x00\x00\x01\x00"
"""The `bool` elements."""

_OIDS: Final = {
    "bool": 16,
    "bytea": 17,
    "int8": 20,
    "int2": 21,
    "int4": 23,
    "text": 25,
    "uuid": 2950,
}
_HEADS: Final = {name: struct.pack("!iii", 1, 0, oid) for name, oid in _OIDS.items()}
_SIZE: Final = struct.Struct("!ii")
_INT2: Final = struct.Struct("!ih")
_INT4: Final = struct.Struct("!ii")
_INT8: Final = struct.Struct("!iq")
_LENGTH: Final = struct.Struct("!i").pack
_UUID_SIZE: Final = b"\x00\x00\x00\x10"
_NULL: Final = b"\xff\xff\xff\xff"


def int2_element(value: int) -> bytes:
    """Pack an `int2` element."""
    return _INT2.pack(2, value)


def int4_element(value: int) -> bytes:
    """Pack an `int4` element."""
    return _INT4.pack(4, value)


def int8_element(value: int) -> bytes:
    """Pack an `int8` element."""
    return _INT8.pack(8, value)


def uuid_element(value: bytes) -> bytes:
    """Pack a `uuid` element from its 16 octets."""
    return _UUID_SIZE + value


def uuid_elements(values: Sequence[bytes]) -> bytes:
    """Pack `uuid` elements, one after the other."""
    return _UUID_SIZE + _UUID_SIZE.join(values) if values else b""


def uuid_text(element: bytes) -> bytes:
    """Return the canonical text of a `uuid` element, in ASCII."""
    digits = element.hex()
    return f"{digits[8:16]}-{digits[16:20]}-{digits[20:24]}-{digits[24:28]}-{digits[28:]}".encode()


def uuid_from_text(text: str) -> bytes:
    """Pack a `uuid` element from its text."""
    return _UUID_SIZE + bytes.fromhex(text.replace("-", ""))


def uuid_or_null(text: str | None) -> bytes:
    """Pack a `uuid` element from its text, or a null."""
    return _NULL if text is None else uuid_from_text(text)


def element_value(element: bytes) -> bytes:
    """Return the value of an element, without its length."""
    return element[4:]


def bytes_element(value: bytes | Raw) -> bytes:
    """Pack a `bytea` element, or a `text` one from its UTF-8."""
    return _LENGTH(len(value)) + value


def room_element(identity: RoomId) -> bytes:
    """Pack the `int4` element of a room."""
    return _INT4.pack(4, identity)


def binary_array(kind: str, elements: Sequence[bytes], count: int | None = None) -> bytes:
    """Build an array from packed elements of one type, given by its name in PostgreSQL.

    `count`: how many elements there are, if one item of `elements` holds several.
    """
    return (
        _HEADS[kind] + _SIZE.pack(len(elements) if count is None else count, 1) + b"".join(elements)
    )


_SPECIAL: Final = str.maketrans({"\\": "\\\\", '"': '\\"', "\x00": "\ufffd"})


def word_array(items: Iterable[str]) -> str:
    """Write ids and words that need no quoting."""
    return "{" + ",".join(items) + "}"


def number_array(items: Iterable[float]) -> str:
    """Write numbers and booleans.

    Most columns of a batch hold one value, which is formatted once.
    """
    values = list(items)
    if values and values.count(values[0]) == len(values):
        return "{" + ",".join([str(values[0])] * len(values)) + "}"
    return "{" + ",".join(map(str, values)) + "}"


def literal_array(items: Iterable[object]) -> str:
    """Write numbers, ids, times and words that need no quoting; None is null."""
    values = list(items)
    first = values[0] if values else None
    if values.count(first) == len(values):
        return "{}" if first is None else "{" + ",".join([str(first)] * len(values)) + "}"
    return "{" + ",".join(["NULL" if item is None else str(item) for item in values]) + "}"


def text_array(items: Iterable[str | None]) -> str:
    """Write text of any origin, quoted; a NUL, which PostgreSQL cannot store, becomes U+FFFD."""
    values = list(items)
    if values.count(None) == len(values):
        return "{}"
    quoted: dict[str | None, str] = {None: "NULL"}
    for item in set(values):
        if item is not None:
            quoted[item] = f'"{item.translate(_SPECIAL)}"'
    return "{" + ",".join([quoted[item] for item in values]) + "}"


def bytes_array(items: Iterable[bytes | None]) -> str:
    """Write bytes; empty ones are null."""
    values = list(items)
    if not any(values):
        return "{}"
    return "{" + ",".join(["NULL" if not item else f'"\\\\x{item.hex()}"' for item in values]) + "}"
