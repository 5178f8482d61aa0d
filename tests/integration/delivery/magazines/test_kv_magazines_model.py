"""Magazines against a plain model: whatever is done in whatever order, nothing is lost, doubled or passed over."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from itertools import count
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rooms.domain.magazine import Entry, MagazineName, Slot, StoredEntry
from rooms.errors import StaleEpochError
from rooms.ports import Magazine, Magazines
from rooms.settings import SCHEMES
from tests.support.magazines import ALL_STUCK_S, NONE_STUCK_S, opened, slots

_T = TypeVar("_T")
SHARDS = 2
Run = Callable[[Coroutine[Any, Any, _T]], _T]


class MagazineMachine(RuleBasedStateMachine):
    """The model: what is alive, by slot, and whether it was handed out; how far each shard was fired and swept."""

    run: Run[Any]
    magazines: Magazines
    names = count(1)

    def __init__(self) -> None:
        super().__init__()
        self.name = MagazineName(f"model{next(self.names)}")
        self.magazine: Magazine = self.run(self.magazines.create(self.name, shards=SHARDS))
        self.live: dict[Slot, Entry] = {}
        self.handed: set[Slot] = set()
        self.ever: set[Slot] = set()
        self.fired_to = [-1] * SHARDS
        self.swept_to = [0] * SHARDS
        self.epochs = [0] * SHARDS
        self.swept = 0
        self.ids = count(1)

    def teardown(self) -> None:
        assert self.run(self.magazines.drop(self.name))

    def _stands(self, homes: Sequence[Slot], entries: Sequence[Entry]) -> None:
        assert not self.ever & set(homes), "a slot is never used again"
        assert len({slot.shard for slot in homes}) <= 1
        assert list(homes) == sorted(homes)
        self.ever |= set(homes)
        self.live |= dict(zip(homes, entries, strict=True))

    def _hands_out(self, found: Sequence[StoredEntry]) -> None:
        for one in found:
            assert self.live[one.slot] == one.entry
            assert one.fire_ts is not None
        assert len(set(slots(found))) == len(found)
        self.handed |= set(slots(found))

    def _some(self, data: st.DataObject) -> list[Slot]:
        known = [*sorted(self.ever), Slot(0, 10_000)]
        return data.draw(st.lists(st.sampled_from(known), unique=True, max_size=6))

    @rule(many=st.integers(1, 5))
    def load(self, many: int) -> None:
        entries = [
            Entry(id=f"{next(self.ids)}", body=b"body", generation=number) for number in range(many)
        ]
        self._stands(self.run(self.magazine.load(entries)), entries)

    @rule(limit=st.integers(1, 6))
    def fire(self, limit: int) -> None:
        waiting = sorted(set(self.live) - self.handed)
        found = self.run(self.magazine.fire(limit))
        assert len(found) == min(limit, len(waiting))
        for shard in range(SHARDS):
            got = [one.slot for one in found if one.slot.shard == shard]
            assert got == [slot for slot in waiting if slot.shard == shard][: len(got)], (
                "in the order of the slots"
            )
            self.fired_to[shard] = max([self.fired_to[shard], *(slot.pointer for slot in got)])
        self._hands_out(found)

    @rule(data=st.data(), again=st.booleans())
    def take(self, data: st.DataObject, again: bool) -> None:  # noqa: FBT001 hypothesis calls it by name
        some = self._some(data)
        found = self.run(self.magazine.take(some, older_than_s=ALL_STUCK_S if again else None))
        wanted = set(some) & set(self.live)
        assert set(slots(found)) == (wanted if again else wanted - self.handed)
        self._hands_out(found)

    @rule(data=st.data(), swept=st.booleans())
    def delete(self, data: st.DataObject, swept: bool) -> None:  # noqa: FBT001 hypothesis calls it by name
        some = self._some(data)
        ended = set(self.run(self.magazine.delete(some, swept=swept)))
        assert ended == set(some) & set(self.live)
        self._end(ended)

    def _end(self, ended: set[Slot]) -> None:
        for slot in ended:
            del self.live[slot]
        self.handed -= ended

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def reload(self, data: st.DataObject) -> None:
        known = sorted(self.live)
        some = self.run(
            self.magazine.find(
                data.draw(st.lists(st.sampled_from(known), unique=True, min_size=1, max_size=4))
            )
        )
        gone = data.draw(st.sets(st.sampled_from(slots(some))))
        self._end(set(self.run(self.magazine.delete(sorted(gone)))))
        homes = self.run(self.magazine.reload(some))
        assert [home is None for home in homes] == [one.slot in gone for one in some]
        self._end({one.slot for one in some} - gone)
        kept = [
            (home, one.entry) for home, one in zip(homes, some, strict=True) if home is not None
        ]
        self._stands([home for home, _ in kept], [entry for _, entry in kept])

    @rule(
        shard=st.integers(0, SHARDS - 1),
        stuck=st.booleans(),
        later=st.booleans(),
        done=st.booleans(),
    )
    def sweep(self, shard: int, *, stuck: bool, later: bool, done: bool) -> None:
        self.epochs[shard] += later
        batch = self.run(
            self.magazine.sweep(
                shard, epoch=self.epochs[shard], older_than_s=ALL_STUCK_S if stuck else NONE_STUCK_S
            )
        )
        assert self.swept_to[shard] <= batch.pointer
        assert all(slot.pointer >= batch.pointer for slot in self.live if slot.shard == shard)
        self.swept_to[shard] = batch.pointer
        passed = {
            slot
            for slot in self.live
            if slot.shard == shard and slot.pointer <= self.fired_to[shard]
        }
        taken = set(slots(batch.entries))
        assert taken <= self.handed, "what waits is not stuck"
        assert taken >= passed if stuck else not taken
        self._hands_out(batch.entries)
        if done:
            assert set(self.run(self.magazine.delete(sorted(taken), swept=True))) == taken
            self._end(taken)

    @precondition(lambda self: any(self.epochs))
    @rule(shard=st.integers(0, SHARDS - 1))
    def sweep_too_late(self, shard: int) -> None:
        if self.epochs[shard]:
            # What no sweep has written yet is no epoch.
            self.run(
                self.magazine.sweep(shard, epoch=self.epochs[shard], older_than_s=NONE_STUCK_S)
            )
            with pytest.raises(StaleEpochError):
                self.run(
                    self.magazine.sweep(
                        shard, epoch=self.epochs[shard] - 1, older_than_s=ALL_STUCK_S
                    )
                )

    @invariant()
    def what_is_alive_is_seen(self) -> None:
        found = self.run(self.magazine.peek(1000))
        assert {one.slot: one.entry for one in found} == self.live
        assert slots(found) == sorted(self.live)
        assert {one.slot for one in found if one.fire_ts} == self.handed

    @invariant()
    def the_counters_agree(self) -> None:
        assert self.run(self.magazine.count()) == len(self.live)
        assert self.run(self.magazine.state()).depth == len(self.live)


@pytest.fixture(params=SCHEMES["MAGAZINE_URL"])
def url(request: pytest.FixtureRequest) -> str:
    name = "database" if request.param == "postgresql" else f"{request.param}_url"
    address: str = request.getfixturevalue(name)
    return address


def test_a_magazine_is_what_the_model_says(url: str) -> None:
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()

        class Machine(MagazineMachine):
            run = staticmethod(runner.run)
            magazines = runner.run(stack.enter_async_context(opened(url)))

        try:
            run_state_machine_as_test(
                Machine,
                settings=settings(
                    max_examples=30,
                    stateful_step_count=30,
                    deadline=None,
                    derandomize=True,
                    database=None,
                    suppress_health_check=list(HealthCheck),
                ),
            )
        finally:
            runner.run(stack.aclose())
