"""The references of JSON Schemas: by anchors and identifiers they are counted, and to nothing they are refused."""

from typing import Any

import pytest

from rooms.errors import InvalidError
from rooms.publishing.json_schema import PayloadSchema
from rooms.publishing.schema_bounds import measure_schema
from rooms.publishing.schema_references import SchemaBoundError

NAMINGS: dict[str, tuple[str, str, str]] = {
    "anchor": ("$anchor", "a{}", "#a{}"),
    "id": ("$id", "urn:x:a{}", "urn:x:a{}"),
    "relative id": ("$id", "a{}", "https://example.com/a{}"),
    "percent-encoded id": ("$id", "urn:x:%61{}", "urn:x:a{}"),
    "id and pointer": ("$id", "urn:x:a{}", "urn:x:a{}#/$defs/body"),
    "id and anchor": ("$id", "urn:x:a{}", "urn:x:a{}#body{}"),
    "dynamic": ("$dynamicAnchor", "a{}", "#a{}"),
    "recursive": ("$id", "urn:x:a{}", "urn:x:a{}#/$defs/body"),
}


def doubling_by_names(kind: str, levels: int) -> dict[str, Any]:
    """A schema whose references by these names double at each level."""
    keyword, name, reference = NAMINGS[kind]
    follow = "$dynamicRef" if kind == "dynamic" else "$ref"
    named: dict[str, Any] = {}
    for number in range(levels + 1):
        twice = [{follow: reference.replace("{}", str(number + 1))} for _ in range(2)]
        body: dict[str, Any] = {"anyOf": twice} if number < levels else {"type": "string"}
        if kind == "recursive":
            resource = {"$schema": "https://json-schema.org/draft/2019-09/schema", **body}
            resource["$defs"] = {
                "body": {"anyOf": [{"$recursiveRef": "#"}, {"$recursiveRef": "#"}]}
            }
            body = resource
        elif kind == "id and pointer":
            body = {"$defs": {"body": body}}
        elif kind == "id and anchor":
            body = {"$defs": {"body": {"$anchor": f"body{number}", **body}}}
        named[f"a{number}"] = {keyword: name.replace("{}", str(number)), **body}
    start = reference.replace("{}", "0")
    return {"$id": "https://example.com/root", "$defs": named, follow: start}


@pytest.mark.parametrize("kind", NAMINGS)
def test_references_by_names_are_counted_and_refused(kind: str) -> None:
    with pytest.raises(InvalidError, match="unfolds to more than"):
        PayloadSchema(doubling_by_names(kind, 22))
    with pytest.raises(InvalidError, match="unfolds to more than"):
        PayloadSchema(doubling_by_names(kind, 22), compiled=True)
    accepted = PayloadSchema(doubling_by_names(kind, 4), compiled=True)
    assert not accepted.is_plain
    if kind != "recursive":
        assert [accepted.is_valid(value) for value in ("x", 1)] == [True, False]


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "https://example.com/other"},
        {"$ref": "#none"},
        {"$ref": "#/$defs/none"},
        {"$ref": "urn:x#/none", "$defs": {"x": {"$id": "urn:x"}}},
        {"$ref": "?x"},
        {"$ref": 1},
        {"$dynamicRef": "#none"},
        {"properties": {"a": {"items": {"$ref": "#none"}}}},
        {
            "$ref": "https://json-schema.org/draft/2020-12/schema",
            "$defs": {"x": {"$id": "https://json-schema.org/draft/2020-12/./schema"}},
            "allOf": [{"$ref": "https://json-schema.org/draft/2020-12/none"}],
        },
    ],
)
def test_a_reference_to_nothing_in_the_schema_is_refused(schema: Any) -> None:
    with pytest.raises(InvalidError, match=r"to nothing in the schema; put what it means under"):
        PayloadSchema(schema)


