"""The Aerospike store with a client that has no node left.

Some seconds after the last node died, the client reports success for every record of a batch, with
generation 0 and without bins. Only the result of the whole batch has an error. `NodelessClient`
answers as a client of version 19.3 does.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from aerospike import exception
from aerospike_helpers.batch.records import BatchRecords

from delivery.magazines.aerospike import AerospikeStore
from delivery.magazines.aerospike_records import RecordKeys
from delivery.magazines.kv_magazines import AsyncKvMagazines
from delivery.magazines.kv_store import AmbiguousResultError, StoreRetryPolicy, WriteOutcome
from rooms.backend_urls import parse_aerospike_url
from rooms.clock import SystemClock
from rooms.domain.magazine import HandlerQueueRecord, MagazineName, Slot, main_magazine_name
from rooms.errors import MagazineUnavailableError
from tests.support.magazines import NAME, entries

NAMES = RecordKeys(namespace="ns", farm="farm", client="client")
CLUSTER_IS_EMPTY = 1
SLOTS = [Slot(0, 0), Slot(0, 1)]


class NodelessClient:
    """Answers every batch with this `gen` for each record; None leaves the record out."""

    def __init__(self, gen: int | None = 0) -> None:
        self._gen = gen

    def batch_write(self, batch: BatchRecords, policy: object = None) -> BatchRecords:
        del policy
        batch.result = CLUSTER_IS_EMPTY
        for one in batch.batch_records:
            one.result = 0
            one.record = (
                None if self._gen is None else (one.key, {"gen": self._gen, "ttl": 4294967295}, {})
            )
        return batch

    def batch_remove(self, keys: Sequence[Any]) -> BatchRecords:
        del keys
        batch = BatchRecords([])
        batch.result = CLUSTER_IS_EMPTY
        return batch

    def operate(self, *_: object, **__: object) -> Any:
        raise exception.ClusterError(-8, "Cluster is empty")

    def close(self) -> None:
        """Do nothing."""


def store(client: NodelessClient | None = None) -> AerospikeStore:
    made = AerospikeStore(parse_aerospike_url("aerospike://127.0.0.1:1/ns"), NAMES)
    made._client._open_client, made._client._checked = client or NodelessClient(), True
    return made


@pytest.mark.parametrize("gen", [0, None])
def test_a_batch_without_an_answer_is_ambiguous(gen: int | None) -> None:
    made = store(NodelessClient(gen))
    assert (
        made.create(NAME, SLOTS, [{"id": "a"}, {"id": "b"}], [None, 60])
        == [WriteOutcome.AMBIGUOUS] * 2
    )
    assert (
        made.stamp(NAME, SLOTS, now_ms=1, call="c", before_ms=None)
        == [(WriteOutcome.AMBIGUOUS, {})] * 2
    )
    assert (
        made.mark_deleted(NAME, SLOTS, [None, "b"], call="c", swept=False)
        == [WriteOutcome.AMBIGUOUS] * 2
    )


def test_an_answered_batch_is_done() -> None:
    made = store(NodelessClient(gen=1))
    assert (
        made.create(NAME, SLOTS, [{"id": "a"}, {"id": "b"}], [None, 60]) == [WriteOutcome.DONE] * 2
    )


@pytest.mark.parametrize(
    "ask",
    [
        lambda store: store.read(NAME, SLOTS, ("gone",)),
        lambda store: store.pointers(NAME, [0, 1]),
        lambda store: store.sweep_state(NAME),
        lambda store: store.check(),
        lambda store: store.create_magazine(NAME, shards=2, expires=False, beginning=0),
        lambda store: store.drop_magazine(NAME, shards=2, batches=[SLOTS]),
        lambda store: store.drop_magazine(NAME, shards=2, batches=[]),
        lambda store: store.save_queue_record(a_queue()),
    ],
    ids=[
        "read",
        "pointers",
        "sweep_state",
        "check",
        "create_magazine",
        "drop_magazine",
        "drop_magazine without slots",
        "save_queue_record",
    ],
)
def test_calls_without_a_node_raise_ambiguous(
    ask: Callable[[AerospikeStore], object],
) -> None:
    with pytest.raises(AmbiguousResultError):
        ask(store())


def test_a_removal_without_a_node_is_ambiguous() -> None:
    """Return no record, and raise nothing, as the client then does."""
    with pytest.raises(AmbiguousResultError):
        store()._client.remove([NAMES.slot(NAME, slot) for slot in SLOTS])


def a_queue() -> HandlerQueueRecord:
    return HandlerQueueRecord(name="orders", handler_type="x.Y", created_at=SystemClock().now())


@pytest.mark.parametrize("gen", [0, None])
async def test_a_magazine_without_a_node_is_unavailable(
    gen: int | None,
) -> None:
    """Use a magazine opened before the last node died, and one opened after."""
    magazines = AsyncKvMagazines(
        store(NodelessClient(gen)),
        retry_policy=StoreRetryPolicy(retries=2, sleep_s=0, mark_s=3600),
        clock=SystemClock(),
        threads=1,
        process="p",
    )
    async with magazines:
        open_before = magazines._make_magazine(NAME, 2, expires=False)
        for call in (
            lambda: open_before.load(entries("a")),
            lambda: open_before._write_entries({0: Slot(0, 0)}, entries("a"), "call"),
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
            magazines.create(main_magazine_name("orders"), shards=2),
            magazines.drop(main_magazine_name("orders")),
            magazines.save_queue_record(a_queue()),
            magazines.delete_queue_record("orders"),
        ):
            with pytest.raises(MagazineUnavailableError):
                await wait
