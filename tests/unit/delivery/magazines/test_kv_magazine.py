"""Test what a magazine on a key-value store hands out, with a store in memory."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import pytest

from delivery.magazines.aerospike_records import (
    FIRE_POINTER,
    FIRE_TS,
    FIRED_BY,
    GONE,
    LOAD_POINTER,
    Bins,
)
from delivery.magazines.kv_magazine import KvMagazine
from delivery.magazines.kv_store import StoreRetryPolicy, WriteOutcome
from rooms.clock import SystemClock
from rooms.domain.magazine import MagazineName, Slot
from tests.support.magazines import entries, ids

SHARDS = 2


class MemoryStore:
    """Answer as a healthy store does, in what loads, fires and deletions call."""

    def __init__(self) -> None:
        self.metas = [{LOAD_POINTER: 0, FIRE_POINTER: 0} for _ in range(SHARDS)]
        self.slots: dict[Slot, dict[str, Any]] = {}

    def pointers(self, _: MagazineName, shards: Sequence[int]) -> list[Bins | None]:
        return [dict(self.metas[shard]) for shard in shards]

    def claim(self, _: MagazineName, shard: int, many: int, __: Mapping[str, int]) -> int:
        first = self.metas[shard][LOAD_POINTER]
        self.metas[shard][LOAD_POINTER] += many
        return first

    def move_fire(self, _: MagazineName, shard: int, *, expected: int, to: int) -> WriteOutcome:
        if self.metas[shard][FIRE_POINTER] != expected:
            return WriteOutcome.FILTERED
        self.metas[shard][FIRE_POINTER] = to
        return WriteOutcome.DONE

    def add_counts(self, _: MagazineName, __: Mapping[int, Mapping[str, int]]) -> None:
        """Keep no counters."""

    def create(
        self, _: MagazineName, slots: Sequence[Slot], bins: Sequence[Bins], __: Sequence[int | None]
    ) -> list[WriteOutcome]:
        self.slots |= {slot: dict(one) for slot, one in zip(slots, bins, strict=True)}
        return [WriteOutcome.DONE] * len(slots)

    def stamp(
        self, _: MagazineName, slots: Sequence[Slot], *, now_ms: int, call: str, before_ms: object
    ) -> list[tuple[WriteOutcome, Bins]]:
        assert before_ms is None
        answers: list[tuple[WriteOutcome, Bins]] = []
        for slot in slots:
            bins = self.slots[slot]
            if GONE in bins or FIRE_TS in bins:
                answers.append((WriteOutcome.FILTERED, {}))
            else:
                bins |= {FIRE_TS: now_ms, FIRED_BY: call}
                answers.append((WriteOutcome.DONE, bins))
        return answers

    def mark_deleted(
        self, _: MagazineName, slots: Sequence[Slot], __: object, *, call: str, swept: bool
    ) -> list[WriteOutcome]:
        assert not swept
        for slot in slots:
            self.slots[slot][GONE] = call
        return [WriteOutcome.DONE] * len(slots)


def calls() -> Iterator[str]:
    return (f"call-{number}" for number in count())


@pytest.fixture
def magazine() -> KvMagazine:
    store: Any = MemoryStore()
    return KvMagazine(
        name=MagazineName("orders_SIDELINE"),
        expires=False,
        store=store,
        clock=SystemClock(),
        retry_policy=StoreRetryPolicy(retries=0, sleep_s=0, mark_s=3600),
        call_ids=calls(),
        shards=SHARDS,
        loads=count(),
        fires=count(),
    )


def test_a_firer_gets_what_is_below_the_slots_that_it_names(magazine: KvMagazine) -> None:
    magazine.load(entries("a", "b", "c"))
    magazine.load(entries("d", "e"))
    assert magazine.fire(10, {}) == []
    assert sorted(ids(magazine.fire(10, {0: 2, 1: 1}))) == ["a", "b", "d"]
    magazine.load(entries("f"))
    assert magazine.fire(10, {0: 2, 1: 1}) == []
    assert ids(magazine.fire(1, {1: 2})) == ["e"]
    assert sorted(ids(magazine.fire(10))) == ["c", "f"]


def test_a_firer_passes_deleted_entries_below_the_slots_that_it_names(
    magazine: KvMagazine,
) -> None:
    homes = magazine.load(entries(*"abcdef"))
    magazine.delete([*homes[:2], homes[4]], swept=False)
    assert ids(magazine.fire(2, {0: 5})) == ["c", "d"]
    assert magazine.fire(2, {0: 5}) == []
    assert ids(magazine.fire(2, {0: 6})) == ["f"]
