"""What a puller sends: decoded strictly, every problem named by its field. What is left out has a default."""

import re
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta

from rooms.complaints import complaint, no_json
from rooms.errors import FieldProblem, InvalidError, MalformedError
from rooms.pulling.receipt import Lease, read_ack_id
from rooms.pulling.selector import Selector

MAX_MESSAGES: Final = 1000
MAX_WAIT_MS: Final = 30_000
MAX_LEASE_MS: Final = 12 * 3_600_000
MAX_PROBLEMS: Final = 100
_AT: Final = re.compile(r"(?P<message>.*?)(?: - at `\$\.?(?P<path>.*)`)?", re.DOTALL)
_FIELD: Final = re.compile(r"Object (?P<what>contains unknown|missing required) field `(?P<name>.*)`", re.DOTALL)

LeaseMs = Annotated[
    int, Meta(ge=1000, le=MAX_LEASE_MS, description="How long the messages are the puller's, in ms, from now on.")
]
AckIds = Annotated[
    list[str], Meta(min_length=1, max_length=MAX_MESSAGES, description="What a pull gave; twice the same counts once.")
]


MAX_CONDITIONS: Final = 16
MAX_VALUE: Final = 256
Value = Annotated[str, Meta(max_length=MAX_VALUE)]
Conditions = Annotated[dict[Value, Value], Meta(max_length=MAX_CONDITIONS)]
Priority = Annotated[
    int, Meta(ge=0, le=9, description="Who goes first among those who wait in the same process: 9 before 0.")
]


class SelectorRequest(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """Which messages are wanted; all of it must hold. Values are compared as text."""

    event_types: Annotated[list[Value], Meta(max_length=MAX_CONDITIONS, description="One of these; none: any.")] = []
    headers: Annotated[Conditions, Meta(description="The publisher's headers by name, and their values.")] = {}
    payload: Annotated[
        Conditions, Meta(description="Places in the payload, like `order.items.0.sku`, and the values there.")
    ] = {}

    def selector(self) -> Selector | None:
        """The same to be evaluated; None where everything is wanted."""
        if not (self.event_types or self.headers or self.payload):
            return None
        return Selector(
            frozenset(self.event_types),
            tuple(sorted((name.lower(), value) for name, value in self.headers.items())),
            tuple(sorted((tuple(place.split(".")), value) for place, value in self.payload.items())),
        )


class PullRequest(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """How many messages at most, how long to wait until there is one, and how long they are the puller's."""

    max_messages: Annotated[int, Meta(ge=1, le=MAX_MESSAGES)] = 10
    wait_ms: Annotated[int, Meta(ge=0, le=MAX_WAIT_MS, description="0: do not wait.")] = 0
    lease_ms: LeaseMs = 30_000
    priority: Priority = 0
    selector: SelectorRequest | None = None


class AckRequest(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """Leases whose messages are done."""

    ack_ids: AckIds


class NackRequest(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """Leases whose messages are to come again, after `delay_ms`."""

    ack_ids: AckIds
    delay_ms: Annotated[int, Meta(ge=0, le=MAX_LEASE_MS)] = 0


class ExtendRequest(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """Leases that are to end `lease_ms` from now."""

    ack_ids: AckIds
    lease_ms: LeaseMs


_T = TypeVar("_T")
_Leases = TypeVar("_Leases", AckRequest, NackRequest, ExtendRequest)

_pull: Final = msgspec.json.Decoder(PullRequest)
_ack: Final = msgspec.json.Decoder(AckRequest)
_nack: Final = msgspec.json.Decoder(NackRequest)
_extend: Final = msgspec.json.Decoder(ExtendRequest)


def read_pull(body: bytes) -> PullRequest:
    """The request in a body; an empty body asks for the defaults. MalformedError: no JSON. InvalidError."""
    return _decoded(_pull, body) if body else PullRequest()


def read_ack(body: bytes) -> tuple[AckRequest, list[Lease]]:
    """The request in a body and its leases. MalformedError, InvalidError (names the index of what is no ack id)."""
    return _with_leases(_decoded(_ack, body))


def read_nack(body: bytes) -> tuple[NackRequest, list[Lease]]:
    """As `read_ack`."""
    return _with_leases(_decoded(_nack, body))


def read_extend(body: bytes) -> tuple[ExtendRequest, list[Lease]]:
    """As `read_ack`."""
    return _with_leases(_decoded(_extend, body))


def leases_of(request: AckRequest | NackRequest | ExtendRequest) -> list[Lease]:
    """What its ack ids stand for. InvalidError names the index of what is none."""
    try:
        return [read_ack_id(text) for text in request.ack_ids]
    except ValueError:
        raise InvalidError(*_misfits(request.ack_ids)[:MAX_PROBLEMS]) from None


def _with_leases(request: _Leases) -> tuple[_Leases, list[Lease]]:
    return request, leases_of(request)


def _misfits(ack_ids: list[str]) -> list[FieldProblem]:
    problems = []
    for index, text in enumerate(ack_ids):
        try:
            read_ack_id(text)
        except ValueError:
            problems.append(FieldProblem(f"ack_ids[{index}]", "is no ack_id; send it as the pull gave it"))
    return problems


def _decoded(decoder: "msgspec.json.Decoder[_T]", body: bytes) -> _T:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as exc:
        problem = exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise MalformedError(no_json(exc)) from exc
    try:
        return msgspec.convert(_whole(msgspec.json.decode(body)), decoder.type)
    except msgspec.ValidationError:
        raise InvalidError(_problem(problem)) from problem
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise MalformedError(no_json(exc)) from exc


def _whole(value: object) -> object:
    """5.0 counts as 5: JSON Schema, by which the document describes bodies, knows no difference."""
    if not isinstance(value, dict):
        return value
    return {name: int(item) if isinstance(item, float) and item.is_integer() else item for name, item in value.items()}


def _problem(error: msgspec.ValidationError) -> FieldProblem:
    place: Any = _AT.fullmatch(str(error))
    path = place["path"] or ""
    field = _FIELD.fullmatch(place["message"])
    if field is None:
        return FieldProblem(path or "body", complaint(place["message"]))
    name = f"{path}.{field['name']}".removeprefix(".")
    return FieldProblem(name, "there is no such field" if field["what"] == "contains unknown" else "is missing")
