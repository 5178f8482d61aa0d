"""Test the priorities of queues of one name against a plain comparison."""

from hypothesis import given
from hypothesis import strategies as st

from delivery.pull.dispatch import CONSUMER_PRIORITIES
from delivery.pull.name_group import IDLE, NameGroup

MEMBERS = range(5)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(MEMBERS),
            st.none() | st.integers(IDLE, CONSUMER_PRIORITIES - 1),
        )
    )
)
def test_a_member_waits_exactly_for_higher_priorities(
    changes: list[tuple[int, int | None]],
) -> None:
    group, priorities = NameGroup[int](), dict[int, int]()
    for member, priority in changes:
        if priority is None:
            if priorities.pop(member, None) is not None:
                group.remove(member)
        else:
            if member not in priorities:
                group.add(member)
            group.record(member, priority)
            priorities[member] = priority
        assert (len(group), set(group)) == (len(priorities), set(priorities))
        for one, own in priorities.items():
            assert group.must_wait(one) == any(own < other for other in priorities.values())
