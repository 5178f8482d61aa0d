"""The transition table, spelled out here once more from section 3 of the design, cell by cell."""

from itertools import product

import pytest

from rooms.domain.state_machine import (
    TRANSITIONS,
    UNFINISHED,
    Event,
    State,
    states_allowing,
    transition,
)

# from, event, to, added to the generation, added to the attempt
TABLE = """
-          publish          queued     +0 +0
-          publish_later    scheduled  +0 +0
scheduled  lookahead_reached  queued     +0 +0
queued     succeeded        delivered  +0 +0
queued     failed           queued     +0 +1
queued     failed_later     scheduled  +0 +1
queued     gave_up          sidelined  +0 +0
queued     ignored          dropped    +0 +0
queued     hold             held       +0 +0
held       release          queued     +1 +0
queued     pulled           leased     +0 +0
queued     hand_over        handed_over +0 +0
handed_over rejected        sidelined  +0 +0
leased     release          queued     +1 +0
leased     acked            delivered  +0 +0
leased     nacked           queued     +1 +1
leased     nacked_later     scheduled  +1 +1
leased     lease_ended      queued     +1 +1
leased     receives_spent   sidelined  +1 +1
sidelined  shovel           queued     +1 =0
sidelined  purge            purged     +0 +0
scheduled  expire           expired    +0 +0
queued     expire           expired    +0 +0
held       expire           expired    +0 +0
leased     expire           expired    +0 +0
sidelined  expire           expired    +0 +0
scheduled  cancel           cancelled  +0 +0
queued     cancel           cancelled  +0 +0
held       cancel           cancelled  +0 +0
leased     cancel           cancelled  +0 +0
sidelined  cancel           cancelled  +0 +0
expired    restore          queued     +1 =0
cancelled  restore          queued     +1 =0
dropped    restore          queued     +1 =0
scheduled  refresh          queued     +1 +0
queued     refresh          queued     +1 +0
held       refresh          held       +1 +0
scheduled  refresh_later    scheduled  +1 +0
queued     refresh_later    scheduled  +1 +0
scheduled  late_success     delivered  +0 +0
queued     late_success     delivered  +0 +0
held       late_success     delivered  +0 +0
sidelined  late_success     delivered  +0 +0
"""

ALLOWED = {
    (None if source == "-" else State(source), Event(event)): (State(to), generation, attempt)
    for source, event, to, generation, attempt in (
        line.split() for line in TABLE.strip().splitlines()
    )
}
CELLS = list(product([None, *State], Event))


@pytest.mark.parametrize(("state", "event"), CELLS, ids=str)
def test_every_cell(state: State | None, event: Event) -> None:
    found = transition(state, event)
    expected = ALLOWED.get((state, event))
    if expected is None:
        assert found is None
        return
    assert found is not None
    to, generation, attempt = expected
    assert found.to is to
    assert f"+{found.generation}" == generation
    assert ("=0" if found.attempt is None else f"+{found.attempt}") == attempt


def test_there_are_no_other_cells() -> None:
    assert len(CELLS) == (len(State) + 1) * len(Event)
    assert set(TRANSITIONS) == set(ALLOWED)


def test_unfinished_is_what_still_owes_a_copy() -> None:
    assert {State.SCHEDULED, State.QUEUED, State.HELD, State.LEASED} == UNFINISHED


@pytest.mark.parametrize("event", Event)
def test_sources_are_the_states_that_allow_the_event(event: Event) -> None:
    assert states_allowing(event) == {
        state for state, happened in ALLOWED if happened is event and state is not None
    }


def test_what_is_delivered_or_purged_is_final() -> None:
    assert not [state for state, _ in TRANSITIONS if state in {State.DELIVERED, State.PURGED}]


def test_what_is_handed_over_only_comes_back_from_its_reader() -> None:
    assert [event for state, event in TRANSITIONS if state is State.HANDED_OVER] == [Event.REJECTED]


def test_whatever_comes_back_to_the_queue_gets_a_step_of_its_own() -> None:
    """A broker that swallows what it has seen, by generation and attempt, must not swallow it."""
    for (state, _), found in TRANSITIONS.items():
        if found.to is State.QUEUED and state not in {None, State.SCHEDULED}:
            assert found.generation or found.attempt
