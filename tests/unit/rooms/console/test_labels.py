"""Test that codes of the API have words."""

import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Final, cast

import pytest

import delivery
import rooms
from delivery.analytics.findings import cells, incidents, root_cause
from rooms.api.app import create_app, govstack_handlers, route_handlers
from rooms.api.auth import CHANGES_NOTHING, DATA_PLANE
from rooms.api.deps import ApiServices
from rooms.api.search import SearchField, SearchKind
from rooms.console.formatting import read_translations
from rooms.console.labels import ACTION_LABELS, LABELS, label_of, last_answer
from rooms.domain.job import JobKind
from rooms.domain.state_machine import LogKind, Reason, State
from rooms.settings import read_settings

_WRITERS: Final = {"make_entry": None, "JournalEntry": None, "_record": 2}
"""Functions that make entries of the journal; the place of the action, where it has no name."""


def actions_of_routes() -> Iterator[str]:
    """Yield the actions of entries that requests make: of changes, and of refused ones.

    GovStack's interfaces also refuse readers that name another member.
    """
    settings = read_settings({})
    app = create_app(cast("ApiServices", SimpleNamespace(settings=settings)))
    for handler, _ in route_handlers(app):
        changes = set(handler.http_methods) - {"GET", "HEAD", "OPTIONS"}
        if changes and not (handler.opt.get(DATA_PLANE) or handler.opt.get(CHANGES_NOTHING)):
            yield handler.handler_name
    for handler, _ in govstack_handlers(app):
        yield handler.handler_name


def actions_of_modules() -> Iterator[str]:
    """Yield the actions that modules name where they make entries."""
    for package in (rooms, delivery):
        for path in Path(package.__path__[0]).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            if "make_entry(" not in text and "JournalEntry(" not in text:
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    yield from _named(node, node.func.id)


def _named(call: ast.Call, function: str) -> Iterator[str]:
    if function not in _WRITERS:
        return
    place = _WRITERS[function]
    given = [one.value for one in call.keywords if one.arg == "action"]
    for one in given if place is None else call.args[place : place + 1]:
        if isinstance(one, ast.Constant):
            yield str(one.value)


def test_every_action_of_the_journal_has_words() -> None:
    found = {*actions_of_routes(), *actions_of_modules(), JobKind.DELETE_ORGANISATION.value}
    assert {"sign_in", "read_payload", "revoke_key", "approve_subscription"} < found
    assert sorted(found - LABELS.keys()) == []
    assert sorted(ACTION_LABELS.keys() - found) == []


def test_every_result_of_a_search_has_words() -> None:
    assert {*SearchKind, *SearchField} <= LABELS.keys()


def test_everything_that_the_analysis_names_has_words() -> None:
    attributes = {*cells.LOGGED, *cells.STRUCTURAL, *cells.FAILURE_ATTRIBUTES, root_cause.SETTINGS}
    shown = {cells.DISPLAYED.get(one, one) for one in attributes}
    kinds = {incidents.SHARED, incidents.SINGLE, incidents.CHRONIC}
    assert sorted((shown | kinds) - LABELS.keys()) == []


@pytest.mark.parametrize("kind", [State, Reason, LogKind, SearchKind, SearchField])
def test_every_code_has_words_without_underscores(
    kind: type[State | Reason | LogKind | SearchKind | SearchField],
) -> None:
    for one in kind:
        assert one in LABELS
        assert "_" not in label_of(one)


@pytest.mark.parametrize("code", ["approve_subscription", "delivery", "target_host"])
def test_words_are_in_the_language_of_the_reader(code: str) -> None:
    assert read_translations()["de"].gettext(label_of(code)) != label_of(code)


def test_an_unknown_code_is_shown_as_words() -> None:
    assert label_of("not_known_yet") == "not known yet"


@pytest.mark.parametrize(
    ("status", "error", "shown"),
    [
        (503, "status: HTTP 503", "HTTP 503"),
        (503, None, "HTTP 503"),
        (410, "status: gone", "HTTP 410 gone"),
        (None, "timeout: no answer in time", "NO ANSWER IN TIME"),
        (None, "connect: refused", "NO CONNECTION: refused"),
        (None, "the message: is unknown", "the message: is unknown"),
        (None, None, ""),
    ],
)
def test_the_last_answer_is_said_once(status: int | None, error: str | None, shown: str) -> None:
    observed = {"last_status": status, "last_error": error}
    assert last_answer(observed, str.upper) == shown
