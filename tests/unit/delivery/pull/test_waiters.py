"""Test wait queues over a source that the test controls."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from delivery.pull import waiters as module
from delivery.pull.dispatch import Dispatcher
from delivery.pull.lease_batcher import MAX_QUEUES
from delivery.pull.wait_queue import MAX_BATCH_MESSAGES, LeaseOutcome, LeaseRequest, Poll
from delivery.pull.waiters import Waiters
from rooms.domain.ids import KeyId
from tests.support.pull_service import until

LONG_S = 30.0


@dataclass
class Source:
    """Hold queues in memory; a lease waits while `gate` is closed."""

    queues: dict[str, list[int]] = field(default_factory=dict)
    requests: list[list[LeaseRequest[str]]] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    returned: list[tuple[str, list[int]]] = field(default_factory=list)
    emptied: list[Any] = field(default_factory=list)
    error: Exception | None = None
    under_way: int = 0
    max_under_way: int = 0
    at_a_time: int = MAX_BATCH_MESSAGES

    def __post_init__(self) -> None:
        self.gate.set()

    async def acquire(self, wanted: Sequence[LeaseRequest[str]]) -> list[LeaseOutcome[int]]:
        assert len({request.key for request in wanted}) == len(wanted)
        self.requests.append(list(wanted))
        self.under_way += 1
        self.max_under_way = max(self.max_under_way, self.under_way)
        self.begun.set()
        try:
            found = [self._got(request.key, request.max_messages) for request in wanted]
            await self.gate.wait()
            if self.error is not None:
                raise self.error
            return found
        finally:
            self.under_way -= 1

    def _got(self, key: str, most: int) -> LeaseOutcome[int]:
        queue = self.queues.setdefault(key, [])
        most = min(most, self.at_a_time)
        found, queue[:] = queue[:most], queue[most:]
        return LeaseOutcome(found, has_more=len(found) >= most)

    def give_back(self, key: str, messages: Sequence[int]) -> None:
        self.returned.append((key, list(messages)))


@pytest.fixture
async def source() -> Source:
    return Source()


@pytest.fixture
async def waiters(source: Source) -> AsyncIterator[Waiters[str, int]]:
    async with Waiters(
        source.acquire,
        name=lambda key: key,
        give_back=source.give_back,
        on_empty=source.emptied.append,
        max_in_flight=2,
    ) as opened:
        yield opened
        source.gate.set()


async def messages_of(poll: Poll[int]) -> list[int]:
    async with asyncio.timeout(LONG_S):
        return list(await poll.future)


async def until_idle(waiters: Waiters[str, int], *keys: str) -> None:
    """Wait until exactly these queues wait for a notification."""
    await until(lambda: sorted(waiters.waiting_keys()) == sorted(keys) and not waiters._running)


def asked(key: str, most: int, lease_ms: int, holder: str | None = None) -> LeaseRequest[str]:
    return LeaseRequest(
        key, most, lease_ms, can_wait=True, holder=None if holder is None else KeyId(holder)
    )


def add_poll(
    waiters: Waiters[str, int],
    key: str = "a",
    *,
    most: int = 1,
    lease_ms: int = 1000,
    wait_s: float = LONG_S,
    priority: int = 0,
    holder: str | None = None,
) -> Poll[int]:
    return waiters.add_poll(
        key,
        max_messages=most,
        lease_ms=lease_ms,
        wait_s=wait_s,
        priority=priority,
        holder=None if holder is None else KeyId(holder),
    )


async def test_available_messages_are_leased_at_once(
    source: Source, waiters: Waiters[str, int]
) -> None:
    source.queues["a"] = [1, 2, 3]
    assert await messages_of(add_poll(waiters, most=2)) == [1, 2]
    assert await messages_of(add_poll(waiters, most=2, wait_s=0)) == [3]
    assert await messages_of(add_poll(waiters, wait_s=0)) == []
    assert waiters.waiting_keys() == []


async def test_polls_of_one_moment_share_a_statement(
    source: Source, waiters: Waiters[str, int]
) -> None:
    source.queues = {"a": [1, 2, 3], "b": [4]}
    polls = [add_poll(waiters, "a", most=2), add_poll(waiters, "b"), add_poll(waiters, "a")]
    assert [await messages_of(poll) for poll in polls] == [[1, 2], [4], [3]]
    assert source.requests == [[asked("a", 3, 1000), asked("b", 1, 1000)]]


async def test_a_notification_serves_the_first_poll_and_no_more_than_there_is(
    source: Source, waiters: Waiters[str, int]
) -> None:
    polls = [add_poll(waiters) for _ in range(5)]
    await until_idle(waiters, "a")
    source.queues["a"] = [1, 2]
    waiters.notify(["a", "unknown"])
    assert [await messages_of(poll) for poll in polls[:2]] == [[1], [2]]
    await until_idle(waiters, "a")
    assert not any(poll.future.done() for poll in polls[2:])
    assert len(source.requests) == 2


async def test_joining_an_empty_queue_costs_no_statement(
    source: Source, waiters: Waiters[str, int]
) -> None:
    first = add_poll(waiters)
    await until_idle(waiters, "a")
    second = add_poll(waiters)
    await asyncio.sleep(0)
    assert len(source.requests) == 1
    source.queues["a"] = [1, 2]
    waiters.notify(None)
    assert (await messages_of(first), await messages_of(second)) == ([1], [2])


async def test_only_queues_that_match_are_notified(
    waiters: Waiters[str, int], source: Source
) -> None:
    polls = [
        waiters.add_poll(key, max_messages=1, lease_ms=1, wait_s=LONG_S)
        for key in ("a1", "a2", "b")
    ]
    await until_idle(waiters, "a1", "a2", "b")
    source.requests.clear()
    for key in ("a1", "a2", "b"):
        source.queues[key].append(1)
    waiters.notify_matching(lambda key: key.startswith("a"))
    assert [await messages_of(poll) for poll in polls[:2]] == [[1], [1]]
    assert {request.key for batch in source.requests for request in batch} == {"a1", "a2"}
    assert not polls[2].future.done()


async def test_a_poll_that_cannot_wait_does_not_overtake(
    source: Source, waiters: Waiters[str, int]
) -> None:
    first = add_poll(waiters)
    await until_idle(waiters, "a")
    source.queues["a"] = [1]
    hasty = add_poll(waiters, wait_s=0)
    assert (await messages_of(first), await messages_of(hasty)) == ([1], [])


async def test_a_notification_during_a_statement_causes_another(
    source: Source, waiters: Waiters[str, int]
) -> None:
    source.gate.clear()
    poll = add_poll(waiters)
    await source.begun.wait()
    source.queues["a"] = [1]
    waiters.notify(["a"])
    source.gate.set()
    assert await messages_of(poll) == [1]
    assert len(source.requests) == 2


async def test_a_poll_that_comes_during_a_statement_is_in_the_next(
    source: Source, waiters: Waiters[str, int]
) -> None:
    source.gate.clear()
    first = add_poll(waiters)
    await source.begun.wait()
    second = add_poll(waiters, wait_s=0)
    source.queues["a"] = [1]
    source.gate.set()
    assert (await messages_of(first), await messages_of(second)) == ([1], [])
    assert len(source.requests) == 2


async def test_a_queue_has_one_statement_and_all_queues_at_most_max_in_flight(
    source: Source, waiters: Waiters[str, int]
) -> None:
    source.gate.clear()
    polls = []
    for key in "abcd":
        polls.append(add_poll(waiters, key, wait_s=0))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        polls.append(add_poll(waiters, key, wait_s=0))
    await asyncio.sleep(0)
    assert [[request.key for request in requests] for requests in source.requests] == [["a"], ["b"]]
    source.gate.set()
    assert [await messages_of(poll) for poll in polls] == [[]] * 8
    assert source.max_under_way == 2


async def test_other_lease_lengths_have_statements_of_their_own_in_order(
    source: Source, waiters: Waiters[str, int]
) -> None:
    source.queues["a"] = [1, 2, 3]
    polls = [add_poll(waiters, lease_ms=lease_ms) for lease_ms in (1000, 2000, 2000)]
    assert [await messages_of(poll) for poll in polls] == [[1], [2], [3]]
    assert source.requests == [[asked("a", 1, 1000)], [asked("a", 2, 2000)]]


async def test_other_lease_lengths_do_not_keep_an_empty_queue_busy(
    source: Source, waiters: Waiters[str, int]
) -> None:
    polls = [
        add_poll(waiters, lease_ms=1000),
        add_poll(waiters, lease_ms=2000),
        add_poll(waiters, lease_ms=3000, wait_s=0),
    ]
    assert await messages_of(polls[2]) == []
    await until_idle(waiters, "a")
    assert source.requests == [[asked("a", 1, 1000)]]


async def test_a_statement_is_bounded(source: Source, waiters: Waiters[str, int]) -> None:
    many = [add_poll(waiters, f"queue {number}", wait_s=0) for number in range(MAX_QUEUES + 1)]
    big = [
        add_poll(waiters, "big", most=MAX_BATCH_MESSAGES, wait_s=0),
        add_poll(waiters, "bigger", most=MAX_BATCH_MESSAGES, wait_s=0),
    ]
    assert [await messages_of(poll) for poll in (*many, *big)] == [[]] * (MAX_QUEUES + 3)
    assert len(source.requests[0]) == MAX_QUEUES
    assert all(
        sum(request.max_messages for request in requests) <= MAX_BATCH_MESSAGES
        for requests in source.requests
    )


async def test_a_partial_result_causes_another_statement(
    source: Source, waiters: Waiters[str, int]
) -> None:
    source.at_a_time = 1
    source.queues["a"] = [1, 2, 3]
    polls = [add_poll(waiters, most=2, wait_s=0) for _ in range(4)]
    assert [await messages_of(poll) for poll in polls] == [[1], [2], [3], []]


async def test_a_waiting_poll_ends_when_its_time_is_up(
    source: Source, waiters: Waiters[str, int]
) -> None:
    short, long = add_poll(waiters, wait_s=0.01), add_poll(waiters)
    assert await messages_of(short) == []
    await until_idle(waiters, "a")
    source.queues["a"] = [1]
    waiters.notify(["a"])
    assert await messages_of(long) == [1]


async def test_a_poll_that_expires_during_a_statement_ends_with_its_result(
    source: Source, waiters: Waiters[str, int]
) -> None:
    source.queues["a"] = [1]
    source.gate.clear()
    lucky, empty = add_poll(waiters, wait_s=0.001), add_poll(waiters, wait_s=0.001)
    await until(lambda: lucky.expired and empty.expired)
    assert not lucky.future.done()
    source.gate.set()
    assert (await messages_of(lucky), await messages_of(empty)) == ([1], [])


async def test_a_removed_poll_is_passed_over(source: Source, waiters: Waiters[str, int]) -> None:
    removed, stays = add_poll(waiters), add_poll(waiters)
    await until_idle(waiters, "a")
    waiters.remove_poll("a", removed)
    source.queues["a"] = [1]
    waiters.notify(["a"])
    assert await messages_of(stays) == [1]
    assert source.returned == []


async def test_messages_leased_for_a_removed_poll_go_to_the_next_or_back(
    source: Source, waiters: Waiters[str, int]
) -> None:
    source.queues["a"] = [1, 2]
    source.gate.clear()
    removed, stays = add_poll(waiters), add_poll(waiters)
    await source.begun.wait()
    waiters.remove_poll("a", removed)
    source.gate.set()
    assert await messages_of(stays) == [1]
    assert source.returned == [("a", [2])]


async def test_messages_given_to_a_poll_that_is_removed_go_back(
    source: Source, waiters: Waiters[str, int]
) -> None:
    source.queues["a"] = [1]
    poll = add_poll(waiters)
    assert await messages_of(poll) == [1]
    waiters.remove_poll("a", poll)
    assert source.returned == [("a", [1])]


async def test_a_poll_whose_task_is_cancelled_leaves_nothing(
    source: Source, waiters: Waiters[str, int]
) -> None:
    poll = add_poll(waiters)
    task = asyncio.create_task(messages_of(poll))
    await until_idle(waiters, "a")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    waiters.remove_poll("a", poll)
    assert waiters._queues == {}
    assert waiters._groups == {}


async def test_an_error_reaches_the_polls_of_its_statement_and_no_others(
    source: Source, waiters: Waiters[str, int]
) -> None:
    source.gate.clear()
    requests = [add_poll(waiters), add_poll(waiters, lease_ms=5000), add_poll(waiters, "b")]
    await source.begun.wait()
    later = add_poll(waiters, wait_s=0)
    source.error = RuntimeError("no")
    source.gate.set()
    for poll in requests:
        with pytest.raises(RuntimeError, match="no"):
            await messages_of(poll)
        source.error = None
    assert await messages_of(later) == []


async def test_leaving_ends_every_poll(source: Source) -> None:
    async with Waiters(
        source.acquire,
        name=lambda key: key,
        give_back=source.give_back,
        on_empty=source.emptied.append,
        max_in_flight=1,
    ) as waiters:
        resting = add_poll(waiters)
        await until_idle(waiters, "a")
        source.queues["b"] = [1]
        source.gate.clear()
        served, waiting = add_poll(waiters, "b"), add_poll(waiters, "c")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        source.gate.set()
    assert [await messages_of(poll) for poll in (resting, served, waiting)] == [[], [1], []]
    assert await messages_of(add_poll(waiters)) == []


async def test_what_no_consumer_can_take_is_given_back_and_looked_for_again(
    source: Source, waiters: Waiters[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader has no credit for a while; when it has, nothing announces what was given back."""
    monkeypatch.setattr(module, "NO_TAKER_S", 0.02)
    woken = asyncio.Event()
    reader = waiters.add_reader("a", lease_ms=1000, wake=woken.set)
    waiters.set_interest("a", reader, interested=True)
    waiters.notify(["a"])
    await woken.wait()
    assert list(await waiters.pull("a", reader, 1)) == []
    await asyncio.sleep(0.1)
    assert source.emptied == [], "it waits for a message"
    waiters.set_interest("a", reader, interested=False)
    await until(lambda: bool(source.emptied))
    await asyncio.sleep(0.1)
    assert source.emptied == ["a"], "once"
    woken.clear()
    source.queues = {"a": [1]}
    waiters.set_interest("a", reader, interested=True)
    await woken.wait()
    assert list(await waiters.pull("a", reader, 1)) == [1]
    waiters.set_interest("a", reader, interested=False)
    await until(lambda: len(source.emptied) == 2)
    waiters.remove_reader("a", reader)
    assert source.emptied == ["a"] * 3


