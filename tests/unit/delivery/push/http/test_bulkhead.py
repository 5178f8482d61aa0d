"""Test the bulkheads: limits hold, no request waits without need, and turns rotate."""

import asyncio
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from delivery.push.http.bulkhead import Bulkhead, ConnectionWaiter, LimitScope
from delivery.push.http.connection import PoolKey
from rooms.domain.ids import OrganisationId

ONE, TWO, THREE = (OrganisationId(name) for name in ("one", "two", "three"))
KEYS: list[PoolKey] = [
    (owner, ("http", host, 80)) for owner in (ONE, TWO, THREE) for host in ("a", "b")
]


def waiter(loop: asyncio.AbstractEventLoop, key: PoolKey) -> ConnectionWaiter:
    return ConnectionWaiter(key=key, addresses=(), fresh=False, granted=loop.create_future())


def granted(bulkhead: Bulkhead) -> list[PoolKey]:
    """Admit all waiters for which there is a slot, as the pool does."""
    keys = []
    while (found := bulkhead.next_waiter()) is not None:
        bulkhead.admit(found)
        bulkhead.acquire(found.key)
        keys.append(found.key)
    return keys


_steps = st.lists(
    st.tuples(
        st.sampled_from(("come", "come", "go", "quit")), st.sampled_from(KEYS), st.integers(0, 9)
    ),
    max_size=60,
)


@given(_steps, st.integers(1, 6), st.integers(1, 4), st.integers(1, 3))
@settings(deadline=None)
def test_limits_hold_and_no_request_waits_without_need(
    steps: list[tuple[str, PoolKey, int]], in_all: int, per_organisation: int, per_endpoint: int
) -> None:
    bulkhead = Bulkhead(total=in_all, per_organisation=per_organisation, per_endpoint=per_endpoint)
    loop = asyncio.new_event_loop()
    taken: list[PoolKey] = []
    waiting: list[ConnectionWaiter] = []
    for step, key, which in steps:
        if step == "come" and bulkhead.exhausted_scope(key) is None:
            bulkhead.acquire(key)
            taken.append(key)
        elif step == "come":
            waiting.append(waiter(loop, key))
            bulkhead.add_waiter(waiting[-1])
        elif step == "go" and taken:
            bulkhead.release(taken.pop(which % len(taken)))
        elif step == "quit" and waiting:
            bulkhead.remove_waiter(waiting[which % len(waiting)])
            bulkhead.remove_waiter(waiting.pop(which % len(waiting)))
        for admitted in granted(bulkhead):
            taken.append(admitted)
            waiting.remove(next(one for one in waiting if one.key == admitted))
        assert bulkhead.size == len(taken) <= in_all
        assert max(Counter(owner for owner, _ in taken).values(), default=0) <= per_organisation
        assert max(Counter(taken).values(), default=0) <= per_endpoint
        assert all(bulkhead.exhausted_scope(one.key) is not None for one in waiting)
        assert bool(bulkhead.waiters) == bool(waiting)
    loop.close()
    for key in taken:
        bulkhead.release(key)
    assert not bulkhead._by_organisation
    assert not bulkhead._by_endpoint
    assert sorted(one.key for one in bulkhead.remove_all_waiters()) == sorted(
        one.key for one in waiting
    )


async def test_turns_rotate() -> None:
    """Expect a delay of one turn by another organisation with a hundred waiting requests."""
    loop = asyncio.get_running_loop()
    bulkhead = Bulkhead(total=1, per_organisation=1, per_endpoint=1)
    bulkhead.acquire(KEYS[4])
    for _ in range(100):
        bulkhead.add_waiter(waiter(loop, KEYS[0]))
        bulkhead.add_waiter(waiter(loop, KEYS[1]))
    bulkhead.add_waiter(waiter(loop, KEYS[2]))
    order = []
    bulkhead.release(KEYS[4])
    for _ in range(5):
        order += (keys := granted(bulkhead))
        bulkhead.release(keys[0])
    assert order == [KEYS[0], KEYS[2], KEYS[1], KEYS[0], KEYS[1]]


async def test_a_waiter_at_its_own_limit_delays_no_other() -> None:
    loop = asyncio.get_running_loop()
    bulkhead = Bulkhead(total=10, per_organisation=2, per_endpoint=1)
    bulkhead.acquire(KEYS[0])
    assert bulkhead.exhausted_scope(KEYS[0]) is LimitScope.ENDPOINT
    bulkhead.add_waiter(waiter(loop, KEYS[0]))
    assert bulkhead.exhausted_scope(KEYS[1]) is None
    bulkhead.acquire(KEYS[1])
    assert bulkhead.exhausted_scope(KEYS[1]) is LimitScope.ORGANISATION
    bulkhead.add_waiter(waiter(loop, KEYS[1]))
    assert bulkhead.next_waiter() is None
    assert bulkhead.exhausted_scope(KEYS[2]) is None
    found = bulkhead.next_waiter(freed=KEYS[1])
    assert found is not None
    assert found.key == KEYS[1]
    assert bulkhead.size == 2
