"""Decode PULL requests strictly: bodies, stream queries, WebSocket frames and ack ids.

Every problem is named by its field; omitted fields have defaults. An ack id is a delivery and the
generation of its lease: 21 bytes as 28 characters that are safe in any text.
"""

import re
from binascii import a2b_base64, b2a_base64
from collections.abc import Sequence
from typing import Annotated, Any, Final, NamedTuple, TypeVar
from urllib.parse import parse_qsl

import msgspec
from msgspec import Meta

from delivery.pull.target import Selector
from rooms.errors import FieldProblem, InvalidError, MalformedError
from rooms.publishing.number_bounds import decode_json
from rooms.validation_messages import invalid_json_message, validation_message

ACK_ID_LENGTH: Final = 28
_ACK_IDS: Final = "ack_ids"
_ACK_ID_FORMAT: Final = b"\x01"
_ID_END: Final = 17
_ACK_ID_BYTES: Final = 21
_TO_URL_SAFE: Final = bytes.maketrans(b"+/", b"-_")
_FROM_URL_SAFE: Final = {ord("-"): "+", ord("_"): "/", ord("+"): "!", ord("/"): "!"}

Lease = tuple[bytes, bytes]
"""(delivery id as 16 bytes, generation as 4), both big-endian."""
MAX_MESSAGES: Final = 1000
MAX_WAIT_MS: Final = 30_000
MAX_LEASE_MS: Final = 12 * 3_600_000
MAX_PROBLEMS: Final = 100
MAX_CONDITIONS: Final = 16
MAX_VALUE: Final = 256
MAX_SUBSCRIPTIONS: Final = 100
MAX_CREDIT_GRANT: Final = 10_000
MAX_DURATION_MS: Final = 24 * 3_600_000
NUMBER_PARAMETERS: Final = {
    "credit": (0, MAX_CREDIT_GRANT),
    "lease_ms": (1000, MAX_LEASE_MS),
    "priority": (0, 9),
    "heartbeat_ms": (100, 60_000),
    "for_ms": (1, MAX_DURATION_MS),
}
"""The numbers of the query with their bounds."""
LIST_PARAMETERS: Final = {
    "subscription": MAX_SUBSCRIPTIONS,
    "event_type": MAX_CONDITIONS,
    "header": MAX_CONDITIONS,
    "payload": MAX_CONDITIONS,
}
"""The most times each of these may be given."""
_ERROR_LOCATION: Final = re.compile(r"(?P<message>.*?)(?: - at `\$\.?(?P<path>.*)`)?", re.DOTALL)
_FIELD_ERROR: Final = re.compile(
    r"Object (?P<what>contains unknown|missing required) field `(?P<name>.*)`", re.DOTALL
)


def ack_id(delivery: bytes, generation: bytes) -> bytes:
    """Return the ack id of a lease, in ASCII."""
    return b2a_base64(_ACK_ID_FORMAT + delivery + generation, newline=False).translate(_TO_URL_SAFE)


def parse_ack_id(text: str) -> Lease:
    """Return the lease of an ack id. ValueError: it is none. One lease has exactly one ack id."""
    if len(text) != ACK_ID_LENGTH:
        raise ValueError("an ack_id has 28 characters")
    packed = a2b_base64(text.translate(_FROM_URL_SAFE), strict_mode=True)
    if len(packed) != _ACK_ID_BYTES or packed[:1] != _ACK_ID_FORMAT or packed[_ID_END] & 0x80:
        raise ValueError("this is not an ack_id")
    return packed[1:_ID_END], packed[_ID_END:]


LeaseMs = Annotated[
    int,
    Meta(
        ge=1000,
        le=MAX_LEASE_MS,
        description="The length of the lease in ms, from now on.",
    ),
]
AckIds = Annotated[
    list[str],
    Meta(
        min_length=1,
        max_length=MAX_MESSAGES,
        description="The ack ids that a pull returned; duplicates count once.",
    ),
]
Value = Annotated[str, Meta(max_length=MAX_VALUE)]
Conditions = Annotated[dict[Value, Value], Meta(max_length=MAX_CONDITIONS)]
Priority = Annotated[
    int,
    Meta(
        ge=0,
        le=9,
        description="The order among consumers that wait in the same process: 9 before 0.",
    ),
]


