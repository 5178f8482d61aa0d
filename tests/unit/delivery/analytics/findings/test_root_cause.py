"""Test the order of causes, and what is left out."""

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from delivery.analytics.findings.cells import LOGGED, AttemptCells, network_of
from delivery.analytics.findings.root_cause import RootCause, divergence, find_causes

_INTS = ("sub_key", "bin", "attempts", "sidelined", "policy_version")
_SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in LOGGED),
        ("first", pa.bool_()),
        *((name, pa.int64()) for name in _INTS),
    ]
)
_PLAIN: dict[str, object] = {
    "room_id": "1", "target_host": "10.0.0.1", "event_type": "made", "event_version": "1", "worker_host": "m-1",
    "worker_version": "1.0", "worker": "1", "error_class": None, "http_status": None, "first": True, "sub_key": 1, "bin": 5, "attempts": 1,
    "sidelined": 0, "policy_version": 1,
}  # fmt: skip
Group = tuple[int, Mapping[str, object]]
REFUSED = {"error_class": "status", "http_status": "503"}


def causes_of(*groups: Group) -> list[RootCause]:
    """Return the causes of the failures in bin 5; each group is so many attempts alike."""
    rows = [{**_PLAIN, **of} for count, of in groups for _ in range(count)]
    cells = AttemptCells.from_arrow(pa.Table.from_pylist(rows, schema=_SCHEMA))
    failures = np.flatnonzero(cells.failed & (cells.bin == 5))
    return find_causes(cells, failures, begin=5, end=5)


def named(causes: Sequence[RootCause]) -> list[tuple[str, str]]:
    return [(cause.attribute, cause.value) for cause in causes]


def test_divergence_is_of_bernoulli_shares() -> None:
    assert divergence(0.5, 0.5) == divergence(0.2, 0.5) == 0.0
    assert abs(divergence(0.9, 0.1) - 0.8 * np.log(9)) < 1e-12


def test_a_failed_host_comes_before_its_network_and_its_error() -> None:
    found = causes_of(
        (60, REFUSED),
        (200, {"target_host": "10.0.7.9"}),
        (200, {"target_host": "10.0.8.9"}),
        (30, {"target_host": "10.0.7.9", "bin": 9, "error_class": "timeout"}),
    )
    assert named(found) == [("target_host", "10.0.0.1"), ("http_status", "503")]
    assert (found[0].inside, found[0].outside) == (1.0, 0.0)


def test_a_network_of_several_failed_hosts_comes_first() -> None:
    found = causes_of(
        *((30, {**REFUSED, "target_host": f"10.0.0.{number}"}) for number in range(4)),
        (300, {"target_host": "10.0.7.9"}),
    )
    assert named(found)[0] == ("network", "10.0.0.0/24")
    assert "target_host" not in {attribute for attribute, _ in named(found)}


def test_a_version_of_one_type_is_named_with_its_type() -> None:
    hosts = [f"10.0.{number}.1" for number in range(4)]
    found = causes_of(
        *((30, {**REFUSED, "event_version": "2", "target_host": host}) for host in hosts),
        *(
            (60, {"event_version": "2", "event_type": "paid", "target_host": host})
            for host in hosts
        ),
        *((60, {"event_version": "1", "target_host": host}) for host in hosts),
    )
    assert named(found)[0] == ("event_version", "made 2")
    assert "event_type" not in {attribute for attribute, _ in named(found)}


def test_a_version_that_only_one_type_has_is_named_by_its_number() -> None:
    hosts = [f"10.0.{number}.1" for number in range(4)]
    found = causes_of(
        *((30, {**REFUSED, "event_version": "2", "target_host": host}) for host in hosts),
        *((60, {"event_version": "1", "target_host": host}) for host in hosts),
    )
    assert named(found)[0] == ("event_version", "2")


def test_a_machine_comes_before_its_processes() -> None:
    hosts = [f"10.0.{number}.1" for number in range(4)]
    found = causes_of(
        *((40, {**REFUSED, "worker_host": "m-2", "worker": w, "target_host": h})
          for h in hosts for w in ("3", "4")),
        *((80, {"target_host": host}) for host in hosts),
    )  # fmt: skip
    assert [one for one in named(found) if one[0].startswith("worker")] == [("worker_host", "m-2")]


def test_a_share_without_contrast_is_no_cause() -> None:
    found = causes_of((50, REFUSED), (500, {}), (40, {**REFUSED, "bin": 9}))
    assert named(found) == []


def test_quiet_minutes_are_compared_with_those_around_them() -> None:
    found = causes_of(
        (12, REFUSED),
        *((40, {"target_host": f"10.0.{number}.1", "bin": 5 + number}) for number in range(1, 9)),
    )
    assert named(found)[0] == ("target_host", "10.0.0.1")
    assert found[0].outside == 0.0


def test_the_network_of_a_target_is_its_prefix_or_parent_domain() -> None:
    assert network_of("10.1.2.3") == "10.1.2.0/24"
    assert network_of("[2001:db8:1:2::3]") == "2001:db8:1::/48"
    assert network_of("a.hooks.example.") == "*.hooks.example"
    assert network_of("hooks.example") is None
    assert network_of("localhost") is None


def test_names_of_one_country_are_no_network() -> None:
    assert network_of("shop.co.uk") is None
    assert network_of("shop.com.br.") is None
    assert network_of("hooks.shop.co.uk") == "*.shop.co.uk"
    assert network_of("tax.gov.ke") == "*.gov.ke"
    assert network_of("co.uk") is None
