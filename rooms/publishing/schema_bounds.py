"""Bound JSON Schemas: their size with references unfolded, and the cost of validating.

A schema is a graph: with `$ref`, a kilobyte of text can mean millions of sub-schemas.
`measure_schema` counts them without unfolding them.

A schema is *plain* if its weight times the bytes of the payload, and its time for a number times
the numbers of the payload, bound the cost of validating. Others run in the sandbox only: those with
recursion, dynamic references, `uniqueItems`, unevaluated keywords, unbounded patterns and so on.

Listing the problems costs more than finding one. A list of 4,000 `required` names is one check
until a name is missing, but may be 4,000 problems; and a problem quotes the schema.
"""

import operator
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec

from rooms.publishing.number_bounds import (
    NUMBER_KEYWORDS,
    NumberScan,
    are_ordinary,
    keyword_ns,
)
from rooms.publishing.regex_bounds import pattern_weight
from rooms.publishing.schema_recursion import ClosureSizes
from rooms.publishing.schema_references import (
    MAX_DEPTH,
    REFERENCE_KEYWORDS,
    SchemaBoundError,
    SchemaReferences,
)

MAX_UNFOLDED: Final = 100_000
"""Most sub-schemas with references unfolded; a recursive reference counts once."""
MAX_PLAIN_PATTERN: Final = 500
"""Largest weight of a pattern that is matched inline."""
_COMPOUND_WEIGHT: Final = 5
_NUMBERS_WEIGHT: Final = 2
"""A byte that is searched for numbers beyond the bounds."""
_QUOTED_BYTES: Final = 64
"""Bytes of the schema that a problem quotes in about the time that it takes itself."""
_MOST: Final = MAX_UNFOLDED * 1_000_000
"""Costs are counted so far."""
_BACKTRACKING: Final = re.compile(r"\\[1-9kKG]|\(\?[=!<>(]|[*+?}]\+")

_SCHEMA_KEYWORDS: Final = frozenset({"not", "if", "then", "else"})
"""Keywords whose value is one schema for the same value."""
_SCHEMA_LIST_KEYWORDS: Final = frozenset({"allOf", "anyOf", "oneOf"})
_EAGER_KEYWORDS: Final = frozenset({"anyOf", "oneOf", "propertyNames"})
"""Keywords with one problem for which the library makes all those of their schemas."""
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
        "$dynamicAnchor", "$recursiveAnchor", "$anchor",
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
_ANNOTATIONS: Final = frozenset(
    {
        "title", "description", "$comment", "default", "examples", "deprecated", "readOnly",
        "writeOnly", "$schema", "$id",
    }
)  # fmt: skip
"""Keywords that no problem quotes, except as part of another."""
FIRST_CHECKS: Final = 2
"""So often a value is checked while one problem is listed, measured with each keyword."""
_QUOTED_LISTS: Final = frozenset({"enum", "const", "required", "not"})
"""Keywords with an object or a list that a problem quotes."""
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
_SAME_VALUE_KEYWORDS: Final = frozenset(
    {*_SCHEMA_KEYWORDS, *_SCHEMA_LIST_KEYWORDS, *_SANDBOX_MAP_KEYWORDS}
)


@dataclass(frozen=True, slots=True)
class SchemaMeasure:
    """Measure a schema before it is compiled."""

    unfolded: int
    is_plain: bool
    weight: int
    """Upper bound of the checks for one value of a payload, if the schema is plain."""
    number_ns: int
    """Upper bound of the time for one ordinary number of a payload without long ones."""
    long_number_ns: int
    """The same where there are long ones."""
    listed: int
    """Upper bound of the problems of one value, each with 64 bytes that it quotes of the schema."""
    listed_names: int
    """Those of them that quote an object for the name of each of its properties."""
    eager_levels: int
    """Most keywords of `_EAGER_KEYWORDS` within one another."""
    divides_by_zero: bool
    """It has the `multipleOf` 0. Drafts refuse that only in places where they expect schemas."""

    @property
    def makes_one(self) -> bool:
        """Return whether the library makes the first problem before the others."""
        return not self.eager_levels

    @property
    def listing_checks(self) -> int:
        """Return how often a value is checked while its problems are listed, at most.

        The library checks what is in such a keyword before it lists the problems of that.
        """
        return FIRST_CHECKS + self.eager_levels

    def numbers_ns(self, numbers: NumberScan, rough_ns: int) -> int:
        """Return an upper bound of the time for the numbers of a text.

        It holds if none is extreme. A rough bound is enough up to `rough_ns`.
        """
        each_ns = self.long_number_ns if numbers.has_long else self.number_ns
        most_ns = each_ns * numbers.rough_count
        return most_ns if most_ns <= rough_ns else each_ns * numbers.count()


