"""Test that codes of the API have words."""

import pytest

from rooms.console.terms import TERMS, term
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
