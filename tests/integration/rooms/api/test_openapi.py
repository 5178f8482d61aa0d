"""Test that the OpenAPI document is complete, valid, and readable without external files."""

import re
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest

from tests.integration.rooms.api.conftest import Api

PROBLEMS = {"400", "401", "403", "404", "413", "422", "429", "503"}


@pytest.fixture
async def document(api: Api) -> dict[str, Any]:
    answer = await api.http.get("/schema/openapi.json")
    assert answer.status_code == 200
    found: dict[str, Any] = answer.json()
    return found


async def test_every_route_documents_every_problem(document: dict[str, Any]) -> None:
    assert document["openapi"].startswith("3.1")
    for path, item in document["paths"].items():
        for method, operation in item.items():
            assert operation["summary"], (method, path)
            assert operation["tags"], (method, path)
            if path.startswith("/v1"):
                reported = {
                    status
                    for status, answer in operation["responses"].items()
                    if list(answer.get("content", {})) == ["application/problem+json"]
                }
                assert reported >= PROBLEMS, (method, path)
                assert {
                    status for status in operation["responses"] if status >= "400"
                } == reported, (
                    method,
                    path,
                )


async def test_operations_have_names_of_their_own(document: dict[str, Any]) -> None:
    names = [
        operation["operationId"]
        for item in document["paths"].values()
        for operation in item.values()
    ]
    assert len(names) == len(set(names))


async def test_schemas_are_schemas_and_references_lead_somewhere(document: dict[str, Any]) -> None:
    def walk(value: Any) -> None:
        match value:
            case {"$ref": str(reference)}:
                assert (
                    reference.removeprefix("#/components/schemas/")
                    in document["components"]["schemas"]
                )
            case dict():
                for inner in value.values():
                    walk(inner)
            case list():
                for inner in value:
                    walk(inner)

    walk(document)
    for item in document["paths"].values():
        for operation in item.values():
            for content in operation.get("requestBody", {}).get("content", {}).values():
                jsonschema_rs.meta.validate(content["schema"])


async def test_bodies_are_documented_as_strictly_as_they_are_checked(
    document: dict[str, Any],
) -> None:
    body = document["paths"]["/v1/rooms/{room_id}/subscriptions"]["post"]["requestBody"]
    schema = jsonschema_rs.validator_for(body["content"]["application/json"]["schema"])
    right: dict[str, Any] = {"name": "s", "type": "PUSH", "push_url": "https://example.com"}
    assert schema.is_valid(right)
    changes: list[dict[str, Any]] = [
        {"name": "a b"},
        {"type": "push"},
        {"more": 1},
        {"timeout_ms": 99},
        {"event_types": []},
        {"event_types": [{"name": "x", "versions": [0]}]},
        {"terminal_statuses": [600]},
    ]
    for wrong in changes:
        assert not schema.is_valid(right | wrong), wrong


def unbounded_lists(schema: Any, place: str) -> Iterator[str]:
    """Yield the places of lists and mappings in a schema that may have any number of items."""
    if isinstance(schema, list):
        for one in schema:
            yield from unbounded_lists(one, place)
    if not isinstance(schema, dict):
        return
    if schema.get("type") == "array" and "maxItems" not in schema:
        yield place
    if isinstance(schema.get("additionalProperties"), dict) and "maxProperties" not in schema:
        yield place
    for name, inner in schema.items():
        if name == "properties":
            for field, found in inner.items():
                yield from unbounded_lists(found, f"{place}.{field}")
        else:
            yield from unbounded_lists(inner, place)


async def test_every_list_that_a_request_takes_has_a_most(document: dict[str, Any]) -> None:
    """A list without one may have as many items as a body has bytes, each an object."""
    unbounded = {
        place
        for path, item in document["paths"].items()
        for method, operation in item.items()
        for content in operation.get("requestBody", {}).get("content", {}).values()
        for place in unbounded_lists(content["schema"], f"{method} {path}")
    }
    # Its messages are counted before they are decoded, and their most is a setting.
    assert unbounded == {"post /v1/rooms/{room_id}/messages/batch.messages"}


async def test_the_page_loads_no_external_files(api: Api, document: dict[str, Any]) -> None:
    answer = await api.http.get("/schema")
    assert answer.headers["content-type"].startswith("text/html")
    assert not re.search(r"(?:src|href)=['\"](?:https?:)?//", answer.text)
    assert "<script" not in answer.text
    for path, item in document["paths"].items():
        assert path in answer.text
        for operation in item.values():
            assert f"id='{operation['operationId']}'" in answer.text
