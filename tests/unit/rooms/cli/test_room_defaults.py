"""Test what is proposed for a new room where nothing is given."""

import click

from rooms.cli.room import create
from rooms.console.rooms import SUGGESTED
from rooms.domain.room import (
    DEFAULT_DELIVERY_ATTEMPTS,
    DEFAULT_DELIVERY_DELAY_MS,
    DEFAULT_DELIVERY_DELAY_MULTIPLIER,
)


def test_the_command_line_and_the_console_propose_the_same_retry_policy() -> None:
    context = click.Context(create)
    proposed = {
        one.name: one.get_default(context) for one in create.params if one.name in SUGGESTED
    }
    assert proposed == {
        "delivery_delay_ms": DEFAULT_DELIVERY_DELAY_MS,
        "delivery_delay_multiplier": DEFAULT_DELIVERY_DELAY_MULTIPLIER,
        "delivery_attempts": DEFAULT_DELIVERY_ATTEMPTS,
    }
    assert {name: float(text) for name, text in SUGGESTED.items()} == proposed
