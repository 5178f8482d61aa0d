"""Aerospike as the store of magazines: rows C1 to C7.

The Python client blocks, so everything runs on threads of the adapter's own; one client serves them all. It is made at the
first call, and made again where that failed: a process starts although its Aerospike is away. Before anything else it asks
the nodes how the namespace is configured.

Its policies know no MASTER_PROLES: POLICY_REPLICA_ANY, which reads from master and replicas alike, is the nearest. TLS and
credentials are an Enterprise server's; they are configured as the client asks for and were never tried on one.
"""

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

import aerospike
from aerospike import exception, predicates
from aerospike_helpers import expressions as exp
from aerospike_helpers.batch.records import BatchRecord, BatchRecords, Read, Write
from aerospike_helpers.operations import map_operations, operations

from delivery.magazines import records
from delivery.magazines.namespace import judge, parse_settings
from delivery.magazines.records import Bins, Names, sweep_bins
from delivery.magazines.store import DoubtError, Outcome, RefusedError
from rooms.aerospike_url import AerospikeUrl
from rooms.domain.magazine import MAX_BATCH, HandlerQueue, MagazineName, Slot, main_of, queue_of, sideline_of

_log = logging.getLogger(__name__)

Key = tuple[str, str, str]

_OUTCOMES: Final = {
    0: Outcome.DONE,
    2: Outcome.MISSING,
    5: Outcome.EXISTS,
    13: Outcome.TOO_LARGE,
    27: Outcome.FILTERED,
}
# Negative codes are the client's own (no connection, no node, no answer), but for a wrong parameter; of the server's: an
# unknown failure (the client's too, where it has no node left), the cluster moves, time is over, the key is hot, the device
# lags.
_PARAMETER: Final = -2
_PASSING: Final = frozenset({1, 7, 9, 11, 14, 18})
_CONNECT_MS: Final = 1_000
_LIVE: Final = exp.Not(exp.BinExists(records.GONE))
_IS_LIVE: Final[list[Any]] = _LIVE.compile()
_ID: Final = "?"
_IS_LIVE_OF: Final = exp.And(_LIVE, exp.Eq(exp.StrBin(records.ID), _ID)).compile()
_ID_AT: Final = next(at for at, one in enumerate(_IS_LIVE_OF) if one[2] == {"val": _ID})
_WAITS: Final = exp.And(_LIVE, exp.Not(exp.BinExists(records.FIRE_TS))).compile()


def client_configuration(url: AerospikeUrl) -> dict[str, Any]:
    """Row C1 and C4: what the client is opened with. Writes are never repeated by the client: it could not know its own."""
    times = {"socket_timeout": url.socket_timeout_ms, "total_timeout": url.total_timeout_ms}
    replica = {"replica": aerospike.POLICY_REPLICA_ANY}
    # A node that came back, and does not have everything yet, asks the others before it says that a record is not there.
    whole = {"read_mode_ap": aerospike.POLICY_READ_MODE_AP_ALL}
    once = times | replica | {"max_retries": 0}
    reads = times | replica | whole | {"max_retries": url.retries, "sleep_between_retries": url.sleep_ms}
    kept = {"commit_level": aerospike.POLICY_COMMIT_LEVEL_ALL, "key": aerospike.POLICY_KEY_SEND}
    configuration: dict[str, Any] = {
        "validate_keys": True,
        "hosts": [(host, port, url.tls_name) if url.tls_name else (host, port) for host, port in url.hosts],
        "connect_timeout": _CONNECT_MS,
        "max_conns_per_node": url.connections,
        "policies": {
            "read": reads,
            "write": once | kept,
            "operate": once | kept | whole,
            "remove": once | kept,
            "query": {"max_retries": url.retries, "socket_timeout": url.socket_timeout_ms} | replica,
            "batch": once | whole,
            "batch_write": kept,
            "batch_remove": kept,
        },
    }
    if url.user:
        configuration |= {"user": url.user, "password": url.password}
    if url.tls:
        files = {"cafile": url.ca, "certfile": url.certificate, "keyfile": url.key}
        configuration["tls"] = {"enable": True} | {name: value for name, value in files.items() if value}
    return configuration