async def test_keys_of_one_name_are_notified_together(source: Source) -> None:
    async with Waiters(
        source.acquire,
        name=lambda key: key[0],
        give_back=source.give_back,
        on_empty=source.emptied.append,
        max_in_flight=1,
    ) as waiters:
        polls = [add_poll(waiters, "a1"), add_poll(waiters, "a2"), add_poll(waiters, "b1")]
        await until_idle(waiters, "a1", "a2", "b1")
        source.queues = {"a1": [1], "a2": [2], "b1": [3]}
        waiters.notify(["a"])
        assert [await messages_of(poll) for poll in polls[:2]] == [[1], [2]]
        assert not polls[2].future.done()


def make_waiters(source: Source, *, selecting: bool, max_in_flight: int = 2) -> Waiters[str, int]:
    """Make wait queues, whose second letter is their tenant.

    With `selecting` they are named by their first letter, and those with a second are exclusive.
    """
    return Waiters(
        source.acquire,
        name=lambda key: key[0] if selecting else key,
        give_back=source.give_back,
        on_empty=source.emptied.append,
        max_in_flight=max_in_flight,
        tenant=lambda key: key[1:2],
        exclusive=lambda key: selecting and len(key) > 1,
    )


@pytest.fixture
async def selecting(source: Source) -> AsyncIterator[Waiters[str, int]]:
    async with make_waiters(source, selecting=True) as opened:
        yield opened
        source.gate.set()


