"""Bounds of JSON Schemas: how much a schema becomes when its references are unfolded, and what validating may cost.

A schema is a graph: `$ref` lets a kilobyte of text stand for millions of sub-schemas. `measure` counts them without unfolding
them. A schema is *plain* where the cost of validating is bounded by its weight times the bytes of the payload. What is not
plain (recursion, dynamic references, `uniqueItems`, unevaluated keywords, unbounded patterns …) runs in the sandbox only.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote

from rooms.publishing.patterns import pattern_weight

MAX_DEPTH: Final = 100
"""Nested objects and lists of a schema's text."""
MAX_UNFOLDED: Final = 100_000
"""Sub-schemas of a schema whose references are unfolded; a recursive reference counts once."""
MAX_PLAIN_PATTERN: Final = 500
"""Weight of a pattern that is matched inline."""

_ONE: Final = frozenset({"not", "if", "then", "else"})
"""Keywords whose value is one schema for the same value."""
_LISTS: Final = frozenset({"allOf", "anyOf", "oneOf"})
_CHILD: Final = frozenset({"items", "additionalItems", "additionalProperties", "contains", "propertyNames"})
"""Keywords whose value is a schema (or, for items, a list of them) for values inside."""
_CHILD_LISTS: Final = frozenset({"prefixItems"})
_CHILD_MAPS: Final = frozenset({"properties", "patternProperties"})
_CLOSED: Final = frozenset({"$defs", "definitions"})
"""Keywords whose schemas are evaluated through references only."""
_SANDBOXED: Final = frozenset(
    {
        "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor", "$anchor", "$vocabulary", "unevaluatedItems",
        "unevaluatedProperties", "uniqueItems", "dependentSchemas", "dependentRequired", "dependencies", "contentSchema",
        "contentMediaType", "contentEncoding",
    }
)  # fmt: skip
_FLAT: Final = frozenset(
    {
        "type", "enum", "const", "required", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
        "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains",
        "title", "description", "$comment", "default", "examples", "deprecated", "readOnly", "writeOnly", "$schema",
    }
)  # fmt: skip
_FORMATS: Final = ("date-time", "date", "time", "uuid", "email", "ipv4", "ipv6", "uri", "hostname")
"""Formats that are checked in one pass over the text."""
_EVERY_SCHEMA: Final = ("unevaluatedItems", "unevaluatedProperties", "contentSchema")
_MAPS_SANDBOXED: Final = ("dependentSchemas", "dependencies")


class SchemaBoundError(ValueError):
    """The schema exceeds a bound."""


@dataclass(frozen=True, slots=True)
class Measure:
    """What is known of a schema before it is compiled."""

    unfolded: int
    plain: bool
    weight: int
    """Upper bound of the schema checks that one value of a payload goes through; of use only where the schema is plain."""


def measure(schema: object) -> Measure:
    """Measure a decoded schema. SchemaBoundError: it is nested too deeply, or unfolds to too much."""
    walk = _Walk(schema, plain=_is_one_resource(schema))
    unfolded, weight = walk.visit(schema)
    if unfolded > MAX_UNFOLDED:
        raise SchemaBoundError(
            f"unfolds to more than {MAX_UNFOLDED} sub-schemas, as its references multiply; share less, or split the type"
        )
    return Measure(unfolded, walk.plain, weight)


def _is_one_resource(schema: object) -> bool:
    """Return whether no part of the schema has an identity of its own. SchemaBoundError: it is nested too deeply."""
    single = True
    level = [schema] if isinstance(schema, dict | list) else []
    for depth in range(MAX_DEPTH + 1):
        if not level:
            return single
        single = single and not (depth and any(isinstance(value, dict) and "$id" in value for value in level))
        inside = (value.values() if isinstance(value, dict) else value for value in level)
        level = [inner for values in inside for inner in values if isinstance(inner, dict | list)]
    raise SchemaBoundError(f"is nested more than {MAX_DEPTH} levels deep")


