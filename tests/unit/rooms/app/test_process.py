"""Test how a process starts, and fails to: one line for an outage, a traceback for a bug."""

import asyncio
import gc
from pathlib import Path

import pytest

from rooms.app import process
from rooms.app.process import first_transient
from rooms.errors import BrokerUnavailableError, NotFoundError, StorageUnavailableError
from rooms.metrics import Metrics
from rooms.settings import read_settings
from tests.support import stall_guard
from tests.unit.rooms.test_loop_watchdog import burn_processor

AWAY = StorageUnavailableError("connection refused")


@pytest.mark.parametrize(
    "group",
    [
        BaseExceptionGroup("parts", [AWAY]),
        BaseExceptionGroup(
            "parts", [BaseExceptionGroup("inner", [AWAY]), BrokerUnavailableError("reset")]
        ),
    ],
)
def test_outages_of_parts_are_one_error(group: BaseExceptionGroup[BaseException]) -> None:
    assert first_transient(group) is AWAY


@pytest.mark.parametrize(
    "other", [ValueError("a bug"), NotFoundError("nothing"), KeyboardInterrupt()]
)
def test_other_errors_keep_the_whole_group(other: BaseException) -> None:
    assert first_transient(BaseExceptionGroup("parts", [AWAY, other])) is None
    assert first_transient(BaseExceptionGroup("parts", [other])) is None


@pytest.mark.parametrize("stall_ms", ["0", "250"])
def test_what_startup_makes_is_never_scanned_by_the_collector(
    stall_ms: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "STARTUP_GRACE_S", 0.01)
    monkeypatch.setattr(process, "log_to_stderr", lambda _: None)  # it is of the whole test run
    settings = read_settings({"ROOMS_DATA": str(tmp_path), "ROOMS_LOOP_STALL_MS": stall_ms})
    made: list[list[object]] = []

    async def main(_: Metrics) -> None:
        made.append([[] for _ in range(1000)])
        await asyncio.sleep(0.1)
        assert not {id(one) for one in made[0]} & {id(one) for one in gc.get_objects()}

    thresholds = gc.get_threshold()
    try:
        process.run("api", main, settings)
    finally:
        gc.set_threshold(*thresholds)
    assert made


def test_a_stall_is_logged_counted_and_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Check the process as it runs: without its watchdog, no test of its log could find a stall."""
    monkeypatch.setattr(process, "STARTUP_GRACE_S", 0.01)
    monkeypatch.setattr(process, "log_to_stderr", lambda _: None)  # it is of the whole test run
    settings = read_settings({"ROOMS_DATA": str(tmp_path), "ROOMS_LOOP_STALL_MS": "250"})
    found: list[Metrics] = []

    async def main(metrics: Metrics) -> None:
        found.append(metrics)
        assert metrics.loop_stalls.labels("api")._value.get() == 0
        await asyncio.sleep(0.2)
        burn_processor(0.6)
        await asyncio.sleep(0.2)

    thresholds = gc.get_threshold()
    try:
        process.run("api", main, settings)
    finally:
        gc.set_threshold(*thresholds)
    (line,) = [text for text in caplog.messages if stall_guard.LOGGED in text]
    assert "burn_processor" in line
    (metrics,) = found
    assert metrics.loop_stalls.labels("api")._value.get() == 1
    assert metrics.loop_longest_stall.labels("api")._value.get() > 0.25