async def test_exclusive_queues_delay_no_other_one(
    source: Source, selecting: Waiters[str, int]
) -> None:
    source.gate.clear()
    for number in range(500):
        add_poll(selecting, f"aT{number}")
    await source.begun.wait()
    other = add_poll(selecting, "b", wait_s=0)
    await until(lambda: len(source.requests) == 2)
    assert [[request.key for request in requests] for requests in source.requests] == [
        ["aT0"],
        ["b"],
    ]
    source.gate.set()
    assert await messages_of(other) == []


async def test_other_queues_delay_no_exclusive_one(
    source: Source, selecting: Waiters[str, int]
) -> None:
    source.gate.clear()
    for key in "abcd":
        add_poll(selecting, key)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    add_poll(selecting, "eT")
    await until(lambda: len(source.requests) == 3)
    assert [request.key for request in source.requests[-1]] == ["eT"]


async def test_tenants_of_exclusive_queues_take_turns(
    source: Source, selecting: Waiters[str, int]
) -> None:
    polls = [add_poll(selecting, f"aT{number}", wait_s=0) for number in range(4)]
    polls += [add_poll(selecting, f"bU{number}", wait_s=0) for number in range(2)]
    for poll in polls:
        assert await messages_of(poll) == []
    assert [requests[0].key for requests in source.requests] == [
        "aT0",
        "bU0",
        "aT1",
        "bU1",
        "aT2",
        "aT3",
    ]


