"""Test when bulk work rests for the sake of other organisations."""

from dataclasses import dataclass

import pytest

from rooms.burst_pacing import MAX_REST_S, BurstPacer
from rooms.domain.ids import OrganisationId

OURS, THEIRS = OrganisationId("ours"), OrganisationId("theirs")
TOOK_S = 0.05


@dataclass
class Machine:
    """Hold a clock, and the times of a thread on it."""

    now_s: float = 100.0
    ran_s: float = 5.0
    waited_s: float = 7.0

    def pass_time(self, *, ran: float = 0.0, waited: float = 0.0, slept: float = 0.0) -> None:
        self.ran_s += ran
        self.waited_s += waited
        self.now_s += ran + waited + slept


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def pacer(machine: Machine) -> BurstPacer:
    return BurstPacer(lambda: machine.now_s, lambda: (machine.ran_s, machine.waited_s))


def work_of_two(pacer: BurstPacer) -> None:
    pacer.note(OURS)
    pacer.note(THEIRS)


def test_bulk_work_rests_as_long_as_it_took_where_processors_are_short(
    machine: Machine, pacer: BurstPacer
) -> None:
    work_of_two(pacer)
    assert pacer.rest_s(TOOK_S) == 0
    machine.pass_time(ran=0.1, waited=0.1)
    assert pacer.is_pacing
    assert pacer.rest_s(TOOK_S) == TOOK_S


@pytest.mark.parametrize(
    ("ran", "waited", "slept"), [(0.1, 0.01, 0.0), (0.1, 0.04, 0.0), (0.0, 0.0, 1.0)]
)
def test_it_does_not_rest_where_this_process_hardly_waits(
    machine: Machine, pacer: BurstPacer, ran: float, waited: float, slept: float
) -> None:
    work_of_two(pacer)
    machine.pass_time(ran=ran, waited=waited, slept=slept)
    assert not pacer.is_pacing
    assert pacer.rest_s(TOOK_S) == 0


def test_sleep_does_not_hide_that_processors_are_short(machine: Machine, pacer: BurstPacer) -> None:
    work_of_two(pacer)
    machine.pass_time(ran=0.01, waited=0.01, slept=1.0)
    assert pacer.rest_s(TOOK_S) == TOOK_S


def test_a_unit_with_more_work_elsewhere_rests_longer(machine: Machine) -> None:
    pacer = BurstPacer(lambda: machine.now_s, lambda: (machine.ran_s, machine.waited_s), factor=4.0)
    work_of_two(pacer)
    machine.pass_time(waited=0.1)
    assert pacer.rest_s(0.01) == pytest.approx(0.04)
    assert pacer.rest_s(TOOK_S) == MAX_REST_S


def test_each_rest_is_reported(machine: Machine) -> None:
    rests: list[float] = []
    pacer = BurstPacer(
        lambda: machine.now_s, lambda: (machine.ran_s, machine.waited_s), on_rest=rests.append
    )
    assert pacer.rest_s(TOOK_S) == 0
    work_of_two(pacer)
    machine.pass_time(waited=0.1)
    assert [pacer.rest_s(TOOK_S), pacer.rest_s(1.0)] == rests == [TOOK_S, MAX_REST_S]


def test_it_does_not_rest_where_every_organisation_has_a_backlog(
    machine: Machine, pacer: BurstPacer
) -> None:
    found = []
    for organisation, has_backlog, slept_s in (
        (OURS, True, 0.0),
        (THEIRS, True, 0.0),
        (OURS, False, 0.0),
        (THEIRS, True, 4.7),
        (OURS, True, 0.4),
    ):
        pacer.note(organisation, has_backlog=has_backlog)
        machine.pass_time(waited=0.1, slept=slept_s)
        found.append((pacer.has_several_organisations, pacer.rest_s(TOOK_S)))
    assert found == [(False, 0), (False, 0), (True, TOOK_S), (True, TOOK_S), (False, 0)]


def test_a_rest_after_an_outage_is_short(machine: Machine, pacer: BurstPacer) -> None:
    work_of_two(pacer)
    machine.pass_time(waited=0.1)
    assert pacer.rest_s(30.0) == MAX_REST_S


def test_a_short_time_says_little(machine: Machine, pacer: BurstPacer) -> None:
    work_of_two(pacer)
    machine.pass_time(waited=0.04)
    assert pacer.rest_s(TOOK_S) == 0
    machine.pass_time(waited=0.02)
    assert pacer.rest_s(TOOK_S) == TOOK_S


def test_processors_are_short_for_some_seconds_more(machine: Machine, pacer: BurstPacer) -> None:
    rests = []
    for ran_s, waited_s in ((0.0, 0.1), (4.9, 0.0), (0.2, 0.0), (0.0, 0.1)):
        machine.pass_time(ran=ran_s, waited=waited_s)
        work_of_two(pacer)
        rests.append(pacer.rest_s(TOOK_S))
    assert rests == [TOOK_S, TOOK_S, 0, TOOK_S]


@pytest.mark.parametrize("organisation", [OURS, None])
def test_one_organisation_never_rests(
    machine: Machine, pacer: BurstPacer, organisation: OrganisationId | None
) -> None:
    for _ in range(3):
        pacer.note(organisation)
    machine.pass_time(waited=0.1)
    assert not pacer.has_several_organisations
    assert pacer.rest_s(TOOK_S) == 0


def test_organisations_are_several_for_a_while(machine: Machine, pacer: BurstPacer) -> None:
    found = []
    for organisation, slept_s in ((OURS, 0.0), (THEIRS, 4.9), (THEIRS, 0.2), (OURS, 0.0)):
        pacer.note(organisation)
        machine.pass_time(slept=slept_s)
        found.append(pacer.has_several_organisations)
    assert found == [False, True, False, True]


def test_without_schedstat_nothing_seems_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise FileNotFoundError

    monkeypatch.setattr("rooms.thread_schedule.os.open", refuse)
    now = [0.0]
    pacer = BurstPacer(lambda: now[0])
    work_of_two(pacer)
    now[0] = 1.0
    assert pacer.rest_s(TOOK_S) == 0
