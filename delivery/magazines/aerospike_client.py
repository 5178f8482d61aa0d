"""Call an Aerospike cluster: policies, lazy connection, and what its answers mean.

The client is created by the first call, and again by the next one where that failed: a process
starts although its Aerospike is unavailable. Before anything else it reads the namespace's
configuration.

Its policies have no MASTER_PROLES: POLICY_REPLICA_ANY, which reads from master and replicas alike,
is the nearest. TLS and credentials need an Enterprise server; they are configured as the client's
documentation says, and were never tried on one.
"""

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import aerospike
from aerospike import exception
from aerospike_helpers.batch.records import BatchRecord, BatchRecords, Read, Write
from aerospike_helpers.operations import operations

from delivery.magazines.aerospike_namespace import check_namespace, parse_settings
from delivery.magazines.aerospike_records import Bins
from delivery.magazines.kv_store import AmbiguousResultError, StoreRefusedError, WriteOutcome
from rooms.backend_urls import AerospikeUrl

_log = logging.getLogger(__name__)

Key = tuple[str, str, str]

_OUTCOME_CODES: Final = {
    0: WriteOutcome.DONE,
    2: WriteOutcome.MISSING,
    5: WriteOutcome.EXISTS,
    13: WriteOutcome.TOO_LARGE,
    27: WriteOutcome.FILTERED,
}
# Negative codes are the client's own (no connection, no node, no answer), but for a wrong
# parameter. Of the server's: an unknown failure (the client's too, where it has no node left), a
# timeout, a cluster that rebalances, a hot key, a device overload.
_PARAMETER_ERROR: Final = -2
_TRANSIENT_CODES: Final = frozenset({1, 7, 9, 11, 14, 18})
_CONNECT_MS: Final = 1_000


def client_configuration(url: AerospikeUrl) -> dict[str, Any]:
    """Return the client's configuration.

    The client never retries writes: it could not recognise its own earlier attempt.
    """
    times = {"socket_timeout": url.socket_timeout_ms, "total_timeout": url.total_timeout_ms}
    replica = {"replica": aerospike.POLICY_REPLICA_ANY}
    # A node that came back without all its records asks the others before it says "not found".
    read_all = {"read_mode_ap": aerospike.POLICY_READ_MODE_AP_ALL}
    once = times | replica | {"max_retries": 0}
    reads = (
        times
        | replica
        | read_all
        | {"max_retries": url.retries, "sleep_between_retries": url.sleep_ms}
    )
    kept = {"commit_level": aerospike.POLICY_COMMIT_LEVEL_ALL, "key": aerospike.POLICY_KEY_SEND}
    configuration: dict[str, Any] = {
        "validate_keys": True,
        "hosts": [
            (host, port, url.tls_name) if url.tls_name else (host, port) for host, port in url.hosts
        ],
        "connect_timeout": _CONNECT_MS,
        "max_conns_per_node": url.connections,
        "policies": {
            "read": reads,
            "write": once | kept,
            "operate": once | kept | read_all,
            "remove": once | kept,
            "query": {"max_retries": url.retries, "socket_timeout": url.socket_timeout_ms}
            | replica,
            "batch": once | read_all,
            "batch_write": kept,
            "batch_remove": kept,
        },
    }
    if url.user:
        configuration |= {"user": url.user, "password": url.password}
    if url.tls:
        files = {"cafile": url.ca, "certfile": url.certificate, "keyfile": url.key}
        configuration["tls"] = {"enable": True} | {
            name: value for name, value in files.items() if value
        }
    return configuration


def _outcome(code: int | None, message: object) -> WriteOutcome:
    if code in _OUTCOME_CODES:
        return _OUTCOME_CODES[code]
    if code is None or code in _TRANSIENT_CODES or (code < 0 and code != _PARAMETER_ERROR):
        _log.debug("Aerospike did not answer: %s %s", code, message)
        return WriteOutcome.AMBIGUOUS
    raise StoreRefusedError(f"Aerospike refused a request: {code} {message}")


def _has_record(one: BatchRecord) -> bool:
    """Return whether a node wrote or read this record: then its generation is at least 1.

    A client that has no node left reports success for every record of a batch, with generation 0
    and without bins.
    """
    return one.result == 0 and one.record is not None and (one.record[1] or {}).get("gen", 0) > 0


@contextmanager
def translate_errors() -> Iterator[None]:
    """Raise the client's errors as StoreRefusedError or AmbiguousResultError."""
    try:
        yield
    except exception.AerospikeError as exc:
        _outcome(exc.code, exc.msg)
        raise AmbiguousResultError(f"Aerospike did not answer: {exc.code} {exc.msg}") from exc


