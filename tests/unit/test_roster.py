"""The consumers of a queue, held against a plain model of a queue and of who wants something from it."""

import gc
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rooms.pulling.chain import Chain, Link
from rooms.pulling.roster import Member, Roster, Stand

PATIENCE_S = 10.0
Name = int


def roster_of(count: int, *, priority: int = 0) -> tuple[Roster[Name], list[Member[Name]]]:
    """So many consumers that are interested in a queue which is known to be empty."""
    roster: Roster[Name] = Roster(patience_s=PATIENCE_S)
    members = [roster.add(name, priority=priority) for name in range(count)]
    for member in members:
        roster.interested(member, 0.0)
    while (called := next(roster.called(), None)) is not None:
        roster.pulls(called)
        roster.exhausted(called, 0.0)
    assert roster.dry
    return roster, members


def names(woken: Sequence[Member[Name]]) -> list[Name]:
    return [member.consumer for member in woken]


class Floor(RuleBasedStateMachine):
    """A queue with so many pieces of work, and consumers that behave in every possible way."""

    def __init__(self) -> None:
        super().__init__()
        self.roster: Roster[Name] = Roster(patience_s=PATIENCE_S)
        self.members: dict[Name, Member[Name]] = {}
        self.line: list[Name] = []  # those who are interested, in the order in which they became it
        self.pulls: dict[Name, tuple[int, int]] = {}  # who pulls: how many it took, and when it began
        self.pieces = 0
        self.clock = 0
        self.published_at = 0
        self.known_empty = False
        self.count = 0
        self.now = 0.0

    def some(self, data: st.DataObject, *stands: Stand) -> Member[Name]:
        names = [name for name, member in self.members.items() if member.stand in stands]
        return self.members[data.draw(st.sampled_from(sorted(names)))]

    def have(self, *stands: Stand) -> bool:
        return any(member.stand in stands for member in self.members.values())

    def head(self) -> Name | None:
        """Who is to be notified next: of the highest priority, the one that has been interested longest."""
        top = max((self.members[name].priority for name in self.line), default=0)
        return next((name for name in self.line if self.members[name].priority == top), None)

    def told(self, woken: Sequence[Member[Name]], head: Name | None) -> None:
        """Nobody was told but the one whose turn it was, and each of the browsers."""
        takers = [member.consumer for member in woken if member.acquiring]
        assert takers in ([], [head])
        for name in takers:
            assert name in self.line
            self.line.remove(name)
        self.known_empty &= not takers

    def leave_line(self, name: Name) -> None:
        if name in self.line:
            self.line.remove(name)

    @rule(priority=st.integers(0, 2))
    def comes(self, priority: int) -> None:
        self.members[self.count] = self.roster.add(self.count, priority=priority)
        self.count += 1

    @rule()
    def browser_comes(self) -> None:
        member = self.members[self.count] = self.roster.add(self.count, acquiring=False)
        assert self.roster.interested(member, self.now) == (member,)
        self.count += 1

    @precondition(lambda self: self.have(Stand.NOT_INTERESTED))
    @rule(data=st.data())
    def becomes_interested(self, data: st.DataObject) -> None:
        member = self.some(data, Stand.NOT_INTERESTED)
        if not member.acquiring:
            assert self.roster.interested(member, self.now) == (member,)
            return
        self.line.append(member.consumer)
        head = self.head()
        woken = self.roster.interested(member, self.now)
        assert bool(woken) is not self.known_empty, "told of what is known not to be there, or not told"
        self.told(woken, head)

    @precondition(lambda self: self.have(*Stand))
    @rule(data=st.data())
    def ceases_to_be(self, data: st.DataObject) -> None:
        member = self.some(data, *Stand)
        notified = member.stand is Stand.NOTIFIED
        self.leave_line(member.consumer)
        self.pulls.pop(member.consumer, None)
        head = self.head()
        woken = self.roster.not_interested(member, self.now)
        assert bool(woken) is (notified and head is not None)
        self.told(woken, head)

    @precondition(lambda self: bool(self.members))
    @rule(data=st.data())
    def goes(self, data: st.DataObject) -> None:
        member = self.some(data, *Stand)
        self.leave_line(member.consumer)
        self.pulls.pop(member.consumer, None)
        del self.members[member.consumer]
        self.told(self.roster.remove(member, self.now), self.head())

    @rule()
    def work_arises(self) -> None:
        self.clock += 1
        self.pieces += 1
        self.published_at = self.clock
        self.known_empty = False
        head = self.head()
        browsers = {name for name, member in self.members.items() if member.stand is Stand.NON_ACQUIRING}
        woken = self.roster.work(self.now)
        assert {member.consumer for member in woken if not member.acquiring} == browsers
        assert [member.consumer for member in woken if member.acquiring] == ([] if head is None else [head])
        self.told(woken, head)

    @precondition(
        lambda self: any(member.stand is Stand.NOTIFIED and not member.pulling for member in self.members.values())
    )
    @rule(data=st.data(), most=st.integers(1, 3))
    def pull_begins(self, data: st.DataObject, most: int) -> None:
        member = self.some(data, Stand.NOTIFIED)
        if member.pulling:
            return
        self.clock += 1
        taken = min(self.pieces, most)
        self.pieces -= taken
        self.pulls[member.consumer] = (taken, self.clock)
        self.roster.pulls(member)

    @precondition(lambda self: bool(self.pulls))
    @rule(data=st.data())
    def pull_ends(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.pulls)))
        taken, began = self.pulls.pop(name)
        member = self.members[name]
        if taken:
            self.roster.served(member, self.now)
            assert member.stand is Stand.NOTIFIED, "who got something goes on pulling"
            return
        self.line.append(name)
        head = self.head()
        woken = self.roster.exhausted(member, self.now)
        self.told(woken, head)
        others = [one for one in self.members.values() if one.stand is Stand.NOTIFIED]
        self.known_empty = not others and self.published_at < began

    @rule(seconds=st.floats(0.1, PATIENCE_S))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        late = {
            name: member
            for name, member in self.members.items()
            if member.stand is Stand.NOTIFIED and not member.pulling and member.since + PATIENCE_S <= self.now
        }
        waiting = len(self.line)
        woken = self.roster.overdue(self.now)
        assert len(woken) == min(len(late), waiting), "another one is told for each that did not come"
        for name in names(woken):
            self.line.remove(name)
        assert all(member.stand is Stand.NOT_INTERESTED for member in late.values())

    @invariant()
    def no_wake_up_is_lost(self) -> None:
        if self.pieces and self.line:
            assert self.have(Stand.NOTIFIED)

    @invariant()
    def everybody_stands_in_one_set(self) -> None:
        assert len(self.roster) == len(self.members) == sum(map(self.roster.size, Stand))
        for stand in Stand:
            assert self.roster.size(stand) == sum(member.stand is stand for member in self.members.values())
        order = sorted(self.line, key=lambda name: -self.members[name].priority)
        assert names(list(self.roster.waiting())) == order

    def teardown(self) -> None:
        """Where everybody who is told comes and takes, nothing is left beside somebody who is interested."""
        if not self.have(Stand.INTERESTED, Stand.NOTIFIED):
            return
        for _ in range(10 * (self.pieces + len(self.members) + 1)):
            for name, (taken, _) in list(self.pulls.items()):
                self._end(self.members[name], taken)
            self.pulls.clear()
            called = list(self.roster.called())
            if not called:
                break
            for member in called:
                self.roster.pulls(member)
                taken, self.pieces = min(1, self.pieces), max(0, self.pieces - 1)
                self._end(member, taken)
        assert not self.have(Stand.NOTIFIED), "told again and again, of nothing"
        assert self.pieces == 0

    def _end(self, member: Member[Name], taken: int) -> None:
        if taken:
            self.roster.served(member, self.now)
        else:
            self.roster.exhausted(member, self.now)


