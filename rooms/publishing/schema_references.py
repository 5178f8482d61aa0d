"""Find what the references of a JSON Schema may mean, within its document.

The library that validates resolves them exactly, by base URIs, `$id`, `$anchor` and
`$dynamicAnchor`. Here each reference has *candidates*: all schemas that it could mean, whatever
the base is. The largest of them bounds what the library follows. Identifiers are therefore
compared by their last part only, in lower case and without percent-encoding.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import unquote

MAX_DEPTH: Final = 100
"""Most levels of nested objects and lists in a schema."""
REFERENCE_KEYWORDS: Final = frozenset({"$ref", "$dynamicRef", "$recursiveRef"})
_MAX_EXTRA_STEPS: Final = 50_000
"""Most steps to all candidates beyond the first of each reference: some hundredths of a second.

The steps to the first are no more than the bytes of the reference.
"""
_MAX_INDEX_DIGITS: Final = 6
_MAX_QUOTED: Final = 100
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*:")
_PARTS: Final = re.compile(r"[/:]")
_META_SCHEMAS: Final = (
    "http://json-schema.org/draft-07/schema",
    "https://json-schema.org/draft/2020-12/",
)
"""The library has these; each of them is of a bounded size."""
_META: Final = True
"""The schema that stands for one of them, and for what a draft ignores."""
_DRAFT_2020_12: Final = "https://json-schema.org/draft/2020-12/schema"
_FOLLOWED: Final[Mapping[str, frozenset[str]]] = {
    "http://json-schema.org/draft-07/schema": frozenset({"$ref"}),
    _DRAFT_2020_12: frozenset({"$ref", "$dynamicRef"}),
}
"""The keywords that a draft follows, of those that a room may declare."""

Schema = Mapping[str, Any]


class SchemaBoundError(ValueError):
    """Report that a schema exceeds a bound."""


class SchemaReferences:
    """Index the schemas of one document by their identifiers and anchors."""

    def __init__(self, root: object) -> None:
        """Index the schemas of a document. SchemaBoundError: it is too deep."""
        self._root = root
        self._anchors: dict[str, list[object]] = {}
        self._resources: dict[str, list[object]] = {"": [root]}
        self._recursive: list[object] = []
        self._resources_around: dict[int, tuple[object, ...]] = {}
        """The schemas with an `$id` that contain a schema, if there are any below the root."""
        self._found: dict[tuple[int, str], list[object]] = {}
        """The candidates by the schema's identity and the keyword."""
        self._extra_steps_left = _MAX_EXTRA_STEPS
        self.is_one_resource = True
        """No part of the schema has an `$id` of its own."""
        declared = root.get("$schema", _DRAFT_2020_12) if isinstance(root, dict) else _DRAFT_2020_12
        self._followed = _keywords(declared)
        """The keywords that a draft of the document or of one of its parts follows."""
        self._index()

    def candidates(self, schema: Schema, keyword: str, reference: object) -> list[object]:
        """Return what a reference may mean. SchemaBoundError: nothing in this document."""
        key = (id(schema), keyword)
        if key in self._found:
            return self._found[key]
        if keyword not in self._followed:
            return [_META]
        found: list[object] = []
        if isinstance(reference, str):
            found = list(self._find(schema, *reference.partition("#")[::2]))
            if keyword == "$recursiveRef":
                found += self._recursive
        if not found:
            quoted = str(reference)[:_MAX_QUOTED]
            raise SchemaBoundError(
                f'has the {keyword} "{quoted}", to nothing in the schema; put what it means under'
                " $defs and refer to #/$defs/NAME"
            )
        self._spend(len(found) - 1)
        self._found[key] = found
        return found

    def _spend(self, steps: int) -> None:
        self._extra_steps_left -= steps
        if self._extra_steps_left < 0:
            raise SchemaBoundError(
                "has too many references that could mean several of its parts; give each $id and"
                " $anchor a name of its own"
            )

    def _find(self, schema: Schema, uri: str, fragment: str) -> Iterator[object]:
        if not uri:
            resources = self._resources_around.get(id(schema), (self._root,))
        elif uri.startswith("?"):
            return
        else:
            resources = tuple(self._resources.get(_last_part(uri), ()))
            if uri.startswith(_META_SCHEMAS) and self.is_one_resource:
                yield _META
        if fragment and not fragment.startswith("/"):
            if resources:
                yield from self._anchors.get(fragment, ())
            return
        # Whether %2F divides a path is ambiguous.
        pointers = {
            tuple(unquote(fragment).split("/")[1:]),
            tuple(unquote(step) for step in fragment.split("/")[1:]),
        }
        steps = 1 + fragment.count("/")
        self._spend(max(0, len(resources) * len(pointers) - 1) * steps)
        for resource in resources:
            for pointer in pointers:
                yield from _follow(resource, pointer)

    def _index(self) -> None:
        level: list[tuple[object, tuple[object, ...]]] = [(self._root, (self._root,))]
        for _ in range(MAX_DEPTH + 1):
            inside: list[tuple[object, tuple[object, ...]]] = []
            for value, around in level:
                resources = around
                if isinstance(value, dict):
                    resources = self._add(value, around)
                    if len(resources) > 1:
                        self._resources_around[id(value)] = resources
                inside += (
                    [
                        (inner, resources)
                        for inner in (value.values() if isinstance(value, dict) else value)
                        if isinstance(inner, dict | list)
                    ]
                    if isinstance(value, dict | list)
                    else []
                )
            level = inside
            if not level:
                return
        raise SchemaBoundError(f"is nested more than {MAX_DEPTH} levels deep")

    def _add(self, schema: Schema, around: tuple[object, ...]) -> tuple[object, ...]:
        """Index a schema, and return the resources around its parts."""
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(name := schema.get(keyword), str):
                self._anchors.setdefault(name, []).append(schema)
        if "$schema" in schema:
            self._followed |= _keywords(schema["$schema"])
        if schema.get("$recursiveAnchor") is True:
            self._recursive.append(schema)
        if "$id" not in schema:
            return around
        self.is_one_resource = self.is_one_resource and schema is self._root
        if not isinstance(given := schema["$id"], str):
            return around
        uri, _, anchor = given.partition("#")
        if anchor:  # as in draft-07
            self._anchors.setdefault(anchor, []).append(schema)
        if not uri:
            return around
        self._resources.setdefault(_last_part(uri), []).append(schema)
        return around if schema is self._root else (*around, schema)


def _keywords(draft: object) -> frozenset[str]:
    """Return the keywords that a draft follows; all of them if it is unknown."""
    uri = draft.removesuffix("#") if isinstance(draft, str) else ""
    return _FOLLOWED.get(uri, REFERENCE_KEYWORDS)


def _last_part(uri: str) -> str:
    """Return the last part of the path, equal for all URIs that mean the same; it may be empty."""
    path = uri.partition("?")[0]
    if scheme := _SCHEME.match(path):
        path = path[scheme.end() :]
    if path.startswith("//"):
        path = path[2:].partition("/")[2]
    last = unquote(_PARTS.split(path)[-1]).lower()
    return "" if last in {".", ".."} else last


def _follow(resource: object, pointer: tuple[str, ...]) -> Iterator[object]:
    """Return what a JSON pointer leads to, if there is such a thing."""
    found: object = resource
    for step in pointer:
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
                return
    yield found
