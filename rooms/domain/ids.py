"""Identities: UUIDv7 text whose low 32 bits are the room, so that an id alone says where its row lives."""

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
_VERSION = 0x7000_8000_0000_0000_0000  # version 7, variant of RFC 9562


class IdMaker:
    """Makes ids for one process: 48 bits of milliseconds, 42 bits that count from a random start, 32 bits of room.

    Counting (instead of drawing each time) rules out a collision inside the process, however many ids one
    millisecond needs; two processes collide only where their ranges of one room and one millisecond overlap.
    """

    def __init__(self, random_bits: Callable[[int], int]) -> None:
        self._counter = random_bits(_COUNTER_BITS)

    def make(self, room: RoomId, now_ms: int) -> str:
        """An id of `room` born at `now_ms` (epoch milliseconds), as canonical text."""
        return id_text(self._next(room, now_ms))

    def octets(self, room: RoomId, now_ms: int, count: int) -> list[bytes]:
        """`count` ids, 16 octets each, in ascending order, but for one wrap of the counter in 4,398 billion."""
        first = self._counter + 1
        if (first & _LOW_MASK) + count > _LOW_MASK:
            return [self._next(room, now_ms).to_bytes(16, "big") for _ in range(count)]
        self._counter = first + count - 1
        high, low = divmod(_put_together(room, now_ms, first), 1 << 64)
        head = high.to_bytes(8, "big")
        return [head + half.to_bytes(8, "big") for half in range(low, low + (count << 32), 1 << 32)]

    def _next(self, room: RoomId, now_ms: int) -> int:
        self._counter = counter = (self._counter + 1) & _COUNTER_MASK
        return _put_together(room, now_ms, counter)

    def global_id(self, now_ms: int) -> str:
        """An id of something that belongs to no room (organisation, key, job)."""
        return self.make(RoomId(0), now_ms)


def id_text(number: int) -> str:
    """The canonical text of an id that was made as a number."""
    digits = number.to_bytes(16, "big").hex()
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def replayed_id(message: MessageId, job: JobId, salt: int) -> DeliveryId:
    """The id of the delivery that a job's replay makes of a message: always the same one, in the message's millisecond.

    Another `salt` gives another id, for the rare case that somebody has it.
    """
    digest = hashlib.sha256(f"{message} {job} {salt}".encode()).digest()
    counter = int.from_bytes(digest[:8], "big") & _COUNTER_MASK
    return DeliveryId(id_text(_put_together(room_of(message), born_ms(message), counter)))


def id_before(identity: str) -> str:
    """The UUID before this one, so that what begins after it begins with this one."""
    return id_text(max(0, int(identity.replace("-", ""), 16) - 1))


def id_after(identity: str) -> str:
    """The UUID after this one, so that what ends before it ends with this one."""
    return id_text(min((1 << 128) - 1, int(identity.replace("-", ""), 16) + 1))


def _put_together(room: RoomId, at_ms: int, counter: int) -> int:
    return (at_ms << 80) | _VERSION | (counter >> 30) << 64 | (counter & _LOW_MASK) << 32 | room


def room_of(identity: str) -> RoomId:
    """The room an id belongs to. ValueError where the text is no id of ours."""
    if _ID.fullmatch(identity) is None:
        raise ValueError(f"{identity!r} is not an id")
    return RoomId(int(identity[28:], 16) & MAX_ROOM)


def born_ms(identity: str) -> int:
    """The epoch millisecond in which the id was made."""
    return int(identity[:8] + identity[9:13], 16)


def is_id(text: str) -> bool:
    """Whether this could be one of these identities."""
    return _ID.fullmatch(text) is not None


def first_id(at_ms: int) -> str:
    """The least UUID of a millisecond: a bound for ranges over ids, and where partitions are cut."""
    return id_text(at_ms << 80)
