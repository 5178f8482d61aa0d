"""Names people choose, and the names made from ids."""

import re

from rooms.domain.ids import RoomId, SubscriptionId

NAME = re.compile(r"[a-zA-Z0-9_.\-]+")
NAME_PATTERN = r"^[a-zA-Z0-9_.\-]+$"
MAX_NAME = 128
NAME_RULE = f"use 1 to {MAX_NAME} of the characters a-z, A-Z, 0-9, '_', '.' and '-'"


def check_name(name: str) -> str:
    """The name, or ValueError: names travel in headers and destinations, so there is one charset for all of them."""
    if not NAME.fullmatch(name) or len(name) > MAX_NAME:
        raise ValueError(NAME_RULE)
    return name


def destination(room: RoomId, subscription: SubscriptionId) -> str:
    """`room-{room}::subscription-{subscription}` (row A10), the same for PUSH and PULL."""
    return f"room-{room}::subscription-{subscription}"
