"""Validate payloads by the JSON Schemas of event types: 2020-12 (the default) and draft-07.

`rooms.publishing.schema_bounds` bounds the cost of a validation before it runs. Cheap ones run
inline, all others in the sandbox (`rooms.publishing.sandbox.client`).
"""

import itertools
import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

import jsonschema_rs
import msgspec

from rooms.errors import FieldProblem, InvalidError
from rooms.publishing.number_bounds import (
    SMALL_BYTES,
    NumberScan,
    decode_small,
    unscanned_ns_per_byte,
)
from rooms.publishing.schema_bounds import (
    FIRST_CHECKS,
    SchemaMeasure,
    measure_schema,
)
from rooms.publishing.schema_references import SchemaBoundError

DRAFT_07: Final = "http://json-schema.org/draft-07/schema"
DRAFT_2020_12: Final = "https://json-schema.org/draft/2020-12/schema"
MAX_SCHEMA_BYTES: Final = 256 * 1024
"""The default of ROOMS_MAX_SCHEMA_BYTES."""
CHECK_NS: Final = 7
"""Upper bound for one schema check of one byte, measured with many schemas."""
_VALIDATORS: Final = {
    DRAFT_07: jsonschema_rs.Draft7Validator,
    DRAFT_2020_12: jsonschema_rs.Draft202012Validator,
}
_PATTERNS: Final = jsonschema_rs.FancyRegexOptions(backtrack_limit=100_000)
"""A pattern that backtracks longer does not match."""
_MAX_INLINE_BYTES: Final = 32 * 1024
"""A larger schema is measured, compiled and run in the sandbox only."""
_MAX_PROBLEMS: Final = 20
_MAX_LISTED_NS: Final = 10_000_000
"""Problems that may take longer are listed in the sandbox; the library makes all before one."""
_MAX_SANDBOX_LISTED_NS: Final = 10 * _MAX_LISTED_NS
"""Beyond it the sandbox lists the first problem only."""
_PROBLEM_NS: Final = 5_000
_QUOTE_NS: Final = 100
"""A byte of the value that a problem quotes."""
_PATH_NS: Final = 8
"""A character of the names on the way to that value."""
_ROUGH_NS: Final = 2_000_000
"""So much of a request's budget is taken for its first message without a search for numbers."""
_MAX_ERROR_CHARS: Final = 300
_FAILURES: Final = (ValueError, RuntimeError)
"""Errors of the library: a value is nested more deeply than it goes, or it has a bug (a panic)."""
_PLAIN_KEY: Final = re.compile(r"[A-Za-z_$][A-Za-z0-9_$\-]*")


def path_text(start: str, path: Sequence[str | int]) -> str:
    """Return a path as problems name it: `payload.items[0]`, `payload["odd name"]`."""
    pieces = [start]
    for step in path:
        if isinstance(step, int):
            pieces.append(f"[{step}]")
        elif _PLAIN_KEY.fullmatch(step):
            pieces.append(f".{step}")
        else:
            pieces.append(f"[{json.dumps(step)}]")
    return "".join(pieces)