async def test_tenants_of_other_queues_take_turns(source: Source) -> None:
    """One tenant polls many queues for as much as a statement may lease: others do not wait."""
    async with make_waiters(source, selecting=False, max_in_flight=1) as waiters:
        source.gate.clear()
        add_poll(waiters, "zT", most=MAX_BATCH_MESSAGES, wait_s=0)
        await source.begun.wait()
        polls = [add_poll(waiters, f"{key}T", most=MAX_BATCH_MESSAGES, wait_s=0) for key in "abcd"]
        polls += [add_poll(waiters, f"{key}U", wait_s=0) for key in "ef"]
        source.gate.set()
        for poll in polls:
            assert await messages_of(poll) == []
    assert [[request.key for request in requests] for requests in source.requests] == [
        ["zT"],
        ["aT"],
        ["eU"],
        ["bT"],
        ["fU"],
        ["cT"],
        ["dT"],
    ]


async def test_tenants_share_a_statement_in_turn(source: Source) -> None:
    async with make_waiters(source, selecting=False, max_in_flight=1) as waiters:
        source.gate.clear()
        add_poll(waiters, "zT", wait_s=0)
        await source.begun.wait()
        polls = [add_poll(waiters, f"{chr(97 + n)}T", wait_s=0) for n in range(MAX_QUEUES)]
        polls.append(add_poll(waiters, "zU", wait_s=0))
        source.gate.set()
        for poll in polls:
            assert await messages_of(poll) == []
    assert [request.key for request in source.requests[1]][:3] == ["aT", "zU", "bT"]
    assert len(source.requests[1]) == MAX_QUEUES


