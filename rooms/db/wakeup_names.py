"""Collect the names of a wake-up, within what a few notifications can carry.

The names of PULL are subscriptions. Where one room has too many of them, its id stands for all, so
that a large publish wakes only polls of its own room.
"""

from collections.abc import Sequence
from itertools import islice
from typing import Final

from rooms.domain.ids import is_id, room_of

MAX_OF_PAYLOAD: Final = 150  # a payload holds 8,000 bytes, an id 36
_MAX_BYTES: Final = 50
MAX_OF_ROOM: Final = 600
MAX_NAMES: Final = 3000
"""The most names of one wake-up, in 20 payloads."""


class WakeupNames:
    """Hold names for one channel. `by_room`: the names are subscriptions."""

    def __init__(self, *, by_room: bool) -> None:
        self._by_room = by_room
        # None: the key itself is the name. Otherwise the key is the room of these names.
        self._groups: dict[str, set[str] | None] = {}
        self._count = 0
        self._is_any = False

    def add(self, name: str) -> None:
        """Add a name; an empty or a long one stands for any."""
        if self._is_any:
            return
        if not name or len(name.encode()) > _MAX_BYTES:
            self._set_any()
        elif self._by_room and is_id(name):
            self._add_of_room(str(room_of(name)), name)
        else:
            self._add_whole(name)
        if self._count > MAX_NAMES:
            self._shorten()

    def merge(self, other: "WakeupNames") -> None:
        """Add the names of another one."""
        for payload in other.payloads():
            for name in payload.split(","):
                self.add(name)

    def payloads(self) -> Sequence[str]:
        """Return the payloads to send; one that is empty says that anything may have changed."""
        if self._is_any:
            return [""]
        names, found = iter(self._names()), list[str]()
        while portion := list(islice(names, MAX_OF_PAYLOAD)):
            found.append(",".join(portion))
        return found

    def _names(self) -> Sequence[str]:
        names: list[str] = []
        for group, members in self._groups.items():
            names.extend((group,) if members is None else members)
        return names

    def _add_of_room(self, room: str, name: str) -> None:
        members = self._groups.setdefault(room, set())
        if members is None or name in members:
            return
        if len(members) >= MAX_OF_ROOM:
            self._add_whole(room)
        else:
            members.add(name)
            self._count += 1

    def _add_whole(self, group: str) -> None:
        members = self._groups.get(group, set[str]())
        if members is not None:
            self._groups[group] = None
            self._count += 1 - len(members)

    def _shorten(self) -> None:
        for room, members in list(self._groups.items()):
            if members is not None:
                self._add_whole(room)
        # Shortening reads all names. So it is not repeated for few further ones.
        if self._count > MAX_NAMES // 2:
            self._set_any()

    def _set_any(self) -> None:
        self._groups.clear()
        self._count, self._is_any = 0, True
