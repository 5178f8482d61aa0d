"""Translate validation errors of msgspec to messages that say what a value must be."""

import re
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from rooms.domain.names import NAME_PATTERN, NAME_RULE
from rooms.domain.similar_names import suggestion

TIME_RULE: Final = "must be a time with its offset, like 2026-01-31T12:00:00Z"
_KINDS: Final = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_RECEIVED_KINDS: Final = {**_KINDS, "float": "a fraction"}
_UNITS: Final = {"str": "character(s)", "array": "item(s)", "object": "field(s)"}
_BOUNDS: Final = {">=": "at least", "<=": "at most", ">": "more than", "<": "less than"}
_EXPECTED: Final = re.compile(
    r"Expected (?P<kinds>[a-z]+(?: \| [a-z]+)*)"
    r"(?:(?P<length> of length)? (?P<bound>[<>]=?) (?P<than>\S+?))?(?:, got (?P<got>[a-z]+))?"
)
_PATH_SEGMENT: Final = re.compile(r"\.?(?P<name>[^.\[\]]+)|\[(?P<index>[0-9.]+)\]")
_DATETIME_ERRORS: Final = ("Invalid RFC3339 encoded datetime", "Expected datetime")
_SURROGATE_ERROR: Final = "surrogate pair"
_TRUNCATED: Final = "Input data was truncated"
_HALF_PAIR: Final = re.compile(
    rb"(?<!\\)(?:\\\\)*\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\)(?<!\\u[dD][89abAB][0-9a-fA-F]{2})(?:\\\\)*\\u[dD][c-fC-F]"
)
_ENUM_ERROR: Final = "Invalid enum value"
_DEFS_PREFIX: Final = "#/$defs/"


def validation_message(message: str, kind: Any = None, path: str = "") -> str:
    """Return the message for a msgspec.ValidationError without its path.

    With the decoded type `kind` and the `path` of the value (`scopes[0]`), it lists the values of
    an enumeration.
    """
    text = message.replace("`", "")
    if text.startswith(_DATETIME_ERRORS):
        return TIME_RULE
    if text.startswith(_ENUM_ERROR):
        choices = _enum_values(kind, path)
        return (
            f"must be one of {', '.join(map(str, choices))}"
            if choices
            else f"is not one of the valid values:{text[len(_ENUM_ERROR) :]}"
        )
    if repr(NAME_PATTERN) in text:
        return NAME_RULE
    found = _EXPECTED.fullmatch(text)
    if found is None or not _KINDS.keys() >= set(found["kinds"].split(" | ")):
        return text
    kinds = [name for name in found["kinds"].split(" | ") if name != "null"] or ["null"]
    must = f"must be {' or '.join(_KINDS[name] for name in kinds)}"
    if found["length"]:
        must = f"must have {_BOUNDS[found['bound']]} {found['than']} {_UNITS[kinds[0]]}"
    elif found["bound"]:
        must = f"{must}, {_BOUNDS[found['bound']]} {found['than']}"
    return (
        f"{must}, not {_RECEIVED_KINDS.get(found['got'], found['got'])}" if found["got"] else must
    )


def unknown_field_message(name: str, known: Iterable[str]) -> str:
    """Return the message for an unknown field, with the nearest of the known ones."""
    return f"there is no such field{suggestion(name, list(known))}"


def invalid_json_message(error: Exception, body: bytes = b"") -> str:
    """Return the message for a body that is not JSON."""
    text = str(error)
    # msgspec says of half a pair near the end of a body that the body was truncated.
    if _SURROGATE_ERROR in text or (text == _TRUNCATED and _HALF_PAIR.search(body)):
        place = text[text.rfind(" (byte ") :] if " (byte " in text else ""
        return (
            f"the body is not valid Unicode{place}: an escape from \\ud800 to \\udfff is half of a "
            "character, and needs its other half"
        )
    match error:
        case UnicodeDecodeError():
            return f"the body is not UTF-8 (byte {error.start}); send JSON, and not compressed"
        case RecursionError():
            return "the body is nested too deeply"
        case _:
            return text


def _enum_values(kind: Any, path: str) -> list[Any]:
    if kind is None:
        return []
    schema = msgspec.json.schema(kind)
    definitions = schema.pop("$defs", {})
    at = [schema]
    for step in _PATH_SEGMENT.finditer(path):
        at = [
            inner
            for one in at
            for inner in _child_schemas(_alternatives(one, definitions), step["name"])
        ]
    return [
        value
        for one in at
        for found in _alternatives(one, definitions)
        for value in found.get("enum", ())
    ]


def _alternatives(schema: dict[str, Any], definitions: dict[str, Any]) -> list[dict[str, Any]]:
    while "$ref" in schema:
        schema = definitions[schema["$ref"].removeprefix(_DEFS_PREFIX)]
    return (
        [inner for one in schema["anyOf"] for inner in _alternatives(one, definitions)]
        if "anyOf" in schema
        else [schema]
    )


def _child_schemas(schemas: list[dict[str, Any]], name: str | None) -> list[dict[str, Any]]:
    inner = [
        schema.get("items") if name is None else schema.get("properties", {}).get(name)
        for schema in schemas
    ]
    return [found for found in inner if isinstance(found, dict)]
