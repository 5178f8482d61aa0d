"""Decode the messages of a publisher, and name every problem by its field.

The payload stays byte for byte as it was sent.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from itertools import chain, islice
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta

from rooms.domain.message import MAX_DELAY_MS
from rooms.domain.message_headers import (
    MAX_HEADERS,
    MAX_NAME,
    MAX_SIGNATURE,
    MAX_VALUE,
    SIGNATURE_HEADER,
    header_key,
    is_reserved,
)
from rooms.errors import FieldProblem, InvalidError, MalformedError
from rooms.publishing.batch_bounds import (
    MAX_DESTINATIONS,
    MOST_COMMAS,
    UNCOUNTED_BYTES,
    check_destinations,
    check_message,
    split_batch,
)
from rooms.validation_messages import (
    invalid_json_message,
    unknown_field_message,
    validation_message,
)

MAX_TEXT: Final = 128
MAX_TTL_MS: Final = 100 * 365 * 86_400_000
MAX_KEY: Final = 255
MAX_PROBLEMS: Final = 100
_MAX_INT4: Final = 2**31 - 1

_VISIBLE: Final = re.compile(r"[!-~]+")
_TOKEN: Final = re.compile(rf"[!#$%&'*+\-.^_`|~0-9A-Za-z]{{1,{MAX_NAME}}}")
_HEADER_VALUE: Final = re.compile(r"(?:[!-~](?:[ \t!-~]*[!-~])?)?")
_ERROR_LOCATION: Final = re.compile(r"(?P<message>.*?)(?: - at `\$?(?P<path>.*)`)?", re.DOTALL)


class MessageRequest(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """Describe one message as it is sent. A field that is null counts as omitted."""

    event_type: Annotated[str, Meta(min_length=1, max_length=MAX_TEXT)]
    payload: Annotated[
        msgspec.Raw, Meta(description="Any JSON, delivered byte for byte as it was sent.")
    ]
    version: (
        Annotated[int, Meta(ge=1, le=_MAX_INT4, description="The latest if omitted.")] | None
    ) = None
    destinations: (
        Annotated[
            list[str],
            Meta(
                min_length=1,
                max_length=MAX_DESTINATIONS,
                description="Only these, of the destinations that would get it anyway.",
            ),
        ]
        | None
    ) = None
    correlation_id: (
        Annotated[
            str,
            Meta(
                min_length=1,
                max_length=MAX_TEXT,
                description="The message's id if omitted.",
                extra_json_schema={"pattern": "^[!-~]+$"},
            ),
        ]
        | None
    ) = None
    priority: (
        Annotated[int, Meta(ge=0, le=9, description="9 is delivered first; 4 if omitted.")] | None
    ) = None
    ttl_ms: (
        Annotated[int, Meta(ge=1, le=MAX_TTL_MS, description="May shorten the room's expiration.")]
        | None
    ) = None
    headers: (
        Annotated[
            dict[str, str],
            Meta(
                max_length=MAX_HEADERS,
                description="Sent with the webhook; names that Rooms, HTTP or proxies use are"
                " refused. One that the subscription sets itself is left out there.",
            ),
        ]
        | None
    ) = None
    ordering_key: Annotated[str, Meta(min_length=1, max_length=MAX_TEXT)] | None = None
    delay_ms: (
        Annotated[
            int,
            Meta(
                ge=0,
                le=MAX_DELAY_MS,
                description="Due this long after it is accepted; not with deliver_at.",
            ),
        ]
        | None
    ) = None
    deliver_at: (
        Annotated[
            datetime,
            Meta(
                tz=True,
                description="Due at this time, within ten years; at once if it is past."
                " Not with delay_ms.",
            ),
        ]
        | None
    ) = None
    business_key: (
        Annotated[
            str,
            Meta(
                min_length=1,
                max_length=MAX_TEXT,
                description="A key by which messages can be listed.",
            ),
        ]
        | None
    ) = None
    id: (
        Annotated[
            str,
            Meta(
                min_length=1,
                max_length=MAX_TEXT,
                description="An id of your own, unique in the room while the message is kept."
                " Publishing it again with the same content returns the first answer,"
                " with other content a conflict.",
                extra_json_schema={"pattern": "^[!-~]+$"},
            ),
        ]
        | None
    ) = None

    signature: (
        Annotated[
            str,
            Meta(
                min_length=1,
                max_length=MAX_SIGNATURE,
                description="Your signature over identity and payload, a JWS by a key of"
                " `/v1/signing-keys`; it needs `version` and `id`. Every subscriber gets it.",
                extra_json_schema={"pattern": "^[!-~]+$"},
            ),
        ]
        | msgspec.UnsetType
        | None
    ) = msgspec.UNSET

    @property
    def delivered_headers(self) -> dict[str, str] | None:
        """Return the headers that subscribers get: the publisher's, and its signature."""
        if self.signature:
            return {**(self.headers or {}), SIGNATURE_HEADER: self.signature}
        return self.headers

    @property
    def is_plain(self) -> bool:
        """Return whether it is due at once and for all, without business key and caller id."""
        return (
            not self.delay_ms
            and self.deliver_at is None
            and self.destinations is None
            and self.business_key is None
            and self.id is None
        )


