"""Prometheus' own checker of rules."""

from pathlib import Path

from tests.support.debian_programs import debian_program


def promtool() -> Path:
    """Return the program. Where it cannot be had, the test is skipped; in CI it fails."""
    return debian_program(
        "promtool", package="prometheus", path="usr/bin/promtool", variable="ROOMS_PROMTOOL"
    )
