"""Findings about an Aerospike namespace's settings, and their effect on the store, without a server."""

import logging
from typing import Any

import pytest

from delivery.magazines.aerospike import AerospikeStore
from delivery.magazines.aerospike_namespace import check_namespace, parse_settings
from delivery.magazines.aerospike_records import RecordKeys
from delivery.magazines.kv_store import AmbiguousResultError, StoreRefusedError, WriteOutcome
from rooms.backend_urls import parse_aerospike_url
from rooms.domain.magazine import Slot
from tests.support.magazines import NAME

SAFE = {
    "replication-factor": "2", "nsup-period": "60", "default-ttl": "0", "apply-ttl-reductions": "true",
    "storage-engine": "device", "storage-engine.filesize": "0", "storage-engine.file[0]": "/data/rooms.dat", "storage-engine.commit-to-device": "true",
    "storage-engine.evict-used-pct": "0", "storage-engine.flush-max-ms": "1000", "storage-engine.cold-start-empty": "false",
}  # fmt: skip

DIRECT = {"storage-engine.commit-to-device": "false", "storage-engine.direct-files": "true"}


def text(settings: dict[str, str]) -> str:
    return ";".join(f"{name}={value}" for name, value in settings.items()) + "\n"


def test_a_safe_namespace_has_no_findings() -> None:
    assert parse_settings(text(SAFE)) == SAFE
    judgement = check_namespace("rooms", SAFE, nodes=2)
    assert (judgement.refusals, judgement.warnings) == ((), ())
    assert check_namespace("rooms", SAFE | {"default-ttl": "86400"}, nodes=2) == judgement, (
        "each record has its own time to live"
    )


@pytest.mark.parametrize(
    ("setting", "value", "fix"),
    [
        ("storage-engine.evict-used-pct", "60", "evict-used-pct 0"),
        ("evict-indexes-memory-pct", "80", "evict-indexes-memory-pct 0"),
        ("index-type.evict-mounts-pct", "80", "evict-mounts-pct 0"),
        ("nsup-period", "0", "nsup-period 60"),
        ("replication-factor", "1", "replication-factor 2"),
    ],
)
def test_settings_that_lose_records_are_refused_with_the_fix(
    setting: str, value: str, fix: str
) -> None:
    (refusal,) = check_namespace("rooms", SAFE | {setting: value}, nodes=2).refusals
    assert "rooms" in refusal
    assert fix in refusal


def test_eviction_thresholds_without_nsup_are_allowed() -> None:
    settings = SAFE | {
        "nsup-period": "0",
        "allow-ttl-without-nsup": "true",
        "storage-engine.evict-used-pct": "60",
    }
    judgement = check_namespace("rooms", settings, nodes=2)
    assert judgement.refusals == ()
    assert "nsup-period 60" in "".join(judgement.warnings)


@pytest.mark.parametrize(
    ("changed", "nodes", "fix"),
    [
        (
            DIRECT | {"storage-engine.flush-max-ms": "500"},
            2,
            "in its last 500 ms: set flush-max-ms 10",
        ),
        (DIRECT | {"storage-engine.flush-max-ms": "0"}, 2, "however long ago: set flush-max-ms 10"),
        ({"storage-engine.cold-start-empty": "true"}, 2, "cold-start-empty false"),
        ({"replication-factor": "1"}, 1, "replication-factor 2"),
        ({}, 1, "two nodes"),
        ({"nsup-period": "0", "allow-ttl-without-nsup": "true"}, 2, "nsup-period 60"),
        ({"apply-ttl-reductions": "false"}, 2, "apply-ttl-reductions true"),
        ({"storage-engine": "memory", "storage-engine.file[0]": ""}, 2, "storage-engine device"),
    ],
)
def test_possible_losses_are_warnings_with_the_fix(
    changed: dict[str, str], nodes: int, fix: str
) -> None:
    judgement = check_namespace("rooms", SAFE | changed, nodes=nodes)
    assert judgement.refusals == ()
    (warning,) = judgement.warnings
    assert fix in warning


@pytest.mark.parametrize(
    ("changed", "fix"),
    [
        ({"storage-engine.direct-files": "false"}, "direct-files true"),
        ({"storage-engine.disable-odsync": "true"}, "disable-odsync false"),
    ],
)
def test_losses_by_a_power_cut_are_a_separate_warning(changed: dict[str, str], fix: str) -> None:
    killed, cut = check_namespace("rooms", SAFE | DIRECT | changed, nodes=2).warnings
    assert "commit-to-device true" in killed
    assert fix in cut


def test_memory_with_a_file_survives_a_restart() -> None:
    assert check_namespace("rooms", SAFE | {"storage-engine": "memory"}, nodes=2).warnings == ()


def test_a_node_without_an_answer_is_a_warning() -> None:
    judgement = check_namespace("rooms", parse_settings("ERROR:81:role violation\n"), nodes=2)
    assert judgement.refusals == ()
    assert "get-config" in judgement.warnings[0]


class Nodes:
    """A client of these nodes that answers nothing else."""

    def __init__(self, *settings: dict[str, str]) -> None:
        self.settings = list(settings)
        self.asked = 0

    def info_all(self, command: str) -> dict[str, Any]:
        assert "id=ns" in command
        self.asked += 1
        return {f"node{at}": (None, text(one)) for at, one in enumerate(self.settings)}

    def batch_write(self, batch: Any, policy: object = None) -> Any:
        del policy
        for one in batch.batch_records:
            one.record = (one.key, {"gen": 1, "ttl": 1}, {})
        return batch


def store(nodes: Nodes) -> AerospikeStore:
    made = AerospikeStore(
        parse_aerospike_url("aerospike://127.0.0.1:1/ns"),
        RecordKeys(namespace="ns", farm="farm", client="client"),
    )
    made._client._open_client = nodes
    return made


def writes(made: AerospikeStore) -> list[WriteOutcome]:
    return made.create(NAME, [Slot(0, 0)], [{"id": "a"}], [None])


def test_warnings_of_all_nodes_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    nodes = Nodes(SAFE, SAFE | {"storage-engine.commit-to-device": "false"})
    made = store(nodes)
    with caplog.at_level(logging.WARNING):
        assert writes(made) == writes(made) == [WriteOutcome.DONE]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "commit-to-device" in caplog.text
    assert nodes.asked == 1


def test_an_evicting_store_is_refused_until_changed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    nodes = Nodes(SAFE, SAFE | {"storage-engine.evict-used-pct": "60"})
    made = store(nodes)
    for _ in range(2):
        with pytest.raises(StoreRefusedError, match="evict-used-pct 0"):
            writes(made)
        with pytest.raises(StoreRefusedError, match="evict-used-pct 0"):
            made.sweep_state(NAME)
    (error,) = caplog.records
    assert "evict-used-pct 0" in error.getMessage(), "once, however often it is asked"
    nodes.settings[1] = SAFE
    assert writes(made) == [WriteOutcome.DONE]


def test_a_store_without_an_answering_node_is_ambiguous_and_asked_again() -> None:
    nodes = Nodes()
    made = store(nodes)
    assert writes(made) == [WriteOutcome.AMBIGUOUS]
    with pytest.raises(AmbiguousResultError):
        made.pointers(NAME, [0])
    nodes.settings = [SAFE, SAFE]
    assert writes(made) == [WriteOutcome.DONE]
