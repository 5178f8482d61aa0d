"""Implement `rooms filter`: test the CEL filter of a subscription."""

from typing import Any

import click

from rooms.cli.context import CliSession, Group, pass_session
from rooms.cli.options import parse_pairs, post_action, read_json, set_fields


@click.group("filter", cls=Group)
def filter_group() -> None:
    """Test the filter of a subscription. SUBSCRIPTION is an id, or ROOM/NAME."""


@filter_group.command()
@click.argument("subscription")
@click.argument("payload")
@click.option(
    "--filter",
    "expression",
    metavar="CEL",
    help="Expression to test instead of the filter of the subscription.",
)
@click.option(
    "--header",
    "headers",
    metavar="NAME=VALUE",
    callback=parse_pairs,
    multiple=True,
    help="A header of the message; repeatable.",
)
@click.option("--event-type", help="Event type of the message.")
@click.option(
    "--version", "event_version", type=click.IntRange(1), help="Version of the event type."
)
@click.option("--ordering-key", help="Ordering key of the message.")
@click.option("--priority", type=click.IntRange(0, 9), help="Priority of the message.")
@pass_session
def test(
    session: CliSession,
    /,
    *,
    subscription: str,
    payload: str,
    expression: str | None,
    **fields: Any,
) -> None:
    """Test whether a message with PAYLOAD (JSON, or @FILE) passes the filter. Publishes nothing."""
    body = {"payload": read_json(payload, "PAYLOAD"), **set_fields(filter=expression, **fields)}
    post_action(session, subscription, "filter/test", body)
