"""Check what rooms assumes of the internals of other packages, so that an upgrade fails here first and by name."""

import ast
import inspect
import textwrap

import pytest
from litestar.dto import AbstractDTO
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rooms.api.codec import Body
from rooms.api.server.fast_protocol import FastProtocol
from rooms.api.server.uvicorn_internals import ASSUMED, PARSER_METHODS
from rooms.api.server.uvicorn_server import BoundedServer
from rooms.api.server.websocket import WebSocket
from tests.support.assumed_names import is_self, names_of, parameters

MODULE = "rooms/api/server/uvicorn_internals.py"


@pytest.mark.parametrize("kind", ASSUMED, ids=lambda kind: kind.__name__)
def test_uvicorn_has_the_names_that_subclasses_use(kind: type) -> None:
    missing = ASSUMED[kind] - names_of(kind)
    assert not missing, (
        f"uvicorn's {kind.__name__} has no {', '.join(sorted(missing))} any more: adapt {MODULE}"
    )


@pytest.mark.parametrize(
    "kind", [FastProtocol, BoundedServer, WebSocket], ids=lambda kind: kind.__name__
)
def test_overridden_methods_of_uvicorn_take_the_same_arguments(kind: type) -> None:
    (base,) = (parent for parent in kind.__mro__ if parent in ASSUMED)
    for name in ASSUMED[base]:
        ours, theirs = vars(kind).get(name), getattr(base, name, None)
        if callable(ours) and callable(theirs):
            assert parameters(ours) == parameters(theirs), (
                f"uvicorn's {base.__name__}.{name} takes other arguments: adapt {kind.__module__}"
            )


def test_uvicorn_asks_its_parser_only_what_the_head_answers() -> None:
    """`data_received` is overridden, and `__init__` only makes the parser, which nothing uses."""
    asked = set()
    for name, method in vars(HttpToolsProtocol).items():
        if inspect.isfunction(method) and name not in {"__init__", "data_received"}:
            asked |= attributes_of_parser(method)
    unknown = asked - PARSER_METHODS
    assert not unknown, (
        f"uvicorn asks its parser for {', '.join(sorted(unknown))} too: adapt {MODULE}"
    )


@pytest.mark.parametrize(
    "name",
    [
        "create_for_field_definition",
        "create_openapi_schema",
        "decode_builtins",
        "decode_bytes",
        "detect_nested_field",
        "generate_field_definitions",
    ],
)
def test_litestar_asks_a_dto_for_what_the_body_overrides(name: str) -> None:
    base = getattr(AbstractDTO, name, None)
    assert base is not None, (
        f"Litestar's AbstractDTO has no {name} any more: adapt rooms/api/codec.py"
    )
    assert parameters(getattr(Body, name)) == parameters(base), (
        f"Litestar's AbstractDTO.{name} takes other arguments: adapt rooms/api/codec.py"
    )


def attributes_of_parser(method: object) -> set[str]:
    """Return the names that a method reads from `self.parser`."""
    assert inspect.isfunction(method)
    return {
        node.attr
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(method))))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "parser"
        and is_self(node.value.value)
    }
