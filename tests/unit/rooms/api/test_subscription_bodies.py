"""Test that a body with very many mistakes is refused without an object for each."""

import pytest

from rooms.api import subscription_fields
from rooms.api.subscription_bodies import to_columns
from rooms.api.subscription_fields import InterestRequest
from rooms.domain.state_machine import SubscriptionType
from rooms.errors import FieldProblem, InvalidError
from rooms.publishing.request import MAX_PROBLEMS


def test_no_more_unknown_versions_are_named_than_an_answer_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[str] = []

    def make_problem(field: str, message: str) -> FieldProblem:
        made.append(field)
        return FieldProblem(field, message)

    monkeypatch.setattr(subscription_fields, "FieldProblem", make_problem)
    names = [f"type{number}" for number in range(10)]
    with pytest.raises(InvalidError) as refused:
        to_columns(
            {"event_types": [InterestRequest(name=name, versions=[2] * 1000) for name in names]},
            subscription_type=SubscriptionType.PULL,
            current=None,
            types=dict.fromkeys(names, frozenset({1})),
            room_expiration_ms=None,
            check_push_url=lambda _: None,
        )
    assert len(made) == len(refused.value.problems) == MAX_PROBLEMS
