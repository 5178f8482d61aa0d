"""What Aerospike's adapter makes of a client that has no node left.

Some seconds after the last node died, the client reports success for every record of a batch, with generation 0 and without
bins, and an error in the result of the whole batch only. `NodelessClient` answers as a client of version 19.3 was seen to.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from aerospike import exception
from aerospike_helpers.batch.records import BatchRecords

from delivery.magazines.aerospike import AerospikeStore
from delivery.magazines.records import Names
from delivery.magazines.repetition import Repetition
from delivery.magazines.shelves import ShelfMagazines
from delivery.magazines.store import DoubtError, Outcome
from rooms.aerospike_url import parse_aerospike_url
from rooms.clock import SystemClock
from rooms.domain.magazine import HandlerQueue, MagazineName, Slot, main_of
from rooms.errors import MagazineUnavailableError
from tests.magazines import NAME, entries

NAMES = Names(namespace="ns", farm="farm", client="client")
CLUSTER_IS_EMPTY = 1
SLOTS = [Slot(0, 0), Slot(0, 1)]


class NodelessClient:
    """Every batch is answered in this way: `gen` for each record; a `gen` of None leaves the record out."""

    def __init__(self, gen: int | None = 0) -> None:
        self._gen = gen

    def batch_write(self, batch: BatchRecords, policy: object = None) -> BatchRecords:
        del policy
        batch.result = CLUSTER_IS_EMPTY
        for one in batch.batch_records:
            one.result = 0
            one.record = None if self._gen is None else (one.key, {"gen": self._gen, "ttl": 4294967295}, {})
        return batch

    def batch_remove(self, keys: Sequence[Any]) -> BatchRecords:
        del keys
        batch = BatchRecords([])
        batch.result = CLUSTER_IS_EMPTY
        return batch

    def operate(self, *_: object, **__: object) -> Any:
        raise exception.ClusterError(-8, "Cluster is empty")

    def close(self) -> None:
        """Nothing is open."""


def store(client: NodelessClient | None = None) -> AerospikeStore:
    made = AerospikeStore(parse_aerospike_url("aerospike://127.0.0.1:1/ns"), NAMES)
    made._opened, made._examined = client or NodelessClient(), True
    return made


@pytest.mark.row("C5")
@pytest.mark.parametrize("gen", [0, None])
def test_a_batch_that_no_node_answered_is_in_doubt(gen: int | None) -> None:
    made = store(NodelessClient(gen))
    assert made.create(NAME, SLOTS, [{"id": "a"}, {"id": "b"}], [None, 60]) == [Outcome.DOUBT] * 2
    assert made.stamp(NAME, SLOTS, now_ms=1, call="c", before_ms=None) == [(Outcome.DOUBT, {})] * 2
    assert made.mark(NAME, SLOTS, [None, "b"], call="c", swept=False) == [Outcome.DOUBT] * 2


@pytest.mark.row("C5")
def test_a_batch_that_a_node_answered_is_done() -> None:
    made = store(NodelessClient(gen=1))
    assert made.create(NAME, SLOTS, [{"id": "a"}, {"id": "b"}], [None, 60]) == [Outcome.DONE] * 2


@pytest.mark.row("C5")
@pytest.mark.parametrize(
    "ask",
    [
        lambda store: store.read(NAME, SLOTS, ("gone",)),
        lambda store: store.pointers(NAME, [0, 1]),
        lambda store: store.sweep_state(NAME),
        lambda store: store.check(),
        lambda store: store.make(NAME, shards=2, expires=False, beginning=0),
        lambda store: store.unmake(NAME, shards=2, batches=[SLOTS]),
        lambda store: store.unmake(NAME, shards=2, batches=[]),
        lambda store: store.keep_queue(a_queue()),
    ],
    ids=["read", "pointers", "sweep_state", "check", "make", "unmake", "unmake an empty one", "keep_queue"],
)
def test_nothing_is_read_made_or_removed_without_a_node(ask: Callable[[AerospikeStore], object]) -> None:
    with pytest.raises(DoubtError):
        ask(store())


@pytest.mark.row("C5")
def test_a_removal_without_a_node_is_in_doubt() -> None:
    """The client returns no record then, and raises nothing."""
    with pytest.raises(DoubtError):
        store()._remove([NAMES.slot(NAME, slot) for slot in SLOTS])


def a_queue() -> HandlerQueue:
    return HandlerQueue(name="orders", handler_type="x.Y", created_at=SystemClock().now())


@pytest.mark.row("C5")
@pytest.mark.parametrize("gen", [0, None])
async def test_a_magazine_without_a_node_is_unavailable_and_neither_empty_nor_missing(gen: int | None) -> None:
    """A magazine that was open before the last node died, and one that is opened after it."""
    magazines = ShelfMagazines(
        store(NodelessClient(gen)),
        repetition=Repetition(retries=2, sleep_s=0, mark_s=3600),
        clock=SystemClock(),
        threads=1,
        process="p",
    )
    async with magazines:
        open_before = magazines._shelf(NAME, 2, expires=False)
        for call in (
            lambda: open_before.load(entries("a")),
            lambda: open_before._put({0: Slot(0, 0)}, entries("a"), "call"),
            lambda: open_before.fire(1),
            lambda: open_before.take(SLOTS, None),
            lambda: open_before.find(SLOTS),
            lambda: open_before.peek(1, None),
            lambda: open_before.delete(SLOTS, swept=False),
            lambda: open_before.sweep(0, epoch=1, older_than_s=0, limit=10),
            open_before.count,
            open_before.state,
        ):
            with pytest.raises(MagazineUnavailableError):
                call()
        for wait in (
            magazines.check(),
            magazines.open(MagazineName("orders")),
            magazines.create(main_of("orders"), shards=2),
            magazines.drop(main_of("orders")),
            magazines.keep_queue(a_queue()),
            magazines.forget_queue("orders"),
        ):
            with pytest.raises(MagazineUnavailableError):
                await wait
