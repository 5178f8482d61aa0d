"""Test that the alert rules name existing metrics with their labels."""

import re
from typing import Any, Final

import click
import yaml

from rooms.api.readiness import BrokerUpGauge, magazines_gauge
from rooms.cli import build_cli
from tests.integration.rooms.api.conftest import Api
from tests.support.service import ROOT

RULES: Final = ROOT / "docs/alerts.yml"
_NAME: Final = re.compile(r"\brooms_[a-z_]+")
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
