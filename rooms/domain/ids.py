"""Generate ids: UUIDv7 text whose low 32 bits are the room, and so the place of its row."""

import hashlib
import re
from collections.abc import Callable
from typing import NewType

OrganisationId = NewType("OrganisationId", str)
KeyId = NewType("KeyId", str)
JobId = NewType("JobId", str)
RoomId = NewType("RoomId", int)
MessageId = NewType("MessageId", str)
DeliveryId = NewType("DeliveryId", str)
SubscriptionId = NewType("SubscriptionId", str)

MAX_ROOM = 0x7FFF_FFFF
_ID = re.compile("[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_COUNTER_BITS = 42
_COUNTER_MASK = (1 << _COUNTER_BITS) - 1
_LOW_MASK = (1 << 30) - 1
_MAX_FANOUT = 1 << 24
"""More than the deliveries that one publish creates."""
COUNTER_START = slice(14, 24)
"""Where the text of an id has the upper 26 bits of its counter."""
COUNTER_DIGITS = slice(14, 28)
"""Where the text of an id has what distinguishes it for people.

Ids of one moment share the digits before it, and ids of one room those behind it.
"""
_VERSION = 0x7000_8000_0000_0000_0000  # version 7, variant of RFC 9562


class IdGenerator:
    """Generate ids for one process: 48 bits of milliseconds, 42 of a counter, 32 of the room.

    The counter starts at random. It rules out collisions within the process, however many ids a
    millisecond needs. Ids of two processes collide only if their ranges overlap for the same room
    in the same millisecond.
    """

    def __init__(self, random_bits: Callable[[int], int]) -> None:
        self._counter = random_bits(_COUNTER_BITS)

    def generate(self, room: RoomId, now_ms: int) -> str:
        """Return an id of `room`, created at `now_ms` (epoch milliseconds), as canonical text."""
        return id_text(self._next_number(room, now_ms))

    def generate_octets(self, room: RoomId, now_ms: int, count: int) -> list[bytes]:
        """Return `count` ids of 16 octets, ascending unless the counter wraps (at 2**42)."""
        first = self._counter + 1
        if (first & _LOW_MASK) + count > _LOW_MASK:
            return [self._next_number(room, now_ms).to_bytes(16, "big") for _ in range(count)]
        self._counter = first + count - 1
        high, low = divmod(_compose(room, now_ms, first), 1 << 64)
        head = high.to_bytes(8, "big")
        return [head + half.to_bytes(8, "big") for half in range(low, low + (count << 32), 1 << 32)]

    def _next_number(self, room: RoomId, now_ms: int) -> int:
        self._counter = counter = (self._counter + 1) & _COUNTER_MASK
        return _compose(room, now_ms, counter)

    def generate_global(self, now_ms: int) -> str:
        """Return an id for an object of no room (organisation, key, job)."""
        return self.generate(RoomId(0), now_ms)


def id_text(number: int) -> str:
    """Return the canonical text of an id that is a number."""
    digits = number.to_bytes(16, "big").hex()
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def replayed_id(message: MessageId, job: JobId, salt: int) -> DeliveryId:
    """Return the id of the delivery that a job's replay creates for a message.

    It is always the same, in the message's millisecond. Another `salt` gives another id, for the
    rare case that the id exists. `is_replayed` is true of it.
    """
    digest = hashlib.sha256(f"{message} {job} {salt}".encode()).digest()
    counter = int.from_bytes(digest[:8], "big") & _COUNTER_MASK
    published = _counter_of(message)
    if (counter - published) & _COUNTER_MASK < _MAX_FANOUT or counter >> 16 == published >> 16:
        counter ^= 1 << (_COUNTER_BITS - 1)
    return DeliveryId(id_text(_compose(room_of(message), created_ms(message), counter)))


def is_replayed(delivery: str, message: str) -> bool:
    """Return whether a replay created a delivery, and not the publish of its message.

    A publish draws the ids of a message and of its deliveries one after the other, so their
    counters follow each other. Those of replayed deliveries never do.
    """
    if delivery[COUNTER_START] == message[COUNTER_START]:
        return False
    return (_counter_of(delivery) - _counter_of(message)) & _COUNTER_MASK >= _MAX_FANOUT


def _counter_of(identity: str) -> int:
    number = int(identity.replace("-", ""), 16)
    return (number >> 64 & 0xFFF) << 30 | number >> 32 & _LOW_MASK


def id_before(identity: str) -> str:
    """Return the preceding UUID, so that an exclusive range after it begins with this id."""
    return id_text(max(0, int(identity.replace("-", ""), 16) - 1))


def id_after(identity: str) -> str:
    """Return the next UUID, so that an exclusive range before it ends with this id."""
    return id_text(min((1 << 128) - 1, int(identity.replace("-", ""), 16) + 1))


def _compose(room: RoomId, at_ms: int, counter: int) -> int:
    return (at_ms << 80) | _VERSION | (counter >> 30) << 64 | (counter & _LOW_MASK) << 32 | room


def room_of(identity: str) -> RoomId:
    """Return the room of an id. ValueError: the text is not an id."""
    if _ID.fullmatch(identity) is None:
        raise ValueError(f"{identity!r} is not an id")
    return RoomId(int(identity[28:], 16) & MAX_ROOM)


def created_ms(identity: str) -> int:
    """Return the epoch millisecond in which an id was created."""
    return int(identity[:8] + identity[9:13], 16)


def is_id(text: str) -> bool:
    """Return whether a text has the form of an id."""
    return _ID.fullmatch(text) is not None


def first_id(at_ms: int) -> str:
    """Return the least UUID of a millisecond, as a bound for ranges and partitions.

    Before 1970 that is the least of all.
    """
    return id_text(max(0, at_ms) << 80)
