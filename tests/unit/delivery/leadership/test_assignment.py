"""Assignment: every partition to one member, evenly, with few moves, and deterministic."""

from collections import Counter
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from delivery.leadership.assignment import assign

PARTITIONS = [f"p{number}" for number in range(12)]
SOME = st.lists(st.sampled_from(PARTITIONS), unique=True)
MEMBERS = st.lists(st.integers(0, 6), unique=True, min_size=1)
BEFORE = st.dictionaries(st.sampled_from([*PARTITIONS, "gone"]), st.integers(0, 9))


def moves(current: dict[str, int], plan: dict[str, int], members: list[int]) -> int:
    """Return the partitions that a living member loses."""
    return sum(
        current[name] != member for name, member in plan.items() if current.get(name) in members
    )


@given(SOME, MEMBERS, BEFORE)
def test_partitions_are_assigned_evenly(
    partitions: list[str], members: list[int], current: dict[str, int]
) -> None:
    plan = assign(partitions, members, current)
    assert plan.keys() == set(partitions)
    assert set(plan.values()) <= set(members)
    counts = Counter(plan.values())
    assert (
        max(counts[member] for member in members) - min(counts[member] for member in members) <= 1
    )
    assert assign(partitions, members, current) == plan
    assert assign(partitions, members, plan) == plan


@given(SOME, MEMBERS)
def test_the_first_assignment_is_in_turn(partitions: list[str], members: list[int]) -> None:
    expected = {name: members[place % len(members)] for place, name in enumerate(partitions)}
    assert assign(partitions, members, {}) == expected


@given(
    st.lists(st.sampled_from(PARTITIONS[:5]), unique=True),
    st.lists(st.integers(0, 2), unique=True, min_size=1),
    st.dictionaries(st.sampled_from(PARTITIONS[:5]), st.integers(0, 3)),
)
def test_no_even_assignment_moves_fewer(
    partitions: list[str], members: list[int], current: dict[str, int]
) -> None:
    def even(plan: dict[str, int]) -> bool:
        counts = [list(plan.values()).count(member) for member in members]
        return max(counts) - min(counts) <= 1

    plans = (
        dict(zip(partitions, chosen, strict=True))
        for chosen in product(members, repeat=len(partitions))
    )
    least = min(moves(current, plan, members) for plan in plans if even(plan))
    assert moves(current, assign(partitions, members, current), members) == least


KINDS = [f"{kind}/{number}" for kind in ("duty", "due") for number in range(6)]


@given(
    st.lists(st.sampled_from(KINDS), unique=True).map(sorted),
    MEMBERS,
    st.dictionaries(st.sampled_from(KINDS), st.integers(0, 9)),
)
def test_each_kind_and_the_total_are_assigned_evenly(
    partitions: list[str], members: list[int], current: dict[str, int]
) -> None:
    plan = assign(partitions, members, current)
    for kind in ("duty/", "due/", ""):
        counts = Counter(member for name, member in plan.items() if name.startswith(kind))
        assert (
            max(counts[member] for member in members) - min(counts[member] for member in members)
            <= 1
        )
    assert plan.keys() == set(partitions)
    assert assign(partitions, members, plan) == plan


def test_later_partitions_are_assigned_to_all_members() -> None:
    """Add shards when the leader has everything else: the other member does not get them all."""
    duties, buckets = [f"duty/{n}" for n in range(8)], [f"due/{n}" for n in range(8)]
    plan = assign([*duties, *buckets], ["leader", "other"], dict.fromkeys(duties, "leader"))
    assert Counter(plan[name] for name in buckets) == {"leader": 4, "other": 4}


def test_without_members_nothing_is_assigned() -> None:
    assert assign(PARTITIONS, list[int](), {"p1": 3}) == {}
