"""Make answers of the API in its documented shapes, with hostile text in every free text field."""

import re
from collections.abc import Mapping
from typing import Any, Final

from tests.support.fake_api import Answer, Seen
from tests.support.reference import openapi

ID: Final = "01900000-0000-7000-8000-000000000001"
TIME: Final = "2026-01-01T00:00:00Z"
_FORMATS: Final = {"uuid": ID, "date-time": TIME, "date": TIME[:10]}
_MAX_DEPTH: Final = 8


class HostileAnswers:
    """Answer each documented request with success and one item a list, all of its text hostile."""

    def __init__(self, text: str) -> None:
        document = openapi()
        self._text = text
        self._schemas: Mapping[str, Any] = document["components"]["schemas"]
        self._routes = [
            (method.upper(), re.compile(re.sub(r"\{[^}]+\}", "[^/]+", path)), operation)
            for path, item in document["paths"].items()
            for method, operation in item.items()
        ]

    def answer(self, seen: Seen) -> Answer | None:
        """Return the answer of a route; None: there is none."""
        fitting = [
            (len(pattern.pattern.replace("[^/]+", "")), operation)
            for method, pattern, operation in self._routes
            if method == seen.method and pattern.fullmatch(seen.path)
        ]
        if not fitting:
            return None
        _, operation = max(fitting, key=lambda found: found[0])
        pick = min if b'"dry_run"' in seen.raw else max
        status = pick(code for code in operation["responses"] if code.startswith("2"))
        content = operation["responses"][status].get("content", {})
        schema = next((kind["schema"] for kind in content.values() if "schema" in kind), None)
        if not content:
            return int(status), b""
        if schema is None or not any("json" in kind for kind in content):
            return int(status), self._text.encode()
        return int(status), self._value(schema)

    def _value(self, schema: Mapping[str, Any], name: str = "", depth: int = 0) -> Any:
        if "$ref" in schema:
            schema = self._schemas[schema["$ref"].rpartition("/")[2]]
        if depth > _MAX_DEPTH or name == "next_cursor":
            return None
        several = schema.get("oneOf") or schema.get("anyOf") or schema.get("allOf")
        if several:
            chosen = next(one for one in several if one.get("type") != "null")
            return self._value(chosen, name, depth)
        if "const" in schema or "enum" in schema:
            return schema.get("const", schema.get("enum", [None])[0])
        kind = schema.get("type")
        if isinstance(kind, list):
            kind = next(one for one in kind if one != "null")
        match kind:
            case "object":
                return self._object(schema, depth)
            case "array":
                return [self._value(schema.get("items", {}), name, depth + 1)]
            case "integer" | "number":
                return 0
            case "boolean":
                # A command repeats a request while there is more.
                return name != "more"
            case _:
                return self._string(schema, name)

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        made = {
            field: self._value(inner, field, depth + 1)
            for field, inner in schema.get("properties", {}).items()
        }
        more = schema.get("additionalProperties")
        if isinstance(more, Mapping):
            made[self._text] = self._value(more, "", depth + 1)
        # A hostile service adds fields, too, and a command may show what it does not know.
        return {self._text: self._text, **made}

    def _string(self, schema: Mapping[str, Any], name: str) -> str:
        if (form := schema.get("format")) in _FORMATS:
            return _FORMATS[form]
        # A command puts them into paths, and compares them, though the document says only "string".
        return ID if name == "id" or name.endswith("_id") else self._text
