"""Read the forms of pages: their fields as text, numbers, lists and choices."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import parse_qsl

from litestar import Request

from rooms.errors import MalformedError, TooLargeError

_SMALL_FORM_BYTES: Final = 64 * 1024
"""A larger form is read in a thread: to decode it takes up to 0.2 s a megabyte."""
MAX_FORM_FIELDS: Final = 200
MAX_NUMBER: Final = 10**18
"""The largest number of a form; no field of the API takes one."""


class Form:
    """Read the fields of a form: text, whole numbers, lists, choices."""

    def __init__(self, fields: Mapping[str, Sequence[str]]) -> None:
        self._fields = fields

    def __contains__(self, name: str) -> bool:
        return bool(self._fields.get(name))

    def text(self, name: str) -> str | None:
        """Return a field without the space around it; None: it is empty."""
        values = self._fields.get(name) or ("",)
        return values[0].strip() or None

    def raw(self, name: str) -> str:
        """Return a field as it was typed, with line feeds as line ends."""
        return (self._fields.get(name) or ("",))[0].replace("\r\n", "\n")

    def checked(self, name: str) -> bool:
        """Return whether a box is checked."""
        return bool(self.text(name))

    def number(self, name: str) -> int | float | str | None:
        """Return a number; what is none is returned as text, which the API refuses by its field.

        So is one beyond `MAX_NUMBER`, with which pages could not calculate.
        """
        text = self.text(name)
        if text is None:
            return None
        value: int | float
        try:
            value = int(text)
        except ValueError:
            try:
                value = float(text)
            except ValueError:
                return text
        # In JSON, what is not finite would be null, which clears a field; NaN compares as False.
        return value if abs(value) <= MAX_NUMBER else text

    def lines(self, name: str) -> list[str]:
        """Return what is separated by commas or line ends, without empty parts."""
        return [
            part.strip() for part in self.raw(name).replace(",", "\n").split("\n") if part.strip()
        ]

    def many(self, name: str) -> list[str]:
        """Return the values of a field that may be chosen several times."""
        return list(self._fields.get(name, ()))

    def values(self) -> dict[str, str]:
        """Return every field as it was typed, to show the form again."""
        return {name: values[0] for name, values in self._fields.items() if name != "form_token"}


async def read_form(request: Request[Any, Any, Any], limit: int) -> dict[str, list[str]]:
    """Return the fields of a form, `application/x-www-form-urlencoded`, of at most `limit` bytes.

    TooLargeError; MalformedError: it has too many fields, or is no such form.
    """
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise TooLargeError(f"this form may have {limit} bytes")
        chunks.append(chunk)
    content = b"".join(chunks)
    try:
        if size <= _SMALL_FORM_BYTES:
            pairs = _parse_form(content)
        else:
            pairs = await asyncio.to_thread(_parse_form, content)
    except ValueError as exc:
        raise MalformedError(f"the form cannot be read: {exc}") from exc
    found: dict[str, list[str]] = {}
    for name, value in pairs:
        found.setdefault(name, []).append(value)
    return found


def _parse_form(content: bytes) -> list[tuple[str, str]]:
    """Return names and values. ValueError."""
    return parse_qsl(content.decode(), keep_blank_values=True, max_num_fields=MAX_FORM_FIELDS)
