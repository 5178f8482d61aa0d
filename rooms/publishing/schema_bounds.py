"""Bound JSON Schemas: their size with references unfolded, and the cost of validating.

A schema is a graph: with `$ref`, a kilobyte of text can mean millions of sub-schemas.
`measure_schema` counts them without unfolding them.

A schema is *plain* if its weight times the bytes of the payload bounds the cost of validating.
Others run in the sandbox only: those with recursion, dynamic references, `uniqueItems`, unevaluated
keywords, unbounded patterns and so on.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote

from rooms.publishing.regex_bounds import pattern_weight

MAX_DEPTH: Final = 100
"""Most levels of nested objects and lists in a schema."""
MAX_UNFOLDED: Final = 100_000
"""Most sub-schemas with references unfolded; a recursive reference counts once."""
MAX_PLAIN_PATTERN: Final = 500
"""Largest weight of a pattern that is matched inline."""
_MAX_INDEX_DIGITS: Final = 6
_COMPOUND_WEIGHT: Final = 5
_DIVISION_WEIGHT: Final = 8
_BACKTRACKING: Final = re.compile(r"\\[1-9kKG]|\(\?[=!<>(]|[*+?}]\+")

_SCHEMA_KEYWORDS: Final = frozenset({"not", "if", "then", "else"})
"""Keywords whose value is one schema for the same value."""
_SCHEMA_LIST_KEYWORDS: Final = frozenset({"allOf", "anyOf", "oneOf"})
_CHILD_KEYWORDS: Final = frozenset(
    {"items", "additionalItems", "additionalProperties", "contains", "propertyNames"}
)
"""Keywords whose value is a schema (or, for items, a list of them) for values inside."""
_CHILD_LIST_KEYWORDS: Final = frozenset({"prefixItems"})
_CHILD_MAP_KEYWORDS: Final = frozenset({"properties", "patternProperties"})
_DEFINITION_KEYWORDS: Final = frozenset({"$defs", "definitions"})
"""Keywords whose schemas are evaluated through references only."""
_SANDBOX_KEYWORDS: Final = frozenset(
    {
        "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor", "$anchor",
        "$vocabulary", "unevaluatedItems", "unevaluatedProperties", "uniqueItems",
        "dependentSchemas", "dependentRequired", "dependencies", "contentSchema",
        "contentMediaType", "contentEncoding",
    }
)  # fmt: skip
_PLAIN_KEYWORDS: Final = frozenset(
    {
        "type", "enum", "const", "required", "minimum", "maximum", "exclusiveMinimum",
        "exclusiveMaximum", "multipleOf", "minLength", "maxLength", "minItems", "maxItems",
        "minProperties", "maxProperties", "minContains", "maxContains", "title", "description",
        "$comment", "default", "examples", "deprecated", "readOnly", "writeOnly", "$schema",
    }
)  # fmt: skip
_PLAIN_FORMATS: Final = (
    "date-time",
    "date",
    "time",
    "uuid",
    "email",
    "ipv4",
    "ipv6",
    "uri",
    "hostname",
)
"""Formats that are checked in one pass over the text."""
_SANDBOX_SCHEMA_KEYWORDS: Final = ("unevaluatedItems", "unevaluatedProperties", "contentSchema")
_SANDBOX_MAP_KEYWORDS: Final = ("dependentSchemas", "dependencies")


class SchemaBoundError(ValueError):
    """Report that a schema exceeds a bound."""


@dataclass(frozen=True, slots=True)
class SchemaMeasure:
    """Measure a schema before it is compiled."""

    unfolded: int
    is_plain: bool
    weight: int
    """Upper bound of the checks for one value of a payload, if the schema is plain."""


def measure_schema(schema: object) -> SchemaMeasure:
    """Measure a decoded schema. SchemaBoundError: it is too deep, or unfolds to too much."""
    walk = _SchemaWalker(schema, plain=_is_one_resource(schema))
    unfolded, weight = walk.visit(schema)
    if unfolded > MAX_UNFOLDED:
        raise SchemaBoundError(
            f"unfolds to more than {MAX_UNFOLDED} sub-schemas, as its references multiply;"
            " share less, or split the type"
        )
    return SchemaMeasure(unfolded, walk.is_plain, weight)


def _is_one_resource(schema: object) -> bool:
    """Return whether no part of a schema has its own `$id`. SchemaBoundError: it is too deep."""
    single = True
    level = [schema] if isinstance(schema, dict | list) else []
    for depth in range(MAX_DEPTH + 1):
        if not level:
            return single
        single = single and not (
            depth and any(isinstance(value, dict) and "$id" in value for value in level)
        )
        inside = (value.values() if isinstance(value, dict) else value for value in level)
        level = [inner for values in inside for inner in values if isinstance(inner, dict | list)]
    raise SchemaBoundError(f"is nested more than {MAX_DEPTH} levels deep")


class _SchemaWalker:
    """Measure each schema object once, and cache the result by its identity."""

    def __init__(self, root: object, *, plain: bool) -> None:
        self._root = root
        self._measured: dict[int, tuple[int, int]] = {}
        self._visiting: set[int] = set()
        self.is_plain = plain

    def visit(self, schema: object) -> tuple[int, int]:
        """Return the unfolded size and the weight."""
        if not isinstance(schema, dict):
            self.is_plain = self.is_plain and isinstance(schema, bool)
            return 1, 1
        known = self._measured.get(id(schema))
        if known is not None:
            return known
        if id(schema) in self._visiting:
            # The payload decides how often a recursive reference is followed.
            self.is_plain = False
            return 1, 1
        if len(self._visiting) > MAX_DEPTH:
            raise SchemaBoundError(
                f"is nested more than {MAX_DEPTH} levels deep, its references unfolded"
            )
        self._visiting.add(id(schema))
        found = self._measured[id(schema)] = self._visit(schema)
        self._visiting.discard(id(schema))
        return found

    def _visit(self, schema: Mapping[str, Any]) -> tuple[int, int]:
        size, here = 1, 1
        named, others = 0, 0
        for keyword, value in schema.items():
            here += _comparison_count(keyword, value) if keyword not in _DEFINITION_KEYWORDS else 0
            for inner in self._subschemas(keyword, value):
                inner_size, inner_weight = self.visit(inner)
                size = min(size + inner_size, MAX_UNFOLDED + 1)
                if keyword == "properties":
                    named = max(named, inner_weight)
                elif (
                    keyword in _CHILD_KEYWORDS
                    or keyword in _CHILD_LIST_KEYWORDS
                    or keyword in _CHILD_MAP_KEYWORDS
                ):
                    others += inner_weight
                else:
                    here += inner_weight
            if keyword in {"pattern", "patternProperties"}:
                here += self._patterns_weight(
                    [value] if isinstance(value, str) else value if isinstance(value, dict) else ()
                )
        return size, min(here + named + others, MAX_UNFOLDED * 1000)

    def _subschemas(self, keyword: str, value: Any) -> Iterable[object]:
        """Return the schemas that a keyword evaluates."""
        if keyword == "$ref":
            return (self._resolve_reference(value),)
        if keyword in _SCHEMA_KEYWORDS or keyword in _CHILD_KEYWORDS:
            return value if isinstance(value, list) else (value,)
        if keyword in _SCHEMA_LIST_KEYWORDS or keyword in _CHILD_LIST_KEYWORDS:
            return value if isinstance(value, list) else ()
        if keyword in _CHILD_MAP_KEYWORDS:
            return value.values() if isinstance(value, dict) else ()
        self.is_plain = self.is_plain and self._has_known_cost(keyword, value)
        if keyword in _SANDBOX_SCHEMA_KEYWORDS:
            return (value,)
        if keyword in _SANDBOX_MAP_KEYWORDS and isinstance(value, dict):
            return [inner for inner in value.values() if isinstance(inner, dict | bool)]
        return ()

    def _has_known_cost(self, keyword: str, value: object) -> bool:
        """Return whether a keyword without schemas has a known cost."""
        if keyword in _SANDBOX_KEYWORDS:
            return keyword == "uniqueItems" and value is False
        if keyword == "$id":
            # References are resolved against it. At the root it does not affect those with a #.
            return isinstance(self._root, dict) and self._root.get("$id") is value
        if keyword == "format":
            return isinstance(value, str) and value in _PLAIN_FORMATS
        # An unknown keyword is no schema, but may hold one that a reference points to.
        known = (
            keyword in _PLAIN_KEYWORDS or keyword in _DEFINITION_KEYWORDS or keyword == "pattern"
        )
        return known or not isinstance(value, dict | list)

    def _resolve_reference(self, reference: object) -> object:
        """Return the target of a reference. If it is unknown, the schema is not plain."""
        if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
            # Percent-encoding is rare and ambiguous, so the sandbox decides.
            self.is_plain = self.is_plain and "%" not in reference
            found: object = self._root
            for step in unquote(reference[1:]).split("/")[1:]:
                name = step.replace("~1", "/").replace("~0", "~")
                match found:
                    case dict() if name in found:
                        found = found[name]
                    case list() if (
                        name.isascii()
                        and name.isdecimal()
                        and len(name) <= _MAX_INDEX_DIGITS
                        and int(name) < len(found)
                    ):
                        found = found[int(name)]
                    case _:
                        break
            else:
                return found
        # Another document, or an anchor: it may mean any schema of the document.
        self.is_plain = False
        return True

    def _patterns_weight(self, patterns: Iterable[str]) -> int:
        total = 0
        for pattern in patterns:
            weight = MAX_PLAIN_PATTERN + 1 if _may_backtrack(pattern) else pattern_weight(pattern)
            if weight > MAX_PLAIN_PATTERN:
                self.is_plain = False
            else:
                total += weight
        return total


def _may_backtrack(pattern: str) -> bool:
    """Return whether a pattern may need backtracking."""
    return _BACKTRACKING.search(pattern) is not None


def _comparison_count(keyword: str, value: object) -> int:
    """Return the cost of one check of a keyword, in comparisons."""
    match keyword, value:
        case "enum", list():
            return sum(_COMPOUND_WEIGHT if isinstance(one, dict | list) else 1 for one in value)
        case "const", dict() | list():
            return _COMPOUND_WEIGHT
        case "multipleOf", _:
            return _DIVISION_WEIGHT
        case "pattern", _:
            return 0
        case _:
            return 1
