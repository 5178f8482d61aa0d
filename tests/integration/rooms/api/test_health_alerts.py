"""Test that the alert rules name existing metrics with their labels."""

import inspect
import re
from types import ModuleType
from typing import Any, Final

import click
import yaml
from prometheus_client.parser import text_string_to_metric_families

from delivery.brokers import postgres as postgres_broker
from delivery.handlers.tasks import QueueTasks
from delivery.magazines.postgres import PostgresMagazines
from delivery.push import broker_intake
from rooms.api.readiness import BrokerUpGauge, magazines_gauge
from rooms.api.server import connections
from rooms.app import api as app_api
from rooms.cli import build_cli
from rooms.db.queue.relay import RELAY_WRITER_KIND
from rooms.domain.state_machine import Reason
from tests.integration.rooms.api.conftest import Api
from tests.support.service import ROOT

RULES: Final = ROOT / "docs/alerts.yml"
_NAME: Final = re.compile(r"\brooms_[a-z_]+")
_SELECTOR: Final = re.compile(r"\b(rooms_[a-z_]+)\{([^}]*)\}")
_MATCHER: Final = re.compile(r'([a-z_]+)(=~?)"([^"]*)"')
_UNITS: Final = re.compile(r"[0-9]+[smhd]")


def rules() -> list[dict[str, Any]]:
    document = yaml.safe_load(RULES.read_text())
    assert set(document) == {"groups"}
    return [rule for group in document["groups"] for rule in group["rules"]]


async def test_every_metric_of_the_rules_exists(api: Api) -> None:
    exposition = (await api.http.get("/metrics")).text
    exposition += api.services.metrics.render(
        BrokerUpGauge(up=True), magazines_gauge(up=True)
    ).decode()
    known = set(re.findall(r"^# TYPE (\S+) ", exposition, re.MULTILINE))
    for rule in rules():
        named = set(_NAME.findall(rule["expr"]))
        assert named, rule["alert"]
        assert named <= known, f"{rule['alert']} asks for {sorted(named - known)}"


async def test_every_label_of_the_rules_has_a_value_that_is_emitted(api: Api) -> None:
    """Take the values from what the processes export, and from the code that counts."""
    metrics = api.services.metrics
    tasks = QueueTasks(PostgresMagazines(api.url, start=0), metrics)
    for magazine in ("main", "sideline"):
        tasks._report_depth("a queue", magazine, 1)
    exposition = (await api.http.get("/metrics")).text
    emitted = {
        ("rooms_processes_alive", "kind"): {
            RELAY_WRITER_KIND,
            *literals(postgres_broker, r"LogWriter\(url, kind="),
            *literals(broker_intake, r"LogWriter\(url, kind="),
        },
        ("rooms_held", "reason"): set(map(str, Reason)),
        ("rooms_tls_end_timestamp_seconds", "file"): literals(app_api, r"tls_end\.labels\("),
    }
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            for label, value in sample.labels.items():
                emitted.setdefault((sample.name, label), set()).add(value)
    closed = literals(connections, r"count_closed\(|_drop_one\([a-z._]+, ")
    assert emitted["rooms_http_connections_closed_total", "reason"] <= closed
    checked = 0
    for rule in rules():
        for metric, matchers in _SELECTOR.findall(rule["expr"]):
            for label, operator, value in _MATCHER.findall(matchers):
                values = set(value.split("|")) if operator == "=~" else {value}
                known = emitted[metric, label]
                assert values <= known, f"{rule['alert']} asks for {label} {values - known}"
                checked += 1
    assert checked == sum(len(_MATCHER.findall(rule["expr"])) for rule in rules())


def literals(module: ModuleType, before: str) -> set[str]:
    """Return the texts that the module passes after `before`."""
    return set(re.findall(rf'(?:{before})"([a-z_]+)"', inspect.getsource(module)))


def test_every_rule_is_whole() -> None:
    found = rules()
    assert len({rule["alert"] for rule in found}) == len(found)
    for rule in found:
        assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert rule["annotations"]["summary"].endswith((".", "?"))
        assert _UNITS.fullmatch(rule["for"])
        assert rule["expr"].count("(") == rule["expr"].count(")")
        assert rule["expr"].count("{") == rule["expr"].count("}")

        for command in re.findall(r"`rooms ([a-z -]+)`", rule["annotations"]["summary"]):
            named: click.Command = build_cli()
            for word in command.split():
                assert isinstance(named, click.Group), command
                inner = named.get_command(click.Context(named), word)
                assert inner is not None, (
                    f"{rule['alert']} names `rooms {command}`, which does not exist"
                )
                named = inner


def test_the_issue_is_covered() -> None:
    text = " ".join(rule["expr"] for rule in rules())
    wanted = (
        "sweeps",
        "sideline_moved",
        "rooms_sidelined",
        "saturated",
        "sideline_lost",
        "leader_absent",
        "broker_up",
        "magazines_up",
    )
    of_queues = (
        f"handler_queue_{what}"
        for what in ("busy", "depth", "handled", "shoveled", "swept", "sweep_failures")
    )
    for part in (*wanted, *of_queues, "outbox_age", "log_held_back", "log_gaps"):
        assert part in text
