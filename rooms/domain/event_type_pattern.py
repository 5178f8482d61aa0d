"""Match event types by patterns: an exact name, `order.*` for all that begin so, or `*` for all."""

from collections.abc import Collection, Iterable
from typing import Final

from rooms.domain.names import MAX_NAME, NAME_CHARACTERS

EVERY_EVENT_TYPE: Final = "*"
_SUFFIX: Final = ".*"
PATTERN: Final = r"^(\*|[a-zA-Z0-9_.\-]+(\.\*)?)$"
"""A regular expression for the API's documents: what `check_pattern` accepts."""
PATTERN_RULE: Final = "use an event type's name, its beginning with '.*' (order.*), or '*' for all"
MAX_PATTERNS: Final = 1000


def check_pattern(pattern: str) -> str:
    """Return a valid pattern. ValueError: it is none."""
    name = pattern.removesuffix(_SUFFIX)
    if pattern != EVERY_EVENT_TYPE and (
        not NAME_CHARACTERS.fullmatch(name) or len(pattern) > MAX_NAME
    ):
        raise ValueError(PATTERN_RULE)
    return pattern


def is_pattern(text: str) -> bool:
    """Return whether a valid pattern can match several event types."""
    return text == EVERY_EVENT_TYPE or text.endswith(_SUFFIX)


def matches(pattern: str, event_type: str) -> bool:
    """Return whether a pattern matches. `order.*` matches `order.paid`, and not `order`."""
    if pattern == EVERY_EVENT_TYPE:
        return True
    if pattern.endswith(_SUFFIX):
        return event_type.startswith(pattern[:-1])
    return pattern == event_type


def matches_any(patterns: Iterable[str] | None, event_type: str) -> bool:
    """Return whether one of the patterns matches; None: every event type is meant."""
    return patterns is None or any(matches(pattern, event_type) for pattern in patterns)


def covers(patterns: Collection[str] | None, wanted: str) -> bool:
    """Return whether `patterns` (None: all) match everything that the pattern `wanted` matches.

    With a set of patterns its time does not depend on how many they are.
    """
    if patterns is None or wanted in patterns or EVERY_EVENT_TYPE in patterns:
        return True
    return any(
        f"{wanted[: end + 1]}*" in patterns
        for end, character in enumerate(wanted)
        if character == "."
    )
