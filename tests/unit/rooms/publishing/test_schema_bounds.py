"""Bounds of schemas: what is refused, what is checked inline, and what only the sandbox may run."""

import json
from typing import Any

import pytest

from rooms.errors import FieldProblem, InvalidError
from rooms.publishing.json_schema import DRAFT_07, PayloadSchema
from rooms.publishing.regex_bounds import MAX_WEIGHT, pattern_weight
from rooms.publishing.schema_bounds import MAX_UNFOLDED, measure_schema
from rooms.publishing.schema_references import MAX_DEPTH, SchemaBoundError


def doubling(levels: int, word: str = "anyOf", under: str = "$defs") -> dict[str, Any]:
    """A schema whose references double at each level."""
    named: dict[str, Any] = {
        f"a{number}": {word: [{"$ref": f"#/{under}/a{number + 1}"}] * 2} for number in range(levels)
    }
    return {under: {**named, f"a{levels}": {"type": "string"}}, "$ref": f"#/{under}/a0"}


def nested(levels: int) -> Any:
    found: Any = True
    for _ in range(levels):
        found = {"items": found}
    return found


@pytest.mark.parametrize("word", ["anyOf", "oneOf", "allOf"])
@pytest.mark.parametrize("under", ["$defs", "definitions", "odd"])
def test_references_that_multiply_are_counted_and_refused(word: str, under: str) -> None:
    bomb = doubling(22, word, under)
    assert len(json.dumps(bomb)) < 2500
    with pytest.raises(InvalidError, match="unfolds to more than"):
        PayloadSchema(bomb)


def test_the_unfolded_size_counts_each_use() -> None:
    """Each level is two references, and each of these stands for the whole level below."""
    sizes = [measure_schema(doubling(levels)).unfolded for levels in (0, 1, 2, 3)]
    assert sizes == [2, 6, 14, 30]
    assert measure_schema(doubling(14)).unfolded < MAX_UNFOLDED


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        (nested(MAX_DEPTH + 2), "nested more than"),
        ({"const": json.loads("[" * 150 + "]" * 150)}, "nested more than"),
        (
            {
                "$defs": {f"a{n}": {"$ref": f"#/$defs/a{n + 1}"} for n in range(500)},
                "$ref": "#/$defs/a0",
            },
            "unfolded",
        ),
    ],
)
def test_what_is_too_deep_is_refused(schema: Any, why: str) -> None:
    with pytest.raises(SchemaBoundError, match=why):
        measure_schema(schema)


def test_a_schema_of_too_many_bytes_is_refused() -> None:
    with pytest.raises(InvalidError, match="at most 100 bytes"):
        PayloadSchema({"description": "x" * 100}, max_bytes=100)


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/b"}},
            "$defs": {"b": {"enum": [1, 2]}},
        },
        {
            "$id": "https://example.com/x",
            "properties": {"a": {"$ref": "#/$defs/b"}},
            "$defs": {"b": True},
        },
        {"pattern": "^[A-Z]{3}-[0-9]{1,6}$", "format": "date-time"},
        {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/a~1b"}], "$defs": {"a/b": {"minLength": 1}}},
        {"if": {"required": ["a"]}, "then": {"maxProperties": 3}, "uniqueItems": False},
        doubling(5),
    ],
)
def test_a_plain_schema_is_checked_inline(schema: Any) -> None:
    found = PayloadSchema(schema)
    assert found.is_plain
    assert (found.cost_ns(100) or 0) > 0


@pytest.mark.parametrize(
    "schema",
    [
        {"items": {"$ref": "#"}},
        {
            "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}]}, "b": {"not": {"$ref": "#/$defs/a"}}},
            "$ref": "#/$defs/a",
        },
        {"$dynamicAnchor": "x", "items": {"$dynamicRef": "#x"}},
        {"$anchor": "x", "properties": {"a": {"$ref": "#x"}}},
        {
            "$defs": {"a": {"$id": "urn:a", "properties": {"x": {"$ref": "#"}}}},
            "$ref": "#/$defs/a/properties/x",
        },
        {"$ref": "#/$defs/%61", "$defs": {"a": True}},
        {"uniqueItems": True},
        {"pattern": "(a+)+\\1"},
        {"pattern": "(?=(a+)+)b"},
        {"pattern": "(a{500}){500}"},
        {"patternProperties": {"(?<!x)y": True}},
        {"unevaluatedProperties": False},
        {"dependentSchemas": {"a": {"type": "object"}}},
        {"format": "regex"},
        {"odd": {"x": {"type": "object"}}, "$ref": "#/odd/x"},
        {"enum": ["x" * 100] * 400},
    ],
)
def test_what_may_cost_more_than_its_payload_is_never_run_inline(schema: Any) -> None:
    found = PayloadSchema(schema)
    assert not found.is_plain
    assert found.cost_ns(1) is None


