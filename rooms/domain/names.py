"""Define the names that users choose for rooms, subscriptions, event types and queues."""

import re
from typing import Final

NAME_CHARACTERS: Final = re.compile(r"[a-zA-Z0-9_.\-]+")
NAME_PATTERN: Final = r"^[a-zA-Z0-9_.\-]+$"
MAX_NAME: Final = 128
NAME_RULE: Final = f"use 1 to {MAX_NAME} of the characters a-z, A-Z, 0-9, '_', '.' and '-'"


def check_name(name: str) -> str:
    """Return a valid name, or raise ValueError. The characters are safe in headers."""
    if not NAME_CHARACTERS.fullmatch(name) or len(name) > MAX_NAME:
        raise ValueError(NAME_RULE)
    return name
