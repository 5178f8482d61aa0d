"""Test that any process reports the counts of all."""

import os
import subprocess
import sys
from pathlib import Path

from rooms.metrics import Metrics

COUNT = "from rooms.metrics import Metrics; m = Metrics(); m.publishes.labels('accepted').inc(2); m.publish_latency.observe(0.1)"
# Dies like a killed process, which leaves its gauges.
DIE = """
import os
from rooms.metrics import Metrics
m = Metrics()
m.publishes.labels("accepted").inc(3)
m.queue_busy_consumers.labels("orders").set(5)
os.kill(os.getpid(), 9)
"""
LIVE = """
from rooms.metrics import Metrics
m = Metrics()
m.queue_busy_consumers.labels("orders").set(2)
print(m.render().decode())
"""
REPORT = """
from rooms.metrics import Metrics
from rooms.db.queries.stats import QueueStats
print(Metrics().render(QueueStats(up=True, depth={"push": 7}, sidelined={"nacked": 2})).decode())
"""


def run(code: str, folder: Path) -> str:
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder)}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout


def test_counters_of_ended_processes_are_summed_with_the_stats(tmp_path: Path) -> None:
    for _ in range(2):
        run(COUNT, tmp_path)
    text = run(REPORT, tmp_path)
    assert 'rooms_publishes_total{outcome="accepted"} 4.0' in text
    assert "rooms_publish_latency_seconds_count 2.0" in text
    assert 'rooms_queue_depth{kind="push"} 7.0' in text
    assert 'rooms_sidelined{reason="nacked"} 2.0' in text
    assert "rooms_database_up 1.0" in text


def test_a_killed_process_keeps_its_counters_and_loses_its_gauges(
    tmp_path: Path,
) -> None:
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    killed = subprocess.run([sys.executable, "-c", DIE], env=environment, check=False, timeout=60)
    assert killed.returncode == -9
    assert list(tmp_path.glob("gauge_live*"))
    text = run(LIVE, tmp_path)
    assert 'rooms_handler_queue_busy{queue="orders"} 2.0' in text
    assert 'rooms_publishes_total{outcome="accepted"} 3.0' in text


def test_refusals_by_each_bound_begin_at_0() -> None:
    """Prometheus sees no increase in a series that begins above 0."""
    exposed = Metrics().render().decode()
    for bound in ("schema", "filter"):
        assert f'rooms_bounds_refused_total{{bound="{bound}"}} 0.0' in exposed
