"""Test how organisations share the credit of a consumer."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from delivery.brokers.credit_shares import CreditShares
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import OrganisationId
from tests.support.tasks import make_task

LARGE = 1 << 40


def tasks_of(owner: str, count: int, size: int = 1) -> list[DeliveryTask]:
    return [replace(make_task(owner), payload=b"x" * size) for _ in range(count)]


def add(shares: CreditShares, tasks: Sequence[DeliveryTask]) -> None:
    shares.add(
        tasks, {task.subscription_id: OrganisationId(task.subscription_id) for task in tasks}
    )


def fill(shares: CreditShares, *owners: str, most: int = 500) -> Counter[str]:
    """Claim for organisations that settle nothing, until none of them gets more."""
    taken: Counter[str] = Counter()
    while True:
        over = shares.over_share()
        limit = shares.free_for_each(most)
        owner = next((one for one in owners if one not in over), None)
        if owner is None or limit <= 0:
            return taken
        add(shares, tasks_of(owner, limit))
        taken[owner] += limit


def test_an_organisation_that_settles_nothing_gets_half_of_the_credit() -> None:
    shares = CreditShares(credit=20_000, max_bytes=LARGE)
    assert 9_000 <= fill(shares, "one")["one"] <= 10_000
    assert shares.free_for_each(500) == 500
    assert shares.over_share() == {"one"}


@pytest.mark.parametrize("count", [2, 5, 10])
def test_of_several_each_leaves_as_much_as_it_gets(count: int) -> None:
    shares = CreditShares(credit=20_000, max_bytes=LARGE)
    taken = fill(shares, *[str(number) for number in range(count)])
    assert len(taken) == count
    assert shares.free(20_000) >= max(1, 20_000 >> (count + 1))


def test_of_several_that_settle_everything_now_and_then_all_get_equal_parts() -> None:
    shares = CreditShares(credit=20_000, max_bytes=LARGE)
    having: dict[str, list[DeliveryTask]] = {"one": [], "two": [], "three": []}
    for turn in range(300):
        owner = list(having)[turn % 3]
        if turn % 10 == 0:
            shares.discard(having[owner][: len(having[owner]) // 2])
            having[owner] = having[owner][len(having[owner]) // 2 :]
        if owner not in shares.over_share():
            tasks = tasks_of(owner, shares.free_for_each(500))
            add(shares, tasks)
            having[owner] += tasks
    assert shares.free(20_000) >= 4_000
    assert min(map(len, having.values())) >= 2_000


@pytest.mark.parametrize("credit", [2, 3, 8, 31])
def test_a_small_credit_is_shared_too(credit: int) -> None:
    shares = CreditShares(credit=credit, max_bytes=LARGE)
    assert 1 <= fill(shares, "one")["one"] <= (credit + 1) // 2
    assert shares.over_share() == {"one"}
    assert shares.free_for_each(500) >= 1


def test_claims_are_not_small_beside_an_organisation_that_is_nearly_over_its_share() -> None:
    shares = CreditShares(credit=20_000, max_bytes=LARGE)
    for count in range(0, 20_000, 100):
        if "one" in shares.over_share():
            break
        assert shares.free_for_each(500) == 500, count
        add(shares, tasks_of("one", 100))
    assert shares.over_share() == {"one"}
    assert shares.free_for_each(500) == 500


def test_bytes_are_shared_too() -> None:
    shares = CreditShares(credit=LARGE, max_bytes=100_000, overhead_bytes=1_000)
    large = tasks_of("one", 5, 9_000)
    add(shares, large)
    assert shares.over_share() == {"one"}
    add(shares, tasks_of("two", 3, 9_000))
    assert shares.over_share() == {"one", "two"}
    assert shares.free(500) == 2
    shares.discard(large)
    assert shares.over_share() == frozenset()
    assert shares.free_for_each(500) == 2


def test_who_was_over_its_share_gets_more_once_it_has_a_quarter_less() -> None:
    shares = CreditShares(credit=100, max_bytes=LARGE)
    taken = tasks_of("one", 50)
    add(shares, taken)
    assert shares.over_share() == {"one"}
    while "one" in shares.over_share():
        shares.discard([taken.pop()])
    assert len(taken) == 42
    add(shares, tasks_of("one", 1))
    assert shares.over_share() == frozenset()


def test_without_other_organisations_nothing_is_left_for_them() -> None:
    shares = CreditShares(credit=10, max_bytes=LARGE)
    shares.is_shared = False
    add(shares, tasks_of("one", 6))
    assert shares.over_share() == frozenset()
    assert shares.free_for_each(500) == 4
    assert shares.is_short(1)
    shares.is_shared = True
    assert shares.over_share() == {"one"}


def test_excess_is_what_leaves_as_much_free_as_the_organisation_has() -> None:
    shares = CreditShares(credit=20, max_bytes=LARGE)
    one = OrganisationId("one")
    assert shares.excess_of(one) == 0
    taken = tasks_of("one", 16)
    add(shares, taken)
    assert shares.excess_of(one) == 6
    assert shares.excess_of(OrganisationId("two")) == 0
    shares.discard(taken[:6])
    assert shares.excess_of(one) == 0
    shares.is_shared = False
    add(shares, taken[:6])
    assert shares.excess_of(one) == 0


def test_excess_is_also_by_bytes() -> None:
    shares = CreditShares(credit=LARGE, max_bytes=20_000)
    add(shares, tasks_of("one", 16, 1_000))
    assert shares.excess_of(OrganisationId("one")) == 6


def test_a_task_that_has_the_whole_credit_is_not_beyond_it() -> None:
    shares = CreditShares(credit=1, max_bytes=LARGE)
    add(shares, tasks_of("one", 1))
    assert shares.excess_of(OrganisationId("one")) == 0


def test_what_is_beyond_a_share_is_the_last_of_the_lowest_priority() -> None:
    shares = CreditShares(credit=1000, max_bytes=LARGE)
    one, two = OrganisationId("one"), OrganisationId("two")
    front = [replace(task, priority=5) for task in tasks_of("one", 600)]
    back = [replace(task, priority=4) for task in tasks_of("one", 200)]
    excess = shares.take_excess([*back, *front], one, are_flowing=False)
    assert len(excess) == (800 - 200) // 2
    assert [*excess] == [*front[500:], *back]
    more, others = tasks_of("one", 1), tasks_of("two", 1)
    assert shares.take_excess(more, one, are_flowing=False) == more
    assert shares.take_excess(others, two, are_flowing=False) == ()
    assert shares.take_excess(tasks_of("one", 1), one, are_flowing=True) == ()
    assert shares.room_for(one, 0.0) == 0
    assert shares.room_for(two, 0.0) == 248
    shares.expect(two, 40, 0.0)
    assert shares.room_for(two, 0.0) == 208
    shares.discard(others)
    shares.discard(front)
    assert shares.room_for(two, 0.0) == 459


@pytest.mark.parametrize("count", [2, 5, 10])
def test_of_several_that_hang_each_holds_what_would_leave_others_less_than_it_has(
    count: int,
) -> None:
    shares = CreditShares(credit=20_000, max_bytes=LARGE)
    for owner in map(str, range(count)):
        for _ in range(40):
            shares.take_excess(tasks_of(owner, 500), OrganisationId(owner), are_flowing=False)
    assert shares.free(20_000) >= 20_000 >> (count + 1)


def test_beside_a_flood_that_flows_others_have_their_share() -> None:
    shares = CreditShares(credit=20_000, max_bytes=LARGE)
    flood, small = OrganisationId("flood"), OrganisationId("small")
    for _ in range(40):
        assert not shares.take_excess(tasks_of("flood", 500), flood, are_flowing=True)
    assert shares.free(1) == 0
    assert shares.room_for(small, 0.0) == 5_000
    assert not shares.take_excess(tasks_of("small", 10), small, are_flowing=False)
    assert shares.room_for(small, 0.0) == 4_992
    assert shares.room_for(flood, 0.0) == 0
    assert len(shares.take_excess(tasks_of("flood", 100), flood, are_flowing=False)) == 100
    more = shares.take_excess(tasks_of("small", 10_000), small, are_flowing=False)
    assert len(more) >= 2_000, "it has no more than its share, either"
    assert len(shares.take_excess(tasks_of("small", 100), small, are_flowing=False)) == 100


def test_beside_a_flood_that_flows_others_have_their_share_of_the_bytes() -> None:
    shares = CreditShares(credit=LARGE, max_bytes=100_000)
    flood, small = OrganisationId("flood"), OrganisationId("small")
    assert not shares.take_excess(tasks_of("flood", 100, 1_000), flood, are_flowing=True)
    assert not shares.take_excess(tasks_of("small", 10, 1_000), small, are_flowing=False)
    assert shares.room_for(small, 0.0)


def test_beside_several_floods_an_organisation_has_no_more_than_an_equal_part() -> None:
    shares = CreditShares(credit=20_000, max_bytes=LARGE)
    for owner in ("a", "b", "c"):
        shares.take_excess(tasks_of(owner, 6_666), OrganisationId(owner), are_flowing=True)
    assert 2_400 <= (shares.room_for(OrganisationId("small"), 0.0) or 0) <= 2_500


def test_what_flowed_and_is_settled_is_given_up_no_more() -> None:
    shares = CreditShares(credit=100, max_bytes=LARGE)
    small = OrganisationId("small")
    flowing = tasks_of("flood", 40)
    shares.take_excess(flowing, OrganisationId("flood"), are_flowing=True)
    add(shares, tasks_of("flood", 60))
    assert shares.room_for(small, 0.0) == 20
    shares.discard(flowing)
    add(shares, tasks_of("flood", 40))
    assert shares.room_for(small, 0.0) == 0


def test_lanes_keep_less_the_longer_their_organisation_is_over_its_share() -> None:
    shares = CreditShares(credit=100, max_bytes=LARGE)
    one = OrganisationId("one")
    taken = tasks_of("one", 60)
    shares.take_excess(taken, one, are_flowing=True)
    assert shares.kept_part(one) == 1.0
    parts = []
    for tick in range(40):
        shares.adapt_kept_part(one, tick * 0.25)
        parts.append(shares.kept_part(one))
    assert parts[:6] == [0.5, 0.5, 0.25, 0.25, 0.125, 0.125]
    assert parts[-1] == 0.5**7
    assert shares.kept_part(OrganisationId("two")) == 1.0
    shares.discard(taken[:40])
    shares.adapt_kept_part(one, 10.0)
    assert shares.kept_part(one) == 0.5**7
    shares.adapt_kept_part(one, 20.0)
    assert shares.kept_part(one) == 0.5**6
    shares.adapt_kept_part(one, 1000.0)
    assert shares.kept_part(one) == 1.0


def test_the_lanes_of_an_only_organisation_keep_their_usual_work() -> None:
    shares = CreditShares(credit=100, max_bytes=LARGE)
    one = OrganisationId("one")
    shares.is_shared = False
    shares.take_excess(tasks_of("one", 100), one, are_flowing=True)
    shares.adapt_kept_part(one, 0.0)
    assert shares.kept_part(one) == 1.0


def test_room_is_left_for_what_is_expected_until_it_comes_or_a_while_has_passed() -> None:
    shares = CreditShares(credit=100, max_bytes=LARGE)
    one, two = OrganisationId("one"), OrganisationId("two")
    assert shares.room_for(one, 0.0) == 50
    shares.expect(one, 20, 0.0)
    shares.expect(one, 10, 1.0)
    assert shares.room_for(one, 1.0) == 20
    assert shares.room_for(two, 1.0) == 50
    add(shares, tasks_of("one", 10))
    shares.on_arrived(one, 10)
    shares.on_arrived(two, 10)
    assert shares.room_for(one, 1.0) == 20
    assert shares.room_for(one, 3.0) == 40
    shares.expect(one, 5, 3.0)
    assert shares.room_for(one, 3.0) == 35


def test_without_its_part_free_an_organisation_has_no_room() -> None:
    shares = CreditShares(credit=100, max_bytes=LARGE)
    add(shares, tasks_of("one", 47))
    assert shares.room_for(OrganisationId("one"), 0.0) == 0
    assert shares.room_for(OrganisationId("two"), 0.0) == 26
    shares.is_shared = False
    assert shares.room_for(OrganisationId("one"), 0.0) is None


def test_room_is_also_by_bytes() -> None:
    shares = CreditShares(credit=LARGE, max_bytes=20_000)
    add(shares, tasks_of("one", 4, 1_000))
    assert shares.room_for(OrganisationId("one"), 0.0) == 6
    assert shares.room_for(OrganisationId("two"), 0.0) == 8


def test_tasks_without_an_owner_are_counted_and_cannot_be_skipped() -> None:
    shares = CreditShares(credit=10, max_bytes=LARGE)
    gone = tasks_of("gone", 9)
    shares.add(gone, {})
    assert shares.over_share() == frozenset()
    assert shares.free(500) == 1
    shares.discard(gone)
    assert shares.free(500) == 10


def test_what_is_settled_again_or_was_never_counted_changes_nothing() -> None:
    shares = CreditShares(credit=10, max_bytes=LARGE)
    (one,) = tasks_of("one", 1)
    add(shares, [one])
    assert one in shares
    add(shares, [one])
    shares.discard([replace(one)])
    assert len(shares) == 1
    shares.discard([one, one])
    shares.discard([one])
    assert (len(shares), one in shares) == (0, False)
    assert shares.free(500) == 10


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_settled_the_counts_are_those_of_what_is_left(seed: int) -> None:
    chosen = random.Random(seed)
    shares = CreditShares(credit=200, max_bytes=40_000)
    unsettled: list[DeliveryTask] = []
    for _ in range(300):
        over = shares.over_share()
        limit = shares.free_for_each(50)
        owner = chosen.choice(["one", "two", "three"])
        if limit > 0 and owner not in over and chosen.random() < 0.7:
            came = tasks_of(owner, chosen.randint(1, limit), chosen.randint(1, 400))
            add(shares, came)
            unsettled += came
        chosen.shuffle(unsettled)
        gone, unsettled = unsettled[:20], unsettled[20:]
        shares.discard(gone)
        assert len(shares) == len(unsettled)
        assert shares._bytes == sum(len(task.payload) for task in unsettled)
        counts = Counter(OrganisationId(task.subscription_id) for task in unsettled)
        assert {known: use.count for known, use in shares._uses.items()} == counts
        assert shares.over_share() <= counts.keys()