async def test_a_higher_priority_goes_first_among_queues_of_one_name(
    source: Source, selecting: Waiters[str, int]
) -> None:
    keys = ["a", "aT1", "aU2", "aT3"]
    polls = [
        add_poll(selecting, key, wait_s=0, priority=priority)
        for key, priority in zip(keys, (0, 1, 2, 9), strict=True)
    ]
    other = add_poll(selecting, "b", wait_s=0)
    for poll in (*polls, other):
        assert await messages_of(poll) == []
    begun = [request.key for requests in source.requests for request in requests]
    assert [key for key in begun if key != "b"] == keys[::-1]
    assert begun.index("b") < 2


@pytest.mark.parametrize("exclusive", [False, True])
async def test_a_wake_up_of_many_queues_of_one_name_costs_each_the_same(
    source: Source,
    selecting: Waiters[str, int],
    monkeypatch: pytest.MonkeyPatch,
    *,
    exclusive: bool,
) -> None:
    """Count instead of timing: 2,000 selectors of one subscription must not block the loop."""
    calls = 0
    look = Dispatcher.top_notified_priority

    def count(dispatcher: Dispatcher[Any]) -> int:
        nonlocal calls
        calls += 1
        return look(dispatcher)

    keys = [f"a{number}" for number in range(400)]
    monkeypatch.setattr(selecting, "_name", lambda _: "a")
    monkeypatch.setattr(selecting, "_tenant", lambda _: "T")
    monkeypatch.setattr(selecting, "_exclusive", lambda _: exclusive)
    for key in keys:
        add_poll(selecting, key)
    await until_idle(selecting, *keys)
    monkeypatch.setattr(Dispatcher, "top_notified_priority", count)
    selecting.notify(["a"])
    await until_idle(selecting, *keys)
    assert calls <= 5 * len(keys)


