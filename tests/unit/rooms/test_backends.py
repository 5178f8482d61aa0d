"""Addresses of stores without credentials, and which stores a command works with beside what runs."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Final
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooms.backends import (
    DATABASE,
    Backends,
    ProcessRecord,
    address_of,
    backends_of,
    differences,
    same_address,
)
from rooms.cli.backends import Resolution, resolve
from rooms.settings import read_settings

_CONTROL: Final = re.compile(r"[\x00-\x1f\ud800-\udfff]")
STOMP = "stomp://rooms:s3cret@127.0.0.1:61613"
STOMP_ADDRESS = "stomp://***@127.0.0.1:61613"
ZOOKEEPER = "zookeeper://127.0.0.1:2181"
AEROSPIKE = "aerospike://127.0.0.1:3000/rooms"
EMBEDDED = Backends(
    broker=DATABASE, election=DATABASE, magazines=DATABASE, farm="rooms", client="default"
)
FULL = dataclasses.replace(EMBEDDED, broker=STOMP_ADDRESS, election=ZOOKEEPER)


def process(
    backends: Backends, *, kind: str = "worker", pid: int = 7, running: bool = True
) -> ProcessRecord:
    return ProcessRecord(
        name=f"{kind}-{pid}",
        kind=kind,
        host="h",
        pid=pid,
        running=running,
        backends=backends,
    )


def resolved(
    environment: Mapping[str, str],
    *processes: ProcessRecord,
    local: Mapping[str, str] | None = None,
) -> Resolution:
    return resolve(read_settings(environment), frozenset(environment), processes, local or {})


@pytest.mark.parametrize(
    ("url", "address"),
    [
        (None, DATABASE),
        ("postgresql://user:s3cret@h/rooms?password=s3cret", DATABASE),
        (STOMP, STOMP_ADDRESS),
        ("stomp://a,b:61614?heartbeat_ms=500", "stomp://a:61613,b:61614"),
        ("STOMP://u:p%40ss%2F@[::1]:61613", "stomp://***@[::1]:61613"),
        ("stomps://a:61617?verify=false", "stomps://***@a:61617"),
        (AEROSPIKE + "?retries=1", AEROSPIKE),
        ("aerospike://u:s3cret@a,b:3100/ns?tls=false", "aerospike://***@a:3000,b:3100/ns"),
        (ZOOKEEPER + "?session_s=5", ZOOKEEPER),
        ("zookeeper://u:s3cret@a:1,b:2/root/", "zookeeper://***@a:1,b:2/root"),
    ],
)
def test_an_address_has_no_credentials_and_no_parameters(url: str | None, address: str) -> None:
    assert address_of(url) == address
    assert "s3cret" not in address


@given(
    st.sampled_from(["stomp", "stomps", "aerospike", "zookeeper"]),
    st.text(min_size=12, max_size=40).filter(lambda text: not _CONTROL.search(text)),
)
def test_no_password_gets_into_an_address(scheme: str, password: str) -> None:
    """Nor does an address change with it, so that two processes with different logins agree."""
    path = "/ns" if scheme == "aerospike" else ""
    encoded = quote(password, safe="")
    address = address_of(f"{scheme}://user:{encoded}@host:61613{path}")
    assert password not in address
    assert encoded not in address
    assert same_address(address, f"{scheme}://host:61613{path}")


def test_the_same_hosts_in_another_order_are_the_same_store() -> None:
    assert same_address("stomp://a:1,b:2", "stomp://***@B:2,a:1")
    assert not same_address("stomp://a:1", "stomps://a:1")
    assert not same_address("aerospike://a:1/x", "aerospike://a:1/y")
    assert not same_address("stomp://a:1", "stomp://a:1,b:2")


def test_names_matter_only_where_a_store_is_shared() -> None:
    renamed = dataclasses.replace(EMBEDDED, farm="other")
    assert differences(EMBEDDED, renamed) == []
    assert [one.variable for one in differences(FULL, dataclasses.replace(FULL, farm="other"))] == [
        "ROOMS_FARM"
    ]
    assert [one.variable for one in differences(EMBEDDED, FULL)] == ["BROKER_URL", "ELECTION_URL"]


def test_without_any_record_the_environment_decides() -> None:
    assert resolved({}) == Resolution()
    assert resolved({"BROKER_URL": STOMP}) == Resolution()


def test_recorded_servers_of_this_machine_are_used_without_process_records() -> None:
    local = {"BROKER_URL": STOMP, "ELECTION_URL": ZOOKEEPER, "DATABASE_URL": "postgresql:///x"}
    assert resolved({"ELECTION_URL": ZOOKEEPER}, local=local).overrides == {"BROKER_URL": STOMP}


def test_an_environment_that_agrees_is_not_changed() -> None:
    for environment, running in (
        ({}, EMBEDDED),
        ({"BROKER_URL": STOMP, "ELECTION_URL": ZOOKEEPER}, FULL),
    ):
        assert backends_of(read_settings(environment)) == running
        assert resolved(environment, process(running)) == Resolution()


def test_what_the_environment_leaves_out_comes_from_the_record_and_the_file() -> None:
    local = {"BROKER_URL": STOMP, "ELECTION_URL": ZOOKEEPER, "DATABASE_URL": "postgresql:///x"}
    found = resolved({}, process(FULL), local=local)
    assert found.overrides == {"BROKER_URL": STOMP, "ELECTION_URL": ZOOKEEPER}
    assert found.problems == []


def test_an_address_that_is_enough_to_connect_is_used_and_one_that_is_not_is_asked_for() -> None:
    found = resolved({}, process(dataclasses.replace(FULL, magazines=AEROSPIKE, farm="ours")))
    assert found.overrides == {
        "ELECTION_URL": ZOOKEEPER,
        "MAGAZINE_URL": AEROSPIKE,
        "ROOMS_FARM": "ours",
    }
    (problem,) = found.problems
    assert problem.startswith(
        f"BROKER_URL is not set, and the running processes (worker 7 on h) use {STOMP_ADDRESS}: set BROKER_URL="
    )


def test_a_record_of_other_servers_is_ignored() -> None:
    found = resolved({}, process(FULL), local={"BROKER_URL": "stomp://rooms:x@127.0.0.1:1"})
    assert "BROKER_URL" not in found.overrides
    assert len(found.problems) == 1


def test_an_environment_that_contradicts_what_runs_is_refused_with_both_names() -> None:
    found = resolved({"BROKER_URL": STOMP}, process(EMBEDDED))
    (problem,) = found.problems
    assert problem.startswith(
        f"BROKER_URL is {STOMP_ADDRESS} here, and postgresql in the running processes (worker 7 on h): set BROKER_URL"
    )
    found = resolved(
        {"MAGAZINE_URL": "aerospike://other/ns"},
        process(dataclasses.replace(FULL, magazines=AEROSPIKE)),
    )
    assert any("aerospike://other:3000/ns" in one and AEROSPIKE in one for one in found.problems)


def test_where_nothing_runs_the_environment_wins_and_the_difference_is_noted() -> None:
    found = resolved({"BROKER_URL": STOMP}, process(EMBEDDED, running=False))
    assert (found.problems, len(found.notes)) == ([], 1)


def test_where_nothing_runs_an_address_on_record_is_never_used_by_itself() -> None:
    """A copy of the database has the record of the original: a repair of the copy must not write into its stores."""
    found = resolved({}, process(dataclasses.replace(EMBEDDED, magazines=AEROSPIKE), running=False))
    assert found.overrides == {}
    assert "nothing runs now" in found.problems[0]


def test_processes_that_disagree_are_named() -> None:
    processes = (process(EMBEDDED, pid=1), process(FULL, kind="serve", pid=2))
    found = resolved({}, *processes)
    assert any("serve 2 on h" in one and "worker 1 on h" in one for one in found.problems)
    chosen = resolved({"BROKER_URL": STOMP, "ELECTION_URL": ZOOKEEPER}, *processes)
    assert chosen.problems == []
    assert len(chosen.mixed) == 2


def test_a_process_that_stopped_says_nothing_beside_those_that_run() -> None:
    assert (
        resolved({}, process(FULL, running=False, pid=1), process(EMBEDDED, pid=2)) == Resolution()
    )
