"""Hide values of headers in what an endpoint answers: some endpoints repeat the request."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from rooms.domain.attempt import AttemptResult

HIDDEN: Final = "***"
MIN_LENGTH: Final = 8
"""Shorter values and words are no secrets, and may be part of any text."""


def hidden_texts(values: Iterable[str]) -> tuple[str, ...]:
    """Return what to hide: long values, and long words of them, such as the token of a scheme."""
    found = {text for value in values for text in (value, *value.split())}
    return tuple(sorted((text for text in found if len(text) >= MIN_LENGTH), key=len, reverse=True))


def hide(result: AttemptResult, texts: Sequence[str]) -> AttemptResult:
    """Return the result with `***` in place of these texts, also of one that is cut off."""
    if not texts or not (result.body_head or result.detail):
        return result
    body = _hide(result.body_head.decode("latin-1"), texts)
    return replace(result, detail=_hide(result.detail, texts), body_head=body.encode("latin-1"))


def _hide(found: str, texts: Sequence[str]) -> str:
    for text in texts:
        found = found.replace(text, HIDDEN)
    for text in texts:
        for length in range(min(len(text) - 1, len(found)), MIN_LENGTH - 1, -1):
            if found.endswith(text[:length]):
                return found[:-length] + HIDDEN
    return found
