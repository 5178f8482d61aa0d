"""Options that say how fast webhooks are called, and when they are spared: of a subscription, or of all in a room."""

from collections.abc import Callable
from typing import Any, Final

import click

CLEARABLE: Final = (
    "max-concurrency",
    "timeout-ms",
    "rate-per-s",
    "rate-burst",
    "circuit-failures",
    "circuit-window-ms",
    "circuit-open-ms",
    "drain-per-s",
    "disable-after-ms",
)


def lane_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Each is named as its field."""
    for option in (
        click.option(
            "--disable-after-ms", type=click.IntRange(0), help="Disable after nothing but failures; 0: never."
        ),
        click.option("--drain-per-s", type=click.FloatRange(0), help="How fast held messages go on; 0: at once."),
        click.option("--circuit-open-ms", type=click.IntRange(100), help="To the first probe, and between probes."),
        click.option("--circuit-window-ms", type=click.IntRange(1), help="Within this the failures have to come."),
        click.option("--circuit-failures", type=click.IntRange(0), help="In a row, to open the circuit; 0: never."),
        click.option("--rate-burst", type=click.IntRange(1), help="Calls at once after a rest."),
        click.option("--rate-per-s", type=click.FloatRange(0), help="Calls a second at most; 0: no limit."),
        click.option("--timeout-ms", type=click.IntRange(1), help="For one call of a webhook."),
        click.option("--max-concurrency", type=click.IntRange(1, 1000), help="Calls at a time, in each worker."),
    ):
        command = option(command)
    return command