class _Cost(NamedTuple):
    """Bound the cost for one value of a payload: as SchemaMeasure does."""

    weight: int
    number_ns: int
    long_number_ns: int
    listed: int
    listed_names: int

    def plus(self, other: "_Cost") -> "_Cost":
        return _Cost(*map(operator.add, self, other))

    def most(self, other: "_Cost") -> "_Cost":
        return _Cost(*map(max, self, other))


class _Part(NamedTuple):
    """Measure a sub-schema."""

    size: int
    cost: _Cost
    path_bytes: int
    """Most bytes of references and patterns on the way to a keyword; its problems name the way."""
    eager_levels: int


_NOTHING: Final = _Cost(0, 0, 0, 0, 0)
_LEAF: Final = _Part(1, _Cost(1, 0, 0, 1, 0), 0, 0)


def measure_schema(schema: object) -> SchemaMeasure:
    """Measure a decoded schema. SchemaBoundError: it is too deep, or unfolds to too much."""
    walk = _SchemaWalker(schema)
    unfolded, cost, path_bytes, eager_levels = walk.visit(schema)
    if unfolded > MAX_UNFOLDED:
        raise SchemaBoundError(
            f"unfolds to more than {MAX_UNFOLDED} sub-schemas, as its references multiply;"
            " share less, or split the type"
        )
    if walk.is_recursive:
        ClosureSizes(walk.list_same_value_parts, MAX_UNFOLDED).check([schema, *walk.starts])
    way = 1 + path_bytes // _QUOTED_BYTES
    return SchemaMeasure(
        unfolded,
        walk.is_plain,
        cost.weight + (_NUMBERS_WEIGHT if cost.number_ns else 0),
        cost.number_ns,
        cost.long_number_ns,
        cost.listed * way,
        cost.listed_names,
        eager_levels,
        walk.divides_by_zero,
    )


