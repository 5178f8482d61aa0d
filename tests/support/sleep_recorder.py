"""Record the sleeps of one module."""

import importlib
import time
from types import SimpleNamespace

import pytest


def recorded_pauses(monkeypatch: pytest.MonkeyPatch, module: str) -> list[float]:
    """The seconds that `module` asks `time.sleep` for from now on, which returns at once for it.

    Only for this module: the function itself is shared, and a thread of another library that sleeps in
    a loop (py4j has one) would never rest, and fill the list.
    """
    found: list[float] = []
    monkeypatch.setattr(
        importlib.import_module(module),
        "time",
        SimpleNamespace(**vars(time) | {"sleep": found.append}),
    )
    return found
