"""JSON bodies: decoded strictly by msgspec, every problem named by its field."""

import re
from collections.abc import Generator, Iterator
from typing import Any, Final, Generic, TypeVar

import msgspec
from litestar._openapi.schema_generation import SchemaCreator
from litestar.dto import AbstractDTO
from litestar.dto.data_structures import DTOFieldDefinition
from litestar.openapi.spec import Reference, Schema
from litestar.typing import FieldDefinition

from rooms.complaints import complaint, no_json, unknown
from rooms.domain.names import check_name
from rooms.errors import FieldProblem, InvalidError, MalformedError
from rooms.rest.problems import field_path

T = TypeVar("T")

_PLACE: Final = re.compile(r"(?P<message>.*?)(?: - at `(?P<path>.*)`)?", re.DOTALL)
_FIELD: Final = re.compile(r"Object (?P<what>contains unknown|missing required) field `(?P<name>.*)`", re.DOTALL)
_GOT_FLOAT: Final = "got `float`"
_MOST_WHOLE: Final = 2.0**63
_NUL: Final = b"\\u0000"
_REFS: Final = "#/$defs/"


def decode(body: bytes, kind: Any) -> Any:
    """The body as `kind` (a msgspec type). MalformedError where it is no JSON, InvalidError where it does not fit."""
    try:
        if _NUL in body:
            _refuse_nul(msgspec.json.decode(body))
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.ValidationError as exc:
            if _GOT_FLOAT not in str(exc):
                raise
        return _decode_whole(body, kind)
    except msgspec.ValidationError as exc:
        raise InvalidError(field_problem(exc, kind)) from exc
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise MalformedError(no_json(exc)) from exc


def _decode_whole(body: bytes, kind: Any) -> Any:
    """Decode with 5.0 counting as 5: JSON Schema, by which the document describes bodies, knows no difference.

    Errors are msgspec's and RecursionError: a decoder stops at the first misfit, and what is behind it may be no JSON.
    """
    return msgspec.convert(_whole(msgspec.json.decode(body)), kind)


def _whole(value: Any) -> Any:
    match value:
        case float() if value.is_integer() and abs(value) < _MOST_WHOLE:
            return int(value)
        case list():
            return [_whole(item) for item in value]
        case dict():
            return {name: _whole(item) for name, item in value.items()}
        case _:
            return value


def field_problem(error: msgspec.ValidationError, kind: Any) -> FieldProblem:
    """What msgspec found wrong with what was to be a `kind`, in the house's words."""
    place = _PLACE.fullmatch(str(error))
    assert place is not None
    path = field_path(place["path"] or "$")
    field = _FIELD.fullmatch(place["message"])
    if field is None:
        return FieldProblem(path, complaint(place["message"], kind, path))
    name = field["name"] if path == "body" else f"{path}.{field['name']}"
    if field["what"] == "missing required":
        return FieldProblem(name, "is missing")
    known = getattr(kind, "__struct_fields__", ()) if path == "body" else ()
    return FieldProblem(name, unknown(name, known))


def checked_name(name: str, field: str = "name") -> str:
    """The name; InvalidError where it has a character that names may not have."""
    try:
        return check_name(name)
    except ValueError as exc:
        raise InvalidError(FieldProblem(field, str(exc))) from exc


def _refuse_nul(value: object) -> None:
    for path in _nuls(value, ""):
        raise InvalidError(FieldProblem(path or "body", "contains the character U+0000, which cannot be kept"))


def _nuls(value: object, path: str) -> Iterator[str]:
    match value:
        case str() if "\x00" in value:
            yield path
        case list():
            for index, item in enumerate(value):
                yield from _nuls(item, f"{path}[{index}]")
        case dict():
            for name, item in value.items():
                inner = f"{path}.{name}".removeprefix(".").replace("\x00", "\\u0000")
                if "\x00" in name:
                    yield inner
                yield from _nuls(item, inner)


class Body(AbstractDTO[T], Generic[T]):
    """How a handler declares its body: `dto=Body[RoomNew]` beside the argument `data: RoomNew`.

    Litestar's own way would take numbers from strings, and documents less than msgspec checks.
    """

    def decode_bytes(self, value: bytes) -> Any:
        """The body, checked."""
        return decode(value, self.model_type)

    def decode_builtins(self, value: dict[str, Any]) -> Any:  # noqa: ARG002 - the base class's signature
        """Forms are no JSON."""
        raise MalformedError("the body must be JSON")

    @classmethod
    def create_for_field_definition(
        cls, field_definition: FieldDefinition, handler_id: str, backend_cls: Any = None
    ) -> None:
        """Nothing to prepare."""

    @classmethod
    def create_openapi_schema(
        cls,
        field_definition: FieldDefinition,
        handler_id: str,  # noqa: ARG003 - the base class's signature
        schema_creator: SchemaCreator,  # noqa: ARG003 - the base class's signature
    ) -> Reference | Schema:
        """What msgspec will check, to the letter."""
        return ExactSchema(schema_of(field_definition.annotation))

    @classmethod
    def generate_field_definitions(
        cls,
        model_type: type[Any],  # noqa: ARG003 - the base class's signature
    ) -> Generator[DTOFieldDefinition, None, None]:
        """None: the type itself is what is decoded."""
        yield from ()

    @classmethod
    def detect_nested_field(cls, field_definition: FieldDefinition) -> bool:  # noqa: ARG003 - the base class's signature
        """None is."""
        return False


class ExactSchema(Schema):
    """A JSON Schema that goes into the document as it is."""

    def __init__(self, exact: dict[str, Any]) -> None:
        super().__init__()
        self._exact = exact

    def to_schema(self) -> dict[str, Any]:
        """The schema as given."""
        return self._exact


def schema_of(kind: Any) -> dict[str, Any]:
    """The JSON Schema of a msgspec type, definitions put in where they are used."""
    schema = msgspec.json.schema(kind)
    definitions = schema.pop("$defs", {})

    def put_in(value: Any) -> Any:
        match value:
            case {"$ref": str(name)}:
                return put_in(definitions[name.removeprefix(_REFS)])
            case dict():
                return {key: put_in(item) for key, item in value.items()}
            case list():
                return [put_in(item) for item in value]
            case _:
                return value

    inlined: dict[str, Any] = put_in(schema)
    return inlined