class _Walk:
    """Visits each schema object once: what it found stands by the object's identity."""

    def __init__(self, root: object, *, plain: bool) -> None:
        self._root = root
        self._found: dict[int, tuple[int, int]] = {}
        self._open: set[int] = set()
        self.plain = plain

    def visit(self, schema: object) -> tuple[int, int]:
        """Return the unfolded size and the weight."""
        if not isinstance(schema, dict):
            self.plain = self.plain and isinstance(schema, bool)
            return 1, 1
        known = self._found.get(id(schema))
        if known is not None:
            return known
        if id(schema) in self._open:
            # Recursion: how often it is followed depends on the payload.
            self.plain = False
            return 1, 1
        if len(self._open) > MAX_DEPTH:
            raise SchemaBoundError(f"is nested more than {MAX_DEPTH} levels deep, its references unfolded")
        self._open.add(id(schema))
        found = self._found[id(schema)] = self._visit(schema)
        self._open.discard(id(schema))
        return found

    def _visit(self, schema: Mapping[str, Any]) -> tuple[int, int]:
        size, here = 1, 1
        named, others = 0, 0
        for keyword, value in schema.items():
            here += _breadth(keyword, value) if keyword not in _CLOSED else 0
            for inner in self._inside(keyword, value):
                inner_size, inner_weight = self.visit(inner)
                size = min(size + inner_size, MAX_UNFOLDED + 1)
                if keyword == "properties":
                    named = max(named, inner_weight)
                elif keyword in _CHILD or keyword in _CHILD_LISTS or keyword in _CHILD_MAPS:
                    others += inner_weight
                else:
                    here += inner_weight
            if keyword in {"pattern", "patternProperties"}:
                here += self._patterns([value] if isinstance(value, str) else value if isinstance(value, dict) else ())
        return size, min(here + named + others, MAX_UNFOLDED * 1000)

    def _inside(self, keyword: str, value: Any) -> Iterable[object]:
        """Return the schemas that evaluating this keyword evaluates."""
        if keyword == "$ref":
            return (self._target(value),)
        if keyword in _ONE or keyword in _CHILD:
            return value if isinstance(value, list) else (value,)
        if keyword in _LISTS or keyword in _CHILD_LISTS:
            return value if isinstance(value, list) else ()
        if keyword in _CHILD_MAPS:
            return value.values() if isinstance(value, dict) else ()
        self.plain = self.plain and self._is_plain(keyword, value)
        if keyword in _EVERY_SCHEMA:
            return (value,)
        if keyword in _MAPS_SANDBOXED and isinstance(value, dict):
            return [inner for inner in value.values() if isinstance(inner, dict | bool)]
        return ()

    def _is_plain(self, keyword: str, value: object) -> bool:
        """Return whether a keyword without schemas has a cost that is known."""
        if keyword in _SANDBOXED:
            return keyword == "uniqueItems" and value is False
        if keyword == "$id":
            # References are resolved against it; at the root it changes nothing for those that begin with #.
            return isinstance(self._root, dict) and self._root.get("$id") is value
        if keyword == "format":
            return isinstance(value, str) and value in _FORMATS
        # An unknown keyword is no schema, but may hold one that a reference points to.
        known = keyword in _FLAT or keyword in _CLOSED or keyword == "pattern"
        return known or not isinstance(value, dict | list)

    def _target(self, reference: object) -> object:
        """Return what a reference points to; the schema is not plain where this is not known."""
        if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
            # Rare, and read in more than one way: the sandbox is for what the library makes of it.
            self.plain = self.plain and "%" not in reference
            found: object = self._root
            for step in unquote(reference[1:]).split("/")[1:]:
                name = step.replace("~1", "/").replace("~0", "~")
                match found:
                    case dict() if name in found:
                        found = found[name]
                    case list() if name.isascii() and name.isdecimal() and len(name) < 7 and int(name) < len(found):  # noqa: PLR2004
                        found = found[int(name)]
                    case _:
                        break
            else:
                return found
        # Elsewhere, or by an anchor: every schema of the document may be meant.
        self.plain = False
        return True

    def _patterns(self, patterns: Iterable[str]) -> int:
        total = 0
        for pattern in patterns:
            weight = MAX_PLAIN_PATTERN + 1 if _fancy(pattern) else pattern_weight(pattern)
            if weight > MAX_PLAIN_PATTERN:
                self.plain = False
            else:
                total += weight
        return total


_FANCY: Final = re.compile(r"\\[1-9kKG]|\(\?[=!<>(]|[*+?}]\+")


def _fancy(pattern: str) -> bool:
    """Return whether a pattern may need backtracking."""
    return _FANCY.search(pattern) is not None


def _breadth(keyword: str, value: object) -> int:
    """Count what one check of a keyword may look at, in units of one comparison."""
    match keyword, value:
        case "enum", list():
            return sum(_COMPOUND if isinstance(one, dict | list) else 1 for one in value)
        case "const", dict() | list():
            return _COMPOUND
        case "multipleOf", _:
            return _DIVISION
        case "pattern", _:
            return 0
        case _:
            return 1


_COMPOUND: Final = 5
_DIVISION: Final = 8