Floor.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


TestFloor = pytest.mark.row("D1")(Floor.TestCase)


@pytest.mark.row("D1")
def test_one_piece_of_work_is_told_to_one_and_only_one() -> None:
    roster, _ = roster_of(5)
    assert names(roster.work(0.0)) == [0]
    assert names(roster.work(0.0)) == [1]
    assert roster.size(Stand.NOTIFIED) == 2


@pytest.mark.row("D1")
def test_work_that_came_while_all_were_told_already_is_owed_to_whoever_finds_nothing() -> None:
    roster, (only,) = roster_of(1)
    assert names(roster.work(0.0)) == [0]
    roster.pulls(only)
    assert roster.work(0.0) == ()
    assert names(roster.exhausted(only, 0.0)) == [0]
    roster.pulls(only)
    assert roster.exhausted(only, 0.0) == ()
    assert roster.dry


@pytest.mark.row("D2")
def test_consumers_stand_in_all_and_in_one_set() -> None:
    roster: Roster[Name] = Roster(patience_s=PATIENCE_S)
    taker, browser = roster.add(1), roster.add(2, acquiring=False)
    assert (list(roster), roster.size(Stand.NOT_INTERESTED)) == ([1, 2], 2)
    roster.interested(browser, 0.0)
    roster.work(0.0)
    roster.interested(taker, 0.0)
    assert (roster.size(Stand.NON_ACQUIRING), roster.size(Stand.NOTIFIED), len(roster)) == (1, 1, 2)
    roster.remove(taker, 0.0)
    assert (list(roster), len(roster)) == ([2], 1)


@pytest.mark.row("D3")
def test_browsers_are_told_of_all_work_and_take_nobody_s_turn() -> None:
    roster, _ = roster_of(2)
    browsers = [roster.add(10 + number, acquiring=False) for number in range(2)]
    for browser in browsers:
        roster.interested(browser, 0.0)
    assert names(roster.work(0.0)) == [0, 10, 11]
    assert names(roster.work(0.0)) == [1, 10, 11]
    assert names(roster.work(0.0)) == [10, 11]


