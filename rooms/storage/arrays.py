"""PostgreSQL's binary form of arrays, packed by hand, for the one statement where a driver's adaptation costs too much.

An element is its length and its bytes; an array is a head and its elements. Elements that repeat (a room, a type) are
packed once and joined many times.
"""

import struct
from collections.abc import Sequence
from typing import Final

from msgspec import Raw

from rooms.domain.ids import RoomId

NULL: Final = b"\xff\xff\xff\xff"
"""The element that is null, of any type."""
TRUE: Final = b"\x00\x00\x00\x01\x01"
FALSE: Final = b"\x00\x00\x00\x01\x00"
"""The `bool` elements."""

_OIDS: Final = {"bool": 16, "bytea": 17, "int8": 20, "int2": 21, "int4": 23, "text": 25, "uuid": 2950}
_HEADS: Final = {name: struct.pack("!iii", 1, 0, oid) for name, oid in _OIDS.items()}
_SIZE: Final = struct.Struct("!ii")
_INT2: Final = struct.Struct("!ih")
_INT4: Final = struct.Struct("!ii")
_INT8: Final = struct.Struct("!iq")
_LENGTH: Final = struct.Struct("!i").pack
_UUID_SIZE: Final = b"\x00\x00\x00\x10"


def int2(value: int) -> bytes:
    """An `int2` element."""
    return _INT2.pack(2, value)


def int4(value: int) -> bytes:
    """An `int4` element."""
    return _INT4.pack(4, value)


def int8(value: int) -> bytes:
    """An `int8` element."""
    return _INT8.pack(8, value)


def uuid(value: bytes) -> bytes:
    """A `uuid` element from its 16 octets."""
    return _UUID_SIZE + value


def uuids(values: Sequence[bytes]) -> bytes:
    """`uuid` elements, one behind the other."""
    return _UUID_SIZE + _UUID_SIZE.join(values) if values else b""


def uuid_text(element: bytes) -> bytes:
    """The canonical text of a `uuid` element, in ASCII."""
    digits = element.hex()
    return f"{digits[8:16]}-{digits[16:20]}-{digits[20:24]}-{digits[24:28]}-{digits[28:]}".encode()


def uuid_of(text: str) -> bytes:
    """A `uuid` element from its text."""
    return _UUID_SIZE + bytes.fromhex(text.replace("-", ""))


def bare(element: bytes) -> bytes:
    """What an element holds, without its length."""
    return element[4:]


def octets(value: bytes | Raw) -> bytes:
    """A `bytea` element, or a `text` one from its UTF-8."""
    return _LENGTH(len(value)) + value


def room(identity: RoomId) -> bytes:
    """The `int4` element of a room."""
    return _INT4.pack(4, identity)


def array(kind: str, elements: Sequence[bytes], count: int | None = None) -> bytes:
    """An array of packed elements of one type (its name in PostgreSQL). `count`: how many there are, where several stand
    in one.
    """
    return _HEADS[kind] + _SIZE.pack(len(elements) if count is None else count, 1) + b"".join(elements)
