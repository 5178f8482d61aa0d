"""Turns of organisations: each in its turn, and on from what was served last."""

from collections.abc import Mapping

from delivery.sideline.turns import OrganisationTurns
from rooms.domain.ids import OrganisationId, SubscriptionId

Served = list[tuple[str | None, list[str]]]


def fill(turns: OrganisationTurns, waiting: Mapping[str, str]) -> int:
    """Let these subscriptions wait, each with its organisation."""
    turns.clear()
    for subscription, organisation in sorted(waiting.items()):
        turns.add(SubscriptionId(subscription), OrganisationId(organisation))
    return turns.start()


def take(turns: OrganisationTurns, count: int, *, limit: int = 2) -> Served:
    """Take this many turns to their ends."""
    found: Served = []
    for _ in range(count):
        organisation, subscriptions = turns.next_turn(limit)
        turns.end_turn(organisation, subscriptions)
        found.append((organisation, list(subscriptions)))
    return found


def test_organisations_take_turns_whatever_each_has() -> None:
    turns = OrganisationTurns()
    waiting = {"1": "A", "2": "A", "3": "A", "4": "A", "5": "A", "6": "B", "7": "C"}
    assert fill(turns, waiting) == 3
    assert take(turns, 5) == [
        ("A", ["1", "2"]),
        ("B", ["6"]),
        ("C", ["7"]),
        ("A", ["3", "4"]),
        ("A", ["5"]),
    ]
    assert turns.is_empty
    assert turns.next_turn(2) == (None, ())


def test_a_new_list_goes_on_behind_what_was_served_last() -> None:
    turns = OrganisationTurns()
    waiting = {"1": "A", "2": "A", "3": "A", "4": "B"}
    fill(turns, waiting)
    assert take(turns, 1) == [("A", ["1", "2"])]
    fill(turns, waiting)
    assert take(turns, 3) == [("B", ["4"]), ("A", ["3", "1"]), ("A", ["2"])]


def test_a_turn_that_fails_is_not_the_first_again() -> None:
    turns = OrganisationTurns()
    waiting = {"1": "A", "2": "A", "3": "B"}
    fill(turns, waiting)
    organisation, (first, _) = turns.next_turn(2)
    turns.serve(organisation, first)
    fill(turns, waiting)
    assert take(turns, 2) == [("B", ["3"]), ("A", ["2", "1"])]


def test_only_some_of_an_organisation_wait_at_a_time_and_all_in_the_end() -> None:
    turns = OrganisationTurns(max_waiting=2)
    waiting = {str(n): "A" for n in range(5)}
    served = []
    for _ in range(4):
        fill(turns, waiting)
        assert turns.is_cut
        served += take(turns, 1)[0][1]
    assert served == ["0", "1", "2", "3", "4", "0", "1", "2"]
    fill(turns, {"1": "A", "9": "B"})
    assert not turns.is_cut
