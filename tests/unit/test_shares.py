"""Shares: everything by one member, counts within one, as few moves as can be, the same for the same."""

from collections import Counter
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from delivery.elections.shares import share

PARTITIONS = [f"p{number}" for number in range(12)]
SOME = st.lists(st.sampled_from(PARTITIONS), unique=True)
MEMBERS = st.lists(st.integers(0, 6), unique=True, min_size=1)
BEFORE = st.dictionaries(st.sampled_from([*PARTITIONS, "gone"]), st.integers(0, 9))


def moves(current: dict[str, int], plan: dict[str, int], members: list[int]) -> int:
    """Partitions that a member loses although it lives."""
    return sum(current[name] != member for name, member in plan.items() if current.get(name) in members)


@given(SOME, MEMBERS, BEFORE)
def test_everything_is_shared_out_evenly(partitions: list[str], members: list[int], current: dict[str, int]) -> None:
    plan = share(partitions, members, current)
    assert plan.keys() == set(partitions)
    assert set(plan.values()) <= set(members)
    counts = Counter(plan.values())
    assert max(counts[member] for member in members) - min(counts[member] for member in members) <= 1
    assert share(partitions, members, current) == plan
    assert share(partitions, members, plan) == plan


@given(SOME, MEMBERS)
def test_at_first_it_goes_round(partitions: list[str], members: list[int]) -> None:
    expected = {name: members[place % len(members)] for place, name in enumerate(partitions)}
    assert share(partitions, members, {}) == expected


@given(
    st.lists(st.sampled_from(PARTITIONS[:5]), unique=True),
    st.lists(st.integers(0, 2), unique=True, min_size=1),
    st.dictionaries(st.sampled_from(PARTITIONS[:5]), st.integers(0, 3)),
)
def test_no_even_plan_moves_less(partitions: list[str], members: list[int], current: dict[str, int]) -> None:
    def even(plan: dict[str, int]) -> bool:
        counts = [list(plan.values()).count(member) for member in members]
        return max(counts) - min(counts) <= 1

    plans = (dict(zip(partitions, chosen, strict=True)) for chosen in product(members, repeat=len(partitions)))
    least = min(moves(current, plan, members) for plan in plans if even(plan))
    assert moves(current, share(partitions, members, current), members) == least


KINDS = [f"{kind}/{number}" for kind in ("duty", "due") for number in range(6)]


@given(
    st.lists(st.sampled_from(KINDS), unique=True).map(sorted),
    MEMBERS,
    st.dictionaries(st.sampled_from(KINDS), st.integers(0, 9)),
)
def test_each_kind_is_shared_out_evenly_and_all_together(
    partitions: list[str], members: list[int], current: dict[str, int]
) -> None:
    plan = share(partitions, members, current)
    for kind in ("duty/", "due/", ""):
        counts = Counter(member for name, member in plan.items() if name.startswith(kind))
        assert max(counts[member] for member in members) - min(counts[member] for member in members) <= 1
    assert plan.keys() == set(partitions)
    assert share(partitions, members, plan) == plan


def test_what_comes_later_goes_to_all() -> None:
    """The leader has had everything else alone when the buckets are named: they are not the other's alone."""
    duties, buckets = [f"duty/{n}" for n in range(8)], [f"due/{n}" for n in range(8)]
    plan = share([*duties, *buckets], ["leader", "other"], dict.fromkeys(duties, "leader"))
    assert Counter(plan[name] for name in buckets) == {"leader": 4, "other": 4}


def test_without_members_nobody_has_anything() -> None:
    assert share(PARTITIONS, list[int](), {"p1": 3}) == {}