@pytest.mark.row("D4")
def test_who_has_no_credit_is_not_told_and_what_it_was_told_of_is_another_s() -> None:
    roster, (first, second) = roster_of(2)
    roster.not_interested(first, 0.0)
    assert names(roster.work(0.0)) == [1]
    assert roster.work(0.0) == ()
    assert names(roster.interested(first, 0.0)) == [0]
    roster.interested(second, 0.0)
    roster.pulls(first)
    roster.exhausted(first, 0.0)
    assert names(roster.not_interested(second, 0.0)) == [0]


@pytest.mark.row("D5")
def test_the_highest_priority_that_is_interested_goes_first_and_a_lower_one_when_it_ceases_to_be() -> None:
    roster: Roster[Name] = Roster(patience_s=PATIENCE_S)
    low, high = roster.add(1, priority=1), roster.add(9, priority=9)
    roster.interested(high, 0.0)
    roster.pulls(high)
    roster.exhausted(high, 0.0)
    roster.interested(low, 0.0)
    assert names(roster.work(0.0)) == [9]
    assert names(roster.not_interested(high, 0.0)) == [1]


@pytest.mark.row("D6")
def test_who_finds_nothing_more_goes_to_the_end() -> None:
    roster, members = roster_of(3)
    order = []
    for _ in range(9):
        (member,) = roster.work(0.0)
        order.append(member.consumer)
        roster.pulls(member)
        roster.served(member, 0.0)
        roster.pulls(member)
        roster.exhausted(member, 0.0)
    assert order == [0, 1, 2] * 3
    assert {member.stand for member in members} == {Stand.INTERESTED}


@pytest.mark.row("D7")
def test_who_was_told_and_does_not_come_is_noticed_and_another_one_told() -> None:
    roster, (idle, other) = roster_of(2)
    roster.work(100.0)
    assert roster.next_overdue() == 100.0 + PATIENCE_S
    assert roster.overdue(109.9) == []
    assert names(roster.overdue(110.0)) == [1]
    assert (idle.stand, other.stand) == (Stand.NOT_INTERESTED, Stand.NOTIFIED)
    roster.pulls(other)
    assert roster.overdue(1000.0) == [], "who pulls is not overdue, however long that takes"
    assert roster.next_overdue() is None
    roster.pulls(idle)
    assert idle.stand is Stand.NOTIFIED, "it comes at last"


def test_who_insists_asks_at_once_but_does_not_overtake() -> None:
    roster, _ = roster_of(2)
    hasty = roster.add(7)
    roster.interested(hasty, 0.0)
    roster.insist(hasty, 0.0)
    assert names(list(roster.called())) == [0, 7]


def steps(work: Callable[[], Any]) -> int:
    """How many lines of the roster are executed. What others left to be collected ends at another time."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        count += event == "line" and frame.f_globals["__name__"] in {Roster.__module__, Chain.__module__}
        return trace

    before = sys.gettrace()
    gc.disable()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
        gc.enable()
    return count


@pytest.mark.row("D2")
def test_every_step_costs_the_same_at_10_and_at_10_000_consumers() -> None:
    def costs(count: int) -> dict[str, int]:
        roster, members = roster_of(count)
        middle, near = members[count // 2], members[count // 2 + 1]
        found = {
            "add": steps(lambda: roster.add(-1)),
            "size": steps(lambda: roster.size(Stand.INTERESTED)),
            "not interested": steps(lambda: roster.not_interested(middle, 0.0)),
            "interested": steps(lambda: roster.interested(middle, 0.0)),
            "work": steps(lambda: roster.work(0.0)),
            "pulls": steps(lambda: roster.pulls(members[0])),
            "served": steps(lambda: roster.served(members[0], 0.0)),
            "exhausted": steps(lambda: roster.exhausted(members[0], 0.0)),
            "remove": steps(lambda: roster.remove(near, 0.0)),
            "overdue": steps(lambda: roster.overdue(0.0)),
            "top": steps(roster.top),
        }
        roster.work(0.0)
        return found | {"passed over": steps(lambda: roster.overdue(PATIENCE_S))}

    assert costs(10) == costs(10_000)


def test_a_chain_refuses_what_stands_elsewhere() -> None:
    first: Chain[Link] = Chain()
    second: Chain[Link] = Chain()
    links = [Link() for _ in range(3)]
    for link in links:
        first.append(link)
    with pytest.raises(ValueError, match="already"):
        second.append(links[0])
    with pytest.raises(ValueError, match="does not stand"):
        second.remove(links[0])
    first.remove(links[1])
    assert (list(first), len(first), first.first) == ([links[0], links[2]], 2, links[0])
