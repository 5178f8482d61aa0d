"""What is said of an Aerospike namespace by its settings, and what the adapter does about it, without a server."""

import logging
from typing import Any

import pytest

from delivery.magazines.aerospike import AerospikeStore
from delivery.magazines.namespace import judge, parse_settings
from delivery.magazines.records import Names
from delivery.magazines.store import DoubtError, Outcome, RefusedError
from rooms.aerospike_url import parse_aerospike_url
from rooms.domain.magazine import Slot
from tests.magazines import NAME

SAFE = {
    "replication-factor": "2", "nsup-period": "60", "default-ttl": "0", "apply-ttl-reductions": "true",
    "storage-engine": "device", "storage-engine.filesize": "0", "storage-engine.file[0]": "/data/rooms.dat", "storage-engine.commit-to-device": "true",
    "storage-engine.evict-used-pct": "0", "storage-engine.flush-max-ms": "1000", "storage-engine.cold-start-empty": "false",
}  # fmt: skip

DIRECT = {"storage-engine.commit-to-device": "false", "storage-engine.direct-files": "true"}


def text(settings: dict[str, str]) -> str:
    return ";".join(f"{name}={value}" for name, value in settings.items()) + "\n"


def test_a_namespace_that_keeps_everything_is_not_mentioned() -> None:
    assert parse_settings(text(SAFE)) == SAFE
    judgement = judge("rooms", SAFE, nodes=2)
    assert (judgement.refusals, judgement.warnings) == ((), ())
    assert judge("rooms", SAFE | {"default-ttl": "86400"}, nodes=2) == judgement, "each record has its own time to live"


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
def test_what_deletes_or_refuses_records_is_refused_with_the_fix(setting: str, value: str, fix: str) -> None:
    (refusal,) = judge("rooms", SAFE | {setting: value}, nodes=2).refusals
    assert "rooms" in refusal
    assert fix in refusal


def test_thresholds_of_an_eviction_that_never_runs_are_no_eviction() -> None:
    settings = SAFE | {"nsup-period": "0", "allow-ttl-without-nsup": "true", "storage-engine.evict-used-pct": "60"}
    judgement = judge("rooms", settings, nodes=2)
    assert judgement.refusals == ()
    assert "nsup-period 60" in "".join(judgement.warnings)


@pytest.mark.parametrize(
    ("changed", "nodes", "fix"),
    [
        (DIRECT | {"storage-engine.flush-max-ms": "500"}, 2, "in its last 500 ms: set flush-max-ms 10"),
        (DIRECT | {"storage-engine.flush-max-ms": "0"}, 2, "however long ago: set flush-max-ms 10"),
        ({"storage-engine.cold-start-empty": "true"}, 2, "cold-start-empty false"),
        ({"replication-factor": "1"}, 1, "replication-factor 2"),
        ({}, 1, "two nodes"),
        ({"nsup-period": "0", "allow-ttl-without-nsup": "true"}, 2, "nsup-period 60"),
        ({"apply-ttl-reductions": "false"}, 2, "apply-ttl-reductions true"),
        ({"storage-engine": "memory", "storage-engine.file[0]": ""}, 2, "storage-engine device"),
    ],
)
def test_what_may_be_lost_is_a_warning_with_the_fix(changed: dict[str, str], nodes: int, fix: str) -> None:
    judgement = judge("rooms", SAFE | changed, nodes=nodes)
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
def test_what_a_power_cut_takes_is_a_warning_of_its_own(changed: dict[str, str], fix: str) -> None:
    killed, cut = judge("rooms", SAFE | DIRECT | changed, nodes=2).warnings
    assert "commit-to-device true" in killed
    assert fix in cut


def test_memory_with_a_file_behind_it_is_not_empty_after_a_restart() -> None:
    assert judge("rooms", SAFE | {"storage-engine": "memory"}, nodes=2).warnings == ()


def test_a_node_that_says_nothing_is_a_warning() -> None:
    judgement = judge("rooms", parse_settings("ERROR:81:role violation\n"), nodes=2)
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
        parse_aerospike_url("aerospike://127.0.0.1:1/ns"), Names(namespace="ns", farm="farm", client="client")
    )
    made._opened = nodes
    return made


def writes(made: AerospikeStore) -> list[Outcome]:
    return made.create(NAME, [Slot(0, 0)], [{"id": "a"}], [None])


def test_a_store_warns_once_of_all_nodes(caplog: pytest.LogCaptureFixture) -> None:
    nodes = Nodes(SAFE, SAFE | {"storage-engine.commit-to-device": "false"})
    made = store(nodes)
    with caplog.at_level(logging.WARNING):
        assert writes(made) == writes(made) == [Outcome.DONE]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "commit-to-device" in caplog.text
    assert nodes.asked == 1


def test_a_store_that_evicts_is_refused_until_it_is_mended(caplog: pytest.LogCaptureFixture) -> None:
    nodes = Nodes(SAFE, SAFE | {"storage-engine.evict-used-pct": "60"})
    made = store(nodes)
    for _ in range(2):
        with pytest.raises(RefusedError, match="evict-used-pct 0"):
            writes(made)
        with pytest.raises(RefusedError, match="evict-used-pct 0"):
            made.sweep_state(NAME)
    (error,) = caplog.records
    assert "evict-used-pct 0" in error.getMessage(), "once, however often it is asked"
    nodes.settings[1] = SAFE
    assert writes(made) == [Outcome.DONE]


def test_a_store_that_no_node_answers_for_is_in_doubt_and_asked_again() -> None:
    nodes = Nodes()
    made = store(nodes)
    assert writes(made) == [Outcome.DOUBT]
    with pytest.raises(DoubtError):
        made.pointers(NAME, [0])
    nodes.settings = [SAFE, SAFE]
    assert writes(made) == [Outcome.DONE]
