"""Test what claims take, and that low-water marks never pass what is committed late, within what they promise."""

import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delivery.brokers import claim_order
from delivery.brokers.claim_order import (
    COMMIT_SLACK_US,
    START_SLACK_US,
    ClaimTurns,
    ClaimWatermarks,
    CommittedUntil,
)
from rooms.db.queue.claims import ClaimedBatch
from rooms.domain.delivery_task import PRIORITIES
from rooms.domain.ids import OrganisationId, SubscriptionId
from tests.support.tasks import make_task

NO_EXCLUSIONS: frozenset[SubscriptionId] = frozenset()
T0 = 1_750_000_000_000_000
ONE, TWO = SubscriptionId("one"), SubscriptionId("two")


def new_watermarks() -> ClaimWatermarks[ClaimedBatch]:
    return ClaimWatermarks(CommittedUntil(), slack_us=START_SLACK_US)


def claim(
    at_us: int, *, oldest: int = 10, newest: int = 10, taken: dict[int, int] | None = None
) -> ClaimedBatch:
    return ClaimedBatch(
        at_us=at_us, xmin=oldest, xmax=newest, highest_due_us=taken or {}, row_count=0, tasks=[]
    )


def test_the_first_claim_scans_everything() -> None:
    assert new_watermarks().lower_bounds(NO_EXCLUSIONS) == (0,) * PRIORITIES


def test_after_an_exhausting_claim_all_marks_are_just_below_it() -> None:
    watermarks = new_watermarks()
    watermarks.advance(claim(T0), exhausted=True)
    assert watermarks.lower_bounds(NO_EXCLUSIONS) == (T0 - START_SLACK_US,) * PRIORITIES


def test_after_a_full_batch_only_what_it_reached_is_marked() -> None:
    """Above the lowest priority taken nothing is left; in it there may be more from its last due time on."""
    watermarks = new_watermarks()
    watermarks.advance(claim(T0, taken={9: T0 - 5_000_000, 4: T0 - 9_000_000}), exhausted=False)
    low = watermarks.lower_bounds(NO_EXCLUSIONS)
    assert low[:5] == (T0 - START_SLACK_US,) * 5
    assert low[5] == T0 - 9_000_000 - START_SLACK_US
    assert low[6:] == (0,) * 4


def test_a_reset_scans_everything_again() -> None:
    watermarks = new_watermarks()
    watermarks.lower_bounds(frozenset({ONE}))
    watermarks.advance(claim(T0), exhausted=True)
    watermarks.reset()
    assert watermarks.lower_bounds(frozenset({ONE})) == (0,) * PRIORITIES


def test_a_transaction_under_way_holds_the_marks_at_the_claim_before_it() -> None:
    watermarks = new_watermarks()
    watermarks.advance(claim(T0, oldest=10, newest=10), exhausted=True)
    watermarks.advance(
        claim(T0 + 100_000, oldest=10, newest=12), exhausted=True
    )  # 10 and 11 began since
    assert watermarks.lower_bounds(NO_EXCLUSIONS)[0] == T0 - START_SLACK_US
    watermarks.advance(
        claim(T0 + 200_000, oldest=12, newest=15), exhausted=True
    )  # they ended; 12 began after the second scan
    assert watermarks.lower_bounds(NO_EXCLUSIONS)[0] == T0 + 100_000 - START_SLACK_US
    watermarks.advance(claim(T0 + 300_000, oldest=15, newest=15), exhausted=True)
    assert watermarks.lower_bounds(NO_EXCLUSIONS)[0] == T0 + 300_000 - START_SLACK_US


def test_a_transaction_that_takes_long_holds_them_only_so_far() -> None:
    committed_until = CommittedUntil()
    watermarks = ClaimWatermarks(committed_until, slack_us=START_SLACK_US)
    for step in range(100):
        watermarks.advance(claim(T0 + step * 100_000, oldest=5, newest=10 + step), exhausted=True)
    assert (
        watermarks.lower_bounds(NO_EXCLUSIONS)[0]
        == T0 + 99 * 100_000 - COMMIT_SLACK_US - START_SLACK_US
    )
    assert len(committed_until._claims) < 10, "looks of long ago are forgotten"


