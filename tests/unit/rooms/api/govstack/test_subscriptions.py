"""GovStack's names of the fields of problems: everything else of a problem is kept."""

import pytest

from rooms.api.govstack import events, exchange, subscriptions
from rooms.errors import FieldProblem, InvalidError


def test_a_problem_of_a_subscription_keeps_the_bound_that_it_exceeds() -> None:
    refused = FieldProblem("push_url", "exceeds a bound", bound="filter")
    with pytest.raises(InvalidError) as raised, subscriptions._renaming():
        raise InvalidError(refused)
    assert raised.value.problems == (FieldProblem("delivery", "exceeds a bound", bound="filter"),)


def test_a_problem_of_an_event_keeps_the_bound_that_it_exceeds() -> None:
    refused = FieldProblem("payload.amount", "exceeds a bound", bound="schema")
    for module in (events, exchange):
        renamed = module._renamed(refused)
        assert renamed.field.endswith(".amount")
        assert (renamed.message, renamed.bound) == ("exceeds a bound", "schema")
