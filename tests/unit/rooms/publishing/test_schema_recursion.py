"""Schemas that refer to themselves, or only seem to: what is combined for one value is bounded."""

from typing import Any

import pytest

from rooms.errors import InvalidError
from rooms.publishing.json_schema import PayloadSchema

SAME_NAMES = "same names"
PROPERTIES = "properties"


def tenfold(levels: int, way_back: str) -> dict[str, Any]:
    """A schema each of whose levels is ten times the next, and refers back to the last."""
    named: dict[str, Any] = {}
    for number in range(1, levels + 1):
        level = named[f"A{number}"] = {}
        if way_back == SAME_NAMES:
            level |= {"$id": f"a{number}", "$anchor": f"n{number}"}
            named[f"T{number}"] = {"$id": f"t{number}", "$anchor": f"n{number}"}
        if number < levels:
            level["allOf"] = [{"$ref": f"#/$defs/A{number + 1}"} for _ in range(10)]
            if way_back == SAME_NAMES:
                level["allOf"] = [{"$ref": f"a{number + 1}"} for _ in range(10)]
        if number > 1 and way_back == SAME_NAMES:
            level["not"] = {"not": {"$ref": f"t{number - 1}#n{number - 1}"}}
        elif number > 1:
            level["properties"] = {"next": {"$ref": f"#/$defs/A{number - 1}"}}
    if way_back == SAME_NAMES:
        return {"allOf": [{"$ref": f"a{levels}"}, {"$ref": "a1"}], "$defs": named}
    first = {"properties": {"first": {"$ref": f"#/$defs/A{levels}"}}}
    return {"allOf": [first, {"$ref": "#/$defs/A1"}], "$defs": named}


@pytest.mark.parametrize("levels", [7, 12])
@pytest.mark.parametrize("way_back", [SAME_NAMES, PROPERTIES])
def test_a_reference_back_hides_nothing_of_what_one_value_costs(way_back: str, levels: int) -> None:
    with pytest.raises(InvalidError, match="references multiply") as caught:
        PayloadSchema(tenfold(levels, way_back))
    assert [problem.bound for problem in caught.value.problems] == ["schema"]


@pytest.mark.parametrize("way_back", [SAME_NAMES, PROPERTIES])
def test_what_multiplies_little_is_accepted(way_back: str) -> None:
    found = PayloadSchema(tenfold(3, way_back), compiled=True)
    assert found.is_valid({})


def test_a_tenfold_schema_below_properties_is_refused_too() -> None:
    schema = {"properties": {"a": {"items": tenfold(7, PROPERTIES)}}}
    schema["$defs"] = schema["properties"]["a"]["items"].pop("$defs")
    with pytest.raises(InvalidError, match="references multiply"):
        PayloadSchema(schema)


def test_a_grammar_of_many_types_that_contain_each_other_is_accepted() -> None:
    """Each of 100 types is one of all the others in a list, as in a syntax tree."""
    names = [f"t{number}" for number in range(100)]
    types = {
        name: {
            "type": "object",
            "properties": {"kind": {"const": name}, "of": {"$ref": "#/$defs/any"}},
        }
        for name in names
    }
    schema = {
        "$defs": {**types, "any": {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in names]}},
        "type": "array",
        "items": {"$ref": "#/$defs/any"},
    }
    found = PayloadSchema(schema, compiled=True)
    assert found.is_valid([{"kind": "t1", "of": {"kind": "t2"}}])
    assert not found.is_valid([{"kind": "t1", "of": {"kind": "none"}}])


def test_a_tree_in_a_resource_of_its_own_is_accepted() -> None:
    tree = {"$id": "tree", "type": "object", "properties": {"in": {"items": {"$ref": "#"}}}}
    found = PayloadSchema({"$ref": "tree", "$defs": {"tree": tree}}, compiled=True)
    assert found.is_valid({"in": [{"in": []}]})
    assert not found.is_valid({"in": [1]})
