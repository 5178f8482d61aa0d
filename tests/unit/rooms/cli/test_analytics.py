"""Test the commands of the analytics where packages or findings are missing."""

import json
import sys
from pathlib import Path

import pytest

from rooms.cli.context import CliSession
from rooms.cli.report import _read_live
from tests.support.cli_runner import Terminal
from tests.support.fake_api import FakeRooms

IMPORTERS = ("delivery.analytics.results.reader", "delivery.analytics.results.by_organisation")


@pytest.mark.parametrize("command", ["export", "incidents", "reconcile", "retry-advice", "report"])
def test_missing_packages_are_named(
    command: str, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in IMPORTERS:
        monkeypatch.delitem(sys.modules, module, raising=False)
    for module in ("numpy", "numpy.typing", "pyarrow"):
        monkeypatch.setitem(sys.modules, module, None)
    result = terminal.run(command)
    assert result.exit_code == 1
    assert "needs the extra `spark` (numpy, pyarrow" in result.stderr


def test_the_live_part_of_the_report_is_what_its_key_may_see(fake: FakeRooms) -> None:
    """The rest of the report comes from files and the database, so only this part has a key."""
    fake.interfere = lambda _: (403, {"title": "Forbidden", "status": 403, "detail": "no"})
    live = _read_live(CliSession(url=fake.url, key="rooms_of_one_organisation"))
    assert live is None
    (asked,) = fake.requests
    assert (asked.method, asked.path) == ("GET", "/v1/status")
    assert asked.headers["authorization"] == "Bearer rooms_of_one_organisation"


@pytest.fixture
def books_only(terminal: Terminal) -> Path:
    """Write the result of a run that has not computed its findings yet."""
    tables = terminal.data / "analysis" / "tables"
    tables.mkdir(parents=True)
    latest = {
        "run": 1,
        "at": "2026-01-01T00:00:00+00:00",
        "findings": None,
        "totals": {},
        "tables": {},
    }
    (tables / "latest.json").write_text(json.dumps(latest))
    return tables


@pytest.mark.usefixtures("books_only")
def test_no_incidents_are_not_no_findings(terminal: Terminal) -> None:
    result = terminal.run("incidents")
    assert result.exit_code == 0, result.output
    assert "no correlated failures" not in result.output
    assert "not computed yet" in result.stderr
    found = terminal.json("incidents")
    assert found["analysed_at"] is None
    assert found["items"] == []


@pytest.mark.usefixtures("books_only")
def test_no_advice_is_not_no_findings(terminal: Terminal) -> None:
    result = terminal.run("retry-advice")
    assert result.exit_code == 0, result.output
    assert "not computed yet" in result.stderr
    result = terminal.run("retry-advice", "019b0000-0000-7000-8000-00000000000a")
    assert result.exit_code == 1
    assert "there is no advice yet" in result.stderr


def test_findings_are_dated_by_their_own_run(terminal: Terminal, books_only: Path) -> None:
    latest = json.loads((books_only / "latest.json").read_text())
    latest |= {"run": 2, "findings": {"run": 1, "at": "2025-12-31T23:55:00+00:00"}}
    (books_only / "latest.json").write_text(json.dumps(latest))
    assert terminal.json("incidents")["analysed_at"] == "2025-12-31T23:55:00+00:00"
    for command in ("incidents", "retry-advice"):
        assert "as of 2025-12-31 23:55:00 UTC" in terminal.run(command).stderr
