"""What several processes count is told by any one of them."""

import os
import subprocess
import sys
from pathlib import Path

COUNT = "from rooms.metrics import Metrics; m = Metrics(); m.publishes.labels('accepted').inc(2); m.publish_latency.observe(0.1)"
TELL = """
from rooms.metrics import Metrics
from rooms.storage.gauges import Counts
print(Metrics().text(Counts(up=True, depth={"push": 7}, sidelined={"nacked": 2})).decode())
"""


def run(code: str, folder: Path) -> str:
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder)}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True, timeout=60
    ).stdout


def test_counters_of_processes_that_ended_are_added_up_beside_what_waits(tmp_path: Path) -> None:
    for _ in range(2):
        run(COUNT, tmp_path)
    text = run(TELL, tmp_path)
    assert 'rooms_publishes_total{outcome="accepted"} 4.0' in text
    assert "rooms_publish_latency_seconds_count 2.0" in text
    assert 'rooms_queue_depth{kind="push"} 7.0' in text
    assert 'rooms_sidelined{reason="nacked"} 2.0' in text
    assert "rooms_database_up 1.0" in text
