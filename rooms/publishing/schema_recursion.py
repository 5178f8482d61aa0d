"""Bound what one value of a payload costs where a schema refers to itself.

The payload decides how often a schema that is recursive through `properties` or `items` is
followed. Each value inside is still checked by all that `allOf`, `not` or `$ref` combine for it,
and this *closure* is bounded here.

A closure must not end at a reference back, because another way through the same schema may be
longer. References with several candidates also make cycles that do not exist. So a size is kept
only if no schema around it cut it short; else it is measured again on each way.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from rooms.publishing.schema_references import MAX_DEPTH, SchemaBoundError

_MAX_REPEATED: Final = 20_000
"""Most parts that are measured again, which takes some hundredths of a second."""
_UNCUT: Final = MAX_DEPTH + 1

Parts = Sequence[Sequence[object]]
"""The schemas that a schema combines for the same value, each with all its candidates."""


class ClosureSizes:
    """Measure the schemas that are combined for one value."""

    def __init__(self, list_parts: Callable[[Mapping[str, Any]], Parts], most: int) -> None:
        """Refuse closures of more than `most` schemas."""
        self._list_parts = list_parts
        self._most = most
        self._parts: dict[int, Parts] = {}
        self._sizes: dict[int, int] = {}
        self._depths: dict[int, int] = {}
        """The depths of the schemas that are being measured."""
        self._repeated_left = _MAX_REPEATED

    def check(self, starts: Iterable[object]) -> None:
        """Raise SchemaBoundError if one of these has too large a closure."""
        for schema in starts:
            self._measure(schema)

    def _measure(self, schema: object) -> tuple[int, int]:
        """Return the size of a closure, and the least depth of a schema that cut it."""
        if not isinstance(schema, dict) or not schema:
            return 1, _UNCUT
        key = id(schema)
        if key in self._sizes:
            return self._sizes[key], _UNCUT
        if key in self._depths:
            return 1, self._depths[key]
        depth = len(self._depths)
        if depth > MAX_DEPTH:
            raise SchemaBoundError(
                f"is nested more than {MAX_DEPTH} levels deep, its references unfolded"
            )
        self._depths[key] = depth
        size, cut = 1, _UNCUT
        for candidates in self._parts_of(schema):
            found = [self._measure(one) for one in candidates]
            size += max(one for one, _ in found)
            cut = min(cut, *(at for _, at in found))
            if size > self._most:
                raise SchemaBoundError(
                    f"unfolds to more than {self._most} sub-schemas for one value, as its"
                    " references multiply; share less, or split the type"
                )
        del self._depths[key]
        if cut < depth:
            return size, cut
        self._sizes[key] = size
        return size, _UNCUT

    def _parts_of(self, schema: Mapping[str, Any]) -> Parts:
        parts = self._parts.get(id(schema))
        if parts is None:
            parts = self._parts[id(schema)] = self._list_parts(schema)
            return parts
        self._repeated_left -= 1 + sum(map(len, parts))
        if self._repeated_left < 0:
            raise SchemaBoundError(
                "refers to itself in too many ways for the same value; refer to itself only below"
                " properties or items, and give each $id and $anchor a name of its own"
            )
        return parts
