"""Test that the pages of docs/reference match the code."""

from collections.abc import Iterator, Mapping
from typing import Any

from rooms.settings import read_settings
from tests.support.reference import api_page, openapi, stale, variables


def test_no_page_is_stale() -> None:
    assert stale() == [], "run `make docs`, or: python -m tests.support.reference"


def test_the_settings_page_has_every_field() -> None:
    fields = {variable.field for variable in variables()}
    settings = read_settings({})
    assert fields - {"listen"} == set(settings.__slots__) - {"listen_host", "listen_port"}


def test_the_api_page_covers_delivery_too() -> None:
    paths = openapi()["paths"]
    assert {"/v1/rooms", "/v1/queues", "/v1/status", "/health/ready"} <= set(paths)


def test_the_api_page_has_every_field_of_every_body() -> None:
    """Also where the body or the object around a field may be null."""
    sections = {part.partition("\n")[0]: part for part in api_page().split("\n### ")}
    for action in ("shovel", "purge"):
        section = sections[f"POST /v1/subscriptions/{{subscription_id}}/sideline/{action}"]
        assert "| `ordering_keys` | array of string or null |" in section
        assert "| `business_keys` | array of string or null |" in section
    assert "| `selector.event_types` |" in sections["POST /v1/subscriptions/{subscription_id}/pull"]
    batch = sections["POST /v1/rooms/{room_id}/messages/batch"]
    assert "| `messages[].ordering_key` |" in batch
    for path, item in openapi()["paths"].items():
        for method, operation in item.items():
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            missing = [
                name
                for name in _names(body.get("schema", {}))
                if f"`{name}`" not in sections[f"{method.upper()} {path}"]
            ]
            assert not missing, f"{method} {path}: {missing}"


def _names(schema: Mapping[str, Any]) -> Iterator[str]:
    for part in (*schema.get("oneOf", ()), *schema.get("anyOf", ())):
        yield from _names(part)
    yield from schema.get("properties", {})