def _lasting(lifetime_s: int | None) -> int:
    return int(aerospike.TTL_NEVER_EXPIRE) if lifetime_s is None else lifetime_s


_KEPT: Final = {"commit_level": aerospike.POLICY_COMMIT_LEVEL_ALL, "key": aerospike.POLICY_KEY_SEND}
_UPDATE: Final = {"exists": aerospike.POLICY_EXISTS_UPDATE, "ttl": aerospike.TTL_DONT_UPDATE}


def _writes(bins: Bins) -> list[Any]:
    return [operations.write(name, aerospike.null() if value is None else value) for name, value in bins.items()]


def _is_live_of(identity: str | None) -> list[Any]:
    """Return the compiled condition that a live entry, of this id where there is one, stands in a slot.

    Compiling costs 13 µs for each entry; a copy of what was compiled once costs less than one.
    """
    if identity is None:
        return _IS_LIVE
    made: list[Any] = list(_IS_LIVE_OF)
    made[_ID_AT] = (*made[_ID_AT][:2], {"val": identity}, *made[_ID_AT][3:])
    return made


def _shard_of_map(name: str, shard: int) -> Any:
    return exp.MapGetByKey(None, aerospike.MAP_RETURN_VALUE, exp.ResultType.INTEGER, str(shard), exp.MapBin(name))


def _outcome(code: int | None, message: object) -> Outcome:
    if code in _OUTCOMES:
        return _OUTCOMES[code]
    if code is None or code in _PASSING or (code < 0 and code != _PARAMETER):
        _log.debug("Aerospike did not answer: %s %s", code, message)
        return Outcome.DOUBT
    raise RefusedError(f"Aerospike refused it: {code} {message}")


def _answered(one: BatchRecord) -> bool:
    """Return whether a node wrote or read this record: its generation is then at least 1.

    A client that has no node left reports success for every record of a batch, with generation 0 and without bins.
    """
    return one.result == 0 and one.record is not None and (one.record[1] or {}).get("gen", 0) > 0


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except exception.AerospikeError as exc:
        _outcome(exc.code, exc.msg)
        raise DoubtError(f"Aerospike did not answer: {exc.code} {exc.msg}") from exc


