"""Lines of polls over a source that a test holds in its hands."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from rooms.pulling.hands import MOST_LINES
from rooms.pulling.line import MOST_MESSAGES, Ask, Got, Poll
from rooms.pulling.waiters import Waiters
from tests.pulling import until

LONG_S = 30.0


@dataclass
class Source:
    """Queues in memory; a take waits while `gate` is closed."""

    queues: dict[str, list[int]] = field(default_factory=dict)
    asked: list[list[Ask[str]]] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    began: asyncio.Event = field(default_factory=asyncio.Event)
    back: list[tuple[str, list[int]]] = field(default_factory=list)
    left: list[Any] = field(default_factory=list)
    error: Exception | None = None
    under_way: int = 0
    most_under_way: int = 0
    at_a_time: int = MOST_MESSAGES

    def __post_init__(self) -> None:
        self.gate.set()

    async def take(self, wanted: Sequence[Ask[str]]) -> list[Got[int]]:
        assert len({ask.key for ask in wanted}) == len(wanted)
        self.asked.append(list(wanted))
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        self.began.set()
        try:
            found = [self._got(ask.key, ask.most) for ask in wanted]
            await self.gate.wait()
            if self.error is not None:
                raise self.error
            return found
        finally:
            self.under_way -= 1

    def _got(self, key: str, most: int) -> Got[int]:
        queue = self.queues.setdefault(key, [])
        most = min(most, self.at_a_time)
        found, queue[:] = queue[:most], queue[most:]
        return Got(found, more=len(found) >= most)

    def give_back(self, key: str, messages: Sequence[int]) -> None:
        self.back.append((key, list(messages)))


@pytest.fixture
async def source() -> Source:
    return Source()


@pytest.fixture
async def lines(source: Source) -> AsyncIterator[Waiters[str, int]]:
    async with Waiters(
        source.take, name=lambda key: key, give_back=source.give_back, left=source.left.append, hands=2
    ) as opened:
        yield opened
        source.gate.set()


async def got(poll: Poll[int]) -> list[int]:
    async with asyncio.timeout(LONG_S):
        return list(await poll.future)


async def rest(lines: Waiters[str, int], *keys: str) -> None:
    """Until these lines, and no others, wait for a ring."""
    await until(lambda: sorted(lines.resting()) == sorted(keys) and not lines._hands._working)


def join(
    lines: Waiters[str, int], key: str = "a", *, most: int = 1, lease_ms: int = 1000, wait_s: float = LONG_S
) -> Poll[int]:
    return lines.join(key, most=most, lease_ms=lease_ms, wait_s=wait_s)


async def test_what_is_there_is_given_at_once(source: Source, lines: Waiters[str, int]) -> None:
    source.queues["a"] = [1, 2, 3]
    assert await got(join(lines, most=2)) == [1, 2]
    assert await got(join(lines, most=2, wait_s=0)) == [3]
    assert await got(join(lines, wait_s=0)) == []
    assert lines.resting() == []


async def test_polls_of_one_moment_share_a_statement(source: Source, lines: Waiters[str, int]) -> None:
    source.queues = {"a": [1, 2, 3], "b": [4]}
    polls = [join(lines, "a", most=2), join(lines, "b"), join(lines, "a")]
    assert [await got(poll) for poll in polls] == [[1, 2], [4], [3]]
    assert source.asked == [[("a", 3, 1000, True), ("b", 1, 1000, True)]]


async def test_a_ring_serves_the_first_in_the_line_first_and_wakes_no_more_than_there_is(
    source: Source, lines: Waiters[str, int]
) -> None:
    polls = [join(lines) for _ in range(5)]
    await rest(lines, "a")
    source.queues["a"] = [1, 2]
    lines.ring(["a", "nobody"])
    assert [await got(poll) for poll in polls[:2]] == [[1], [2]]
    await rest(lines, "a")
    assert not any(poll.future.done() for poll in polls[2:])
    assert len(source.asked) == 2


async def test_who_joins_a_resting_line_costs_nothing(source: Source, lines: Waiters[str, int]) -> None:
    first = join(lines)
    await rest(lines, "a")
    second = join(lines)
    await asyncio.sleep(0)
    assert len(source.asked) == 1
    source.queues["a"] = [1, 2]
    lines.ring(None)
    assert (await got(first), await got(second)) == ([1], [2])


async def test_who_cannot_wait_asks_but_does_not_overtake(source: Source, lines: Waiters[str, int]) -> None:
    first = join(lines)
    await rest(lines, "a")
    source.queues["a"] = [1]
    hasty = join(lines, wait_s=0)
    assert (await got(first), await got(hasty)) == ([1], [])


async def test_what_is_rung_while_a_statement_is_under_way_is_looked_for_again(
    source: Source, lines: Waiters[str, int]
) -> None:
    source.gate.clear()
    poll = join(lines)
    await source.began.wait()
    source.queues["a"] = [1]
    lines.ring(["a"])
    source.gate.set()
    assert await got(poll) == [1]
    assert len(source.asked) == 2


async def test_who_comes_while_a_statement_is_under_way_is_asked_for_by_the_next(
    source: Source, lines: Waiters[str, int]
) -> None:
    source.gate.clear()
    first = join(lines)
    await source.began.wait()
    second = join(lines, wait_s=0)
    source.queues["a"] = [1]
    source.gate.set()
    assert (await got(first), await got(second)) == ([1], [])
    assert len(source.asked) == 2


async def test_a_line_never_has_two_statements_and_all_lines_no_more_than_hands(
    source: Source, lines: Waiters[str, int]
) -> None:
    source.gate.clear()
    polls = []
    for key in "abcd":
        polls.append(join(lines, key, wait_s=0))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        polls.append(join(lines, key, wait_s=0))
    await asyncio.sleep(0)
    assert [[ask.key for ask in asked] for asked in source.asked] == [["a"], ["b"]]
    source.gate.set()
    assert [await got(poll) for poll in polls] == [[]] * 8
    assert source.most_under_way == 2


async def test_other_leases_are_taken_apart_in_order(source: Source, lines: Waiters[str, int]) -> None:
    source.queues["a"] = [1, 2, 3]
    polls = [join(lines, lease_ms=lease_ms) for lease_ms in (1000, 2000, 2000)]
    assert [await got(poll) for poll in polls] == [[1], [2], [3]]
    assert source.asked == [[("a", 1, 1000, True)], [("a", 2, 2000, True)]]


async def test_other_leases_do_not_keep_an_empty_queue_busy(source: Source, lines: Waiters[str, int]) -> None:
    polls = [join(lines, lease_ms=1000), join(lines, lease_ms=2000), join(lines, lease_ms=3000, wait_s=0)]
    assert await got(polls[2]) == []
    await rest(lines, "a")
    assert source.asked == [[("a", 1, 1000, True)]]


async def test_a_statement_is_bounded(source: Source, lines: Waiters[str, int]) -> None:
    many = [join(lines, f"line {number}", wait_s=0) for number in range(MOST_LINES + 1)]
    big = [join(lines, "big", most=MOST_MESSAGES, wait_s=0), join(lines, "bigger", most=MOST_MESSAGES, wait_s=0)]
    assert [await got(poll) for poll in (*many, *big)] == [[]] * (MOST_LINES + 3)
    assert len(source.asked[0]) == MOST_LINES
    assert all(sum(ask.most for ask in asked) <= MOST_MESSAGES for asked in source.asked)


async def test_where_less_came_than_there_is_it_is_asked_again(source: Source, lines: Waiters[str, int]) -> None:
    source.at_a_time = 1
    source.queues["a"] = [1, 2, 3]
    polls = [join(lines, most=2, wait_s=0) for _ in range(4)]
    assert [await got(poll) for poll in polls] == [[1], [2], [3], []]


async def test_time_ends_a_poll_that_rests(source: Source, lines: Waiters[str, int]) -> None:
    short, long = join(lines, wait_s=0.01), join(lines)
    assert await got(short) == []
    await rest(lines, "a")
    source.queues["a"] = [1]
    lines.ring(["a"])
    assert await got(long) == [1]


async def test_time_that_is_up_in_mid_statement_ends_with_what_comes(source: Source, lines: Waiters[str, int]) -> None:
    source.queues["a"] = [1]
    source.gate.clear()
    lucky, empty = join(lines, wait_s=0.001), join(lines, wait_s=0.001)
    await until(lambda: lucky.over and empty.over)
    assert not lucky.future.done()
    source.gate.set()
    assert (await got(lucky), await got(empty)) == ([1], [])


async def test_who_leaves_is_passed_over(source: Source, lines: Waiters[str, int]) -> None:
    gone, stays = join(lines), join(lines)
    await rest(lines, "a")
    lines.leave("a", gone)
    source.queues["a"] = [1]
    lines.ring(["a"])
    assert await got(stays) == [1]
    assert source.back == []


async def test_what_was_taken_for_one_who_left_goes_to_the_next_or_back(
    source: Source, lines: Waiters[str, int]
) -> None:
    source.queues["a"] = [1, 2]
    source.gate.clear()
    gone, stays = join(lines), join(lines)
    await source.began.wait()
    lines.leave("a", gone)
    source.gate.set()
    assert await got(stays) == [1]
    assert source.back == [("a", [2])]


async def test_what_was_given_to_one_who_left_at_that_moment_goes_back(
    source: Source, lines: Waiters[str, int]
) -> None:
    source.queues["a"] = [1]
    poll = join(lines)
    assert await got(poll) == [1]
    lines.leave("a", poll)
    assert source.back == [("a", [1])]


async def test_a_poll_whose_task_is_cancelled_leaves_nothing(source: Source, lines: Waiters[str, int]) -> None:
    poll = join(lines)
    task = asyncio.create_task(got(poll))
    await rest(lines, "a")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    lines.leave("a", poll)
    assert lines._lines == {}
    assert lines._named == {}


async def test_an_error_reaches_all_who_were_asked_for_and_nobody_else(
    source: Source, lines: Waiters[str, int]
) -> None:
    source.gate.clear()
    asked = [join(lines), join(lines, lease_ms=5000), join(lines, "b")]
    await source.began.wait()
    later = join(lines, wait_s=0)
    source.error = RuntimeError("no")
    source.gate.set()
    for poll in asked:
        with pytest.raises(RuntimeError, match="no"):
            await got(poll)
        source.error = None
    assert await got(later) == []


async def test_leaving_ends_every_poll(source: Source) -> None:
    async with Waiters(
        source.take, name=lambda key: key, give_back=source.give_back, left=source.left.append, hands=1
    ) as lines:
        resting = join(lines)
        await rest(lines, "a")
        source.queues["b"] = [1]
        source.gate.clear()
        served, waits = join(lines, "b"), join(lines, "c")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        source.gate.set()
    assert [await got(poll) for poll in (resting, served, waits)] == [[], [1], []]
    assert await got(join(lines)) == []


async def test_keys_of_one_name_are_rung_together(source: Source) -> None:
    async with Waiters(
        source.take, name=lambda key: key[0], give_back=source.give_back, left=source.left.append, hands=1
    ) as lines:
        polls = [join(lines, "a1"), join(lines, "a2"), join(lines, "b1")]
        await rest(lines, "a1", "a2", "b1")
        source.queues = {"a1": [1], "a2": [2], "b1": [3]}
        lines.ring(["a"])
        assert [await got(poll) for poll in polls[:2]] == [[1], [2]]
        assert not polls[2].future.done()


@pytest.mark.parametrize("seed", range(20))
async def test_nothing_is_lost_or_doubled_whatever_comes_when(
    source: Source, lines: Waiters[str, int], seed: int
) -> None:
    """Every message reaches one poll or goes back, in order within a line, and in the end nobody rests beside one."""
    draw = random.Random(seed)
    polls: dict[str, list[Poll[int]]] = {"a": [], "b": [], "c": []}
    made = 0
    for _ in range(300):
        key = draw.choice("abc")
        match draw.randrange(6):
            case 0 | 1:
                wait_s = draw.choice([0, 0.001, LONG_S])
                polls[key].append(
                    join(lines, key, most=draw.randrange(1, 4), lease_ms=draw.choice([1, 2]), wait_s=wait_s)
                )
            case 2 | 3:
                for _ in range(draw.randrange(1, 4)):
                    source.queues.setdefault(key, []).append(made)
                    made += 1
                lines.ring([key])
            case 4 if polls[key]:
                poll = draw.choice(polls[key])
                if not poll.future.done():
                    lines.leave(key, poll)
            case _:
                (source.gate.set if draw.randrange(3) else source.gate.clear)()
        await asyncio.sleep(0)
    source.gate.set()
    await until(lambda: not lines._hands._working and not lines._hands._ready)
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
    back = [message for _, messages in source.back for message in messages]
    left = [message for queue in source.queues.values() for message in queue]
    assert sorted(given + back + left) == list(range(made))


@dataclass
class Distant(Source):
    """What is asked for comes later."""

    soon: bool = True
    away: Exception | None = None

    async def take(self, wanted: Sequence[Ask[str]]) -> list[Got[int]]:
        found = await super().take(wanted)
        return [got if got.messages else Got(soon=self.soon, away=self.away) for got in found]


@pytest.fixture
async def distant() -> Distant:
    return Distant()


@pytest.fixture
async def far(distant: Distant) -> AsyncIterator[Waiters[str, int]]:
    async with Waiters(
        distant.take, name=lambda key: key, give_back=distant.give_back, left=distant.left.append, hands=2
    ) as opened:
        yield opened


async def test_who_cannot_wait_stays_for_what_is_on_its_way(distant: Distant, far: Waiters[str, int]) -> None:
    hurried, patient = join(far, wait_s=0), join(far)
    await rest(far, "a")
    assert distant.asked == [[("a", 2, 1000, True)]]
    distant.queues["a"] = [1]
    far.ring(["a"])
    assert await got(hurried) == [1]
    distant.soon = False
    late = join(far, wait_s=0)
    assert await got(late) == []
    assert not patient.future.done()


async def test_whose_time_is_up_stays_for_what_is_on_its_way_too(distant: Distant, far: Waiters[str, int]) -> None:
    poll = join(far, wait_s=0.01)
    await until(lambda: poll.over)
    assert not poll.future.done()
    distant.queues["a"] = [1]
    far.ring(["a"])
    assert await got(poll) == [1]


async def test_why_nothing_comes_is_told_to_those_whose_time_is_up(distant: Distant, far: Waiters[str, int]) -> None:
    distant.soon, distant.away = False, ConnectionError("away")
    hurried, short, patient = join(far, wait_s=0), join(far, wait_s=0.05), join(far)
    for poll in (hurried, short):
        with pytest.raises(ConnectionError):
            await got(poll)
    assert not patient.future.done()


async def test_a_line_that_nobody_waits_in_is_told_of(source: Source, lines: Waiters[str, int]) -> None:
    first, second = join(lines), join(lines, "b", wait_s=0)
    assert await got(second) == []
    assert source.left == ["b"]
    lines.leave("a", first)
    assert source.left == ["b", "a"]
    lines.leave("a", first)
    assert source.left == ["b", "a"]
