"""Run every alert rule with promtool over recorded series that must fire and that must not."""

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.support.promtool import promtool
from tests.support.service import ROOT

RULES: Final = ROOT / "docs/alerts.yml"
_TIMEOUT_S: Final = 120
_UP: Final = "1x300"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Series by name, a sample a minute, in promtool's notation.

    `at`: the time at which `firing` must have fired, and `quiet` must not. `labels`: labels of the
    alert besides its severity.
    """

    firing: Mapping[str, str]
    quiet: Mapping[str, str]
    at: str = "10m"
    labels: Mapping[str, str] = field(default_factory=dict)


def above(series: str, *, fires: float, stays: float, at: str = "30m", **labels: str) -> Case:
    """Return a gauge that fires at one value, and not at another."""
    return Case(
        firing={series: f"{fires:g}x3000"}, quiet={series: f"{stays:g}x3000"}, at=at, labels=labels
    )


def counted(series: str, *, at: str = "10m", **labels: str) -> Case:
    """Return a counter whose first increase fires, and that then stays constant."""
    return Case(firing={series: "0x5 1x100"}, quiet={series: "7x300"}, at=at, labels=labels)


def _closed(reason: str) -> str:
    return f'rooms_http_connections_closed_total{{reason="{reason}"}}'


_WORKER: Final = 'rooms_processes_alive{kind="worker"}'
_RELAY: Final = 'rooms_processes_alive{kind="relay"}'
_PROCESSES_REFUSED: Final = 'rooms_counts_refused{count="processes"}'
_HANDLED: Final = 'rooms_handler_queue_handled_total{queue="q",outcome="sidelined"}'
_SHOVELED: Final = 'rooms_handler_queue_shoveled_total{queue="q",outcome="queued"}'
_QUEUED: Final = 'rooms_sideline_moved_total{outcome="queued"}'

CASES: Final[Mapping[str, Case]] = {
    "RoomsApiGone": Case(
        firing={"rooms_database_up": "1x3 stale"}, quiet={"rooms_database_up": "0x300"}
    ),
    "RoomsDatabaseDown": Case(
        firing={
            'rooms_database_up{instance="a"}': "1x3 0x300",
            'rooms_database_up{instance="b"}': "0x300",
        },
        quiet={'rooms_database_up{instance="a"}': _UP, 'rooms_database_up{instance="b"}': "0x300"},
    ),
    "RoomsCountsRefused": Case(
        firing={'rooms_counts_refused{count="outbox"}': "0x3 1x300"},
        quiet={'rooms_counts_refused{count="outbox"}': "1x8 0x300"},
        at="30m",
        labels={"count": "outbox"},
    ),
    "RoomsBrokerDown": Case(
        firing={"rooms_broker_up": "1x3 0x300"}, quiet={"rooms_broker_up": _UP}
    ),
    "RoomsMagazinesDown": Case(
        firing={"rooms_magazines_up": "1x3 0x300"}, quiet={"rooms_magazines_up": _UP}
    ),
    "RoomsNoFilesLeft": Case(
        firing={_closed("files"): "0+1x100"},
        quiet={_closed("files"): "7x300", _closed("unauthenticated"): "0+9x300"},
    ),
    "RoomsTlsFilesRefused": above("rooms_tls_reload_failed", fires=1, stays=0),
    "RoomsTlsEnds": Case(
        firing={'rooms_tls_end_timestamp_seconds{file="certificate"}': "600000x300"},
        quiet={
            'rooms_tls_end_timestamp_seconds{file="certificate"}': "900000x300",
            'rooms_tls_end_timestamp_seconds{file="revocation_list"}': "10000x300",
        },
        labels={"file": "certificate"},
    ),
    "RoomsConnectionsFull": Case(
        firing={_closed("unauthenticated"): "0+30x300"},
        quiet={_closed("unauthenticated"): "0+15x300", _closed("slow_request"): "0+90x300"},
        at="30m",
        labels={"reason": "unauthenticated"},
    ),
    "RoomsBrokerDiskFull": above("rooms_broker_disk_usage_ratio", fires=0.85, stays=0.7),
    "RoomsLeaderAbsent": above("rooms_leader_absent_seconds", fires=61, stays=59),
    "RoomsNoWorker": Case(
        firing={"rooms_database_up": _UP, _PROCESSES_REFUSED: "0x300", _WORKER: "1x3 stale"},
        quiet={"rooms_database_up": _UP, _PROCESSES_REFUSED: "0x3 1x300", _WORKER: "1x3 stale"},
    ),
    "RoomsNoRelay": Case(
        firing={
            "rooms_database_up": _UP,
            "rooms_broker_up": _UP,
            _PROCESSES_REFUSED: "0x300",
            _RELAY: "1x3 stale",
        },
        quiet={
            "rooms_database_up": _UP,
            "rooms_broker_up": "0x300",
            _PROCESSES_REFUSED: "0x300",
            _RELAY: _UP,
        },
    ),
    "RoomsLoopStalls": Case(
        firing={'rooms_loop_stalls_total{process="worker"}': "0+3x100"},
        quiet={'rooms_loop_stalls_total{process="worker"}': "0+1x100"},
        at="30m",
        labels={"process": "worker"},
    ),
    "RoomsOutboxOld": above("rooms_outbox_age_seconds", fires=301, stays=299),
    "RoomsNativeQueueDeep": above("rooms_native_queue_depth", fires=100001, stays=100000),
    "RoomsSaturated": above('rooms_held{reason="saturated"}', fires=10001, stays=10000),
    "RoomsWebhooksFailing": Case(
        firing={
            'rooms_attempts_total{outcome="queued"}': "0+6x100",
            'rooms_attempts_total{outcome="delivered"}': "0+4x100",
        },
        quiet={
            'rooms_attempts_total{outcome="queued"}': "0+4x100",
            'rooms_attempts_total{outcome="delivered"}': "0+6x100",
        },
        at="30m",
    ),
    "RoomsCopiesRefused": Case(
        firing={'rooms_relay_refused_total{reason="unreadable"}': "0x5 1x100"},
        quiet={'rooms_relay_refused_total{reason="subscription_deleted"}': "0+1x100"},
    ),
    "RoomsWorkersKilled": above("rooms_outbox_abandoned", fires=1, stays=0),
    "RoomsOrphans": counted('rooms_orphans_total{outcome="discarded"}'),
    "RoomsRetentionWaits": above(
        'rooms_retention_waiting{for="export"}', fires=1, stays=0, at="25h"
    ),
    "RoomsRetentionStands": Case(
        firing={"rooms_retention_success_timestamp_seconds": "1x3000"},
        quiet={"rooms_retention_success_timestamp_seconds": "1x60 86400x3000"},
        at="25h",
    ),
    "RoomsSidelinesRising": Case(
        firing={'rooms_sidelined{reason="nacked"}': "0+1x300", _QUEUED: "5x300"},
        quiet={'rooms_sidelined{reason="nacked"}': "0+1x300", _QUEUED: "0+1x300"},
        at="2h",
    ),
    "RoomsSidelinesDeep": Case(
        firing={
            'rooms_sidelined{reason="nacked"}': "60000x100",
            'rooms_sidelined{reason="stuck"}': "60000x100",
        },
        quiet={
            'rooms_sidelined{reason="nacked",instance="a"}': "60000x100",
            'rooms_sidelined{reason="nacked",instance="b"}': "60000x100",
        },
        at="30m",
    ),
    "RoomsSidelinesOld": above(
        'rooms_sideline_oldest_seconds{reason="nacked"}', fires=604801, stays=604799
    ),
    "RoomsSidelinesNotLoaded": above("rooms_sideline_unloaded", fires=1, stays=0),
    "RoomsSidelineEntriesLost": counted("rooms_sideline_lost_total"),
    "RoomsSweepsFailing": counted('rooms_sideline_sweeps_total{outcome="failed"}', at="30m"),
    "RoomsNoSweep": Case(
        firing={'rooms_sideline_sweeps_total{outcome="done"}': "0x300"},
        quiet={
            'rooms_sideline_sweeps_total{outcome="done"}': "0x14 1x14 2x14 3x14 4x14 5x14 6x14 7x14 8x14 9x200"
        },
        at="3h",
    ),
    "RoomsCircuitsOpen": above("rooms_circuits_open", fires=1, stays=0, at="90m"),
    "RoomsEndpointsDisabled": Case(
        firing={'rooms_lane_changes_total{change="failed_long"}': "0x5 1x100"},
        quiet={'rooms_lane_changes_total{change="tripped"}': "0+1x100"},
    ),
    "RoomsHandlerQueueSaturated": Case(
        firing={
            'rooms_handler_queue_busy{queue="q"}': "10x100",
            'rooms_handler_queue_consumers{queue="q"}': "10x100",
        },
        quiet={
            'rooms_handler_queue_busy{queue="q"}': "9x100",
            'rooms_handler_queue_consumers{queue="q"}': "10x100",
        },
        at="30m",
        labels={"queue": "q"},
    ),
    "RoomsHandlerQueueDeep": Case(
        firing={'rooms_handler_queue_depth{queue="q",magazine="main"}': "100001x100"},
        quiet={'rooms_handler_queue_depth{queue="q",magazine="sideline"}': "100001x100"},
        at="30m",
        labels={"queue": "q"},
    ),
    "RoomsHandlerQueueSidelinedNotShoveled": Case(
        firing={_HANDLED: "0+1x300", _SHOVELED: "0x300"},
        quiet={_HANDLED: "0+1x300", _SHOVELED: "0+1x300"},
        at="2h",
        labels={"queue": "q"},
    ),
    "RoomsHandlerQueueStuck": counted(
        'rooms_handler_queue_swept_total{queue="q",magazine="main"}', queue="q"
    ),
    "RoomsHandlerQueueSweepsFailing": counted(
        'rooms_handler_queue_sweep_failures_total{queue="q"}', at="30m", queue="q"
    ),
    "RoomsLogHeldBack": above("rooms_log_held_back_seconds", fires=1801, stays=1800),
    "RoomsLogGaps": counted("rooms_log_gaps_total"),
}
_BROKEN: Final = ("RoomsApiGone", "RoomsDatabaseDown")
"""With unreachable counts, no other rule may fire."""


def rules() -> list[dict[str, Any]]:
    document = yaml.safe_load(RULES.read_text())
    return [rule for group in document["groups"] for rule in group["rules"]]


def expected(rule: Mapping[str, Any], labels: Mapping[str, str]) -> dict[str, Any]:
    """Return the alert that promtool must find."""
    summary = rule["annotations"]["summary"]
    for name, value in labels.items():
        summary = summary.replace(f"{{{{ $labels.{name} }}}}", value)
    return {"exp_labels": {**rule["labels"], **labels}, "exp_annotations": {"summary": summary}}


def played(
    series: Mapping[str, str], wanted: Mapping[str, list[dict[str, Any]]], at: str
) -> dict[str, Any]:
    """Return one promtool test: series, and the expected alerts."""
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [
            {"eval_time": at, "alertname": name, "exp_alerts": alerts}
            for name, alerts in wanted.items()
        ],
    }


def write_tests(folder: Path, *tests: Mapping[str, Any], rule: str | None = None) -> Path:
    """Write a file of tests for promtool; `rule`: the only one that it evaluates."""
    name = rule or "all"
    rules = RULES
    if rule is not None:
        rules = folder / f"{name}.rules.yml"
        rules.write_text(yaml.safe_dump(only(rule)))
    file = folder / f"{name}.yml"
    file.write_text(
        yaml.safe_dump(
            {"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": list(tests)}
        )
    )
    return file


def only(rule: str) -> dict[str, Any]:
    """Return the document of rules without all others."""
    document: dict[str, Any] = yaml.safe_load(RULES.read_text())
    groups = [
        group | {"rules": [one for one in group["rules"] if one["alert"] == rule]}
        for group in document["groups"]
    ]
    return document | {"groups": [group for group in groups if group["rules"]]}


def promtool_test(*files: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(promtool()), "test", "rules", *map(str, files)],
        check=False,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
    )


def test_every_rule_has_a_case_that_fires_and_one_that_does_not() -> None:
    named = [rule["alert"] for rule in rules()]
    assert sorted(named) == sorted(CASES)
    assert all(case.firing != case.quiet for case in CASES.values())


def test_promtool_accepts_the_rules() -> None:
    done = subprocess.run(
        [str(promtool()), "check", "rules", str(RULES)],
        check=False,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(CASES)} rules found" in done.stdout


def test_every_rule_fires_only_where_it_must(tmp_path: Path) -> None:
    """Each beside no other: evaluating all of them for each case takes most of the time."""
    files = []
    for rule in rules():
        name, case = rule["alert"], CASES[rule["alert"]]
        files.append(
            write_tests(
                tmp_path,
                played(case.firing, {name: [expected(rule, case.labels)]}, case.at),
                played(case.quiet, {name: []}, case.at),
                # Not at the first evaluation, so that a brief condition raises no alert.
                played(case.firing, {name: []}, "0m"),
                rule=name,
            )
        )
    done = promtool_test(*files)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("SUCCESS") == len(CASES)


@pytest.mark.parametrize("name", _BROKEN)
def test_nothing_else_fires_while_counts_are_unreachable(tmp_path: Path, name: str) -> None:
    """An outage of PostgreSQL, or of all APIs, is one alert."""
    others: dict[str, list[dict[str, Any]]] = {
        rule["alert"]: [] for rule in rules() if rule["alert"] != name
    }
    series = {"rooms_database_up": "0x300"} if name == "RoomsDatabaseDown" else {"other": "1x300"}
    done = promtool_test(write_tests(tmp_path, played(series, others, "5h")))
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_wrong_expectation_fails(tmp_path: Path) -> None:
    """The run itself can fail, with one rule as with all."""
    wrong = played({"rooms_database_up": "0x300"}, {"RoomsDatabaseDown": []}, "10m")
    assert promtool_test(write_tests(tmp_path, wrong)).returncode != 0
    right = write_tests(
        tmp_path,
        played({"rooms_magazines_up": _UP}, {"RoomsMagazinesDown": []}, "10m"),
        rule="RoomsMagazinesDown",
    )
    assert promtool_test(right).returncode == 0
    alone = write_tests(tmp_path, wrong, rule="RoomsDatabaseDown")
    assert promtool_test(right, alone).returncode != 0
