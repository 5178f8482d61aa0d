"""Test that the pages of docs/reference match the code."""

from rooms.settings import read_settings
from tests.support.reference import openapi, stale, variables


def test_no_page_is_stale() -> None:
    assert stale() == [], "run `make docs`, or: python -m tests.support.reference"


def test_the_settings_page_has_every_field() -> None:
    fields = {variable.field for variable in variables()}
    settings = read_settings({})
    assert fields - {"listen"} == set(settings.__slots__) - {"listen_host", "listen_port"}


def test_the_api_page_covers_delivery_too() -> None:
    paths = openapi()["paths"]
    assert {"/v1/rooms", "/v1/queues", "/v1/status", "/health/ready"} <= set(paths)