class AerospikeClient:
    """Make the calls of the store, each tried once unless it reads. Thread-safe."""

    def __init__(self, url: AerospikeUrl) -> None:
        self._url = url
        self._lock = threading.Lock()
        self._open_client: Any = None
        self._checked = False
        self._logged_refusal = ""
        reads = client_configuration(url)["policies"]["read"]
        self._read_policy = reads | {"respond_all_keys": True}

    @property
    def raw(self) -> Any:
        """Return the library's client, created and checked."""
        with self._lock:
            if self._open_client is None:
                with translate_errors():
                    self._open_client = aerospike.client(client_configuration(self._url))
            if not self._checked:
                self._check_namespace(self._open_client)
                self._checked = True
            return self._open_client

    def _check_namespace(self, client: Any) -> None:
        """Log once what the namespace may lose.

        StoreRefusedError, at each call until it is changed: it would lose records by itself.
        """
        namespace = self._url.namespace
        with translate_errors():
            answers = client.info_all(f"get-config:context=namespace;id={namespace}")
        if not answers:
            raise AmbiguousResultError("Aerospike did not answer: there is no node")
        found = [
            check_namespace(namespace, parse_settings(text or ""), nodes=len(answers))
            for _, text in answers.values()
        ]
        if refusal := "; ".join(
            dict.fromkeys(sentence for one in found for sentence in one.refusals)
        ):
            if refusal != self._logged_refusal:
                _log.error("Aerospike is not used until this is changed: %s", refusal)
            self._logged_refusal = refusal
            raise StoreRefusedError(refusal)
        if warning := "; ".join(
            dict.fromkeys(sentence for one in found for sentence in one.warnings)
        ):
            _log.warning("the Aerospike namespace %s can lose records: %s", namespace, warning)

    def close(self) -> None:
        """Close the connections to the cluster."""
        with self._lock:
            client, self._open_client = self._open_client, None
        if client is not None:
            client.close()

    def operate(
        self, key: Key, ops: Sequence[Any], policy: Mapping[str, Any]
    ) -> tuple[WriteOutcome, Bins]:
        """Run operations on one record, once."""
        try:
            return WriteOutcome.DONE, self.raw.operate(key, list(ops), policy=dict(policy))[2] or {}
        except exception.AerospikeError as exc:
            return _outcome(exc.code, exc.msg), {}
        except AmbiguousResultError:
            return WriteOutcome.AMBIGUOUS, {}

    def write(self, writes: Iterable[Write]) -> list[tuple[WriteOutcome, Bins]]:
        """Run a batch of writes, once; return the outcome and bins of each."""
        batch = BatchRecords(list(writes))
        if not batch.batch_records:
            return []
        try:
            self.raw.batch_write(batch)
        except exception.AerospikeError as exc:
            _outcome(exc.code, exc.msg)
        except AmbiguousResultError:
            return [(WriteOutcome.AMBIGUOUS, {})] * len(batch.batch_records)
        # It does not raise, and what was never sent has a result of 0 too.
        return [
            (WriteOutcome.AMBIGUOUS, {})
            if one.result == 0 and not _has_record(one)
            else (
                _outcome(one.result, one.message),
                one.record[2] if one.record and one.record[2] else {},
            )
            for one in batch.batch_records
        ]

    def read(self, keys: Sequence[Key], bins: Sequence[str]) -> list[Bins | None]:
        """Read bins of records; None for a missing record."""
        batch = BatchRecords([Read(key, [operations.read(name) for name in bins]) for key in keys])
        if not keys:
            return []
        with translate_errors():
            self.raw.batch_write(batch, self._read_policy)
        found: list[Bins | None] = []
        for one in batch.batch_records:
            if _has_record(one):
                found.append(
                    {name: value for name, value in one.record[2].items() if value is not None}
                )
            elif _OUTCOME_CODES.get(one.result) is WriteOutcome.MISSING:
                found.append(None)
            else:
                _outcome(one.result, one.message)
                raise AmbiguousResultError(
                    f"Aerospike did not answer: {batch.result} {one.result} {one.message}"
                )
        return found

    def remove(self, keys: Sequence[Key]) -> None:
        """Remove records; missing ones count as removed."""
        if keys:
            with translate_errors():
                found = self.raw.batch_remove(list(keys))
            if len(found.batch_records) != len(keys):
                # A client that has no node left returns no record, and raises nothing.
                raise AmbiguousResultError(f"Aerospike did not answer: {found.result}")
            require_answers(
                [(_outcome(one.result, one.message), {}) for one in found.batch_records]
            )


def require_answers(results: Iterable[tuple[WriteOutcome, Bins]]) -> None:
    """Raise AmbiguousResultError if one of the results is ambiguous."""
    if any(outcome is WriteOutcome.AMBIGUOUS for outcome, _ in results):
        raise AmbiguousResultError("Aerospike did not answer")
