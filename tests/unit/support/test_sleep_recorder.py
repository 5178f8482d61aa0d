"""Test that a test records only the pauses of its own module."""

import importlib
import time

import pytest

from tests.support.sleep_recorder import recorded_pauses


def test_records_only_the_pauses_of_one_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses = recorded_pauses(monkeypatch, "rooms.cli.pull")
    theirs = vars(importlib.import_module("rooms.cli.pull"))["time"]
    time.sleep(0.001)
    theirs.sleep(60)
    assert pauses == [60]
    assert theirs.monotonic() <= time.monotonic()
