"""Test that codes of the API have words."""

import pytest

from rooms.console.terms import TERMS, last_answer, term
from rooms.domain.state_machine import LogKind, Reason, State


@pytest.mark.parametrize("kind", [State, Reason, LogKind])
def test_every_code_has_words_without_underscores(
    kind: type[State] | type[Reason] | type[LogKind],
) -> None:
    for one in kind:
        assert one in TERMS
        assert "_" not in term(one)


def test_an_unknown_code_is_shown_as_words() -> None:
    assert term("not_known_yet") == "not known yet"


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
