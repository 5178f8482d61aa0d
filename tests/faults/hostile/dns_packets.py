"""Malformed DNS answers (RFC 1035), each made from a recipe and the query that it answers.

A recipe holds its kind and its random numbers only, so its repr shows the whole input.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from random import Random
from typing import Final

from tests.support.name_server import Query

GOOD: Final = "127.0.0.1"
"""The address in records that answer the question, or lead to an answer by CNAME."""
FORGED: Final = "127.0.66.66"
"""The address in packets that answer another query: no look-up may return it."""
PRIVATE: Final = ("10.0.0.1", "169.254.169.254", "0.0.0.0", "::1", "fe80::1", "::ffff:10.0.0.1")
_REFUSED_SHARE: Final = 0.1
A: Final = 1
AAAA: Final = 28
_CNAME: Final = 5
_TYPES: Final = (1, 2, 5, 6, 12, 13, 15, 16, 24, 28, 33, 35, 41, 52, 64, 65, 255, 256, 257, 65_535)
_IN: Final = 1
_ANSWER: Final = 0x8180
_TRUNCATED: Final = 0x0200
_HEADER: Final = struct.Struct("!HHHHHH")
_RECORD: Final = struct.Struct("!HHIH")
_ASKED: Final = b"\xc0\x0c"
"""A pointer to the name in the question."""
_MAX_UDP: Final = 65_507
_MAX_TCP: Final = 65_535


@dataclass(frozen=True, slots=True)
class Recipe:
    """Hold one answer: its kind, a number that the kind understands, and a seed for its bytes."""

    kind: str
    number: int
    seed: int

    def packet(self, query: Query) -> bytes:
        """Return the answer to a query, of at most 65,535 bytes."""
        rng = Random(self.seed)
        return _KINDS[self.kind](query, self.number, rng)[:_MAX_TCP]


def make_recipe(rng: Random) -> Recipe:
    """Make a recipe of any kind."""
    kind = "refused addresses" if rng.random() < _REFUSED_SHARE else rng.choice(tuple(_KINDS))
    return Recipe(kind, rng.choice((0, 1, 2, 3, 7, 40, 300, 3_000)), rng.randrange(1 << 32))


def good(query: Query) -> bytes:
    """Return a whole answer: one A record, and no AAAA record."""
    return _message(query, _good_records(query))


def fits_udp(packet: bytes) -> bool:
    """Return whether a packet can be one datagram."""
    return len(packet) <= _MAX_UDP


def _good_records(query: Query) -> list[bytes]:
    return [_address(_ASKED, GOOD)] if query.type == A else []


def _record(owner: bytes, kind: int, content: bytes, *, length: int | None = None) -> bytes:
    size = len(content) if length is None else length
    return owner + _RECORD.pack(kind, _IN, 60, size) + content


def _address(owner: bytes, text: str) -> bytes:
    packed = ip_address(text).packed
    return _record(owner, A if len(packed) == len(ip_address(GOOD).packed) else AAAA, packed)


def _name(*labels: bytes) -> bytes:
    return b"".join(bytes([len(label)]) + label for label in labels) + b"\0"


def _message(
    query: Query,
    records: Sequence[bytes],
    *,
    flags: int = _ANSWER,
    id_: int | None = None,
    question: bytes | None = None,
    counts: Sequence[int] | None = None,
) -> bytes:
    asked = query.question if question is None else question
    qd, an, ns, ar = counts or (1 if asked else 0, len(records), 0, 0)
    header = _HEADER.pack(query.id if id_ is None else id_, flags, qd, an, ns, ar)
    return header + asked + b"".join(records)


def _noise(query: Query, number: int, rng: Random) -> bytes:
    content = rng.randbytes(rng.randrange(number + 1))
    return content if number % 2 else query.id.to_bytes(2, "big") + content


def _after_header(query: Query, number: int, rng: Random) -> bytes:
    content = rng.randbytes(rng.randrange(number + 1))
    return _message(query, [content], counts=[rng.choice((0, 1, 1, 9)) for _ in range(4)])


def _cut(query: Query, number: int, rng: Random) -> bytes:
    whole = _many(query, min(number, 40), rng)
    return whole[: rng.randrange(len(whole))]


def _flipped(query: Query, number: int, rng: Random) -> bytes:
    packet = bytearray(
        _message(query, [_record(_ASKED, _CNAME, _name(b"a")), *_good_records(query)])
    )
    for _ in range(1 + number % 8):
        packet[rng.randrange(2, len(packet))] = rng.randrange(256)
    return bytes(packet)


def _other_id(query: Query, number: int, rng: Random) -> bytes:
    other = (query.id + rng.choice((1, 255, 256, 0x8000, 1 + number))) % 65_536
    return _message(query, [_address(_ASKED, FORGED)], id_=other)


def _other_question(query: Query, number: int, rng: Random) -> bytes:
    name = rng.choice((_name(b"other", b"test"), _name(), query.question[:-4]))
    kind, klass = rng.choice(((A, 3), (16, _IN), (query.type, 255)))
    if name != query.question[:-4]:
        kind, klass = query.type, _IN
    question = name + struct.pack("!HH", kind, klass)
    return _message(query, [_address(_ASKED, FORGED)] * (1 + number % 3), question=question)


def _no_question(query: Query, number: int, rng: Random) -> bytes:
    del rng
    owner = query.question[:-4]
    return _message(query, [_address(owner, FORGED)] * (1 + number % 3), question=b"")


def _looping_name(query: Query, number: int, rng: Random) -> bytes:
    at = _HEADER.size + len(query.question)
    forms = (
        struct.pack("!H", 0xC000 | at),
        struct.pack("!HH", 0xC000 | (at + 2), 0xC000 | at),
        b"\x01a" + struct.pack("!H", 0xC000 | at),
        b"\xff\xff",
        struct.pack("!H", 0xC000 | (at + 40)),
        b"\xc0\x00",
        b"\xc0",
    )
    owner = rng.choice(forms)
    if number % 2:
        return _message(query, [_record(_ASKED, _CNAME, owner), *_good_records(query)])
    return _message(query, [_record(owner, query.type, bytes(4 if query.type == A else 16))])


def _pointer_chain(query: Query, number: int, rng: Random) -> bytes:
    """Return a name of pointers to pointers: each step costs a parser time."""
    del rng
    at = _HEADER.size + len(query.question) + len(_ASKED) + _RECORD.size
    steps = max(1, min(number, 8_000))
    chain = b"".join(
        struct.pack("!H", 0xC000 | min(0x3FFF, _HEADER.size if step == 0 else at + 2 * step - 2))
        for step in range(steps)
    )
    last = struct.pack("!H", 0xC000 | min(0x3FFF, at + 2 * steps - 2))
    return _message(query, [_record(_ASKED, 16, chain), _address(last, GOOD)])


def _wrong_counts(query: Query, number: int, rng: Random) -> bytes:
    counts = [rng.choice((0, 1, 2, number, 65_535)) for _ in range(4)]
    return _message(query, _good_records(query), counts=counts)


def _long_name(query: Query, number: int, rng: Random) -> bytes:
    label = bytes([rng.choice((63, 64, 65, 127, 128, 191))]) + rng.randbytes(63)
    owner = label * max(1, number % 50) + b"\0"
    if rng.random() < 0.5:
        return _message(query, [_record(_ASKED, _CNAME, owner), *_good_records(query)])
    return _message(query, [_record(owner, query.type, bytes(4 if query.type == A else 16))])


def _odd_name(query: Query, number: int, rng: Random) -> bytes:
    """Return a CNAME to a name with any bytes: zeros, dots, escapes, no UTF-8."""
    del number
    labels = [rng.randbytes(rng.randrange(1, 63)) for _ in range(rng.choice((1, 2, 3)))]
    labels[0] = rng.choice((labels[0], b"\x1b[2J", b"\0", b".", b"\\", b"\xff\xfe", b" ", b"*"))
    target = _name(*labels)
    return _message(query, [_record(_ASKED, _CNAME, target), _address(target, GOOD)])


def _wrong_length(query: Query, number: int, rng: Random) -> bytes:
    length = rng.choice((0, 1, 3, 4, 5, 15, 16, 17, number, 65_535))
    content = rng.randbytes(rng.choice((0, 3, 4, 5, 15, 16, 17, min(number, 300))))
    if rng.random() < 0.5:
        length = len(content)
    kind = rng.choice((A, AAAA, query.type, _CNAME))
    return _message(query, [_record(_ASKED, kind, content, length=length)])


def _other_types(query: Query, number: int, rng: Random) -> bytes:
    """Return records of types that were not asked for, with any content."""
    records = [
        _record(_ASKED, rng.choice(_TYPES), rng.randbytes(rng.randrange(min(number, 300) + 1)))
        for _ in range(1 + number % 20)
    ]
    section = rng.randrange(1, 4)
    counts = [1, 0, 0, 0]
    counts[section] = len(records)
    return _message(query, records, counts=counts)


def _cnames(query: Query, number: int, rng: Random) -> bytes:
    """Return a chain of CNAMEs, which ends at an address or where it began."""
    names = [_name(f"c{step}".encode(), b"test") for step in range(min(number, 1_500) + 1)]
    owners = [_ASKED, *names]
    records = [_record(owner, _CNAME, target) for owner, target in zip(owners, names, strict=False)]
    end = rng.choice(("address", "loop", "nothing"))
    if end == "address" and query.type == A:
        records.append(_address(names[-1], GOOD))
    elif end == "loop":
        records.append(_record(names[-1], _CNAME, rng.choice((_ASKED, names[-1], names[0]))))
    rng.shuffle(records)
    return _message(query, records)


def _many(query: Query, number: int, rng: Random) -> bytes:
    """Return up to some thousand addresses."""
    del rng
    packed = [
        _address(_ASKED, f"127.0.{1 + at // 250 % 60}.{at % 250}") for at in range(max(1, number))
    ]
    return _message(query, packed if query.type == A else [])


def _other_owner(query: Query, number: int, rng: Random) -> bytes:
    owner = rng.choice((_name(b"other", b"test"), _name(), _name(b"x" * 63, b"test")))
    return _message(query, [_address(owner, "127.0.2.2")] * (1 + number % 3))


def _refused(query: Query, number: int, rng: Random) -> bytes:
    texts = [
        rng.choice((*PRIVATE, *((GOOD,) if number % 2 else ()))) for _ in range(1 + number % 9)
    ]
    return _message(query, [_address(_ASKED, text) for text in texts])


def _truncated(query: Query, number: int, rng: Random) -> bytes:
    del rng
    records = _good_records(query) if number % 2 else []
    return _message(query, records, flags=_ANSWER | _TRUNCATED)


def _flags(query: Query, number: int, rng: Random) -> bytes:
    del number
    return _message(query, _good_records(query), flags=rng.randrange(1 << 16))


def _code(query: Query, number: int, rng: Random) -> bytes:
    del number
    records = _good_records(query) if rng.random() < 0.3 else []
    return _message(query, records, flags=_ANSWER | rng.randrange(16))


def _trailing(query: Query, number: int, rng: Random) -> bytes:
    return good(query) + rng.randbytes(number)


def _good(query: Query, number: int, rng: Random) -> bytes:
    del number, rng
    return good(query)


_KINDS: Final[dict[str, Callable[[Query, int, Random], bytes]]] = {
    "noise": _noise,
    "after header": _after_header,
    "cut": _cut,
    "flipped": _flipped,
    "other id": _other_id,
    "other question": _other_question,
    "no question": _no_question,
    "looping name": _looping_name,
    "pointer chain": _pointer_chain,
    "wrong counts": _wrong_counts,
    "long name": _long_name,
    "odd name": _odd_name,
    "wrong length": _wrong_length,
    "other types": _other_types,
    "cnames": _cnames,
    "many": _many,
    "other owner": _other_owner,
    "refused addresses": _refused,
    "truncated": _truncated,
    "flags": _flags,
    "code": _code,
    "trailing": _trailing,
    "good": _good,
}