TEXT: Any = {"type": "string"}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#a", "$defs": {"x": {"$anchor": "a", **TEXT}}},
        {"$ref": "#/%24defs/x", "$defs": {"x": TEXT}},
        {"$ref": "urn:x:a", "$defs": {"x": {"$id": "urn:x:a", **TEXT}}},
        {"$id": "https://e.com/r/root", "$ref": "item", "$defs": {"x": {"$id": "item", **TEXT}}},
        {"$ref": "item", "$defs": {"x": {"$id": "item", **TEXT}}},
        {"$ref": "urn:a#/$defs/q", "$defs": {"x": {"$id": "urn:a", "$defs": {"q": TEXT}}}},
        {
            "$ref": "urn:a#q",
            "$defs": {"x": {"$id": "urn:a", "$defs": {"q": {"$anchor": "q", **TEXT}}}},
        },
        {
            "$ref": "urn:a",
            "$defs": {"x": {"$id": "urn:a", "$ref": "#/$defs/q", "$defs": {"q": TEXT}}},
        },
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "allOf": [{"$ref": "#a"}],
            "definitions": {"x": {"$id": "#a", **TEXT}},
        },
        {"$dynamicRef": "#n", "$defs": {"x": {"$dynamicAnchor": "n", **TEXT}}},
        {"$dynamicRef": "#/$defs/x", "$defs": {"x": TEXT}},
        {"$ref": "urn:q", "$defs": {"x": {"$id": "urn:q#", **TEXT}}},
        {
            "$id": "https://e.com/a/b",
            "$ref": "https://E.com/a/../a/c",
            "$defs": {"x": {"$id": "c", **TEXT}},
        },
        {"$ref": "https://json-schema.org/draft/2020-12/meta/core#/$defs/uriString", **TEXT},
        {**TEXT, "$defs": {"unused": {"$ref": "#none"}}},
    ],
)
def test_references_within_the_schema_go_on_working(schema: Any) -> None:
    found = PayloadSchema(schema, compiled=True)
    assert [found.is_valid(value) for value in ("x", 1)] == [True, False]


def test_references_with_many_meanings_are_bounded() -> None:
    parts = [{"$id": f"urn:{number}:x"} for number in range(400)]
    references = [{"$ref": f"urn:{number}:x"} for number in range(400)]
    with pytest.raises(SchemaBoundError, match="too many references"):
        measure_schema({"$defs": {"x": {"prefixItems": parts}}, "allOf": references})


def test_long_pointers_into_many_resources_are_bounded() -> None:
    """Each of the references is looked up in all 93 resources around it, at 40 steps each."""
    schema: dict[str, Any] = {"anyOf": [{"$ref": "#" + "/a" * 40} for _ in range(310)]}
    for _ in range(93):
        schema = {"$id": "a", "a": schema}
    schema["allOf"] = [{"$ref": "#" + "/a" * 93}]
    with pytest.raises(SchemaBoundError, match="too many references"):
        measure_schema(schema)


def test_many_references_that_mean_one_part_each_are_not_bounded_so() -> None:
    references = [{"$ref": "#/$defs/a/b/c/d"} for _ in range(20_000)]
    schema = {"$defs": {"a": {"b": {"c": {"d": TEXT}}}}, "allOf": references}
    assert measure_schema(schema).unfolded == 40_001


DRAFT_07 = "http://json-schema.org/draft-07/schema#"
DRAFT_2019_09 = "https://json-schema.org/draft/2019-09/schema"
DRAFT_2020_12 = "https://json-schema.org/draft/2020-12/schema"


@pytest.mark.parametrize(
    "schema",
    [
        {"$schema": DRAFT_07, "$dynamicRef": "foo", **TEXT},
        {"$schema": DRAFT_07, "$recursiveRef": 1, **TEXT},
        {"$schema": DRAFT_2020_12, "$recursiveRef": "x", **TEXT},
        {"$recursiveRef": "x", **TEXT},
    ],
)
def test_a_keyword_that_the_draft_ignores_may_mean_nothing(schema: Any) -> None:
    found = PayloadSchema(schema, compiled=True)
    assert [found.is_valid(value) for value in ("x", 1)] == [True, False]


@pytest.mark.parametrize(
    ("draft", "keyword", "inner"),
    [
        (DRAFT_07, "$dynamicRef", DRAFT_2020_12),
        (DRAFT_07, "$recursiveRef", DRAFT_2019_09),
        (DRAFT_2020_12, "$recursiveRef", DRAFT_2019_09),
        (DRAFT_2020_12, "$recursiveRef", "urn:unknown"),
    ],
)
def test_a_part_of_another_draft_may_use_its_keywords(draft: str, keyword: str, inner: str) -> None:
    part = {"$id": "urn:a", "$schema": inner, keyword: "x"}
    with pytest.raises(InvalidError, match="to nothing in the schema"):
        PayloadSchema({"$schema": draft, "properties": {"a": part}})