def test_excluded_tasks_are_seen_again_when_they_are_admitted() -> None:
    watermarks = new_watermarks()
    watermarks.advance(claim(T0), exhausted=True)
    watermarks.lower_bounds(frozenset({ONE}))
    watermarks.advance(claim(T0 + 1_000_000), exhausted=True)
    watermarks.lower_bounds(frozenset({ONE, TWO}))
    watermarks.advance(claim(T0 + 2_000_000), exhausted=True)
    assert watermarks.lower_bounds(frozenset({ONE, TWO}))[0] == T0 + 2_000_000 - START_SLACK_US
    assert watermarks.lower_bounds(frozenset({ONE}))[0] == T0 + 1_000_000 - START_SLACK_US
    watermarks.advance(claim(T0 + 3_000_000), exhausted=True)
    assert watermarks.lower_bounds(NO_EXCLUSIONS)[0] == T0 - START_SLACK_US
    watermarks.advance(claim(T0 + 4_000_000), exhausted=True)
    assert watermarks.lower_bounds(NO_EXCLUSIONS)[0] == T0 + 4_000_000 - START_SLACK_US, "once"


@dataclass
class Row:
    due_us: int
    visible_us: int
    transaction: int
    priority: int
    subscription: SubscriptionId


@given(st.integers(0, 2**32), st.floats(0.0, 1.0))
def test_a_queue_that_commits_late_is_claimed_whole(seed: int, slowness: float) -> None:
    """Compare with a model of a queue.

    Transactions fix due times as they begin and commit up to the promised time later. A consumer
    claims in small batches and excludes subscriptions in turn. Once all is committed, claims from
    the marks find everything.
    """
    chance = random.Random(seed)
    rows: list[Row] = []
    begun: list[tuple[int, int, int]] = []
    at = T0
    for number in range(60):
        at += chance.randrange(1, 40_000)
        ends = at + int(chance.random() * slowness * (COMMIT_SLACK_US - 1))
        begun.append((number, at, ends))
        rows += [
            Row(at, ends, number, chance.randrange(10), chance.choice([ONE, TWO]))
            for _ in range(chance.randrange(4))
        ]
    watermarks, left = new_watermarks(), list(rows)

    def scan(now: int, excluded: frozenset[SubscriptionId], limit: int) -> int:
        low = watermarks.lower_bounds(excluded)
        seen = [
            row
            for row in left
            if row.visible_us <= now
            and row.due_us <= now
            and row.subscription not in excluded
            and row.due_us >= low[PRIORITIES - 1 - row.priority]
        ]
        seen.sort(key=lambda row: (-row.priority, row.due_us))
        taken = seen[:limit]
        for row in taken:
            left.remove(row)
        newest = sum(start <= now for _, start, _ in begun)
        oldest = min(
            (number for number, start, ends in begun if start <= now < ends), default=newest
        )
        highest: dict[int, int] = {}
        for row in taken:
            highest[row.priority] = max(row.due_us, highest.get(row.priority, 0))
        found = claim(now, oldest=oldest, newest=newest, taken=highest)
        watermarks.advance(found, exhausted=len(taken) < limit)
        return len(taken)

    now = T0
    while now < at + COMMIT_SLACK_US:
        scan(now, frozenset(chance.sample([ONE, TWO], chance.randrange(3))), chance.randrange(1, 6))
        now += chance.randrange(1, 60_000)
    while scan(now, NO_EXCLUSIONS, 5):
        now += 1
    assert left == []


@pytest.mark.parametrize("priority", range(PRIORITIES))
def test_marks_run_from_the_highest_priority_to_the_lowest(priority: int) -> None:
    watermarks = new_watermarks()
    watermarks.advance(claim(T0, taken={priority: T0 - 1}), exhausted=False)
    low = watermarks.lower_bounds(NO_EXCLUSIONS)
    assert low[PRIORITIES - 1 - priority] == T0 - 1 - START_SLACK_US
    assert all(mark == 0 for mark in low[PRIORITIES - priority :])


