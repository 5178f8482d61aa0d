"""What a stream is asked for: its query, and the frames that come over a WebSocket."""

from collections.abc import Sequence
from typing import Annotated, Any, Final, NamedTuple
from urllib.parse import parse_qsl

import msgspec
from msgspec import Meta

from rooms.complaints import complaint, no_json
from rooms.errors import FieldProblem, InvalidError, MalformedError
from rooms.pulling.request import (
    MAX_CONDITIONS,
    MAX_LEASE_MS,
    MAX_VALUE,
    AckRequest,
    ExtendRequest,
    NackRequest,
    SelectorRequest,
)
from rooms.pulling.selector import Selector

MOST_SUBSCRIPTIONS: Final = 100
MOST_CREDIT: Final = 10_000
MAX_FOR_MS: Final = 24 * 3_600_000
NUMBERS: Final = {
    "credit": (0, MOST_CREDIT),
    "lease_ms": (1000, MAX_LEASE_MS),
    "priority": (0, 9),
    "heartbeat_ms": (100, 60_000),
    "for_ms": (1, MAX_FOR_MS),
}
"""The query's numbers with their bounds."""
LISTS: Final = {
    "subscription": MOST_SUBSCRIPTIONS,
    "event_type": MAX_CONDITIONS,
    "header": MAX_CONDITIONS,
    "payload": MAX_CONDITIONS,
}
"""What may be given more than once, and how often."""


class StreamRequest(NamedTuple):
    """How a stream is to be."""

    subscriptions: Sequence[str] = ()
    credit: int | None = None
    """So many messages may be with the client; None: what its kind of stream begins with."""
    lease_ms: int = 30_000
    priority: int = 0
    heartbeat_ms: int = 15_000
    for_ms: int | None = None
    """How long it lasts; None: until somebody ends it."""
    browse: bool = False
    selector: Selector | None = None


class Grant(msgspec.Struct, forbid_unknown_fields=True):
    """So many messages more may come."""

    credit: Annotated[int, Meta(ge=1, le=MOST_CREDIT)]


Frame = Grant | AckRequest | NackRequest | ExtendRequest


def read_stream(query: bytes, *, several: bool) -> StreamRequest:
    """The request in a query; `several`: it names its subscriptions itself. InvalidError names what is wrong."""
    problems: list[FieldProblem] = []
    lists: dict[str, list[str]] = {name: [] for name in LISTS if several or name != "subscription"}
    given: dict[str, str] = {}
    for name, value in parse_qsl(query.decode("latin-1"), keep_blank_values=True):
        if "\x00" in value or len(value) > 2 * MAX_VALUE:
            problems.append(FieldProblem(name, "is too long, or contains the character U+0000"))
        elif name in lists:
            lists[name].append(value)
        elif name not in NUMBERS and name != "browse":
            valid = ", ".join(sorted((*NUMBERS, *lists, "browse")))
            problems.append(FieldProblem(name, f"there is no such query parameter; there are {valid}"))
        elif name in given:
            problems.append(FieldProblem(name, "is given more than once"))
        else:
            given[name] = value
    problems += [
        FieldProblem(name, f"may be given {LISTS[name]} times")
        for name, values in lists.items()
        if len(values) > LISTS[name]
    ]
    numbers = {name: _number(name, given[name], problems) for name in NUMBERS if name in given}
    if given.get("browse", "false") not in ("true", "false"):
        problems.append(FieldProblem("browse", "is true or false"))
    if several and not lists["subscription"]:
        problems.append(FieldProblem("subscription", "is missing; give the id of each subscription"))
    asked = SelectorRequest(
        [name for value in lists["event_type"] for name in value.split(",")],
        _pairs("header", lists["header"], problems),
        _pairs("payload", lists["payload"], problems),
    )
    if problems:
        raise InvalidError(*problems)
    subscriptions = list(dict.fromkeys(lists.get("subscription", ())))
    browse = given.get("browse") == "true"
    return StreamRequest(subscriptions, **numbers, browse=browse, selector=asked.selector())


def read_frame(text: str | bytes) -> Frame:
    """What a client sends over a WebSocket. MalformedError: it is no JSON. InvalidError."""
    try:
        fields = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise MalformedError(no_json(exc)) from exc
    if not isinstance(fields, dict) or len(named := _FRAMES.keys() & fields.keys()) != 1:
        raise InvalidError(FieldProblem("frame", f"is an object with one of {', '.join(_FRAMES)}"))
    (name,) = named
    kind: Any = _FRAMES[name]
    if kind is not Grant:
        fields["ack_ids"] = fields.pop(name)
    try:
        frame: Frame = msgspec.convert(fields, kind)
    except msgspec.ValidationError as exc:
        raise InvalidError(FieldProblem(name, complaint(str(exc).partition(" - at ")[0]))) from exc
    return frame


_FRAMES: Final = {"credit": Grant, "ack": AckRequest, "nack": NackRequest, "extend": ExtendRequest}


def _number(name: str, text: str, problems: list[FieldProblem]) -> int:
    low, high = NUMBERS[name]
    if text.isdecimal() and text.isascii() and len(text) < 10 and low <= int(text) <= high:  # noqa: PLR2004 - as many as fit
        return int(text)
    problems.append(FieldProblem(name, f"is a whole number from {low} to {high}"))
    return low


def _pairs(name: str, values: Sequence[str], problems: list[FieldProblem]) -> dict[str, str]:
    found = {}
    for value in values:
        key, colon, wanted = value.partition(":")
        if not key or not colon:
            problems.append(FieldProblem(name, "is like name:value"))
        found[key] = wanted
    return found
