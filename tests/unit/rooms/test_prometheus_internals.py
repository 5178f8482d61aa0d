"""Compare what uses private parts of the Prometheus client with the client's own functions."""

import os
import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from rooms.prometheus_internals import observe_many, remove_dead_gauges

_BOUNDS = (0.1, 0.5, 1.0, 5.0)


@given(st.lists(st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.75, 1.0, 4.0, 5.0, 8.0])))
def test_many_values_are_observed_as_one_by_one(values: list[float]) -> None:
    texts = []
    for together in (True, False):
        registry = CollectorRegistry()
        histogram = Histogram("h", "Test.", registry=registry, buckets=_BOUNDS)
        if together:
            observe_many(histogram, values)
        else:
            for value in values:
                histogram.observe(value)
        text = generate_latest(registry).decode()
        texts.append([line for line in text.splitlines() if "_created" not in line])
    assert texts[0] == texts[1]


def test_live_gauges_of_dead_processes_are_removed(tmp_path: Path) -> None:
    """The library writes them under the names that are looked for."""
    code = (
        "import os; from prometheus_client import Gauge;"
        "Gauge('g', 'Test.', multiprocess_mode='livesum').set(1); print(os.getpid())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)},
        check=True,
        capture_output=True,
        text=True,
    )
    dead = tmp_path / f"gauge_livesum_{done.stdout.strip()}.db"
    assert dead.exists()
    alive, counter = tmp_path / f"gauge_livesum_{os.getpid()}.db", tmp_path / "counter_1.db"
    for file in (alive, counter):
        file.write_bytes(b"")
    remove_dead_gauges(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([alive, counter])
