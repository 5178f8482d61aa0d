"""Test batches by key: one call at a time for each, and no memory of a key that is idle."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Sequence

import pytest

from rooms.batching import KeyedBatcher


class Gated:
    """Answer items with their key once the key's gate is open."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[int]]] = []
        self.gates: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.under_way: Counter[str] = Counter()
        self.begun = asyncio.Semaphore(0)

    async def __call__(self, key: str, items: Sequence[int]) -> list[str]:
        self.calls.append((key, list(items)))
        self.begun.release()
        self.under_way[key] += 1
        assert self.under_way[key] == 1
        try:
            await self.gates[key].wait()
        finally:
            self.under_way[key] -= 1
        if 13 in items:
            raise ValueError("13")
        return [f"{key}{item}" for item in items]


@pytest.fixture
def gated() -> Gated:
    return Gated()


@pytest.fixture
def batcher(gated: Gated) -> KeyedBatcher[str, int, str]:
    return KeyedBatcher(gated, max_items=2)


async def test_keys_do_not_wait_for_each_other(
    gated: Gated, batcher: KeyedBatcher[str, int, str]
) -> None:
    held = asyncio.create_task(batcher.submit("a", [1]))
    await gated.begun.acquire()
    waiting = [asyncio.create_task(batcher.submit("a", [n])) for n in (2, 3, 4)]
    gated.gates["b"].set()
    assert await batcher.submit("b", [5]) == ["b5"]
    assert not held.done()
    gated.gates["a"].set()
    assert await asyncio.gather(held, *waiting) == [["a1"], ["a2"], ["a3"], ["a4"]]
    assert gated.calls == [("a", [1]), ("b", [5]), ("a", [2, 3]), ("a", [4])]


async def test_an_idle_key_is_forgotten(gated: Gated, batcher: KeyedBatcher[str, int, str]) -> None:
    assert await batcher.submit("a", []) == []
    for gate in "ab":
        gated.gates[gate].set()
    assert await batcher.submit("a", [1]) == ["a1"]
    with pytest.raises(ValueError, match="13"):
        await batcher.submit("b", [13])
    gated.gates["c"].clear()
    left = [asyncio.create_task(batcher.submit("c", [n])) for n in (1, 2, 3)]
    for _ in range(3):
        await gated.begun.acquire()
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    assert list(batcher._batchers) == ["c"]  # its call goes on without its callers
    last = asyncio.create_task(batcher.submit("c", [4]))
    await asyncio.sleep(0)
    gated.gates["c"].set()
    assert await last == ["c4"]
    assert gated.calls[2:] == [("c", [1, 2]), ("c", [3, 4])]
    assert not batcher._batchers
