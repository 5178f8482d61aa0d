"""Check what docs/compatibility.md says of routes and fields against the API itself."""

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

from litestar.handlers import HTTPRouteHandler

from rooms.api.app import create_app
from rooms.api.deps import ApiServices
from rooms.settings import read_settings
from tests.support.markdown import spans, table_rows
from tests.support.service import ROOT

PAGE = (ROOT / "docs" / "compatibility.md").read_text()
_ROUTE = re.compile(r"(?:(GET|POST|PUT|PATCH|DELETE) )?(/[a-z0-9/{}_.]+)", re.IGNORECASE)
_MISSING = re.compile(r"\bnot implemented\b|\bnot served\b|\ball but\b|\bexcept\b", re.IGNORECASE)
_EXCEPTED = re.compile(rf"(?:{_MISSING.pattern})[\s*:]*`[^`]+`", re.IGNORECASE)
_MEMBER = "/{}/{}/{}"
"""A member id in a route: three parts, of which the first implementation makes one."""


def anonymous(path: str) -> str:
    """Return the path with the names of its parameters left out."""
    return re.sub(r"\{[^}]*\}", "{}", path.replace("/{memberId}", _MEMBER))


def served() -> set[tuple[str, str]]:
    services = cast("ApiServices", SimpleNamespace(settings=read_settings({})))
    return {
        (method, anonymous(path))
        for route in create_app(services).routes
        for handler in getattr(route, "route_handlers", ())
        if isinstance(handler, HTTPRouteHandler)
        for path in [route.path]
        for method in handler.http_methods
    }


def function_rows() -> Iterator[list[str]]:
    """Yield the rows that have a number: row, function, Rooms, tests."""
    for _, cells in table_rows(PAGE):
        if re.fullmatch(r"[A-F]\d*", cells[0]):
            yield cells


def test_a_row_names_routes_that_are_served_and_no_served_one_as_missing() -> None:
    methods = served()
    paths = {path for _, path in methods}
    wrong = []
    for row, *cells in function_rows():
        missing = _MISSING.search(cells[1]) is not None
        for _, text in spans(" | ".join(cells)):
            if found := _ROUTE.fullmatch(text):
                method, path = found[1], anonymous(found[2])
                is_served = (method, path) in methods if method else path in paths
                if is_served == missing:
                    wrong.append(f"{row}: {text}")
    assert wrong == []


def test_a_row_that_denies_something_names_it_as_code() -> None:
    """Only a route or field in backticks can be looked up; a phrase outlives the change."""
    vague = [
        row
        for row, _, rooms, _ in function_rows()
        if _MISSING.search(rooms) and not _EXCEPTED.search(rooms)
    ]
    assert vague == []


def test_every_row_names_a_test() -> None:
    assert [row for row, *_, tests in function_rows() if "`tests/" not in tests] == []
