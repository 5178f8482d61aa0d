"""Implement `rooms usage last-hour` and `rooms subscription activity`: counts by the minute."""

from collections.abc import Mapping
from typing import Any, Final

import click

from rooms.cli.context import CliSession, Command, pass_session
from rooms.cli.options import find_organisation, find_subscription, set_fields
from rooms.cli.output import Output, format_cell
from rooms.domain.ids import is_id
from rooms.domain.usage import MINUTE_COUNTERS

_EVERY_ORGANISATION: Final = "*"
_LATENCIES: Final = ("p50_ms", "p95_ms", "p99_ms")
_FIELDS: Final = ("start", *MINUTE_COUNTERS, *_LATENCIES)


@click.command("last-hour", cls=Command)
@click.option(
    "--organisation",
    help="Of another one, by id, name or member id, or '*'; needs the scope platform.",
)
@pass_session
def last_hour(session: CliSession, /, *, organisation: str | None) -> None:
    """Count the deliveries of the last hour by the minute, with the times that calls took.

    Minutes in which nothing happened are left out. The last one still grows.
    """
    with session.client() as client:
        if not (organisation is None or organisation == _EVERY_ORGANISATION or is_id(organisation)):
            organisation = str(find_organisation(client, organisation)["id"])
        found = client.call("GET", "/activity", params=set_fields(organisation_id=organisation))
    _show(session.output(), found)


@click.command(cls=Command)
@click.argument("subscription")
@pass_session
def activity(session: CliSession, /, *, subscription: str) -> None:
    """Count the last hour of a subscription by the minute, with the times that calls took.

    Minutes in which nothing happened are left out. The last one still grows.
    """
    with session.client() as client:
        found = find_subscription(client, subscription)
        answer = client.call("GET", f"/subscriptions/{found['id']}/activity")
    _show(session.output(), answer)


def _show(output: Output, found: Mapping[str, Any]) -> None:
    if output.as_json:
        output.document(found)
        return
    rows = [one for one in found["minutes"] if any(one[name] for name in MINUTE_COUNTERS)]
    output.table(
        [name.replace("_", " ") for name in _FIELDS],
        [[one[name] for name in _FIELDS] for one in rows],
        empty="nothing was delivered in the last hour",
    )
    latency = found["latency"]
    if latency["p50_ms"] is not None:
        shares = ", ".join(f"{name[:3]} {format_cell(latency[name])} ms" for name in _LATENCIES)
        output.line(f"calls of the hour: {shares}")