def test_the_weight_counts_what_one_value_is_checked_by() -> None:
    """Alternatives add up, properties of different names do not."""
    alternatives = PayloadSchema({"items": {"anyOf": [{"type": "string"}] * 50}})
    properties = PayloadSchema(
        {"properties": {f"p{number}": {"type": "string"} for number in range(50)}}
    )
    assert alternatives.weight > 50
    assert properties.weight < 10


@pytest.mark.parametrize("nest", [300, 600, 900])
def test_a_payload_nested_too_deeply_to_be_validated_is_a_problem(nest: int) -> None:
    schema = {"type": "array", "$defs": {"a": {"$ref": "#"}}}
    found = PayloadSchema(schema, compiled=True).problems(b"[" * nest + b"]" * nest, "payload")
    assert found is None or all(problem.field.startswith("payload") for problem in found)


NAMES = [f"{number:x}" for number in range(4000)]


@pytest.mark.parametrize(
    ("schema", "payload"),
    [
        ({"items": {"required": NAMES}}, [{}] * 150),
        ({"required": NAMES}, {}),
        ({"anyOf": [{"required": NAMES[:2000]}] * 2}, {}),
        (
            {"items": {"anyOf": [{"$ref": "#/$defs/a"}] * 20}, "$defs": {"a": {"required": NAMES}}},
            [{}],
        ),
        ({"items": {"const": "x" * 30_000}}, [1] * 300),
        ({"items": {"enum": ["x" * 30_000]}}, [1] * 300),
        ({"items": {"required": ["x" * 30_000]}}, [{}] * 300),
        ({"items": {"const": [[]] * 8000}}, [1] * 100),
        ({"items": {"not": {"description": "x" * 30_000}}}, [1] * 300),
        (
            {
                "$defs": {"n" * 12_000: {"type": "string"}},
                "items": {"$ref": "#/$defs/" + "n" * 12_000},
            },
            [1] * 300,
        ),
        ({"propertyNames": {"maxLength": 1}}, {f"key {number}": "x" for number in range(450)}),
        (
            {"additionalProperties": {"items": {"type": "string"}}},
            {"k" * 30_000: [1] * 300},
        ),
    ],
)
def test_problems_that_are_many_or_quote_much_are_not_listed_inline(
    schema: Any, payload: Any
) -> None:
    found = PayloadSchema(schema)
    assert found.is_plain
    text = json.dumps(payload).encode()
    assert (found.cost_ns(len(text)) or 0) < 10_000_000
    assert found.problems(text, "payload") is None


def test_the_first_problem_is_found_where_there_are_very_many() -> None:
    schema = PayloadSchema({"items": {"required": NAMES}}, compiled=True)
    found = schema.list_problems([{}] * 150, 451, "payload")
    assert [problem.field for problem in found] == ["payload[0]"]


def test_the_problems_of_an_ordinary_message_are_listed_inline() -> None:
    fields = [f"field_{number}" for number in range(30)]
    schema = PayloadSchema(
        {
            "type": "object",
            "required": fields,
            "properties": {
                "amount": {"type": "number", "minimum": 0, "multipleOf": 0.01},
                "state": {"enum": ["new", "paid", "sent"]},
                **{name: {"type": "string", "maxLength": 100} for name in fields},
            },
            "additionalProperties": False,
        }
    )
    payload = {"amount": -1.234, "state": "odd", "other": 1, **dict.fromkeys(fields[:15], "text")}
    found = schema.problems(json.dumps(payload).encode(), "payload")
    assert found is not None
    assert len(found) == 19


class Budget:
    """Have enough for everything."""

    def __init__(self) -> None:
        self.spent_ns: float = 0

    def spend(self, cost_ns: float) -> bool:
        self.spent_ns += cost_ns
        return True


