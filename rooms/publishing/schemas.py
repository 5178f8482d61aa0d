"""JSON Schemas of event types: 2020-12 (the default) and draft-07, bounded, compiled once, checked against the published bytes.

A schema whose cost is bounded by its payload is checked inline; any other, and any check that may take long, in the sandbox
(`rooms.publishing.sandbox`). What validating may cost is known before (`rooms.publishing.schema_bounds`).
"""

import itertools
import json
import re
from collections.abc import Sequence
from typing import Any, Final

import jsonschema_rs
import msgspec

from rooms.errors import FieldProblem, InvalidError
from rooms.publishing.schema_bounds import SchemaBoundError, measure

DRAFT_07: Final = "http://json-schema.org/draft-07/schema"
DRAFT_2020_12: Final = "https://json-schema.org/draft/2020-12/schema"
MAX_SCHEMA_BYTES: Final = 256 * 1024
"""The default of ROOMS_MAX_SCHEMA_BYTES."""
CHECK_NS: Final = 7
"""Upper bound of what one schema check of one byte takes, as measured with many different schemas."""
_VALIDATORS: Final = {DRAFT_07: jsonschema_rs.Draft7Validator, DRAFT_2020_12: jsonschema_rs.Draft202012Validator}
_PATTERNS: Final = jsonschema_rs.FancyRegexOptions(backtrack_limit=100_000)
"""A pattern that backtracks for longer does not match."""
_PLAIN_BYTES: Final = 32 * 1024
"""A larger schema is measured, compiled and run in the sandbox only."""
_MAX_PROBLEMS: Final = 20
_LISTED: Final = 2_000
"""Checks whose every failure may be listed inline; the library makes all of them before it returns the first."""
_LISTED_BYTES: Final = 200_000
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
    """A bounded schema, compiled where it is plain."""

    __slots__ = ("_ns", "_validator", "field", "plain", "text", "weight")

    def __init__(
        self, schema: object, *, field: str = "schema", max_bytes: int = MAX_SCHEMA_BYTES, compiled: bool = False
    ) -> None:
        """Bound and compile a schema; one that is not plain only where `compiled` says so, as this may take long.

        InvalidError (naming `field`): it is no schema, of another draft, exceeds a bound, or refers outside itself.
        """
        if not isinstance(schema, dict | bool):
            raise InvalidError(FieldProblem(field, "a JSON Schema is an object, true or false"))
        self.field = field
        self.text = _encoded(schema, field)
        if len(self.text) > max_bytes:
            raise InvalidError(
                FieldProblem(field, f"a schema has at most {max_bytes} bytes; this one has {len(self.text)}")
            )
        declared = schema.get("$schema", DRAFT_2020_12) if isinstance(schema, dict) else DRAFT_2020_12
        kind = _VALIDATORS.get(str(declared)[:_LONGEST_MESSAGE].removesuffix("#"))
        if kind is None:
            raise InvalidError(FieldProblem(f"{field}.$schema", f"use {DRAFT_2020_12} or {DRAFT_07}#"))
        self.plain, self.weight, self._ns = False, 0, 0
        self._validator: Any = None
        if len(self.text) > _PLAIN_BYTES and not compiled:
            return  # to measure and compile it takes too long here
        try:
            measured = measure(schema)
        except SchemaBoundError as exc:
            raise InvalidError(FieldProblem(field, str(exc))) from exc
        self.plain = measured.plain and len(self.text) <= _PLAIN_BYTES
        self.weight = measured.weight
        self._ns = measured.weight * CHECK_NS if self.plain else 0
        if compiled or self.plain:
            self._validator = _compiled(kind, schema, field)

    def cost_ns(self, size: int) -> int | None:
        """Return an upper bound of what checking `size` bytes takes; None where only the sandbox can bound it."""
        return self._ns * size if self._ns else None

    def problems(self, payload: bytes, at: str) -> list[FieldProblem] | None:
        """Return what does not fit in a JSON text, each with its place under `at`; empty where all does.

        None: something does not fit, and listing it may take too long here (`listed` does it in the sandbox).
        """
        try:
            value = msgspec.json.decode(payload)
        except (ValueError, RecursionError) as exc:
            return [FieldProblem(at, _shortened(str(exc)))]
        try:
            if self._validator.is_valid(value):
                return []
        except ValueError as exc:
            return [_undecidable(exc, at)]
        if len(payload) * self.weight > _LISTED_BYTES or _count(value, _LISTED) * self.weight > _LISTED:
            return None
        return self._listed(value, at)

    def is_valid(self, value: object) -> bool:
        """Return whether a decoded value fits."""
        fits: bool = self._validator.is_valid(value)
        return fits

    def listed(self, value: object, at: str) -> list[FieldProblem]:
        """Return at most 20 of the problems of a decoded value; the first only where there may be very many."""
        if self.plain and _count(value, 10 * _LISTED) * self.weight <= 10 * _LISTED:
            return self._listed(value, at)
        try:
            self._validator.validate(value)
        except jsonschema_rs.ValidationError as exc:
            return [FieldProblem(path_text(at, exc.instance_path), _shortened(exc.message))]
        except ValueError as exc:
            return [_undecidable(exc, at)]
        return []

    def _listed(self, value: object, at: str) -> list[FieldProblem]:
        try:
            return [
                FieldProblem(path_text(at, error.instance_path), _shortened(error.message))
                for error in itertools.islice(self._validator.iter_errors(value), _MAX_PROBLEMS)
            ]
        except ValueError as exc:
            return [_undecidable(exc, at)]


def _undecidable(error: ValueError, at: str) -> FieldProblem:
    # A value that is nested more deeply than the library goes.
    return FieldProblem(at, f"cannot be validated: {_shortened(str(error))}")


def _encoded(schema: object, field: str) -> bytes:
    try:
        return msgspec.json.encode(schema)
    except (ValueError, OverflowError, RecursionError) as exc:
        raise InvalidError(FieldProblem(field, _shortened(str(exc)))) from exc


def _compiled(kind: Any, schema: object, field: str) -> Any:
    try:
        # Offline: a schema must not make us fetch addresses or read files.
        return kind(schema, offline=True, pattern_options=_PATTERNS)
    except jsonschema_rs.ValidationError as exc:
        raise InvalidError(FieldProblem(path_text(field, exc.instance_path), _shortened(exc.message))) from exc
    except (jsonschema_rs.ReferencingError, ValueError, RecursionError) as exc:
        raise InvalidError(FieldProblem(field, _shortened(str(exc)))) from exc


def _count(value: object, most: int) -> int:
    """Count the values in a decoded text, up to about `most`."""
    count, level = 1, [value]
    while level and count <= most:
        inside = [
            inner
            for one in level
            if isinstance(one, dict | list)
            for inner in itertools.islice(one.values() if isinstance(one, dict) else one, most)
        ]
        count += len(inside)
        level = inside
    return count


def _shortened(message: str) -> str:
    return message if len(message) <= _LONGEST_MESSAGE else message[: _LONGEST_MESSAGE - 1] + "…"
