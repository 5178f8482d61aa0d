"""Sandboxes of tests."""

from rooms.metrics import Metrics
from rooms.publishing.sandbox.client import CheckSandbox


def idle_sandbox(
    *, processes: int = 2, cpu_ms: int = 1_000, metrics: Metrics | None = None
) -> CheckSandbox:
    """Return a sandbox; enter it where a test starts its processes."""
    return CheckSandbox(
        processes=processes, cpu_ms=cpu_ms, memory_bytes=1 << 29, metrics=metrics or Metrics()
    )