class PayloadSchema:
    """Hold a bounded schema, compiled if it is plain."""

    __slots__ = (
        "_measure",
        "_ns_per_byte",
        "_number_measure",
        "_unscanned_ns_per_byte",
        "_validator",
        "field",
        "is_plain",
        "text",
        "weight",
    )

    def __init__(
        self,
        schema: object,
        *,
        field: str = "schema",
        max_bytes: int = MAX_SCHEMA_BYTES,
        compiled: bool = False,
    ) -> None:
        """Bound and compile a schema. One that is not plain is compiled only with `compiled`.

        InvalidError (naming `field`): it is no schema, of another draft, exceeds a bound, or refers
        outside itself.
        """
        if not isinstance(schema, dict | bool):
            raise InvalidError(FieldProblem(field, "a JSON Schema is an object, true or false"))
        self.field = field
        self.text = _encode(schema, field)
        if len(self.text) > max_bytes:
            raise InvalidError(
                FieldProblem(
                    field,
                    f"a schema has at most {max_bytes} bytes; this one has {len(self.text)}",
                    bound="schema",
                )
            )
        declared = (
            schema.get("$schema", DRAFT_2020_12) if isinstance(schema, dict) else DRAFT_2020_12
        )
        kind = _VALIDATORS.get(str(declared)[:_MAX_ERROR_CHARS].removesuffix("#"))
        if kind is None:
            raise InvalidError(
                FieldProblem(f"{field}.$schema", f"use {DRAFT_2020_12} or {DRAFT_07}#")
            )
        self.is_plain, self.weight, self._ns_per_byte = False, 0, 0
        self._measure: SchemaMeasure | None = None
        self._number_measure: SchemaMeasure | None = None
        self._unscanned_ns_per_byte = 0
        self._validator: Any = None
        if len(self.text) > _MAX_INLINE_BYTES and not compiled:
            return  # Measuring and compiling it takes too long here.
        try:
            measured = measure_schema(schema)
        except SchemaBoundError as exc:
            raise InvalidError(FieldProblem(field, str(exc), bound="schema")) from exc
        self.is_plain = measured.is_plain and len(self.text) <= _MAX_INLINE_BYTES
        self._measure, self.weight = measured, measured.weight
        if measured.number_ns:
            self._number_measure = measured
            self._unscanned_ns_per_byte = unscanned_ns_per_byte(
                measured.number_ns, measured.long_number_ns
            )
        self._ns_per_byte = measured.weight * CHECK_NS if self.is_plain else 0
        if compiled or self.is_plain:
            self._validator = _compile(kind, schema, field)
            if measured.divides_by_zero:
                raise InvalidError(FieldProblem(field, "has the multipleOf 0; use a larger factor"))

    def cost_ns(self, size: int) -> int | None:
        """Return an upper bound for `size` bytes, beside the costs for which `problems` asks.

        None: only the sandbox can bound it.
        """
        return self._ns_per_byte * size if self._ns_per_byte else None

    def problems(
        self,
        payload: bytes,
        at: str,
        spend: Callable[[float], bool] = lambda _: True,
        *,
        many: bool = False,
    ) -> list[FieldProblem] | None:
        """Return the problems of a JSON text, with places under `at`; empty if it is valid.

        `spend` takes a bound of the nanoseconds that the values of this payload cost, and returns
        False if that is too much. `many`: others were checked just before, and of further ones the
        first problem is enough. None: it takes too long here, and the sandbox must check it.
        """
        size, numbers = len(payload), None
        is_scanned = many or size >= SMALL_BYTES
        numbers_ns = 0 if is_scanned else self._unscanned_ns_per_byte * size
        if is_scanned or (self._number_measure is not None and not 0 < numbers_ns <= _ROUGH_NS):
            numbers = NumberScan(bytes(payload))  # msgspec.Raw has no methods of bytes.
            if not self._spend_on_decoding(numbers, spend):
                return None
        try:
            value = decode_small(payload) if numbers is None else numbers.decode()
        except (ValueError, RecursionError) as exc:
            return [FieldProblem(at, _shortened(str(exc)))]
        if numbers is not None:
            if not self._spend_on_numbers(numbers, spend, many=many):
                return None
        elif numbers_ns and not spend(numbers_ns):
            return None
        try:
            if self._validator.is_valid(value):
                return []
        except _FAILURES as exc:
            return [_cannot_validate(exc, at)]
        check_ns = self._check_ns(payload, numbers)
        return self._list_within(value, size, at, spend, check_ns, many=many)

    def _spend_on_decoding(self, numbers: NumberScan, spend: Callable[[float], bool]) -> bool:
        """Spend what it costs to decode scanned numbers. False: it is too much, or in vain."""
        if self._number_measure is not None and numbers.has_too_many:
            return False
        decode_ns = numbers.decode_ns
        return not decode_ns or spend(decode_ns)

    def _spend_on_numbers(
        self, numbers: NumberScan, spend: Callable[[float], bool], *, many: bool
    ) -> bool:
        """Spend what scanned numbers may cost. False: it is too much, or one is extreme."""
        measure = self._number_measure
        if measure is None:
            return True
        if not spend(numbers.search_ns) or numbers.find_extreme():
            return False
        return spend(measure.numbers_ns(numbers, 0 if many else _ROUGH_NS))

    def _list_within(
        self,
        value: object,
        size: int,
        at: str,
        spend: Callable[[float], bool],
        check_ns: float,
        *,
        many: bool,
    ) -> list[FieldProblem] | None:
        """List problems, of which each check of the value takes `check_ns` at most."""
        measure = self._measure
        if measure is None:
            return None
        listing_ns = self._listing_ns(value, size, _MAX_LISTED_NS)
        listing_ns += measure.listing_checks * check_ns
        if listing_ns > _MAX_LISTED_NS:
            return None
        if spend(listing_ns):
            return self._list_problems(value, at)
        first_ns = self._first_ns(size) + FIRST_CHECKS * check_ns
        if many and measure.makes_one and spend(first_ns):
            return self._list_first(value, at)
        return None

    def _check_ns(self, payload: bytes, numbers: NumberScan | None) -> float:
        """Return an upper bound of the time of one more check of a payload that was decoded."""
        size, measure = len(payload), self._number_measure
        numbers_ns = 0
        if measure is not None:
            if numbers is None:
                numbers = NumberScan(bytes(payload))
                is_bounded = not numbers.find_extreme()
            else:
                is_bounded = True
            # It was not scanned only if its bytes bound the time for any numbers, too.
            numbers_ns = (
                measure.numbers_ns(numbers, 0) if is_bounded else measure.long_number_ns * size
            )
        return self._ns_per_byte * size + numbers_ns

    def is_valid(self, value: object) -> bool:
        """Return whether a decoded value is valid."""
        fits: bool = self._validator.is_valid(value)
        return fits

    def list_problems(self, value: object, size: int, at: str) -> list[FieldProblem]:
        """Return up to 20 problems of a decoded value; only the first if there may be very many.

        `size`: bytes of its JSON text.
        """
        if (
            self.is_plain
            and self._listing_ns(value, size, _MAX_SANDBOX_LISTED_NS) <= _MAX_SANDBOX_LISTED_NS
        ):
            return self._list_problems(value, at)
        return self._list_first(value, at)

    def _first_ns(self, size: int) -> int:
        """Return an upper bound of the time to list the first problem of `size` bytes.

        It may quote all of the value, and of the schema. Checks come on top.
        """
        return _PROBLEM_NS + _QUOTE_NS * (size + len(self.text))

    def _listing_ns(self, value: object, size: int, most_ns: int) -> float:
        """Return an upper bound of the time to list the problems of a value of `size` bytes.

        It is not exact above `most_ns`. Checks come on top.
        """
        measure = self._measure
        if measure is None:
            return math.inf
        values, path_chars = _count_values(value, most_ns // (_PROBLEM_NS * measure.listed))
        problems = values * measure.listed
        return (
            problems * (_PROBLEM_NS + _PATH_NS * path_chars)
            # A value is quoted by its own problems, and so by those of each level above it once.
            + measure.listed * _QUOTE_NS * size
            # Each name of a property is reported with a copy of the object.
            + values * measure.listed_names * _QUOTE_NS * size
        )

    def _list_first(self, value: object, at: str) -> list[FieldProblem]:
        try:
            self._validator.validate(value)
        except jsonschema_rs.ValidationError as exc:
            return [FieldProblem(path_text(at, exc.instance_path), _shortened(exc.message))]
        except _FAILURES as exc:
            return [_cannot_validate(exc, at)]
        return []

    def _list_problems(self, value: object, at: str) -> list[FieldProblem]:
        try:
            return [
                FieldProblem(path_text(at, error.instance_path), _shortened(error.message))
                for error in itertools.islice(self._validator.iter_errors(value), _MAX_PROBLEMS)
            ]
        except _FAILURES as exc:
            return [_cannot_validate(exc, at)]


def _cannot_validate(error: Exception, at: str) -> FieldProblem:
    return FieldProblem(at, f"cannot be validated: {_shortened(str(error))}")


def _encode(schema: object, field: str) -> bytes:
    try:
        return msgspec.json.encode(schema)
    except (ValueError, OverflowError, RecursionError) as exc:
        raise InvalidError(FieldProblem(field, _shortened(str(exc)))) from exc


def _compile(kind: Any, schema: object, field: str) -> Any:
    try:
        # Offline: a schema must not cause requests or reads of files.
        return kind(schema, offline=True, pattern_options=_PATTERNS)
    except jsonschema_rs.ValidationError as exc:
        raise InvalidError(
            FieldProblem(path_text(field, exc.instance_path), _shortened(exc.message))
        ) from exc
    except (jsonschema_rs.ReferencingError, ValueError, RecursionError) as exc:
        raise InvalidError(FieldProblem(field, _shortened(str(exc)))) from exc


def _count_values(value: object, limit: int) -> tuple[int, int]:
    """Count the values in a decoded text, up to about `limit`, and the characters of a path.

    These are at most so many: those of the longest name of each level.
    """
    count, path_chars, level = 1, 0, [value]
    while level and count <= limit:
        names = [name for one in level if isinstance(one, dict) for name in one]
        path_chars += max(map(len, names), default=0)
        inside = [
            inner
            for one in level
            if isinstance(one, dict | list)
            for inner in itertools.islice(one.values() if isinstance(one, dict) else one, limit)
        ]
        count += len(inside)
        level = inside
    return count, path_chars


def _shortened(message: str) -> str:
    return message if len(message) <= _MAX_ERROR_CHARS else message[: _MAX_ERROR_CHARS - 1] + "…"
