"""Magazines as records: names, keys, bins and policies, without a server."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import aerospike
import pytest
from aerospike import exception
from aerospike_helpers import expressions as exp

from delivery.magazines import aerospike as adapter
from delivery.magazines import aerospike_client, aerospike_records, open_magazines
from delivery.magazines.aerospike_records import RecordKeys
from delivery.magazines.kv_store import (
    AmbiguousResultError,
    StoreRefusedError,
    StoreRetryPolicy,
    WriteOutcome,
)
from rooms.backend_urls import parse_aerospike_url
from rooms.domain.magazine import (
    Entry,
    HandlerQueueRecord,
    MagazineName,
    Slot,
    StoredEntry,
    main_magazine_name,
    sideline_name,
)
from rooms.errors import MagazineUnavailableError, SettingsError

NAMES = RecordKeys(namespace="ns", farm="farm", client="client")
NOW_MS = 1_700_000_000_000
URL = "aerospike://h1:3000,h2:3001/ns"


def test_a_queues_record_and_its_index() -> None:
    assert NAMES.queue("orders") == ("ns", "farm_client_ignis_queues", "orders")
    assert NAMES.index == "farm_client_ignis_queues_active"
    queue = HandlerQueueRecord(
        name="orders", handler_type="x.Y", created_at=datetime.fromtimestamp(NOW_MS / 1000, UTC), shards=8,
        queue_expiry_s=100, message_expiry_s=None, sweep_duration_s=60, max_batch=5, max_wait_s=3,
    )  # fmt: skip
    bins = aerospike_records.queue_bins(queue)
    assert bins == {
        "handlerType": "x.Y", "shards": 8, "queueExpiry": 100, "messageExpiry": 0, "concurrency": 1, "shovelConcur": 4,
        "shovelInterval": 600, "createdAt": NOW_MS, "active": "true", "sweepDuration": 60_000, "maxBatchSize": 5,
        "maxWaitTime": 3,
    }  # fmt: skip
    assert aerospike_records.to_handler_queue("orders", bins) == queue
    main, sideline = (
        aerospike_records.sweep_bins(main_magazine_name("orders")),
        aerospike_records.sweep_bins(sideline_name("orders")),
    )
    assert (main.pointers, main.counter) == ("sweepPointers", "sweptCounter")
    assert (sideline.pointers, sideline.counter) == ("sidelineSweep", "sidelineSwept")


def test_sets_and_keys_of_slots_and_pointers() -> None:
    name = sideline_name("orders")
    assert NAMES.slot(name, Slot(3, 17)) == ("ns", "client_data_set", "orders_SIDELINE_SHARD_3_17")
    assert NAMES.meta(name, 3) == ("ns", "client_meta_set", "orders_SIDELINE_SHARD_3")


def test_bin_names_have_at_most_15_characters() -> None:
    sweeps = [aerospike_records.sweep_bins(MagazineName(name)) for name in ("q", "q_SIDELINE")]
    names = {
        *aerospike_records.STORED_BINS, *aerospike_records.STATE_BINS, *aerospike_records.QUEUE_BINS, aerospike_records.LOADED_BY, aerospike_records.FIRED_BY, aerospike_records.LOAD_POINTER,
        aerospike_records.FIRE_POINTER, aerospike_records.LOADED, aerospike_records.FIRED, aerospike_records.DELETED, aerospike_records.RELOADED,
        *(name for bins in sweeps for name in (bins.pointers, bins.epochs, bins.counter, bins.expires)),
    }  # fmt: skip
    assert max(map(len, names)) <= 15
    assert len(names) > 30


def test_an_entry_round_trips_and_empty_fields_take_no_bin() -> None:
    slot = Slot(0, 1)
    loaded_at = datetime.fromtimestamp(NOW_MS / 1000, UTC)
    bare = Entry(id="a", body=b"")
    assert aerospike_records.entry_bins(bare, NOW_MS, "p-1") == {
        "id": "a",
        "body": b"",
        "loadTS": NOW_MS,
        "loadedBy": "p-1",
    }
    whole = Entry(
        id="a",
        body=b"\x00",
        generation=2,
        shovels=1,
        reason="stuck",
        detail="d",
        expires_at=loaded_at + timedelta(hours=1),
    )
    for entry in (bare, whole):
        bins = aerospike_records.entry_bins(entry, NOW_MS, "p-1")
        assert aerospike_records.to_stored_entry(slot, bins) == StoredEntry(
            slot=slot, entry=entry, loaded_at=loaded_at, fire_ts=None
        )
    fired = aerospike_records.to_stored_entry(
        slot, aerospike_records.entry_bins(bare, NOW_MS, "p-1") | {"fireTS": NOW_MS + 5}
    )
    assert fired.fire_ts == loaded_at + timedelta(milliseconds=5)


@pytest.mark.parametrize(
    ("ms", "seconds"), [(1, 1), (999, 1), (1000, 1), (1001, 2), (-5, 1), (3_600_000, 3600)]
)
def test_the_ttl_is_in_whole_seconds_rounded_up(ms: int, seconds: int) -> None:
    entry = Entry(id="a", body=b"", expires_at=datetime.fromtimestamp((NOW_MS + ms) / 1000, UTC))
    assert aerospike_records.ttl_s(entry, NOW_MS) == seconds
    assert aerospike_records.ttl_s(Entry(id="a", body=b""), NOW_MS) is None


def test_an_expiry_between_two_milliseconds_is_rounded_down() -> None:
    expires_at = datetime.fromtimestamp(NOW_MS / 1000, UTC) + timedelta(
        seconds=600, microseconds=600
    )
    assert aerospike_records.ttl_s(Entry(id="a", body=b"", expires_at=expires_at), NOW_MS) == 600


def test_the_clients_configuration() -> None:
    found = aerospike_client.client_configuration(
        parse_aerospike_url(f"{URL}?retries=4&sleep_ms=50&connections=9")
    )
    assert found["validate_keys"] is True, "else a policy that is misspelt is ignored in silence"
    assert found["hosts"] == [("h1", 3000), ("h2", 3001)]
    assert found["max_conns_per_node"] == 9
    assert "user" not in found
    assert "tls" not in found
    policies = found["policies"]
    for name in ("read", "write", "operate", "batch"):
        assert (policies[name]["socket_timeout"], policies[name]["total_timeout"]) == (3000, 5000)
        assert policies[name]["replica"] == aerospike.POLICY_REPLICA_ANY
    for name in ("read", "operate", "batch"):
        assert policies[name]["read_mode_ap"] == aerospike.POLICY_READ_MODE_AP_ALL
    for name in ("write", "operate", "batch"):
        assert policies[name]["max_retries"] == 0, (
            "the client would not know its own write when it repeats it"
        )
    assert (policies["read"]["max_retries"], policies["read"]["sleep_between_retries"]) == (4, 50)
    for name in ("write", "operate", "batch_write"):
        assert policies[name]["commit_level"] == aerospike.POLICY_COMMIT_LEVEL_ALL
        assert policies[name]["key"] == aerospike.POLICY_KEY_SEND


def test_credentials_and_tls_of_an_enterprise_server(tmp_path: Path) -> None:
    (ca := tmp_path / "ca.pem").write_text("")
    secured = aerospike_client.client_configuration(
        parse_aerospike_url(f"aerospike://me:wo%20rd@h:4333/ns?tls_name=cluster&ca={ca}")
    )
    assert (secured["user"], secured["password"]) == ("me", "wo rd")
    assert secured["hosts"] == [("h", 4333, "cluster")]
    assert secured["tls"] == {"enable": True, "cafile": str(ca)}
    plain = aerospike_client.client_configuration(
        parse_aerospike_url("aerospike://me:word@h/ns?tls=false")
    )
    assert "tls" not in plain


def test_the_client_knows_every_key_of_its_configuration() -> None:
    for url in ("aerospike://127.0.0.1:1/ns", "aerospike://me:word@127.0.0.1:1/ns?tls_name=n"):
        with pytest.raises(exception.AerospikeError) as caught:
            aerospike.client(aerospike_client.client_configuration(parse_aerospike_url(url)))
        assert not isinstance(caught.value, exception.ParamError), caught.value


def test_the_condition_on_an_id_equals_the_compiled_one() -> None:
    for identity in ("a", "?", "0" * 200):
        condition = exp.And(exp.Not(exp.BinExists("gone")), exp.Eq(exp.StrBin("id"), identity))
        assert adapter._is_live_of(identity) == condition.compile()
    assert adapter._is_live_of(None) == exp.Not(exp.BinExists("gone")).compile()


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        (0, WriteOutcome.DONE), (2, WriteOutcome.MISSING), (5, WriteOutcome.EXISTS), (13, WriteOutcome.TOO_LARGE), (27, WriteOutcome.FILTERED),
        (1, WriteOutcome.AMBIGUOUS), (9, WriteOutcome.AMBIGUOUS), (11, WriteOutcome.AMBIGUOUS), (14, WriteOutcome.AMBIGUOUS), (18, WriteOutcome.AMBIGUOUS), (-1, WriteOutcome.AMBIGUOUS),
        (-10, WriteOutcome.AMBIGUOUS), (None, WriteOutcome.AMBIGUOUS),
    ],
)  # fmt: skip
def test_outcomes_of_result_codes(code: int | None, outcome: WriteOutcome) -> None:
    assert aerospike_client._outcome(code, "said") is outcome


@pytest.mark.parametrize("code", [-2, 4, 8, 20, 22, 80])
def test_permanent_errors_are_refused(code: int) -> None:
    with pytest.raises(StoreRefusedError, match="said"):
        aerospike_client._outcome(code, "said")


def test_the_number_of_retries_is_limited() -> None:
    calls = [0]
    slept: list[float] = []

    def call(answers_at: int) -> int:
        calls[0] += 1
        if calls[0] < answers_at:
            raise AmbiguousResultError("away")
        return calls[0]

    repetition = StoreRetryPolicy(retries=3, sleep_s=0.1, mark_s=3600)
    assert repetition.call_with_retries(lambda: call(4), sleep=slept.append) == 4
    assert slept == [0.1, 0.1, 0.1]
    calls[0] = 0
    with pytest.raises(MagazineUnavailableError, match="away"):
        repetition.call_with_retries(lambda: call(5), sleep=slept.append)
    assert calls[0] == 4


async def test_an_unavailable_aerospike_raises_at_the_first_call() -> None:
    async with open_magazines(
        "aerospike://127.0.0.1:1/ns?retries=1&sleep_ms=1", farm="farm", client="client"
    ) as magazines:
        with pytest.raises(MagazineUnavailableError):
            await magazines.open(MagazineName("q"))


def test_an_unknown_scheme_names_the_valid_ones() -> None:
    with pytest.raises(SettingsError, match=r"postgresql://, aerospike://"):
        open_magazines("redis://h", farm="farm", client="client")
