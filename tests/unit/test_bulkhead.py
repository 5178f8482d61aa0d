"""The bulkheads between tenants: no bound is ever exceeded, nothing that may go on waits, turns go round."""

import asyncio
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from delivery.bulkhead import Bound, Bulkhead, PoolKey, Waiter
from rooms.domain.ids import OrganisationId

ONE, TWO, THREE = (OrganisationId(name) for name in ("one", "two", "three"))
KEYS: list[PoolKey] = [(owner, ("http", host, 80)) for owner in (ONE, TWO, THREE) for host in ("a", "b")]


def waiter(loop: asyncio.AbstractEventLoop, key: PoolKey) -> Waiter:
    return Waiter(key=key, addresses=(), fresh=False, given=loop.create_future())


def granted(bulkhead: Bulkhead) -> list[PoolKey]:
    """Let in all that may go on, as the pool does."""
    keys = []
    while (found := bulkhead.next()) is not None:
        bulkhead.admit(found)
        bulkhead.enter(found.key)
        keys.append(found.key)
    return keys


_steps = st.lists(
    st.tuples(st.sampled_from(("come", "come", "go", "quit")), st.sampled_from(KEYS), st.integers(0, 9)), max_size=60
)


@given(_steps, st.integers(1, 6), st.integers(1, 4), st.integers(1, 3))
@settings(deadline=None)
def test_bounds_hold_and_nothing_waits_without_need(
    steps: list[tuple[str, PoolKey, int]], in_all: int, per_organisation: int, per_endpoint: int
) -> None:
    bulkhead = Bulkhead(in_all=in_all, per_organisation=per_organisation, per_endpoint=per_endpoint)
    loop = asyncio.new_event_loop()
    taken: list[PoolKey] = []
    waiting: list[Waiter] = []
    for step, key, which in steps:
        if step == "come" and bulkhead.reached(key) is None:
            bulkhead.enter(key)
            taken.append(key)
        elif step == "come":
            waiting.append(waiter(loop, key))
            bulkhead.join(waiting[-1])
        elif step == "go" and taken:
            bulkhead.leave(taken.pop(which % len(taken)))
        elif step == "quit" and waiting:
            bulkhead.withdraw(waiting[which % len(waiting)])
            bulkhead.withdraw(waiting.pop(which % len(waiting)))
        for admitted in granted(bulkhead):
            taken.append(admitted)
            waiting.remove(next(one for one in waiting if one.key == admitted))
        assert bulkhead.size == len(taken) <= in_all
        assert max(Counter(owner for owner, _ in taken).values(), default=0) <= per_organisation
        assert max(Counter(taken).values(), default=0) <= per_endpoint
        assert all(bulkhead.reached(one.key) is not None for one in waiting)
        assert bool(bulkhead.waiting) == bool(waiting)
    loop.close()
    for key in taken:
        bulkhead.leave(key)
    assert not bulkhead._by_organisation
    assert not bulkhead._by_endpoint
    assert sorted(one.key for one in bulkhead.dismiss()) == sorted(one.key for one in waiting)


async def test_turns_go_round() -> None:
    """One organisation that has a hundred requests waiting delays another one's by one turn."""
    loop = asyncio.get_running_loop()
    bulkhead = Bulkhead(in_all=1, per_organisation=1, per_endpoint=1)
    bulkhead.enter(KEYS[4])
    for _ in range(100):
        bulkhead.join(waiter(loop, KEYS[0]))
        bulkhead.join(waiter(loop, KEYS[1]))
    bulkhead.join(waiter(loop, KEYS[2]))
    order = []
    bulkhead.leave(KEYS[4])
    for _ in range(5):
        order += (keys := granted(bulkhead))
        bulkhead.leave(keys[0])
    assert order == [KEYS[0], KEYS[2], KEYS[1], KEYS[0], KEYS[1]]


async def test_what_waits_at_its_own_bound_holds_up_no_other() -> None:
    loop = asyncio.get_running_loop()
    bulkhead = Bulkhead(in_all=10, per_organisation=2, per_endpoint=1)
    bulkhead.enter(KEYS[0])
    assert bulkhead.reached(KEYS[0]) is Bound.ENDPOINT
    bulkhead.join(waiter(loop, KEYS[0]))
    assert bulkhead.reached(KEYS[1]) is None
    bulkhead.enter(KEYS[1])
    assert bulkhead.reached(KEYS[1]) is Bound.ORGANISATION
    bulkhead.join(waiter(loop, KEYS[1]))
    assert bulkhead.next() is None
    assert bulkhead.reached(KEYS[2]) is None
    found = bulkhead.next(freed=KEYS[1])
    assert found is not None
    assert found.key == KEYS[1]
    assert bulkhead.size == 2