def test_the_problems_of_a_large_order_are_listed_in_the_sandbox() -> None:
    """Check that the bound is not so high that only the first problem is named."""
    fields = {
        "sku": {"type": "string", "minLength": 1, "maxLength": 40, "pattern": "^[A-Z]+$"},
        "count": {"type": "integer", "minimum": 1, "maximum": 1000},
        "note": {"type": ["string", "null"], "maxLength": 200},
    }
    item = {"type": "object", "required": list(fields), "properties": fields}
    schema = PayloadSchema(
        {"type": "object", "properties": {"items": {"type": "array", "items": item}}}
    )
    order = {"items": [{"sku": "a", "count": 0, "note": "x" * 90} for _ in range(100)]}
    text = json.dumps(order).encode()
    assert len(text) > 10_000
    assert len(schema.list_problems(order, len(text), "payload")) == 20


def test_the_time_to_list_problems_is_taken_from_the_budget() -> None:
    schema = PayloadSchema({"required": NAMES[:300]})
    budget = Budget()
    found = schema.problems(b"{}", "payload", budget.spend)
    assert len(found or ()) == 20
    assert budget.spent_ns > 1_000_000
    assert schema.problems(b"{}", "payload", lambda _: False) is None


def within(keyword: str, levels: int, schema: Any) -> Any:
    """Return a schema within a keyword for schemas, so many times."""
    for _ in range(levels):
        schema = {keyword: [schema]}
    return schema


@pytest.mark.parametrize("keyword", ["anyOf", "oneOf"])
@pytest.mark.parametrize(
    ("schema", "payload"),
    [
        ({"enum": [number + 0.1 for number in range(450)]}, b"0.12345"),
        ({"allOf": [{"multipleOf": 0.1 + number / 1000} for number in range(300)]}, b"0.12345"),
        ({"pattern": "^[a-z]{100}[0-9]{30}x"}, b'"' + b"abcdefghij" * 25 + b'"'),
    ],
)
def test_the_checks_of_each_level_are_taken_from_the_budget(
    keyword: str, schema: Any, payload: bytes
) -> None:
    """To list the problems of 40 levels, the library checks what is in them 40 times."""
    found = PayloadSchema(within(keyword, 40, schema))
    assert found.is_plain
    budget = Budget()
    assert found.problems(payload, "payload", budget.spend) is None
    once = PayloadSchema(schema)
    assert once.problems(payload, "payload", budget.spend)
    flat = PayloadSchema(within("allOf", 40, schema))
    assert flat.problems(payload, "payload", budget.spend)


def test_a_further_message_of_a_batch_pays_for_the_checks_of_each_level() -> None:
    numbers = {"enum": [number + 0.1 for number in range(110)]}
    spent: list[float] = []

    def spend(cost_ns: float) -> bool:
        spent.append(cost_ns)
        return cost_ns <= 1_000_000

    schema = PayloadSchema(within("oneOf", 47, numbers))
    assert schema.problems(b"0.12345", "payload", spend, many=True) is None
    assert PayloadSchema(numbers).problems(b"0.12345", "payload", lambda _: True, many=True)


def test_the_first_problem_of_a_further_message_costs_its_checks() -> None:
    """The value is compared with all numbers twice more, though the list is too long."""
    numbers = [number + 0.1 for number in range(100)]
    schema = PayloadSchema({"enum": numbers, "required": NAMES[:1000]})
    spent: list[float] = []

    def spend(cost_ns: float) -> bool:
        spent.append(cost_ns)
        return cost_ns <= 2_500_000

    found = schema.problems(b"0.12345", "payload", spend, many=True)
    assert found is not None
    assert len(found) == 1
    assert spent[-1] >= 2 * 7_000 * len(numbers)


@pytest.mark.parametrize(
    ("schema", "number"),
    [
        ({"multipleOf": 0.1}, "1e300"),
        ({"multipleOf": 3}, "1e300"),
        ({"multipleOf": 0.1}, "9" * 4000),
        ({"multipleOf": 0.01}, "-1.5E+30"),
        ({"minimum": 0.1}, "1e-300"),
        ({"exclusiveMaximum": 7}, "9" * 4000),
        ({"const": 0.1}, "1e-300"),
        ({"enum": [[{"a": 1}]]}, "1e300"),
    ],
)
@pytest.mark.parametrize("place", ["{}", "[{}]", "[1,{}]", '{{"a" : {}}}', "[\n{}]"])
def test_extreme_numbers_are_not_compared_inline(schema: Any, number: str, place: str) -> None:
    found = PayloadSchema({"anyOf": [schema, True]})
    assert found.problems(place.format("123.45").encode(), "payload") == []
    assert found.problems(place.format(number).encode(), "payload") is None