@dataclass
class Queue:
    """Model the queue of several organisations; due times are numbers in order.

    An owner is an organisation with one subscription, or `organisation/subscription`.
    """

    turns: ClaimTurns[ClaimedBatch]
    limit: int
    rows: list[tuple[int, str]]
    now_us: int = T0
    excluded: frozenset[SubscriptionId] = NO_EXCLUSIONS
    ended: set[str] = field(default_factory=set)
    """Owners whose subscription was deleted: claims skip them only by its name."""

    def claim(self) -> list[str]:
        """Claim as the consumer does, and return the owner of each row."""
        turn = self.turns.next()
        resting = self.turns.resting.difference(turn.excluded)
        low = turn.watermarks.lower_bounds(self.excluded | resting)[PRIORITIES - 1 - 4]
        taken = [
            (due, owner)
            for due, owner in sorted(self.rows)
            if (
                owner not in turn.ended
                if owner in self.ended
                else organisation_of(owner) not in {*turn.excluded, *resting}
            )
            and owner not in turn.excluded_subscriptions
            and owner not in self.excluded
            and due >= low
        ][: self.limit]
        for row in taken:
            self.rows.remove(row)
        self.now_us += 1_000
        found = ClaimedBatch(
            at_us=self.now_us,
            xmin=10,
            xmax=10,
            highest_due_us={4: max(due for due, _ in taken)} if taken else {},
            row_count=len(taken),
            tasks=[
                replace(make_task(owner), subscription_version=None if owner in self.ended else 1)
                for _, owner in taken
            ],
            organisations={SubscriptionId(owner): organisation_of(owner) for _, owner in taken},
        )
        self.turns.record(turn, found, exhausted=found.row_count < self.limit)
        return [owner for _, owner in taken]

    def add(self, owner: str, count: int) -> None:
        """Publish so many; they are due now."""
        self.now_us += 1_000
        self.rows += [(self.now_us, owner)] * count


def organisation_of(owner: str) -> OrganisationId:
    return OrganisationId(owner.partition("/")[0])


def turns() -> ClaimTurns[ClaimedBatch]:
    return ClaimTurns(new_watermarks())


def test_a_message_waits_for_one_claim_of_a_backlog_of_another_organisation() -> None:
    queue = Queue(turns(), 10, [])
    queue.add("large", 1000)
    assert queue.claim() == ["large"] * 10
    for _ in range(20):
        queue.add("small", 1)
        assert "small" in queue.claim() + queue.claim()
    assert queue.turns.has_backlog


def test_backlogged_organisations_get_as_many_rows_a_round() -> None:
    queue = Queue(turns(), 10, [])
    for owner in ("one", "two", "three"):
        queue.add(owner, 400)
    taken: Counter[str] = Counter()
    for _ in range(100):
        taken.update(queue.claim())
    assert max(taken.values()) - min(taken.values()) <= 20
    assert sum(taken.values()) >= 380, (
        "a claim in two is for those without a backlog, and of the others one in five for those of"
        " the same organisation"
    )


def test_a_turn_says_how_many_rows_all_others_had_since_the_last_one() -> None:
    queue = Queue(turns(), 10, [])
    queue.add("large", 1000)
    queue.claim()
    shares = []
    for number in (0, 3, 1):
        queue.add("small", number)
        assert queue.claim() == ["small"] * number
        shares.append(queue.turns.next().share)
        while not (taken := queue.claim()):
            pass
        assert set(taken) == {"large"}
    assert shares == [0, 3, 1]


def test_a_lone_backlog_ends_and_claims_are_for_all_again() -> None:
    queue = Queue(turns(), 10, [])
    queue.add("large", 35)
    while queue.claim() or queue.turns.has_backlog:
        pass
    assert queue.rows == []
    turn = queue.turns.next()
    assert (turn.organisation, list(turn.excluded)) == (None, [])


def test_a_full_claim_of_many_small_senders_makes_none_of_them_wait() -> None:
    queue = Queue(turns(), 40, [])
    for number in range(60):
        queue.add(f"small-{number}", 1)
    queue.claim()
    assert not queue.turns.has_backlog


