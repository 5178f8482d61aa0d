"""Store magazines in Aerospike.

Every method is one attempt of a blocking client; `kv_magazines.py` calls them on its own threads.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import aerospike
from aerospike import exception, predicates
from aerospike_helpers import expressions as exp
from aerospike_helpers.batch.records import Write
from aerospike_helpers.operations import map_operations, operations

from delivery.magazines import aerospike_records
from delivery.magazines.aerospike_client import AerospikeClient, require_answers, translate_errors
from delivery.magazines.aerospike_records import Bins, RecordKeys, sweep_bins
from delivery.magazines.kv_store import AmbiguousResultError, StoreRefusedError, WriteOutcome
from rooms.backend_urls import AerospikeUrl
from rooms.domain.magazine import (
    MAX_BATCH,
    HandlerQueueRecord,
    MagazineName,
    Slot,
    main_magazine_name,
    queue_from_magazine,
    sideline_name,
)

_KEPT: Final = {"commit_level": aerospike.POLICY_COMMIT_LEVEL_ALL, "key": aerospike.POLICY_KEY_SEND}
_UPDATE: Final = {"exists": aerospike.POLICY_EXISTS_UPDATE, "ttl": aerospike.TTL_DONT_UPDATE}

_LIVE: Final = exp.Not(exp.BinExists(aerospike_records.GONE))
_IS_LIVE: Final[list[Any]] = _LIVE.compile()
_ID_PLACEHOLDER: Final = "?"
_IS_LIVE_OF: Final = exp.And(
    _LIVE, exp.Eq(exp.StrBin(aerospike_records.ID), _ID_PLACEHOLDER)
).compile()
_ID_INDEX: Final = next(
    at for at, one in enumerate(_IS_LIVE_OF) if one[2] == {"val": _ID_PLACEHOLDER}
)
_IS_WAITING: Final = exp.And(_LIVE, exp.Not(exp.BinExists(aerospike_records.FIRE_TS))).compile()


def _ttl(lifetime_s: int | None) -> int:
    return int(aerospike.TTL_NEVER_EXPIRE) if lifetime_s is None else lifetime_s


def _write_operations(bins: Bins) -> list[Any]:
    return [
        operations.write(name, aerospike.null() if value is None else value)
        for name, value in bins.items()
    ]


def _is_live_of(entry_id: str | None) -> list[Any]:
    """Return the compiled condition that a slot has a live entry, of this id if one is given.

    Compiling it for each entry is slow; this copies one that was compiled once.
    """
    if entry_id is None:
        return _IS_LIVE
    condition: list[Any] = list(_IS_LIVE_OF)
    condition[_ID_INDEX] = (*condition[_ID_INDEX][:2], {"val": entry_id}, *condition[_ID_INDEX][3:])
    return condition


def _shard_of_map(name: str, shard: int) -> Any:
    return exp.MapGetByKey(
        None, aerospike.MAP_RETURN_VALUE, exp.ResultType.INTEGER, str(shard), exp.MapBin(name)
    )


class AerospikeStore:
    """Implement `delivery.magazines.kv_store.KvQueueStore` on Aerospike."""

    def __init__(self, url: AerospikeUrl, keys: RecordKeys) -> None:
        self._client = AerospikeClient(url)
        self._keys = keys
        self._mark_s = url.mark_s
        self._index_created = False

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def check(self) -> None:
        """Read a record that is never written, from the node that would have it."""
        self._client.read([self._keys.queue("_check")], (aerospike_records.ACTIVE,))

    def pointers(self, name: MagazineName, shards: Sequence[int]) -> list[Bins | None]:
        bins = (
            aerospike_records.LOAD_POINTER,
            aerospike_records.FIRE_POINTER,
            aerospike_records.LOADED,
            aerospike_records.FIRED,
            aerospike_records.DELETED,
            aerospike_records.RELOADED,
        )
        return self._client.read([self._keys.meta(name, shard) for shard in shards], bins)

    def claim(
        self, name: MagazineName, shard: int, count: int, counters: Mapping[str, int]
    ) -> int | None:
        moved = {aerospike_records.LOAD_POINTER: count, **counters}
        ops = [operations.increment(bin_name, by) for bin_name, by in moved.items()]
        outcome, bins = self._client.operate(
            self._keys.meta(name, shard),
            [*ops, operations.read(aerospike_records.LOAD_POINTER)],
            _UPDATE,
        )
        if outcome is WriteOutcome.AMBIGUOUS:
            raise AmbiguousResultError("Aerospike did not answer")
        return (
            None
            if outcome is WriteOutcome.MISSING
            else int(bins[aerospike_records.LOAD_POINTER]) - count
        )

    def move_fire(self, name: MagazineName, shard: int, *, expected: int, to: int) -> WriteOutcome:
        unmoved = exp.Eq(exp.IntBin(aerospike_records.FIRE_POINTER), expected).compile()
        ops = [
            operations.write(aerospike_records.FIRE_POINTER, to),
            operations.increment(aerospike_records.FIRED, to - expected),
        ]
        return self._client.operate(
            self._keys.meta(name, shard), ops, _UPDATE | {"expressions": unmoved}
        )[0]

    def add_counts(self, name: MagazineName, counts: Mapping[int, Mapping[str, int]]) -> None:
        self._client.write(
            Write(
                self._keys.meta(name, shard),
                [operations.increment(*one) for one in more.items()],
                policy=_UPDATE,
            )
            for shard, more in counts.items()
        )

    def create(
        self,
        name: MagazineName,
        slots: Sequence[Slot],
        bins: Sequence[Bins],
        lifetimes_s: Sequence[int | None],
    ) -> list[WriteOutcome]:
        answers = self._client.write(
            Write(
                self._keys.slot(name, slot),
                _write_operations(one),
                policy={"exists": aerospike.POLICY_EXISTS_CREATE, "ttl": _ttl(lifetime_s)} | _KEPT,
            )
            for slot, one, lifetime_s in zip(slots, bins, lifetimes_s, strict=True)
        )
        return [outcome for outcome, _ in answers]

    def stamp(
        self,
        name: MagazineName,
        slots: Sequence[Slot],
        *,
        now_ms: int,
        call: str,
        before_ms: int | None,
    ) -> list[tuple[WriteOutcome, Bins]]:
        free = _IS_WAITING
        if before_ms is not None:
            free = exp.And(
                _LIVE,
                exp.Or(
                    exp.Not(exp.BinExists(aerospike_records.FIRE_TS)),
                    exp.LT(exp.IntBin(aerospike_records.FIRE_TS), before_ms),
                ),
            ).compile()
        ops = [
            *_write_operations(
                {aerospike_records.FIRE_TS: now_ms, aerospike_records.FIRED_BY: call}
            ),
            *(operations.read(bin_name) for bin_name in aerospike_records.STORED_BINS),
        ]
        policy = _UPDATE | _KEPT | {"expressions": free}
        return self._client.write(
            Write(self._keys.slot(name, slot), ops, policy=policy) for slot in slots
        )

    def mark_deleted(
        self,
        name: MagazineName,
        slots: Sequence[Slot],
        ids: Sequence[str | None],
        *,
        call: str,
        swept: bool,
    ) -> list[WriteOutcome]:
        ops = _write_operations(
            {aerospike_records.GONE: call}
            | ({aerospike_records.SWEPT: 1} if swept else {})
            | dict.fromkeys(aerospike_records.BODY_BINS)
        )
        policy = {"exists": aerospike.POLICY_EXISTS_UPDATE, "ttl": self._mark_s} | _KEPT
        answers = self._client.write(
            Write(
                self._keys.slot(name, slot),
                ops,
                policy=policy | {"expressions": _is_live_of(identity)},
            )
            for slot, identity in zip(slots, ids, strict=True)
        )
        return [outcome for outcome, _ in answers]

    def read(
        self, name: MagazineName, slots: Sequence[Slot], bins: Sequence[str]
    ) -> list[Bins | None]:
        return self._client.read([self._keys.slot(name, slot) for slot in slots], bins)

    def sweep_state(self, name: MagazineName) -> Bins | None:
        bins = sweep_bins(name)
        key = self._keys.queue(queue_from_magazine(name)[0])
        return self._client.read([key], (bins.pointers, bins.epochs, bins.counter, bins.expires))[0]

    def move_sweep(
        self, name: MagazineName, shard: int, *, expected: int, to: int, epoch: int, swept: int
    ) -> WriteOutcome:
        bins = sweep_bins(name)
        held = exp.And(
            exp.Eq(_shard_of_map(bins.pointers, shard), expected),
            exp.LE(_shard_of_map(bins.epochs, shard), epoch),
        ).compile()
        ops = [
            map_operations.map_put(bins.pointers, str(shard), to),
            map_operations.map_put(bins.epochs, str(shard), epoch),
            operations.increment(bins.counter, swept),
        ]
        key = self._keys.queue(queue_from_magazine(name)[0])
        return self._client.operate(key, ops, _UPDATE | {"expressions": held})[0]

    def create_magazine(
        self, name: MagazineName, *, shards: int, expires: bool, beginning: int
    ) -> None:
        """Create the pointers first, then the record that makes the magazine exist.

        Existing records stay. A cluster may lose some of them and keep others. Where a shard's
        pointers were lost, its sweep pointer is raised too, or a sweep would walk all the way from
        the old one; `KvMagazine.recover_entries` reloads the entries there. Where the record was
        lost, sweep pointers start before the first slot that is still remembered.
        """
        created = {
            "exists": aerospike.POLICY_EXISTS_CREATE,
            "ttl": aerospike.TTL_NEVER_EXPIRE,
        } | _KEPT
        pointers = _write_operations(
            {aerospike_records.LOAD_POINTER: beginning, aerospike_records.FIRE_POINTER: beginning}
        )
        answers = self._client.write(
            Write(self._keys.meta(name, shard), pointers, policy=created) for shard in range(shards)
        )
        require_answers(answers)
        new = {shard for shard, (outcome, _) in enumerate(answers) if outcome is WriteOutcome.DONE}
        bins = sweep_bins(name)
        if bins.pointers in (self.sweep_state(name) or {}):
            require_answers([self._raise_sweep_pointer(name, shard, beginning) for shard in new])
            return
        each = {
            str(shard): beginning if shard in new else self._first_remembered_slot(name, shard)
            for shard in range(shards)
        }
        ops = _write_operations(
            {
                bins.pointers: each,
                bins.epochs: dict.fromkeys(each, 0),
                bins.counter: 0,
                bins.expires: int(expires),
            }
        )
        absent = exp.Not(exp.BinExists(bins.pointers)).compile()
        key = self._keys.queue(queue_from_magazine(name)[0])
        policy = {"ttl": aerospike.TTL_NEVER_EXPIRE, "expressions": absent}
        require_answers([self._client.operate(key, ops, policy)])

    def _raise_sweep_pointer(
        self, name: MagazineName, shard: int, beginning: int
    ) -> tuple[WriteOutcome, Bins]:
        pointers = sweep_bins(name).pointers
        lower = exp.LT(_shard_of_map(pointers, shard), beginning).compile()
        ops = [map_operations.map_put(pointers, str(shard), beginning)]
        return self._client.operate(
            self._keys.queue(queue_from_magazine(name)[0]), ops, _UPDATE | {"expressions": lower}
        )

    def _first_remembered_slot(self, name: MagazineName, shard: int) -> int:
        """Return a pointer below which a whole batch of slots is empty."""
        (meta,) = self.pointers(name, [shard])
        at = 0 if meta is None else int(meta[aerospike_records.FIRE_POINTER])
        while at:
            before = max(0, at - MAX_BATCH)
            slots = [Slot(shard, pointer) for pointer in range(before, at)]
            if all(bins is None for bins in self.read(name, slots, (aerospike_records.LOAD_TS,))):
                break
            at = before
        return at

    def drop_magazine(
        self, name: MagazineName, *, shards: int, batches: Iterable[Sequence[Slot]]
    ) -> None:
        """Remove entries, pointers, and the magazine's bins in the record, in this order."""
        for slots in batches:
            self._client.remove([self._keys.slot(name, slot) for slot in slots])
        self._client.remove([self._keys.meta(name, shard) for shard in range(shards)])
        bins = sweep_bins(name)
        gone = _write_operations(
            dict.fromkeys((bins.pointers, bins.epochs, bins.counter, bins.expires))
        )
        require_answers(
            [self._client.operate(self._keys.queue(queue_from_magazine(name)[0]), gone, _UPDATE)]
        )

    def save_queue_record(self, queue: HandlerQueueRecord) -> None:
        """Write the record; set the time to live of it and of its magazines' pointers."""
        expiry_s = (
            None if queue.active or queue.queue_expiry_s is None else 2 * queue.queue_expiry_s
        )
        require_answers(
            [
                self._client.operate(
                    self._keys.queue(queue.name),
                    _write_operations(aerospike_records.queue_bins(queue)),
                    {"ttl": _ttl(expiry_s)},
                )
            ]
        )
        lasting = {"exists": aerospike.POLICY_EXISTS_UPDATE, "ttl": _ttl(expiry_s)} | _KEPT
        require_answers(
            self._client.write(
                Write(self._keys.meta(name, shard), [operations.touch()], policy=lasting)
                for name in (main_magazine_name(queue.name), sideline_name(queue.name))
                for shard in range(queue.shards)
            )
        )

    def list_queue_records(self, *, active: bool) -> list[HandlerQueueRecord]:
        """Query the records by the secondary index."""
        try:
            return self._query_queues(active=active)
        except StoreRefusedError:
            # The server that had the index may have been replaced by an empty one.
            self._index_created = False
            return self._query_queues(active=active)

    def _query_queues(self, *, active: bool) -> list[HandlerQueueRecord]:
        with translate_errors():
            self._create_index()
            query = self._client.raw.query(self._keys.namespace, self._keys.queues)
            query.where(predicates.equals(aerospike_records.ACTIVE, "true" if active else "false"))
            found = [(key[2], bins) for key, _, bins in query.results()]
        return sorted(
            (aerospike_records.to_handler_queue(name, bins) for name, bins in found),
            key=lambda queue: queue.name,
        )

    def _create_index(self) -> None:
        if not self._index_created:
            with suppress(exception.IndexFoundError):
                self._client.raw.index_single_value_create(
                    self._keys.namespace,
                    self._keys.queues,
                    aerospike_records.ACTIVE,
                    aerospike.INDEX_STRING,
                    self._keys.index,
                )
            self._index_created = True

    def delete_queue_record(self, name: str) -> bool:
        """Delete the queue's bins; those of magazines that still exist stay."""
        there = exp.BinExists(aerospike_records.HANDLER_TYPE).compile()
        gone = _write_operations(dict.fromkeys(aerospike_records.QUEUE_BINS))
        answer = self._client.operate(
            self._keys.queue(name), gone, _UPDATE | {"expressions": there}
        )
        require_answers([answer])
        return answer[0] is WriteOutcome.DONE
