"""Test the commands of the analytics where their packages are missing."""

import sys

import pytest

from tests.support.cli_runner import Terminal

READER = "delivery.analytics.results.reader"


@pytest.mark.parametrize("command", ["export", "incidents", "reconcile", "retry-advice", "report"])
def test_missing_packages_are_named(
    command: str, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, READER, raising=False)
    for module in ("numpy", "numpy.typing", "pyarrow"):
        monkeypatch.setitem(sys.modules, module, None)
    result = terminal.run(command)
    assert result.exit_code == 1
    assert "needs the extra `spark` (numpy, pyarrow" in result.stderr
