"""Read the filters of lists from the address of a page, and times as the reader writes them."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from rooms.console.page import Page

CORRECTABLE: Final = frozenset({409, 422})
"""The answers to a form after which it is shown again, as it was typed."""


def read_filters(page: Page, names: Sequence[str]) -> dict[str, Any]:
    """Return the filters of an address as parameters of the API; `since` and `until` in UTC."""
    found: dict[str, Any] = {name: page.query(name) for name in names}
    for name in ("since", "until"):
        if name in found:
            found[name] = to_utc(page, found[name])
    return found


def to_utc(page: Page, text: str | None) -> str | None:
    """Return a time of a form, which has no zone where it is the reader's, as RFC 3339.

    Text that is no time is returned as it is: the API refuses it by its field.
    """
    if text is None:
        return None
    try:
        moment = _parse_time(text)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=page.format.zone)
        return moment.astimezone(UTC).isoformat()
    except (ValueError, OverflowError):
        return text


def _parse_time(text: str) -> datetime:
    """Return a time as browsers write it, or as the API reads it. ValueError."""
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return msgspec.convert(text, datetime)


def is_filtered(page: Page, names: Sequence[str]) -> bool:
    """Return whether one of these filters is set."""
    return any(page.query(name) for name in names)
