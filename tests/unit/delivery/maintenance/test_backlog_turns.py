"""Turns of organisations in what ends by time, against rows in a list."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from delivery.maintenance.backlog_turns import MAX_BACKLOGGED, BacklogTurn, BacklogTurns
from rooms.domain.ids import OrganisationId

BATCH = 10
NOW = datetime(2026, 11, 27, tzinfo=UTC)
START = datetime(2000, 1, 1, tzinfo=UTC)
A, B, C = (OrganisationId(name) for name in "abc")


@dataclass
class Due:
    """Hold what is due, by time; it ends in batches."""

    rows: list[tuple[datetime, OrganisationId]]

    def add(self, organisation: OrganisationId, count: int, seconds_ago: float) -> None:
        self.rows += [(NOW - timedelta(seconds=seconds_ago), organisation)] * count
        self.rows.sort()

    def end(self, turn: BacklogTurn) -> Sequence[tuple[datetime, OrganisationId]]:
        due = [row for row in self.rows if row[0] >= turn.low and row[1] not in turn.excluded]
        taken = due[:BATCH]
        for row in taken:
            self.rows.remove(row)
        return taken

    def play(self, turns: BacklogTurns, at: datetime = NOW) -> Counter[OrganisationId]:
        """Play one turn; return how much ended of each organisation."""
        turn = turns.next()
        taken = self.end(turn)
        counts = Counter(organisation for _, organisation in taken)
        turns.record(
            turn,
            reached=taken[-1][0] if len(taken) == BATCH else None,
            largest=max(counts, key=counts.__getitem__, default=None),
            at=at,
        )
        return counts


def test_one_waits_for_one_batch_of_a_backlog() -> None:
    due, turns = Due([]), BacklogTurns(START)
    due.add(A, 20 * BATCH, 60.0)
    due.add(B, 1, 30.0)
    assert [due.play(turns) for _ in range(3)] == [{A: BATCH}, {B: 1}, {A: BATCH}]
    due.add(B, 1, 0.0)
    assert due.play(turns) == {B: 1}


def test_two_backlogs_end_side_by_side() -> None:
    due, turns = Due([]), BacklogTurns(START)
    due.add(A, 20 * BATCH, 60.0)
    due.add(C, 20 * BATCH, 30.0)
    ended = sum((due.play(turns) for _ in range(23)), Counter[OrganisationId]())
    assert ended == {A: 6 * BATCH, C: 6 * BATCH}


def test_everything_ends_and_then_it_is_done() -> None:
    due, turns = Due([]), BacklogTurns(START)
    for number in range(MAX_BACKLOGGED + 6):
        due.add(OrganisationId(f"o{number}"), 2 * BATCH + number % 3, 60.0 + number % 7)
    plays = 0
    while not turns.is_done:
        due.play(turns)
        plays += 1
        assert plays < 10 * MAX_BACKLOGGED
    assert due.rows == []


def test_what_came_late_is_found_when_a_backlog_has_ended() -> None:
    """A row of a backlogged organisation that is due from then on is one of all others'."""
    due, turns = Due([]), BacklogTurns(START)
    due.add(A, BATCH + 5, 60.0)
    assert [due.play(turns) for _ in range(3)] == [{A: BATCH}, {}, {A: 5}]
    assert not turns.is_done
    due.add(A, 1, 1.0)
    assert due.play(turns) == {A: 1}
    assert turns.is_done


def test_what_was_locked_or_committed_late_waits_for_a_long_look() -> None:
    """A row of another organisation was not seen by the look at its time."""
    due, turns = Due([]), BacklogTurns(START)
    due.add(A, 100 * BATCH, 600.0)
    assert [due.play(turns) for _ in range(3)] == [{A: BATCH}, {}, {A: BATCH}]
    due.add(B, 1, 30.0)
    waited_s, counts = 0.0, Counter[OrganisationId]()
    while B not in counts:
        waited_s += 1.0
        counts += due.play(turns, NOW + timedelta(seconds=waited_s))
        assert waited_s < 20.0
    assert due.rows


def test_rows_of_no_organisation_end_in_the_turns_of_all_others() -> None:
    """Those of deleted subscriptions are never skipped."""
    turns = BacklogTurns(START)
    turn = turns.next()
    turns.record(turn, reached=NOW - timedelta(seconds=9), largest=None, at=NOW)
    assert turns.next() == BacklogTurn(None, [], NOW - timedelta(seconds=9))
    assert not turns.is_done
