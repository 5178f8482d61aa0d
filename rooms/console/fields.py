"""Turn settings of the API into the fields of a form and back, and find those that were changed.

A form carries, hidden, what its fields showed. Only what differs from that is sent to the API: a
change that another person made meanwhile is kept, and the journal names what was changed.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum, auto
from typing import Any, Final

import msgspec

from rooms.console.form import Form
from rooms.console.page import Page
from rooms.publishing.number_bounds import decode_json

SHOWN: Final = "shown"
"""The hidden field that says what the other fields showed."""


class Kind(Enum):
    """Say how a field of a form is written."""

    TEXT = auto()
    NUMBER = auto()
    FLAG = auto()
    """A box."""
    YES_NO = auto()
    """A choice of yes, no, and neither: null."""
    MANY = auto()
    """A set of boxes."""
    NUMBERS = auto()
    """Whole numbers, separated by commas."""
    LINES = auto()
    """Texts, one a line."""
    NUMBER_LINES = auto()
    """Whole numbers, one a line."""
    INTERESTS = auto()
    """Event types, one a line, with versions after the name: `order.made 1, 2`."""
    HEADERS = auto()
    """Headers, one a line: `Name: value`."""


@dataclass(frozen=True, slots=True)
class Field:
    """Name a setting of the API, and say how it is written."""

    name: str
    kind: Kind = Kind.TEXT


RETRY_FIELDS: Final = (
    Field("delivery_delay_ms", Kind.NUMBER),
    Field("delivery_delay_multiplier", Kind.NUMBER),
    Field("delivery_attempts", Kind.NUMBER),
    Field("delivery_max_delay_ms", Kind.NUMBER),
    Field("delivery_jitter", Kind.NUMBER),
)
THROTTLE_FIELDS: Final = tuple(
    Field(name, Kind.NUMBER)
    for name in (
        "max_concurrency",
        "timeout_ms",
        "rate_per_s",
        "rate_burst",
        "circuit_failures",
        "circuit_window_ms",
        "circuit_open_ms",
        "drain_per_s",
        "disable_after_ms",
    )
)


def to_texts(fields: Sequence[Field], values: Mapping[str, Any]) -> dict[str, str]:
    """Return what the fields of a form show for values of the API."""
    return {one.name: _to_text(one.kind, values.get(one.name)) for one in fields}


def typed_texts(fields: Sequence[Field], form: Form) -> dict[str, str]:
    """Return what was typed, as `to_texts` shows it."""
    return {
        one.name: "\n".join(sorted(form.many(one.name)))
        if one.kind is Kind.MANY
        else form.raw(one.name)
        for one in fields
    }


def shown_texts(texts: Mapping[str, str]) -> str:
    """Return the value of the hidden field."""
    return json.dumps(texts, ensure_ascii=True)


def read_fields(fields: Sequence[Field], form: Form) -> dict[str, Any]:
    """Return the values of all fields that are not empty."""
    read = {one.name: _read(one, form) for one in fields}
    return {name: value for name, value in read.items() if value is not None}


def read_changes(fields: Sequence[Field], form: Form) -> dict[str, Any]:
    """Return the values of the fields that differ from what the form showed; None: emptied."""
    shown = _parse_shown(form.raw(SHOWN))
    typed = typed_texts(fields, form)
    return {
        one.name: _read(one, form)
        for one in fields
        if typed[one.name].strip() != shown.get(one.name, "").strip()
    }


def _parse_shown(text: str) -> dict[str, str]:
    try:
        # Texts only: it stops at what is none, and 2 MiB of numbers took 146 ms.
        found: dict[str, str] = decode_json(text.encode() or b"{}", dict[str, str])
    except (msgspec.DecodeError, UnicodeError):
        return {}
    return found


def _to_text(kind: Kind, value: Any) -> str:
    if value is None or value == []:
        return ""
    match kind:
        case Kind.FLAG:
            return "on" if value else ""
        case Kind.YES_NO:
            return "yes" if value else "no"
        case Kind.MANY | Kind.LINES | Kind.NUMBER_LINES:
            return "\n".join(map(str, sorted(value) if kind is Kind.MANY else value))
        case Kind.NUMBERS:
            return ", ".join(map(str, value))
        case Kind.INTERESTS:
            return "\n".join(
                " ".join([one["name"], ", ".join(map(str, one.get("versions") or ()))]).strip()
                for one in value
            )
        case Kind.HEADERS:
            return "\n".join(f"{name}: {text}" for name, text in value.items())
        case Kind.NUMBER:
            is_whole = isinstance(value, float) and value.is_integer()
            return str(int(value) if is_whole else value)
        case Kind.TEXT:
            return str(value)


def _read(field: Field, form: Form) -> Any:
    """Return a value for the API. What cannot be read is passed on, and the API refuses it."""
    match field.kind:
        case Kind.FLAG:
            return form.checked(field.name)
        case Kind.YES_NO:
            return {"yes": True, "no": False}.get(form.raw(field.name))
        case Kind.MANY:
            return sorted(form.many(field.name))
        case Kind.NUMBER:
            return form.number(field.name)
        case Kind.NUMBERS | Kind.NUMBER_LINES:
            return [whole_number(part) for part in form.lines(field.name)] or None
        case Kind.LINES:
            return form.lines(field.name) or None
        case Kind.INTERESTS:
            lines = [line.strip() for line in form.raw(field.name).split("\n") if line.strip()]
            return [_interest(line) for line in lines] or None
        case Kind.HEADERS:
            lines = [line for line in form.raw(field.name).split("\n") if line.strip()]
            pairs = (line.partition(":") for line in lines)
            return {name.strip(): value.strip() for name, _, value in pairs} or None
        case Kind.TEXT:
            return form.text(field.name)


def _interest(line: str) -> dict[str, Any]:
    name, _, versions = line.partition(" ")
    named: dict[str, Any] = {"name": name}
    if versions.strip():
        named["versions"] = [
            whole_number(part.strip())
            for part in versions.replace(",", " ").split()
            if part.strip()
        ]
    return named


def whole_number(text: str) -> int | str:
    """Return a typed number; what is none is returned as text, which the API refuses."""
    try:
        return int(text)
    except ValueError:
        return text


def typed_time(page: Page, text: str | None) -> str | None:
    """Return a typed time for the API; what is none is passed on, and the API refuses it."""
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return text
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=page.format.zone)
    return moment.isoformat()