class AerospikeStore:
    """`delivery.magazines.store.Store`, and the records of queues."""

    def __init__(self, url: AerospikeUrl, names: Names) -> None:
        self._url = url
        self._names = names
        self._opening = threading.Lock()
        self._opened: Any = None
        self._examined = False
        self._refusal = ""
        self._indexed = False
        reads = client_configuration(url)["policies"]["read"]
        self._read_policy = reads | {"respond_all_keys": True}

    @property
    def _client(self) -> Any:
        with self._opening:
            if self._opened is None:
                with _told():
                    self._opened = aerospike.client(client_configuration(self._url))
            if not self._examined:
                self._examine(self._opened)
                self._examined = True
            return self._opened

    def _examine(self, client: Any) -> None:
        """Log once what the namespace may lose. RefusedError, at each call until it is mended: it loses records by itself."""
        namespace = self._url.namespace
        with _told():
            answers = client.info_all(f"get-config:context=namespace;id={namespace}")
        if not answers:
            raise DoubtError("Aerospike did not answer: there is no node")
        found = [judge(namespace, parse_settings(text or ""), nodes=len(answers)) for _, text in answers.values()]
        if refusal := "; ".join(dict.fromkeys(sentence for one in found for sentence in one.refusals)):
            if refusal != self._refusal:
                _log.error("Aerospike is not used until this is changed: %s", refusal)
            self._refusal = refusal
            raise RefusedError(refusal)
        if warning := "; ".join(dict.fromkeys(sentence for one in found for sentence in one.warnings)):
            _log.warning("the Aerospike namespace %s can lose records: %s", namespace, warning)

    def close(self) -> None:
        """Let the cluster go."""
        with self._opening:
            client, self._opened = self._opened, None
        if client is not None:
            client.close()

    def check(self) -> None:
        """Read a record that is never written: the node that would have it answers."""
        self._read([self._names.queue("_check")], (records.ACTIVE,))

    def _operate(self, key: Key, ops: Sequence[Any], policy: Mapping[str, Any]) -> tuple[Outcome, Bins]:
        try:
            return Outcome.DONE, self._client.operate(key, list(ops), policy=dict(policy))[2] or {}
        except exception.AerospikeError as exc:
            return _outcome(exc.code, exc.msg), {}
        except DoubtError:
            return Outcome.DOUBT, {}

    def _write(self, writes: Iterable[Write]) -> list[tuple[Outcome, Bins]]:
        batch = BatchRecords(list(writes))
        if not batch.batch_records:
            return []
        try:
            self._client.batch_write(batch)
        except exception.AerospikeError as exc:
            _outcome(exc.code, exc.msg)
        except DoubtError:
            return [(Outcome.DOUBT, {})] * len(batch.batch_records)
        # It does not raise, and what was never sent has a result of 0 too.
        return [
            (Outcome.DOUBT, {})
            if one.result == 0 and not _answered(one)
            else (_outcome(one.result, one.message), one.record[2] if one.record and one.record[2] else {})
            for one in batch.batch_records
        ]

    def _read(self, keys: Sequence[Key], bins: Sequence[str]) -> list[Bins | None]:
        batch = BatchRecords([Read(key, [operations.read(name) for name in bins]) for key in keys])
        if not keys:
            return []
        with _told():
            self._client.batch_write(batch, self._read_policy)
        found: list[Bins | None] = []
        for one in batch.batch_records:
            if _answered(one):
                found.append({name: value for name, value in one.record[2].items() if value is not None})
            elif _OUTCOMES.get(one.result) is Outcome.MISSING:
                found.append(None)
            else:
                _outcome(one.result, one.message)
                raise DoubtError(f"Aerospike did not answer: {batch.result} {one.result} {one.message}")
        return found

    def pointers(self, name: MagazineName, shards: Sequence[int]) -> list[Bins | None]:
        bins = (
            records.LOAD_POINTER, records.FIRE_POINTER, records.LOADED, records.FIRED, records.DELETED, records.RELOADED,
        )  # fmt: skip
        return self._read([self._names.meta(name, shard) for shard in shards], bins)

    def claim(self, name: MagazineName, shard: int, count: int, counters: Mapping[str, int]) -> int | None:
        moved = {records.LOAD_POINTER: count, **counters}
        ops = [operations.increment(bin_name, by) for bin_name, by in moved.items()]
        outcome, bins = self._operate(
            self._names.meta(name, shard), [*ops, operations.read(records.LOAD_POINTER)], _UPDATE
        )
        if outcome is Outcome.DOUBT:
            raise DoubtError("Aerospike did not answer")
        return None if outcome is Outcome.MISSING else int(bins[records.LOAD_POINTER]) - count

    def move_fire(self, name: MagazineName, shard: int, *, expected: int, to: int) -> Outcome:
        unmoved = exp.Eq(exp.IntBin(records.FIRE_POINTER), expected).compile()
        ops = [operations.write(records.FIRE_POINTER, to), operations.increment(records.FIRED, to - expected)]
        return self._operate(self._names.meta(name, shard), ops, _UPDATE | {"expressions": unmoved})[0]

    def add(self, name: MagazineName, counts: Mapping[int, Mapping[str, int]]) -> None:
        self._write(
            Write(self._names.meta(name, shard), [operations.increment(*one) for one in more.items()], policy=_UPDATE)
            for shard, more in counts.items()
        )

    def create(
        self, name: MagazineName, slots: Sequence[Slot], bins: Sequence[Bins], lifetimes_s: Sequence[int | None]
    ) -> list[Outcome]:
        answers = self._write(
            Write(
                self._names.slot(name, slot),
                _writes(one),
                policy={"exists": aerospike.POLICY_EXISTS_CREATE, "ttl": _lasting(lifetime_s)} | _KEPT,
            )
            for slot, one, lifetime_s in zip(slots, bins, lifetimes_s, strict=True)
        )
        return [outcome for outcome, _ in answers]

    def stamp(
        self, name: MagazineName, slots: Sequence[Slot], *, now_ms: int, call: str, before_ms: int | None
    ) -> list[tuple[Outcome, Bins]]:
        free = _WAITS
        if before_ms is not None:
            free = exp.And(
                _LIVE, exp.Or(exp.Not(exp.BinExists(records.FIRE_TS)), exp.LT(exp.IntBin(records.FIRE_TS), before_ms))
            ).compile()
        ops = [
            *_writes({records.FIRE_TS: now_ms, records.FIRED_BY: call}),
            *(operations.read(bin_name) for bin_name in records.STORED_BINS),
        ]
        policy = _UPDATE | _KEPT | {"expressions": free}
        return self._write(Write(self._names.slot(name, slot), ops, policy=policy) for slot in slots)

    def mark(
        self, name: MagazineName, slots: Sequence[Slot], ids: Sequence[str | None], *, call: str, swept: bool
    ) -> list[Outcome]:
        ops = _writes({records.GONE: call} | ({records.SWEPT: 1} if swept else {}) | dict.fromkeys(records.BODY_BINS))
        policy = {"exists": aerospike.POLICY_EXISTS_UPDATE, "ttl": self._url.mark_s} | _KEPT
        answers = self._write(
            Write(self._names.slot(name, slot), ops, policy=policy | {"expressions": _is_live_of(identity)})
            for slot, identity in zip(slots, ids, strict=True)
        )
        return [outcome for outcome, _ in answers]

    def read(self, name: MagazineName, slots: Sequence[Slot], bins: Sequence[str]) -> list[Bins | None]:
        return self._read([self._names.slot(name, slot) for slot in slots], bins)

    def sweep_state(self, name: MagazineName) -> Bins | None:
        bins = sweep_bins(name)
        key = self._names.queue(queue_of(name)[0])
        return self._read([key], (bins.pointers, bins.epochs, bins.counter, bins.expires))[0]

    def move_sweep(self, name: MagazineName, shard: int, *, expected: int, to: int, epoch: int, swept: int) -> Outcome:
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
        key = self._names.queue(queue_of(name)[0])
        return self._operate(key, ops, _UPDATE | {"expressions": held})[0]

    def make(self, name: MagazineName, *, shards: int, expires: bool, beginning: int) -> None:
        """Pointers first, and only then the record that says the magazine is there; what is there stays.

        A cluster may lose some of these records and keep others. Shards whose pointers were lost begin anew in the record,
        too, or a sweep would walk all the way from where they were (`Shelf.gather` takes what is left there); where the
        record was lost, sweeps begin anew in front of what is still remembered.
        """
        created = {"exists": aerospike.POLICY_EXISTS_CREATE, "ttl": aerospike.TTL_NEVER_EXPIRE} | _KEPT
        pointers = _writes({records.LOAD_POINTER: beginning, records.FIRE_POINTER: beginning})
        answers = self._write(Write(self._names.meta(name, shard), pointers, policy=created) for shard in range(shards))
        self._sure(answers)
        anew = {shard for shard, (outcome, _) in enumerate(answers) if outcome is Outcome.DONE}
        bins = sweep_bins(name)
        if bins.pointers in (self.sweep_state(name) or {}):
            self._sure([self._lift(name, shard, beginning) for shard in anew])
            return
        each = {
            str(shard): beginning if shard in anew else self._remembered_from(name, shard) for shard in range(shards)
        }
        ops = _writes(
            {bins.pointers: each, bins.epochs: dict.fromkeys(each, 0), bins.counter: 0, bins.expires: int(expires)}
        )
        absent = exp.Not(exp.BinExists(bins.pointers)).compile()
        key = self._names.queue(queue_of(name)[0])
        policy = {"ttl": aerospike.TTL_NEVER_EXPIRE, "expressions": absent}
        self._sure([self._operate(key, ops, policy)])

    def _lift(self, name: MagazineName, shard: int, beginning: int) -> tuple[Outcome, Bins]:
        pointers = sweep_bins(name).pointers
        lower = exp.LT(_shard_of_map(pointers, shard), beginning).compile()
        ops = [map_operations.map_put(pointers, str(shard), beginning)]
        return self._operate(self._names.queue(queue_of(name)[0]), ops, _UPDATE | {"expressions": lower})

    def _remembered_from(self, name: MagazineName, shard: int) -> int:
        """A slot below which nothing is known of any other, for as far as a batch goes."""
        (meta,) = self.pointers(name, [shard])
        at = 0 if meta is None else int(meta[records.FIRE_POINTER])
        while at:
            before = max(0, at - MAX_BATCH)
            slots = [Slot(shard, pointer) for pointer in range(before, at)]
            if all(bins is None for bins in self.read(name, slots, (records.LOAD_TS,))):
                break
            at = before
        return at

    def unmake(self, name: MagazineName, *, shards: int, batches: Iterable[Sequence[Slot]]) -> None:
        """Entries, pointers, and what the queue's record says of it, in this order."""
        for slots in batches:
            self._remove([self._names.slot(name, slot) for slot in slots])
        self._remove([self._names.meta(name, shard) for shard in range(shards)])
        bins = sweep_bins(name)
        gone = _writes(dict.fromkeys((bins.pointers, bins.epochs, bins.counter, bins.expires)))
        self._sure([self._operate(self._names.queue(queue_of(name)[0]), gone, _UPDATE)])

    def _remove(self, keys: Sequence[Key]) -> None:
        if keys:
            with _told():
                found = self._client.batch_remove(list(keys))
            if len(found.batch_records) != len(keys):
                # A client that has no node left returns no record, and raises nothing.
                raise DoubtError(f"Aerospike did not answer: {found.result}")
            self._sure([(_outcome(one.result, one.message), {}) for one in found.batch_records])

    def _sure(self, answers: Iterable[tuple[Outcome, Bins]]) -> None:
        if any(outcome is Outcome.DOUBT for outcome, _ in answers):
            raise DoubtError("Aerospike did not answer")

    def keep_queue(self, queue: HandlerQueue) -> None:
        """The record, and how long it and the pointers of its magazines last (row C7)."""
        expiry_s = None if queue.active or queue.queue_expiry_s is None else 2 * queue.queue_expiry_s
        self._sure(
            [
                self._operate(
                    self._names.queue(queue.name), _writes(records.queue_bins(queue)), {"ttl": _lasting(expiry_s)}
                )
            ]
        )
        lasting = {"exists": aerospike.POLICY_EXISTS_UPDATE, "ttl": _lasting(expiry_s)} | _KEPT
        self._sure(
            self._write(
                Write(self._names.meta(name, shard), [operations.touch()], policy=lasting)
                for name in (main_of(queue.name), sideline_of(queue.name))
                for shard in range(queue.shards)
            )
        )

    def queues(self, *, active: bool) -> list[HandlerQueue]:
        """By the secondary index."""
        try:
            return self._query(active=active)
        except RefusedError:
            self._indexed = False  # the server that had the index may have been replaced by an empty one
            return self._query(active=active)

    def _query(self, *, active: bool) -> list[HandlerQueue]:
        with _told():
            self._index()
            query = self._client.query(self._names.namespace, self._names.queues)
            query.where(predicates.equals(records.ACTIVE, "true" if active else "false"))
            found = [(key[2], bins) for key, _, bins in query.results()]
        return sorted((records.handler_queue(name, bins) for name, bins in found), key=lambda queue: queue.name)

    def _index(self) -> None:
        if not self._indexed:
            with suppress(exception.IndexFoundError):
                self._client.index_single_value_create(
                    self._names.namespace, self._names.queues, records.ACTIVE, aerospike.INDEX_STRING, self._names.index
                )
            self._indexed = True

    def forget_queue(self, name: str) -> bool:
        """Its bins; those of magazines that are still there stay."""
        there = exp.BinExists(records.HANDLER_TYPE).compile()
        gone = _writes(dict.fromkeys(records.QUEUE_BINS))
        answer = self._operate(self._names.queue(name), gone, _UPDATE | {"expressions": there})
        self._sure([answer])
        return answer[0] is Outcome.DONE
