"""Decode JSON bodies strictly with msgspec, and name every problem by its field."""

import re
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import cache
from itertools import islice
from types import NoneType
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, get_args

import msgspec
import msgspec.structs
from litestar.dto import AbstractDTO
from litestar.dto.data_structures import DTOFieldDefinition
from litestar.openapi.spec import Reference, Schema
from litestar.typing import FieldDefinition

from rooms.api.errors import to_field_path
from rooms.domain.names import check_name
from rooms.errors import FieldProblem, InvalidError, MalformedError
from rooms.publishing.batch_bounds import bound_batch
from rooms.publishing.number_bounds import decode_json
from rooms.validation_messages import (
    invalid_json_message,
    unknown_field_message,
    validation_message,
)

if TYPE_CHECKING:
    # Only for the signature of `AbstractDTO.create_openapi_schema`: nothing private of Litestar is
    # used at run time.
    from litestar._openapi.schema_generation import SchemaCreator

T = TypeVar("T")

_ERROR_AND_PATH: Final = re.compile(r"(?P<message>.*?)(?: - at `(?P<path>.*)`)?", re.DOTALL)
_FIELD_ERROR: Final = re.compile(
    r"Object (?P<what>contains unknown|missing required) field `(?P<name>.*)`", re.DOTALL
)
_GOT_FLOAT: Final = "got `float`"
_MAX_WHOLE_FLOAT: Final = 2.0**63
_MAX_FLOATS_BYTES: Final = 1024 * 1024
"""A larger body must have whole numbers without a point where it must have whole numbers."""
_MAX_NAME: Final = 128
_MAX_ERROR: Final = 1000
_MAX_EXPLAINED_BYTES: Final = 64 * 1024
"""Of a larger body only the first wrong field is named: the others would take milliseconds."""
_MAX_PROBLEMS: Final = 50
_BODY: Final = "body"
"""The name of the whole body in a problem."""
_ESCAPED_NUL: Final = b"\\u0000"
_DEFS_PREFIX: Final = "#/$defs/"


def decode(body: bytes, kind: Any) -> Any:
    """Return the body as `kind` (a msgspec type).

    MalformedError: not JSON; InvalidError: it does not fit.
    """
    try:
        if _ESCAPED_NUL in body:
            _reject_nul(decode_json(body))
        return _decode_value(body, kind)
    except msgspec.ValidationError as exc:
        raise InvalidError(*_field_problems(exc, body, kind, _decode_value)) from exc
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise MalformedError(invalid_json_message(exc, body)) from exc


def decode_kept(body: bytes, kind: Any) -> Any:
    """Return the body as `kind`, whose raw fields keep their bytes. Errors as for `decode`."""
    try:
        return decode_json(body, kind)
    except msgspec.ValidationError as exc:
        raise InvalidError(*_field_problems(exc, body, kind, decode_json)) from exc
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise MalformedError(invalid_json_message(exc, body)) from exc


def bounded_batch(body: bytes, limit: int) -> bytes:
    """Return the batch of `messages` in a body, to be decoded: it has not many more than `limit`.

    Errors as for `decode`; InvalidError also: it has too many.
    """
    try:
        bounded = bound_batch(body, limit)
    except msgspec.ValidationError as exc:
        raise InvalidError(to_field_problem(exc, Any)) from exc
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise MalformedError(invalid_json_message(exc, body)) from exc
    if bounded is None:
        raise InvalidError(
            FieldProblem("messages", f"a batch takes 1 to {limit} messages; this one has more")
        )
    return bounded


def _decode_value(text: bytes | msgspec.Raw, kind: Any) -> Any:
    """Return a body, or one of its values. Raises what `decode_json` raises."""
    try:
        return decode_json(text, kind)
    except msgspec.ValidationError as exc:
        if _GOT_FLOAT not in str(exc) or len(text) > _MAX_FLOATS_BYTES:
            raise
    return _decode_whole_floats(text, kind)