class SelectorRequest(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """Select messages by type, header and payload; all conditions must hold.

    Values are compared as text.
    """

    event_types: Annotated[
        list[Value],
        Meta(max_length=MAX_CONDITIONS, description="Any of these types; empty: every type."),
    ] = []
    headers: Annotated[
        Conditions, Meta(description="Headers of the publisher by name, and their values.")
    ] = {}
    payload: Annotated[
        Conditions,
        Meta(description="Paths in the payload, like `order.items.0.sku`, and the values there."),
    ] = {}

    def selector(self) -> Selector | None:
        """Return the selector to evaluate; None if it selects every message."""
        if not (self.event_types or self.headers or self.payload):
            return None
        return Selector(
            frozenset(self.event_types),
            tuple(sorted((name.lower(), value) for name, value in self.headers.items())),
            tuple(
                sorted((tuple(place.split(".")), value) for place, value in self.payload.items())
            ),
        )


class PullRequest(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """Ask for messages: how many, how long to wait for the first, and how long to lease them."""

    max_messages: Annotated[int, Meta(ge=1, le=MAX_MESSAGES)] = 10
    wait_ms: Annotated[int, Meta(ge=0, le=MAX_WAIT_MS, description="0: do not wait.")] = 0
    lease_ms: LeaseMs = 30_000
    priority: Priority = 0
    selector: SelectorRequest | None = None


class AckRequest(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """Settle the messages of these leases."""

    ack_ids: AckIds


class NackRequest(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """Return the messages of these leases to the queue after `delay_ms`."""

    ack_ids: AckIds
    delay_ms: Annotated[int, Meta(ge=0, le=MAX_LEASE_MS)] = 0


class ExtendRequest(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """Set these leases to end `lease_ms` from now."""

    ack_ids: AckIds
    lease_ms: LeaseMs


_T = TypeVar("_T")
_Leases = TypeVar("_Leases", AckRequest, NackRequest, ExtendRequest)

_pull_decoder: Final = msgspec.json.Decoder(PullRequest)
_ack_decoder: Final = msgspec.json.Decoder(AckRequest)
_nack_decoder: Final = msgspec.json.Decoder(NackRequest)
_extend_decoder: Final = msgspec.json.Decoder(ExtendRequest)


def decode_pull(body: bytes) -> PullRequest:
    """Decode a pull request; an empty body asks for the defaults.

    MalformedError: no JSON. InvalidError.
    """
    return _decode(_pull_decoder, body) if body else PullRequest()


def decode_ack(body: bytes) -> tuple[AckRequest, list[Lease]]:
    """Decode an ack request and its leases.

    MalformedError. InvalidError names the index of an invalid ack id.
    """
    return _with_leases(_decode(_ack_decoder, body))


def decode_nack(body: bytes) -> tuple[NackRequest, list[Lease]]:
    """Decode a nack request and its leases. Errors as for `decode_ack`."""
    return _with_leases(_decode(_nack_decoder, body))


def decode_extend(body: bytes) -> tuple[ExtendRequest, list[Lease]]:
    """Decode an extend request and its leases. Errors as for `decode_ack`."""
    return _with_leases(_decode(_extend_decoder, body))


def parse_frame_leases(frame: AckRequest | NackRequest | ExtendRequest) -> list[Lease]:
    """Return the leases of a frame's ack ids. InvalidError names the index of an invalid one."""
    return _parse_leases(frame, _FRAME_FIELDS[type(frame)])


def _parse_leases(request: AckRequest | NackRequest | ExtendRequest, field: str) -> list[Lease]:
    try:
        return [parse_ack_id(text) for text in request.ack_ids]
    except ValueError:
        raise InvalidError(*_ack_id_problems(request.ack_ids, field)[:MAX_PROBLEMS]) from None


def _with_leases(request: _Leases) -> tuple[_Leases, list[Lease]]:
    return request, _parse_leases(request, _ACK_IDS)


def _ack_id_problems(ack_ids: list[str], field: str) -> list[FieldProblem]:
    problems = []
    for index, text in enumerate(ack_ids):
        try:
            parse_ack_id(text)
        except ValueError:
            problems.append(
                FieldProblem(
                    f"{field}[{index}]", "is not an ack_id; send it as the pull returned it"
                )
            )
    return problems


def _decode(decoder: "msgspec.json.Decoder[_T]", body: bytes) -> _T:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as exc:
        problem = exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise MalformedError(invalid_json_message(exc, body)) from exc
    try:
        return msgspec.convert(_integral_floats(decode_json(body)), decoder.type)
    except msgspec.ValidationError:
        raise InvalidError(_as_field_problem(problem)) from problem
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise MalformedError(invalid_json_message(exc, body)) from exc


def _integral_floats(value: object) -> object:
    """Return the object with 5.0 as 5: JSON Schema, which describes bodies, knows no difference."""
    if not isinstance(value, dict):
        return value
    return {
        name: int(item) if isinstance(item, float) and item.is_integer() else item
        for name, item in value.items()
    }


def _as_field_problem(error: msgspec.ValidationError) -> FieldProblem:
    place: Any = _ERROR_LOCATION.fullmatch(str(error))
    path = place["path"] or ""
    field = _FIELD_ERROR.fullmatch(place["message"])
    if field is None:
        return FieldProblem(path or "body", validation_message(place["message"]))
    name = f"{path}.{field['name']}".removeprefix(".")
    return FieldProblem(
        name, "there is no such field" if field["what"] == "contains unknown" else "is missing"
    )


class StreamRequest(NamedTuple):
    """Describe the stream that a client asks for."""

    subscriptions: Sequence[str] = ()
    credit: int | None = None
    """The number of unsettled messages the client may have; None: the default of its stream."""
    lease_ms: int = 30_000
    priority: int = 0
    heartbeat_ms: int = 15_000
    for_ms: int | None = None
    """The stream's duration; None: until the client or the server ends it."""
    browse: bool = False
    selector: Selector | None = None


class CreditGrant(msgspec.Struct, forbid_unknown_fields=True):
    """Allow the server to send so many messages more."""

    credit: Annotated[int, Meta(ge=1, le=MAX_CREDIT_GRANT)]


ClientFrame = CreditGrant | AckRequest | NackRequest | ExtendRequest


def decode_stream_query(query: bytes, *, several: bool) -> StreamRequest:
    """Decode a stream's query.

    With `several` it names its subscriptions itself. InvalidError names the parameters.
    """
    problems: list[FieldProblem] = []
    lists: dict[str, list[str]] = {
        name: [] for name in LIST_PARAMETERS if several or name != "subscription"
    }
    given: dict[str, str] = {}
    for name, value in parse_qsl(query.decode("latin-1"), keep_blank_values=True):
        if "\x00" in value or len(value) > 2 * MAX_VALUE:
            problems.append(FieldProblem(name, "is too long, or contains the character U+0000"))
        elif name in lists:
            lists[name].append(value)
        elif name not in NUMBER_PARAMETERS and name != "browse":
            valid = ", ".join(sorted((*NUMBER_PARAMETERS, *lists, "browse")))
            problems.append(
                FieldProblem(name, f"there is no such query parameter; there are {valid}")
            )
        elif name in given:
            problems.append(FieldProblem(name, "is given more than once"))
        else:
            given[name] = value
    problems += [
        FieldProblem(name, f"may be given {LIST_PARAMETERS[name]} times")
        for name, values in lists.items()
        if len(values) > LIST_PARAMETERS[name]
    ]
    numbers = {
        name: _parse_number(name, given[name], problems)
        for name in NUMBER_PARAMETERS
        if name in given
    }
    if given.get("browse", "false") not in ("true", "false"):
        problems.append(FieldProblem("browse", "is true or false"))
    if several and not lists["subscription"]:
        problems.append(
            FieldProblem("subscription", "is missing; give the id of each subscription")
        )
    selector = SelectorRequest(
        [name for value in lists["event_type"] for name in value.split(",")],
        _parse_pairs("header", lists["header"], problems),
        _parse_pairs("payload", lists["payload"], problems),
    )
    if problems:
        raise InvalidError(*problems)
    subscriptions = list(dict.fromkeys(lists.get("subscription", ())))
    browse = given.get("browse") == "true"
    return StreamRequest(subscriptions, **numbers, browse=browse, selector=selector.selector())


def decode_client_frame(text: str | bytes) -> ClientFrame:
    """Decode a WebSocket frame of a client. MalformedError: it is not JSON. InvalidError."""
    body = text.encode() if isinstance(text, str) else text
    try:
        fields = decode_json(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise MalformedError(invalid_json_message(exc, body)) from exc
    if not isinstance(fields, dict) or len(named := _FRAME_TYPES.keys() & fields.keys()) != 1:
        raise InvalidError(
            FieldProblem("frame", f"is an object with one of {', '.join(_FRAME_TYPES)}")
        )
    (name,) = named
    kind: Any = _FRAME_TYPES[name]
    if kind is not CreditGrant:
        if _ACK_IDS in fields:
            raise InvalidError(FieldProblem(_ACK_IDS, f"there is no such field; use {name}"))
        fields[_ACK_IDS] = fields.pop(name)
    try:
        frame: ClientFrame = msgspec.convert(fields, kind)
    except msgspec.ValidationError as exc:
        problem = _as_field_problem(exc)
        if problem.field.startswith(_ACK_IDS):
            problem = FieldProblem(problem.field.replace(_ACK_IDS, name, 1), problem.message)
        raise InvalidError(problem) from exc
    return frame


_FRAME_TYPES: Final = {
    "credit": CreditGrant,
    "ack": AckRequest,
    "nack": NackRequest,
    "extend": ExtendRequest,
}
_FRAME_FIELDS: Final = {kind: name for name, kind in _FRAME_TYPES.items()}


def _parse_number(name: str, text: str, problems: list[FieldProblem]) -> int:
    low, high = NUMBER_PARAMETERS[name]
    if text.isdecimal() and text.isascii() and len(text) < 10 and low <= int(text) <= high:  # noqa: PLR2004 - as many as fit
        return int(text)
    problems.append(FieldProblem(name, f"is a whole number from {low} to {high}"))
    return low


def _parse_pairs(name: str, values: Sequence[str], problems: list[FieldProblem]) -> dict[str, str]:
    found = {}
    for value in values:
        key, colon, wanted = value.partition(":")
        if not key or not colon:
            problems.append(FieldProblem(name, "is like name:value"))
        found[key] = wanted
    return found