async def test_a_queue_that_needs_no_statement_any_more_holds_up_no_other(
    source: Source, selecting: Waiters[str, int]
) -> None:
    """Check the poll that hung: one of a higher priority left, and a stream with it does not read."""
    source.gate.clear()
    busy = add_poll(selecting, "zU", wait_s=0)
    await source.begun.wait()
    reader = selecting.add_reader("aT", lease_ms=1000, wake=lambda: None, priority=9)
    selecting.set_interest("aT", reader, interested=True)
    leaving = add_poll(selecting, "aT", priority=9)
    hasty = add_poll(selecting, "a", wait_s=0)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(source.requests) == 1
    selecting.remove_poll("aT", leaving)
    await until(lambda: len(source.requests) == 2)
    source.gate.set()
    assert await messages_of(hasty) == await messages_of(busy) == []
    selecting.remove_reader("aT", reader)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("keys", [["a", "b", "c"], ["a", "aT", "aU", "b", "bT"]])
async def test_nothing_is_lost_or_doubled_in_any_order_of_events(
    source: Source, keys: list[str], seed: int
) -> None:
    """Every message reaches one poll or goes back, in order within a queue; no poll waits beside one."""
    async with make_waiters(source, selecting="aT" in keys) as waiters:
        await let_events_happen(source, waiters, keys, seed)
        source.gate.set()


async def let_events_happen(
    source: Source, waiters: Waiters[str, int], keys: list[str], seed: int
) -> None:
    draw = random.Random(seed)
    polls: dict[str, list[Poll[int]]] = {key: [] for key in keys}
    made = 0
    for _ in range(300):
        key = draw.choice(keys)
        match draw.randrange(6):
            case 0 | 1:
                wait_s = draw.choice([0, 0.001, LONG_S])
                polls[key].append(
                    add_poll(
                        waiters,
                        key,
                        most=draw.randrange(1, 4),
                        lease_ms=draw.choice([1, 2]),
                        wait_s=wait_s,
                        priority=draw.choice([0, 0, 5]),
                    )
                )
            case 2 | 3:
                for _ in range(draw.randrange(1, 4)):
                    source.queues.setdefault(key, []).append(made)
                    made += 1
                waiters.notify([key[0]])
            case 4 if polls[key]:
                poll = draw.choice(polls[key])
                if not poll.future.done():
                    waiters.remove_poll(key, poll)
            case _:
                (source.gate.set if draw.randrange(3) else source.gate.clear)()
        await asyncio.sleep(0)
    source.gate.set()
    await until(lambda: not (waiters._running or waiters._batcher))
    for key, joined in polls.items():
        if any(not poll.future.done() for poll in joined):
            assert source.queues.get(key, []) == []
    given = [
        message
        for joined in polls.values()
        for poll in joined
        if poll.future.done()
        for message in poll.future.result()
    ]
    returned = [message for _, messages in source.returned for message in messages]
    emptied = [message for queue in source.queues.values() for message in queue]
    assert sorted(given + returned + emptied) == list(range(made))


@dataclass
class Distant(Source):
    """Record a request whose messages come later."""

    soon: bool = True
    away: Exception | None = None

    async def acquire(self, wanted: Sequence[LeaseRequest[str]]) -> list[LeaseOutcome[int]]:
        found = await super().acquire(wanted)
        return [
            messages_of
            if messages_of.messages
            else LeaseOutcome(more_expected=self.soon, broker_error=self.away)
            for messages_of in found
        ]


@pytest.fixture
async def distant() -> Distant:
    return Distant()


@pytest.fixture
async def distant_waiters(distant: Distant) -> AsyncIterator[Waiters[str, int]]:
    async with Waiters(
        distant.acquire,
        name=lambda key: key,
        give_back=distant.give_back,
        on_empty=distant.emptied.append,
        max_in_flight=2,
    ) as opened:
        yield opened


async def test_a_poll_that_cannot_wait_stays_for_what_is_on_its_way(
    distant: Distant, distant_waiters: Waiters[str, int]
) -> None:
    hurried, patient = add_poll(distant_waiters, wait_s=0), add_poll(distant_waiters)
    await until_idle(distant_waiters, "a")
    assert distant.requests == [[asked("a", 2, 1000)]]
    distant.queues["a"] = [1]
    distant_waiters.notify(["a"])
    assert await messages_of(hurried) == [1]
    distant.soon = False
    late = add_poll(distant_waiters, wait_s=0)
    assert await messages_of(late) == []
    assert not patient.future.done()