def test_no_more_than_so_many_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proved for a smaller bound: each claim of this model sorts all rows."""
    bound = 8
    assert bound < claim_order.MAX_BACKLOGGED
    monkeypatch.setattr(claim_order, "MAX_BACKLOGGED", bound)
    queue = Queue(turns(), 2, [])
    for number in range(bound + 10):
        queue.add(f"large-{number}", 1000)
    most = 0
    for _ in range(3 * bound):
        queue.claim()
        most = max(most, len(queue.turns.next().excluded))
    assert most == bound


@given(st.integers(0, 2**32), st.integers(1, 8))
def test_turns_take_everything_in_the_end(seed: int, limit: int) -> None:
    """Claim until nothing is left, with arrivals and exclusions by chance."""
    chance = random.Random(seed)
    queue, owners = Queue(turns(), limit, []), ["a/1", "a/2", "a/3", "b", "c/1", "c/2"]
    for _ in range(60):
        if chance.random() < 0.3:
            queue.add(chance.choice(owners), chance.randrange(1, 12))
        if chance.random() < 0.2:
            busy = chance.sample(owners, chance.randrange(3))
            queue.excluded = frozenset(map(SubscriptionId, busy))
        if chance.random() < 0.05:
            queue.turns.reset()
        queue.claim()
    queue.excluded = NO_EXCLUSIONS
    idle = 0
    while idle < 12:
        idle = 0 if queue.claim() else idle + 1
    assert queue.rows == []


def test_a_scan_that_is_wanted_during_a_claim_is_not_forgotten_when_that_ends() -> None:
    """The claim began above what the scan looks for."""
    order = turns()
    first = order.next()
    order.record(first, claim(T0), exhausted=True)
    under_way = order.next()
    order.reset()
    order.record(under_way, claim(T0 + 1), exhausted=True)
    assert order.next().watermarks.lower_bounds(NO_EXCLUSIONS) == (0,) * PRIORITIES


def test_a_message_waits_for_few_claims_of_a_burst_to_another_webhook_of_its_organisation() -> None:
    queue = Queue(turns(), 10, [])
    queue.add("one/large", 1000)
    queue.claim()
    for _ in range(20):
        queue.add("one/small", 1)
        claims = 0
        while "one/small" not in queue.claim():
            claims += 1
        assert claims <= 10, "every second one is for other organisations, one in five for this"
    assert queue.rows, "the burst still waits"


def test_bursts_to_two_webhooks_of_an_organisation_take_turns_and_those_of_another_as_many() -> (
    None
):
    queue = Queue(turns(), 10, [])
    for owner in ("one/a", "one/b", "two"):
        queue.add(owner, 1000)
    taken: Counter[str] = Counter()
    for _ in range(200):
        taken.update(queue.claim())
    assert abs(taken["one/a"] - taken["one/b"]) <= 20
    assert abs(taken["one/a"] + taken["one/b"] - taken["two"]) <= 40


def test_a_burst_to_many_webhooks_of_an_organisation_is_taken_in_its_order() -> None:
    """Turns would let each claim read the rows of all others."""
    queue = Queue(turns(), 10, [])
    for _ in range(30):
        for number in range(4):
            queue.add(f"one/{number}", 1)
    while queue.rows:
        queue.claim()
        assert not queue.turns.next().excluded_subscriptions


def test_the_turns_of_a_webhook_end_with_its_burst() -> None:
    queue = Queue(turns(), 10, [])
    queue.add("one/large", 55)
    queue.add("one/small", 5)
    idle = 0
    while idle < 12:
        idle = 0 if queue.claim() else idle + 1
    assert queue.rows == []
    assert not queue.turns.has_backlog
    turn = queue.turns.next()
    assert (turn.organisation, turn.subscription, turn.excluded_subscriptions) == (None, None, ())


def test_a_message_waits_for_one_claim_of_a_backlog_whose_subscription_was_deleted() -> None:
    """Delete one before its organisation takes turns, and another meanwhile."""
    queue = Queue(turns(), 10, [], ended={"one/a"})
    queue.add("one/a", 1000)
    queue.add("two", 1)
    assert "two" in queue.claim() + queue.claim()
    queue.add("one/b", 1000)
    for _ in range(12):
        queue.claim()
    queue.ended.add("one/b")
    queue.add("two", 1)
    while queue.turns.next().organisation is not None:
        queue.claim()
    assert "two" in queue.claim() + queue.claim()


@pytest.mark.parametrize("limit", [7, 40])
def test_what_deleted_subscriptions_have_is_taken_in_the_end(
    monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """The first of them are skipped by name, and the others are not."""
    monkeypatch.setattr(claim_order, "MAX_ENDED", 3)
    queue = Queue(turns(), limit, [])
    queue.ended = {f"one/{number}" for number in range(6)}
    for number in range(60):
        queue.add(f"one/{number % 9}", 5)
        queue.add("two", 1)
    idle = 0
    while idle < 12:
        idle = 0 if queue.claim() else idle + 1
        assert len(queue.turns.next_of_others().ended) <= 3
    assert queue.rows == []
    assert not queue.turns.has_backlog
    assert queue.turns.next_of_others().ended == ()


@pytest.mark.parametrize("seed", range(30))
def test_organisations_that_rest_get_nothing_and_lose_nothing(seed: int) -> None:
    chosen = random.Random(seed)
    queue = Queue(turns(), chosen.choice([3, 10]), [])
    owners = ["one/a", "one/b", "two/a", "three/a"]
    for _ in range(200):
        queue.add(chosen.choice(owners[: chosen.randint(1, 4)]), chosen.randint(0, 6))
        if chosen.random() < 0.2:
            queue.turns.resting = frozenset(
                OrganisationId(name) for name in ("one", "two", "three") if chosen.random() < 0.4
            )
        if chosen.random() < 0.02:
            queue.turns.scan_all()
        resting = queue.turns.resting
        assert not {organisation_of(owner) for owner in queue.claim()} & resting
    queue.turns.resting = frozenset()
    idle = 0
    while idle < 12:
        idle = 0 if queue.claim() else idle + 1
    assert queue.rows == []
    assert not queue.turns.has_backlog


def test_a_backlog_that_rests_asks_for_no_claim() -> None:
    queue = Queue(turns(), 10, [])
    queue.add("one", 30)
    queue.claim()
    assert queue.turns.is_backlogged(OrganisationId("one"))
    queue.turns.resting = frozenset({OrganisationId("one")})
    assert not queue.turns.has_backlog
    assert queue.turns.next_backlogged() is None
    queue.turns.has_several_organisations = False
    assert queue.turns.next().organisation is None


def test_a_row_whose_subscription_is_gone_has_no_owner() -> None:
    order = turns()
    found = taken_of(*["one/a"] * 9, "gone")
    found.tasks[-1].subscription_version = None
    owners = {SubscriptionId("one/a"): OrganisationId("one")}
    order.record(order.next(), replace(found, organisations=owners), exhausted=False)
    assert order.is_backlogged(OrganisationId("one"))
    assert not order.next_of_others().ended


def taken_of(*owners: str) -> ClaimedBatch:
    """Return a claim that took a row of each owner."""
    return ClaimedBatch(
        at_us=T0,
        xmin=10,
        xmax=10,
        highest_due_us={4: T0},
        row_count=len(owners),
        tasks=[make_task(owner) for owner in owners],
        organisations={SubscriptionId(owner): organisation_of(owner) for owner in owners},
    )


def test_rows_of_a_backlogged_organisation_in_a_claim_of_all_others_change_nothing() -> None:
    """A claim skips no deleted subscription that none has met, while the turn of the organisation is under way."""
    order = turns()
    order.record(order.next(), taken_of(*["one/a"] * 9), exhausted=False)
    order.record(order.next(), taken_of(*["one/a"] * 9), exhausted=False)
    under_way = order.next_backlogged()
    assert under_way is not None
    order.record(order.next_of_others(), taken_of(*["one/a"] * 9), exhausted=False)
    order.record(under_way, taken_of(*["one/a"] * 9), exhausted=False)
    again = order.next_backlogged()
    assert again is not None
    assert again.organisation == "one"
    assert again.watermarks in {
        under_way.watermarks,
        order._subscriptions[OrganisationId("one")].others,
    }


def test_a_claim_of_all_others_that_skipped_an_ended_backlog_raises_no_marks() -> None:
    """All others own what it skipped now, and it was not looked at."""
    order = turns()
    order.record(order.next(), taken_of("one/a", "one/b", "one/c", "one/d"), exhausted=False)
    others = order.next_of_others()
    assert list(others.excluded) == ["one"]
    backlog = order.next_backlogged()
    assert backlog is not None
    order.record(backlog, claim(T0 + 1_000_000), exhausted=True)
    assert not order.has_backlog
    before = others.watermarks.marks.bounds
    order.record(others, claim(T0 + 9_000_000), exhausted=True)
    assert others.watermarks.marks.bounds == before


def test_an_organisation_is_backlogged_by_what_a_claim_took() -> None:
    """A bound on bytes may leave most rows that were found."""
    order = turns()
    found = taken_of(*["one/a"] * 20)
    order.record(order.next(), replace(found, row_count=500), exhausted=False)
    assert order.is_backlogged(OrganisationId("one"))


def test_only_subscriptions_of_the_organisation_take_turns_within_it() -> None:
    order = turns()
    order.record(order.next(), taken_of(*["one/a"] * 9), exhausted=False)
    turn = order.next_backlogged()
    assert turn is not None
    order.record(turn, taken_of(*["one/a"] * 2, *["two/b"] * 7), exhausted=False)
    assert list(order._subscriptions[OrganisationId("one")].backlogged) == ["one/a"]


def test_a_lone_organisation_takes_no_turns_with_others() -> None:
    queue = Queue(turns(), 10, [])
    queue.turns.has_several_organisations = False
    for number in range(100):
        queue.add(f"one/{number % 5}", 3)
    queue.claim()
    while queue.rows:
        assert queue.claim(), "no claim is in vain"
    queue.turns.has_several_organisations = True
    queue.add("one/0", 100)
    queue.add("two", 1)
    assert "two" in queue.claim() + queue.claim() + queue.claim()