def _decode_whole_floats(text: bytes | msgspec.Raw, kind: Any) -> Any:
    """Decode with 5.0 counting as 5, because JSON Schema does not distinguish the two.

    Raises what msgspec raises, and RecursionError: a decoder stops at the first misfit, and what
    follows it may not be JSON.
    """
    return msgspec.convert(_floats_to_ints(decode_json(text)), kind)


def _floats_to_ints(value: Any) -> Any:
    match value:
        case float() if value.is_integer() and abs(value) < _MAX_WHOLE_FLOAT:
            return int(value)
        case list():
            return [_floats_to_ints(item) for item in value]
        case dict():
            return {name: _floats_to_ints(item) for name, item in value.items()}
        case _:
            return value


def _field_problems(
    error: msgspec.ValidationError,
    body: bytes,
    kind: Any,
    decode_value: Callable[[msgspec.Raw, Any], Any],
) -> list[FieldProblem]:
    """Return the problems of all fields of a body, for the `error` at the first one.

    Of a field that has fields or items itself, its first problem is named. `decode_value`: decodes
    one field as the body was decoded.
    """
    first = to_field_problem(error, kind)
    struct = _struct_of(kind)
    if struct is None or len(body) > _MAX_EXPLAINED_BYTES:
        return [first]
    try:
        given = decode_json(body, dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return [first]
    found = list(islice(_each_problem(given, struct, decode_value), _MAX_PROBLEMS))
    # It is not among them if a field occurs twice, or if it is about several fields.
    return found if first in found else [first, *found]


def _each_problem(
    given: Mapping[str, msgspec.Raw],
    struct: type[msgspec.Struct],
    decode_value: Callable[[msgspec.Raw, Any], Any],
) -> Iterator[FieldProblem]:
    """Yield the problem of each field in the order of msgspec: as they were sent, then missing."""
    fields = _fields_of(struct)
    for name, value in given.items():
        field = fields.get(name)
        if field is None:
            if struct.__struct_config__.forbid_unknown_fields and len(name) <= _MAX_NAME:
                yield FieldProblem(name, unknown_field_message(name, fields))
            continue
        try:
            decode_value(value, field.type)
        except msgspec.ValidationError as exc:
            yield to_field_problem(exc, struct, name)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue  # no value of JSON: the error at the first wrong field is the answer
    for name, field in fields.items():
        if field.required and name not in given:
            yield FieldProblem(name, "is missing")


def _struct_of(kind: Any) -> type[msgspec.Struct] | None:
    """Return the struct of a body, which may also be null; None: it has no such fields."""
    kinds = [one for one in get_args(kind) or (kind,) if one is not NoneType]
    if len(kinds) != 1 or not isinstance(kinds[0], type(msgspec.Struct)):
        return None
    struct: type[msgspec.Struct] = kinds[0]
    config = struct.__struct_config__
    return None if config.array_like or config.tag_field is not None else struct


@cache
def _fields_of(struct: type[msgspec.Struct]) -> Mapping[str, msgspec.structs.FieldInfo]:
    return {field.encode_name: field for field in msgspec.structs.fields(struct)}


def to_field_problem(error: msgspec.ValidationError, kind: Any, at: str = "") -> FieldProblem:
    """Return msgspec's error about a value of `kind` as a field problem in plain words.

    `at`: the error is about this field of the value.
    """
    text = str(error)
    if len(text) > _MAX_ERROR:  # it repeats a name of the body, which may be as long as that
        text = f"{text[: _MAX_ERROR // 2]}…{text[-_MAX_ERROR // 2 :]}"
    match = _ERROR_AND_PATH.fullmatch(text)
    assert match is not None
    path = to_field_path(match["path"] or "$")
    if at:
        inner = "" if path == _BODY else path
        path = f"{at}.{inner}" if inner and not inner.startswith("[") else f"{at}{inner}"
    field = _FIELD_ERROR.fullmatch(match["message"])
    if field is None:
        return FieldProblem(path, validation_message(match["message"], kind, path))
    name = field["name"] if path == _BODY else f"{path}.{field['name']}"
    if field["what"] == "missing required":
        return FieldProblem(name, "is missing")
    known = getattr(kind, "__struct_encode_fields__", ()) if path == _BODY else ()
    return FieldProblem(name, unknown_field_message(name, known))


def validate_name(name: str, field: str = "name") -> str:
    """Return the name. InvalidError: it has a character that names may not have."""
    try:
        return check_name(name)
    except ValueError as exc:
        raise InvalidError(FieldProblem(field, str(exc))) from exc


def _reject_nul(value: object) -> None:
    found = _find_nul(value)
    if found is not None:
        path = _path_text(found).replace("\x00", "\\u0000").removeprefix(".")
        raise InvalidError(
            FieldProblem(path or "body", "contains the character U+0000, which cannot be stored")
        )


_Place = tuple["_Place | None", str]
"""Where a value is: the place around it, and its own part of the path.

Paths are only made of the one that is shown: those of all values would be larger than the body.
"""
_ROOT: Final[_Place] = (None, "")


def _find_nul(value: object) -> _Place | None:
    """Return the place of a text or name with the character U+0000; None: there is none."""
    waiting: list[tuple[object, _Place]] = [(value, _ROOT)]
    while waiting:
        one, place = waiting.pop()
        match one:
            case str() if "\x00" in one:
                return place
            case list():
                waiting += ((item, (place, f"[{index}]")) for index, item in enumerate(one))
            case dict():
                for name, item in one.items():
                    if "\x00" in name:
                        return place, f".{name}"
                    waiting.append((item, (place, f".{name[:_MAX_NAME]}")))
    return None


def _path_text(place: _Place) -> str:
    parts: list[str] = []
    around: _Place | None = place
    while around is not None:
        around, part = around
        parts.append(part[:_MAX_NAME])
    return "".join(reversed(parts))


class Body(AbstractDTO[T], Generic[T]):
    """Declare a handler's body: `dto=Body[CreateRoom]` beside the argument `data: CreateRoom`.

    Litestar's own decoding would convert strings to numbers, and documents less than msgspec
    checks.
    """

    def decode_bytes(self, value: bytes) -> Any:
        """Return the checked body."""
        return decode(value, self.model_type)

    def decode_builtins(self, value: dict[str, Any]) -> Any:  # noqa: ARG002 - the base class's signature
        """Refuse forms, which are not JSON."""
        raise MalformedError("the body must be JSON")

    @classmethod
    def create_for_field_definition(
        cls, field_definition: FieldDefinition, handler_id: str, backend_cls: Any = None
    ) -> None:
        """Prepare nothing."""

    @classmethod
    def create_openapi_schema(
        cls,
        field_definition: FieldDefinition,
        handler_id: str,  # noqa: ARG003 - the base class's signature
        schema_creator: "SchemaCreator",  # noqa: ARG003 - the base class's signature
    ) -> Reference | Schema:
        """Return the exact schema that msgspec checks."""
        return RawSchema(inlined_schema(field_definition.annotation))

    @classmethod
    def generate_field_definitions(
        cls,
        model_type: type[Any],  # noqa: ARG003 - the base class's signature
    ) -> Generator[DTOFieldDefinition, None, None]:
        """Yield nothing: the type itself is decoded."""
        yield from ()

    @classmethod
    def detect_nested_field(cls, field_definition: FieldDefinition) -> bool:  # noqa: ARG003 - the base class's signature
        """Return False: no field is nested."""
        return False


class RawSchema(Schema):
    """Hold a JSON Schema that goes into the document unchanged."""

    def __init__(self, raw: dict[str, Any]) -> None:
        super().__init__()
        self._raw = raw

    def to_schema(self) -> dict[str, Any]:
        """Return the schema as given."""
        return self._raw


def inlined_schema(kind: Any) -> dict[str, Any]:
    """Return the JSON Schema of a msgspec type with all definitions inlined."""
    schema = msgspec.json.schema(kind)
    definitions = schema.pop("$defs", {})

    def put_in(value: Any) -> Any:
        match value:
            case {"$ref": str(name)}:
                return put_in(definitions[name.removeprefix(_DEFS_PREFIX)])
            case dict():
                return {key: put_in(item) for key, item in value.items()}
            case list():
                return [put_in(item) for item in value]
            case _:
                return value

    inlined: dict[str, Any] = put_in(schema)
    return inlined