async def test_a_poll_whose_time_is_up_stays_for_what_is_on_its_way(
    distant: Distant, distant_waiters: Waiters[str, int]
) -> None:
    poll = add_poll(distant_waiters, wait_s=0.01)
    await until(lambda: poll.expired)
    assert not poll.future.done()
    distant.queues["a"] = [1]
    distant_waiters.notify(["a"])
    assert await messages_of(poll) == [1]


async def test_polls_whose_time_is_up_get_the_broker_s_error(
    distant: Distant, distant_waiters: Waiters[str, int]
) -> None:
    distant.soon, distant.away = False, ConnectionError("away")
    hurried, short, patient = (
        add_poll(distant_waiters, wait_s=0),
        add_poll(distant_waiters, wait_s=0.05),
        add_poll(distant_waiters),
    )
    for poll in (hurried, short):
        with pytest.raises(ConnectionError):
            await messages_of(poll)
    assert not patient.future.done()


async def test_an_empty_queue_is_reported(source: Source, waiters: Waiters[str, int]) -> None:
    first, second = add_poll(waiters), add_poll(waiters, "b", wait_s=0)
    assert await messages_of(second) == []
    assert source.emptied == ["b"]
    waiters.remove_poll("a", first)
    assert source.emptied == ["b", "a"]
    waiters.remove_poll("a", first)
    assert source.emptied == ["b", "a"]


async def test_a_poll_that_is_ended_gets_the_error_and_its_messages_go_on(
    source: Source, waiters: Waiters[str, int]
) -> None:
    source.queues["a"] = [1]
    source.gate.clear()
    first, second = add_poll(waiters), add_poll(waiters)
    await source.begun.wait()
    waiters.end_poll("a", first, LookupError("gone"))
    with pytest.raises(LookupError, match="gone"):
        await messages_of(first)
    source.gate.set()
    assert await messages_of(second) == [1]
    assert source.returned == []


async def test_what_was_leased_for_an_ended_poll_goes_back(
    source: Source, waiters: Waiters[str, int]
) -> None:
    source.queues["a"] = [1, 2]
    source.gate.clear()
    poll = add_poll(waiters, most=2)
    await source.begun.wait()
    waiters.end_poll("a", poll, None)
    assert await messages_of(poll) == []
    source.gate.set()
    await until(lambda: source.returned == [("a", [1, 2])])


async def test_a_poll_that_has_its_answer_keeps_it(
    source: Source, waiters: Waiters[str, int]
) -> None:
    source.queues["a"] = [1]
    poll = add_poll(waiters)
    await until(poll.future.done)
    waiters.end_poll("a", poll, LookupError("gone"))
    assert await messages_of(poll) == [1]
    assert source.returned == []


async def test_a_statement_leases_for_consumers_of_one_key(
    waiters: Waiters[str, int], source: Source
) -> None:
    """So each lease says who has it. A consumer waits for one statement more at most."""
    source.queues["a"] = [1, 2, 3, 4, 5]
    polls = [add_poll(waiters, wait_s=0, holder=holder) for holder in ("x", "y", "x", "y", "x")]
    found = [await messages_of(poll) for poll in polls]
    assert found == [[1], [4], [2], [5], [3]]
    assert [[request.holder for request in batch] for batch in source.requests] == [["x"], ["y"]]
    assert [request.max_messages for batch in source.requests for request in batch] == [3, 2]


async def test_another_key_with_less_priority_does_not_go_first(
    waiters: Waiters[str, int], source: Source
) -> None:
    source.queues["a"] = [1, 2, 3]
    first, second = [
        waiters.add_poll(
            "a", max_messages=1, lease_ms=1000, wait_s=0, priority=priority, holder=KeyId(holder)
        )
        for holder, priority in (("x", 5), ("y", 5))
    ]
    last = waiters.add_poll(
        "a", max_messages=1, lease_ms=1000, wait_s=0, priority=1, holder=KeyId("x")
    )
    assert [await messages_of(one) for one in (first, second, last)] == [[1], [2], [3]]
