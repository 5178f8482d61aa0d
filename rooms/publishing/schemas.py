"""JSON Schemas of event types: 2020-12 (the default) and draft-07, compiled once, checked against the published bytes."""

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from typing import Final

import jsonschema_rs
import msgspec

from rooms.errors import FieldProblem, InvalidError

DRAFT_07: Final = "http://json-schema.org/draft-07/schema"
DRAFT_2020_12: Final = "https://json-schema.org/draft/2020-12/schema"
_VALIDATORS: Final = {DRAFT_07: jsonschema_rs.Draft7Validator, DRAFT_2020_12: jsonschema_rs.Draft202012Validator}
# A pattern that backtracks longer than this does not match: nobody may spend our time by a clever one.
_PATTERNS: Final = jsonschema_rs.FancyRegexOptions(backtrack_limit=100_000)
_MOST_PROBLEMS: Final = 20
_LONGEST_MESSAGE: Final = 300
_PLAIN: Final = re.compile(r"[A-Za-z_$][A-Za-z0-9_$\-]*")


def path_text(start: str, path: Sequence[str | int]) -> str:
    """Where something stands, as problems name it: `payload.items[0]`, `payload["odd name"]`."""
    pieces = [start]
    for step in path:
        if isinstance(step, int):
            pieces.append(f"[{step}]")
        elif _PLAIN.fullmatch(step):
            pieces.append(f".{step}")
        else:
            pieces.append(f"[{json.dumps(step)}]")
    return "".join(pieces)


class PayloadSchema:
    """A compiled schema."""

    def __init__(self, schema: object, *, field: str = "schema") -> None:
        """InvalidError (naming `field`) where it is no schema, of another draft, or refers outside itself."""
        if not isinstance(schema, dict | bool):
            raise InvalidError(FieldProblem(field, "a JSON Schema is an object, true or false"))
        declared = schema.get("$schema", DRAFT_2020_12) if isinstance(schema, dict) else DRAFT_2020_12
        validator = _VALIDATORS.get(str(declared).removesuffix("#"))
        if validator is None:
            raise InvalidError(FieldProblem(f"{field}.$schema", f"use {DRAFT_2020_12} or {DRAFT_07}#"))
        try:
            # Offline: a schema must not make us fetch addresses or read files.
            self._validator = validator(schema, offline=True, pattern_options=_PATTERNS)
        except jsonschema_rs.ValidationError as exc:
            raise InvalidError(FieldProblem(path_text(field, exc.instance_path), _shortened(exc.message))) from exc
        except (jsonschema_rs.ReferencingError, ValueError, RecursionError) as exc:
            raise InvalidError(FieldProblem(field, _shortened(str(exc)))) from exc

    def problems(self, payload: bytes, at: str) -> list[FieldProblem]:
        """What does not fit in a JSON text, each with its place under `at`; empty where all does."""
        try:
            value = msgspec.json.decode(payload)
        except (ValueError, RecursionError) as exc:
            return [FieldProblem(at, str(exc))]
        if self._validator.is_valid(value):
            return []
        return list(itertools.islice(self._told(value, at), _MOST_PROBLEMS))

    def _told(self, value: object, at: str) -> Iterator[FieldProblem]:
        for error in self._validator.iter_errors(value):
            yield FieldProblem(path_text(at, error.instance_path), _shortened(error.message))


def _shortened(message: str) -> str:
    return message if len(message) <= _LONGEST_MESSAGE else message[: _LONGEST_MESSAGE - 1] + "…"