@pytest.mark.parametrize(
    "schema",
    [
        {"multipleOf": 1e-308},
        {"multipleOf": 1e308},
        {"minimum": 1e-308},
        {"const": 1e-300},
        {"enum": [1, [{"a": 1e300}]]},
    ],
)
def test_a_schema_with_extreme_numbers_is_not_plain(schema: Any) -> None:
    assert not PayloadSchema({"items": schema}).is_plain


@pytest.mark.parametrize(
    ("schema", "number_ns"),
    [
        ({"multipleOf": 0.01}, 1000),
        ({"minimum": -(2**63), "maximum": 2**63 - 1}, 300),
        ({"maximum": 1.7976931348623157e308}, 1000),
        ({"const": 0}, 1000),
        ({"enum": [True, 1, 2.5]}, 1000),
    ],
)
def test_comparisons_of_numbers_are_taken_from_the_budget(schema: Any, number_ns: int) -> None:
    found = PayloadSchema({"anyOf": [{"items": schema}, True]})
    budget = Budget()
    text = b"[" + b"1," * 999 + b'"3f2b4e55-9a7d-4e55", 1.5e9]'
    assert found.problems(text, "payload", budget.spend) == []
    assert budget.spent_ns >= number_ns * 1000
    assert found.problems(text, "payload", lambda _: False) is None


@pytest.mark.parametrize("factor", [0, 0.0, -0.0])
@pytest.mark.parametrize(
    "schema",
    [
        {"$schema": DRAFT_07, "$defs": {"x": {}}, "$ref": "#/$defs/x"},
        {"$schema": DRAFT_07, "$defs": {"x": {}}, "items": {"$ref": "#/$defs/x"}},
        {"$defs": {"x": {}}, "$ref": "#/$defs/x"},
        {"x": {}, "$ref": "#/x"},
    ],
)
def test_a_factor_of_zero_is_refused_wherever_a_schema_is(schema: Any, factor: float) -> None:
    """A draft refuses it only where it expects schemas, and the library panics as it divides."""
    text = json.dumps(schema).replace('"x": {}', f'"x": {{"multipleOf": {factor}}}')
    with pytest.raises(InvalidError, match="multipleOf"):
        PayloadSchema(json.loads(text), compiled=True)


def test_a_failure_of_the_library_is_a_problem_of_the_payload() -> None:
    class Failing:
        def is_valid(self, _: object) -> bool:
            raise RuntimeError("Validation panicked")

    schema = PayloadSchema({"type": "integer"})
    schema._validator = Failing()  # no known schema makes the library fail
    assert schema.problems(b"1", "payload") == [
        FieldProblem("payload", "cannot be validated: Validation panicked")
    ]


def test_strings_are_compared_without_a_cost_for_numbers() -> None:
    schema = PayloadSchema({"items": {"enum": ["a", "b"], "minLength": 1}})
    assert schema.problems(b'["a"]', "payload", lambda _: False) == []


def test_problems_of_many_values_are_not_listed_inline() -> None:
    schema = PayloadSchema({"items": {"anyOf": [{"type": "string"}] * 50}})
    assert schema.problems(json.dumps([1] * 1000).encode(), "payload") is None
    assert (
        len(
            PayloadSchema({"items": {"type": "string"}}).problems(
                b"[" + b"1," * 50 + b"1]", "payload"
            )
            or ()
        )
        == 20
    )


@pytest.mark.parametrize(
    ("pattern", "low", "high"),
    [
        ("abc", 3, 6), ("^[A-Z]{3}$", 3, 30), ("(a{100}){100}", 10_000, 100_000), ("a{1000}{1000}{1000}{1000}", MAX_WEIGHT, MAX_WEIGHT),
        ("[]{900}]", 1, 30), ("\\{900}", 1, 10), ("x|y*", 2, 12), ("(", 1, 5), (")))", 1, 5), ("[", 1, 20), ("\\", 1, 5),
        ("(?i)\\pL{50}", 50_000, MAX_WEIGHT), ("", 1, 1), ("((((a{10}){10}){10}){10})", 10_000, 100_000),
    ],
)  # fmt: skip
def test_the_weight_of_a_pattern_bounds_its_states(pattern: str, low: int, high: int) -> None:
    assert low <= pattern_weight(pattern) <= high
