"""What tests record of pauses is theirs alone."""

import importlib
import time

import pytest

from tests.pauses import recorded_pauses


def test_the_pauses_of_one_module_are_recorded_and_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = recorded_pauses(monkeypatch, "rooms.cli.pull")
    theirs = vars(importlib.import_module("rooms.cli.pull"))["time"]
    time.sleep(0.001)
    theirs.sleep(60)
    assert pauses == [60]
    assert theirs.monotonic() <= time.monotonic()
