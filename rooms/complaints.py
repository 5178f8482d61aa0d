"""What msgspec finds wrong with a request, in the house's words: what the value must be, never only that it is not so."""

import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, Final

import msgspec

from rooms.domain.names import NAME_PATTERN, NAME_RULE

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
_GOT: Final = {**_KINDS, "float": "a fraction"}
_UNITS: Final = {"str": "character(s)", "array": "item(s)", "object": "field(s)"}
_BOUNDS: Final = {">=": "at least", "<=": "at most", ">": "more than", "<": "less than"}
_EXPECTED: Final = re.compile(
    r"Expected (?P<kinds>[a-z]+(?: \| [a-z]+)*)(?:(?P<length> of length)? (?P<bound>[<>]=?) (?P<than>\S+?))?(?:, got (?P<got>[a-z]+))?"
)
_STEP: Final = re.compile(r"\.?(?P<name>[^.\[\]]+)|\[(?P<index>[0-9.]+)\]")
_TIMES: Final = ("Invalid RFC3339 encoded datetime", "Expected datetime")
_CHOICE: Final = "Invalid enum value"
_REFS: Final = "#/$defs/"
_LONGEST_NAME: Final = 64


def complaint(message: str, kind: Any = None, path: str = "") -> str:
    """The message of a msgspec.ValidationError without its place. `kind`, `path`: what was decoded, and where in it the
    value stands (`scopes[0]`), so that a choice can say what there is.
    """
    told = message.replace("`", "")
    if told.startswith(_TIMES):
        return TIME_RULE
    if told.startswith(_CHOICE):
        choices = _choices(kind, path)
        return (
            f"must be one of {', '.join(map(str, choices))}"
            if choices
            else f"is none of the values there are:{told[len(_CHOICE) :]}"
        )
    if repr(NAME_PATTERN) in told:
        return NAME_RULE
    found = _EXPECTED.fullmatch(told)
    if found is None or not _KINDS.keys() >= set(found["kinds"].split(" | ")):
        return told
    kinds = [name for name in found["kinds"].split(" | ") if name != "null"] or ["null"]
    must = f"must be {' or '.join(_KINDS[name] for name in kinds)}"
    if found["length"]:
        must = f"must have {_BOUNDS[found['bound']]} {found['than']} {_UNITS[kinds[0]]}"
    elif found["bound"]:
        must = f"{must}, {_BOUNDS[found['bound']]} {found['than']}"
    return f"{must}, not {_GOT.get(found['got'], found['got'])}" if found["got"] else must


def unknown(name: str, known: Iterable[str]) -> str:
    """What to say of a field that nobody reads, where there are these."""
    near = get_close_matches(name, list(known), n=1) if len(name) <= _LONGEST_NAME else []
    return f"there is no such field; is {near[0]} meant?" if near else "there is no such field"


def no_json(error: Exception) -> str:
    """Why a body is no JSON at all."""
    match error:
        case UnicodeDecodeError():
            return f"the body is not UTF-8 (byte {error.start}); send JSON, and not compressed"
        case RecursionError():
            return "the body is nested too deeply"
        case _:
            return str(error)


def _choices(kind: Any, path: str) -> list[Any]:
    if kind is None:
        return []
    schema = msgspec.json.schema(kind)
    definitions = schema.pop("$defs", {})
    at = [schema]
    for step in _STEP.finditer(path):
        at = [inner for one in at for inner in _inside(_alternatives(one, definitions), step["name"])]
    return [value for one in at for found in _alternatives(one, definitions) for value in found.get("enum", ())]


def _alternatives(schema: dict[str, Any], definitions: dict[str, Any]) -> list[dict[str, Any]]:
    while "$ref" in schema:
        schema = definitions[schema["$ref"].removeprefix(_REFS)]
    return (
        [inner for one in schema["anyOf"] for inner in _alternatives(one, definitions)]
        if "anyOf" in schema
        else [schema]
    )


def _inside(schemas: list[dict[str, Any]], name: str | None) -> list[dict[str, Any]]:
    inner = [schema.get("items") if name is None else schema.get("properties", {}).get(name) for schema in schemas]
    return [found for found in inner if isinstance(found, dict)]