class _SchemaWalker:
    """Measure each schema object once, and cache the result by its identity."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._references = SchemaReferences(root)
        self._measured: dict[int, _Part] = {}
        self._visiting: set[int] = set()
        self.is_plain = self._references.is_one_resource
        self.is_recursive = False
        """A reference may lead back to a schema around it."""
        self.divides_by_zero = False
        self.starts: list[object] = []
        """The schemas for values inside others."""

    def visit(self, schema: object) -> _Part:
        """Return the unfolded size and the cost."""
        if not isinstance(schema, dict):
            self.is_plain = self.is_plain and isinstance(schema, bool)
            return _LEAF
        if not schema:
            return _LEAF  # In 32 KiB there may be ten thousand of them.
        known = self._measured.get(id(schema))
        if known is not None:
            return known
        if id(schema) in self._visiting:
            # The payload decides how often a recursive reference is followed.
            self.is_plain = False
            self.is_recursive = True
            return _LEAF
        if len(self._visiting) > MAX_DEPTH:
            raise SchemaBoundError(
                f"is nested more than {MAX_DEPTH} levels deep, its references unfolded"
            )
        self._visiting.add(id(schema))
        found = self._measured[id(schema)] = self._visit(schema)
        self._visiting.discard(id(schema))
        return found

    def _visit(self, schema: Mapping[str, Any]) -> _Part:
        size, path_bytes, eager_levels = 1, 0, 0
        here, named, others = _LEAF.cost, _NOTHING, _NOTHING
        for keyword, value in schema.items():
            if keyword == "multipleOf" and isinstance(value, int | float) and not value:
                self.divides_by_zero = True
            if keyword not in _DEFINITION_KEYWORDS:
                here = here.plus(_keyword_cost(keyword, value))
            step_bytes = _step_bytes(keyword, value)
            for part in self._parts(schema, keyword):
                size = min(size + part.size, MAX_UNFOLDED + 1)
                path_bytes = max(path_bytes, part.path_bytes + step_bytes)
                eager_levels = max(eager_levels, part.eager_levels + (keyword in _EAGER_KEYWORDS))
                if keyword == "properties":
                    named = named.most(part.cost)
                elif (
                    keyword in _CHILD_KEYWORDS
                    or keyword in _CHILD_LIST_KEYWORDS
                    or keyword in _CHILD_MAP_KEYWORDS
                ):
                    others = others.plus(part.cost)
                    if keyword == "propertyNames":
                        others = others.plus(_Cost(0, 0, 0, 0, part.cost.listed))
                else:
                    here = here.plus(part.cost)
            if keyword in {"pattern", "patternProperties"}:
                weight = self._patterns_weight(
                    [value] if isinstance(value, str) else value if isinstance(value, dict) else ()
                )
                here = here.plus(_Cost(weight, 0, 0, 0, 0))
        cost = here.plus(named).plus(others)
        return _Part(size, _Cost(*(min(one, _MOST) for one in cost)), path_bytes, eager_levels)

    def _parts(self, schema: Mapping[str, Any], keyword: str) -> list[_Part]:
        """Measure the schemas that a keyword evaluates."""
        if keyword in REFERENCE_KEYWORDS:
            return [self._reference_part(schema, keyword)]
        inside = list(self._subschemas(keyword, schema[keyword]))
        if keyword not in _SAME_VALUE_KEYWORDS:
            self.starts += inside
        return [self.visit(inner) for inner in inside]

    def list_same_value_parts(self, schema: Mapping[str, Any]) -> list[list[object]]:
        """Return the schemas that a schema combines for its own value, with all candidates."""
        found: list[list[object]] = []
        for keyword, value in schema.items():
            if keyword in REFERENCE_KEYWORDS:
                found.append(self._references.candidates(schema, keyword, value))
            elif keyword in _SAME_VALUE_KEYWORDS:
                found += [[inner] for inner in self._subschemas(keyword, value)]
        return found

    def _subschemas(self, keyword: str, value: Any) -> Iterable[object]:
        """Return the schemas that a keyword evaluates, other than those it refers to."""
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
        if keyword in NUMBER_KEYWORDS and not are_ordinary(keyword, value):
            return False
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

    def _reference_part(self, schema: Mapping[str, Any], keyword: str) -> _Part:
        """Return the largest part that a reference may mean.

        SchemaBoundError: it means nothing in this document.
        """
        reference = schema[keyword]
        # Percent-encoding is rare and ambiguous, so the sandbox decides, as it does for anchors.
        self.is_plain = self.is_plain and (
            isinstance(reference, str)
            and (reference == "#" or reference.startswith("#/"))
            and "%" not in reference
        )
        found = self._references.candidates(schema, keyword, reference)
        return max([self.visit(one) for one in found], key=operator.attrgetter("size"))

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


def _keyword_cost(keyword: str, value: object) -> _Cost:
    """Return the cost of a keyword, without the schemas in it."""
    return _Cost(
        _comparison_count(keyword, value),
        *keyword_ns(keyword, value),
        _listing_count(keyword, value),
        0,
    )


def _comparison_count(keyword: str, value: object) -> int:
    """Return the cost of one check of a keyword, in comparisons."""
    match keyword, value:
        case "enum", list():
            return sum(_COMPOUND_WEIGHT if isinstance(one, dict | list) else 1 for one in value)
        case "const", dict() | list():
            return _COMPOUND_WEIGHT
        case "pattern", _:
            return 0
        case _:
            return 1


def _listing_count(keyword: str, value: object) -> int:
    """Return the cost of the problems of a keyword, in problems that quote little."""
    if keyword in _ANNOTATIONS:
        return 0
    count = len(value) if keyword == "required" and isinstance(value, list) else 1
    if keyword in _QUOTED_LISTS or not isinstance(value, dict | list):
        count += len(msgspec.json.encode(value)) // _QUOTED_BYTES
    return count


def _step_bytes(keyword: str, value: object) -> int:
    """Return the most bytes by which a keyword makes the way to schemas in it longer."""
    if keyword == "$ref" and isinstance(value, str):
        return len(value)
    if keyword == "patternProperties" and isinstance(value, dict):
        return max(map(len, value), default=0)
    return 0
