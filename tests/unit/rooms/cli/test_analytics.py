"""Test the commands of the analytics where their packages are missing."""

import sys

import pytest

from tests.support.cli_runner import Terminal

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