class BatchRequest(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """Hold several messages, which are published together or not at all."""

    messages: list[MessageRequest]


class _RawBatch(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    messages: list[msgspec.Raw]


_T = TypeVar("_T")

_FIELDS: Final = {field.name: field for field in msgspec.structs.fields(MessageRequest)}
_message_decoder: Final = msgspec.json.Decoder(MessageRequest)
_batch_decoder: Final = msgspec.json.Decoder(BatchRequest)
_raw_decoder: Final = msgspec.json.Decoder(msgspec.Raw)
_raw_batch_decoder: Final = msgspec.json.Decoder(_RawBatch)
_raw_fields_decoder: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


def decode_message(body: bytes) -> MessageRequest:
    """Return the message in a body. MalformedError: no JSON. InvalidError: names every field.

    TooLargeError: it has too much beside its payload.
    """
    if len(body) > UNCOUNTED_BYTES:
        _decode(body, check_message)
    try:
        request = _decode(body, _message_decoder.decode)
    except msgspec.ValidationError as exc:
        problems = _decode(
            body, lambda raw: list(islice(_field_problems(_complete_json(raw), ""), MAX_PROBLEMS))
        )
        raise InvalidError(*(problems or [_as_field_problem(exc, "body")])) from exc
    if (
        request.correlation_id
        or request.headers
        or request.ordering_key
        or request.signature
        or not request.is_plain
    ) and (problems := list(islice(_value_problems(request, ""), MAX_PROBLEMS))):
        raise InvalidError(*problems)
    return request


def decode_batch(body: bytes, limit: int) -> list[MessageRequest]:
    """Return the messages in a body, 1 to `limit`. Raises as `decode_message`, with indexes.

    BatchTooCostlyError: they name too many destinations.
    """
    is_small = body.count(b",") <= MOST_COMMAS
    messages = _decode_at_once(body, limit) if is_small else _decode_each(body, limit)
    if not 1 <= len(messages) <= limit:
        raise InvalidError(_size_problem(len(messages), limit))
    of_values = (
        problem
        for index, message in enumerate(messages)
        for problem in _value_problems(message, f"messages[{index}].")
    )
    if problems := list(islice(chain(of_values, _repeated_ids(messages)), MAX_PROBLEMS)):
        raise InvalidError(*problems)
    return messages


def _decode_at_once(body: bytes, limit: int) -> list[MessageRequest]:
    try:
        return _decode(body, _batch_decoder.decode).messages
    except msgspec.ValidationError as exc:
        found = _decode(body, lambda raw: _batch_problems(_complete_json(raw), limit))
        raise InvalidError(*(found[:MAX_PROBLEMS] or [_as_field_problem(exc, "body")])) from exc


def _decode_each(body: bytes, limit: int) -> list[MessageRequest]:
    """Decode a batch that may list very much: of it no more becomes objects than it may have."""
    try:
        items = _decode(body, lambda whole: split_batch(whole, limit))
    except msgspec.ValidationError as exc:
        raise InvalidError(_as_field_problem(exc, "body")) from exc
    if items is None:
        raise InvalidError(_size_problem("more", limit))
    try:
        return _decode(body, lambda _: _decode_items(items))
    except msgspec.ValidationError as exc:
        found = _message_problems(items)
        raise InvalidError(*(found[:MAX_PROBLEMS] or [_as_field_problem(exc, "body")])) from exc


def _decode_items(items: Iterable[msgspec.Raw]) -> list[MessageRequest]:
    messages, named = [], 0
    for item in items:
        check_message(item)
        message = _message_decoder.decode(item)
        named += len(message.destinations or ())
        check_destinations(named)
        messages.append(message)
    return messages


def check_idempotency_key(key: str) -> None:
    """Raise InvalidError if the value of an Idempotency-Key header is invalid."""
    if len(key) > MAX_KEY or not _VISIBLE.fullmatch(key):
        raise InvalidError(
            FieldProblem(
                "Idempotency-Key", f"the header takes 1 to {MAX_KEY} visible ASCII characters"
            )
        )


def _decode(body: bytes, decode: Callable[[bytes], _T]) -> _T:
    try:
        if not body.isascii():
            body.decode()  # The decoder does not check values that stay raw.
        return decode(body)
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise MalformedError(invalid_json_message(exc, body)) from exc


def _complete_json(body: bytes) -> bytes:
    """Return the body. Malformed JSON anywhere in it is reported before a field."""
    return bytes(_raw_decoder.decode(body))


def _size_problem(count: int | str, limit: int) -> FieldProblem:
    return FieldProblem("messages", f"a batch takes 1 to {limit} messages; this one has {count}")


def _batch_problems(body: bytes, limit: int) -> list[FieldProblem]:
    try:
        raws = _raw_batch_decoder.decode(body).messages
    except msgspec.ValidationError as exc:
        return [_as_field_problem(exc, "body")]
    if not 1 <= len(raws) <= limit:
        return [_size_problem(len(raws), limit)]
    return _message_problems(raws)


def _message_problems(raws: Iterable[msgspec.Raw]) -> list[FieldProblem]:
    problems: list[FieldProblem] = []
    for index, raw in enumerate(raws):
        problems.extend(islice(_field_problems(bytes(raw), f"messages[{index}]"), MAX_PROBLEMS))
        if len(problems) >= MAX_PROBLEMS:
            break
    return problems


def _field_problems(raw: bytes, at: str) -> Iterator[FieldProblem]:
    """Yield every problem of one message, field by field. The decoder stops at the first."""
    prefix = f"{at}." if at else ""
    try:
        given = _raw_fields_decoder.decode(raw)
    except msgspec.ValidationError as exc:
        yield _as_field_problem(exc, at or "body")
        return
    values: dict[str, Any] = {}
    for name, value in given.items():
        field = _FIELDS.get(name)
        if field is None:
            yield FieldProblem(prefix + name, unknown_field_message(name, _FIELDS))
            continue
        try:
            values[name] = msgspec.json.decode(value, type=field.type)
        except msgspec.ValidationError as exc:
            yield _as_field_problem(exc, prefix + name)
    for name, field in _FIELDS.items():
        if name not in given and field.default is msgspec.NODEFAULT:
            yield FieldProblem(prefix + name, "is missing")
    rest = MessageRequest(event_type="-", payload=msgspec.Raw(b"null"))
    for name, value in values.items():
        setattr(rest, name, value)
    yield from _value_problems(rest, prefix)


def _value_problems(message: MessageRequest, prefix: str) -> Iterator[FieldProblem]:
    """Yield problems that types and bounds do not cover."""
    if message.correlation_id is not None and not _VISIBLE.fullmatch(message.correlation_id):
        yield FieldProblem(
            f"{prefix}correlation_id", "use visible ASCII characters, without spaces"
        )
    if message.ordering_key is not None and "\x00" in message.ordering_key:
        yield FieldProblem(
            f"{prefix}ordering_key", "contains the character U+0000, which cannot be stored"
        )
    if message.business_key is not None and "\x00" in message.business_key:
        yield FieldProblem(
            f"{prefix}business_key", "contains the character U+0000, which cannot be stored"
        )
    if message.id is not None and not _VISIBLE.fullmatch(message.id):
        yield FieldProblem(f"{prefix}id", "use visible ASCII characters, without spaces")
    if message.signature and not _VISIBLE.fullmatch(message.signature):
        yield FieldProblem(f"{prefix}signature", "use a compact JWS: it has no spaces")
    if message.delay_ms is not None and message.deliver_at is not None:
        yield from (
            FieldProblem(prefix + name, "give delay_ms or deliver_at, not both")
            for name in ("delay_ms", "deliver_at")
        )
    if message.headers:
        yield from _header_problems(message.headers, f"{prefix}headers")


def _repeated_ids(messages: list[MessageRequest]) -> Iterator[FieldProblem]:
    seen: set[str] = set()
    for index, message in enumerate(messages):
        if message.id is None:
            continue
        if message.id in seen:
            yield FieldProblem(f"messages[{index}].id", "this id occurs twice")
        seen.add(message.id)


def _header_problems(headers: dict[str, str], at: str) -> Iterator[FieldProblem]:
    seen: set[str] = set()
    for name, value in headers.items():
        field = f"{at}.{name[:MAX_TEXT]}"
        if not _TOKEN.fullmatch(name):
            yield FieldProblem(
                field, f"a header's name is a token of RFC 9110, up to {MAX_NAME} characters"
            )
        elif is_reserved(header_key(name)):
            yield FieldProblem(
                field,
                "publishers cannot set this header, which Rooms, HTTP or a proxy sets: use another"
                " name",
            )
        elif name.lower() in seen:
            yield FieldProblem(field, "this header occurs twice")
        seen.add(name.lower())
        if len(value) > MAX_VALUE or not _HEADER_VALUE.fullmatch(value):
            yield FieldProblem(
                field, f"a header's value is up to {MAX_VALUE} visible ASCII characters"
            )


def _as_field_problem(error: msgspec.ValidationError, at: str) -> FieldProblem:
    match = _ERROR_LOCATION.fullmatch(str(error))
    assert match is not None
    path = match["path"] or ""
    if path.startswith("[...]") or path == "key":
        path = ""
    message = validation_message(match["message"])
    if message.startswith("Object contains unknown field "):
        path, message = f"{path}.{message.rpartition(' ')[2]}", "there is no such field"
    elif message.startswith("Object missing required field "):
        path, message = f"{path}.{message.rpartition(' ')[2]}", "is missing"
    return FieldProblem((f"{at}{path}" if at != "body" else path.removeprefix(".")) or at, message)
