"""`rooms pull`: fetch what waits for a PULL subscription, show it, acknowledge it."""

import sys
import time
from collections.abc import Iterator
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import click

from rooms.cli.errors import ProblemError, UnreachableError
from rooms.cli.references import find_subscription
from rooms.cli.session import Command, Session, pass_session

if TYPE_CHECKING:
    from rooms.cli.client import Client
    from rooms.cli.output import Output

_AT_ONCE = 100
_FOLLOW_WAIT_MS = 20_000
_SLACK_S = 15.0
_PAUSE_S = 1.0
PASSING = {
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.BAD_GATEWAY,
    HTTPStatus.SERVICE_UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT,
}


@click.command(cls=Command)
@click.argument("subscription")
@click.option("--max", "most", type=click.IntRange(1), help="End after so many.  [10; with --follow: never]")
@click.option("--follow", is_flag=True, help="Wait for more, until Ctrl-C.")
@click.option("--ack/--no-ack", default=True, show_default=True, help="Acknowledge what was shown.")
@click.option("--wait-ms", type=click.IntRange(0, 60_000), help="How long one call waits for messages.")
@click.option("--lease-ms", type=click.IntRange(1), help="How long they are ours.")
@pass_session
def pull(
    session: Session,
    /,
    *,
    subscription: str,
    most: int | None,
    follow: bool,
    ack: bool,
    wait_ms: int | None,
    lease_ms: int | None,
) -> None:
    """Fetch the messages of SUBSCRIPTION (an id, or ROOM/NAME); with --json, one a line.

    A message is acknowledged after it was written, so that what is cut off comes again.
    """
    out = session.output()
    left = most if most is not None or follow else 10
    wait_ms = wait_ms if wait_ms is not None else (_FOLLOW_WAIT_MS if follow else 0)
    with session.client() as client:
        path = f"/subscriptions/{find_subscription(client, subscription)['id']}"
        while left is None or left > 0:
            body = {"max_messages": min(_AT_ONCE, left or _AT_ONCE), "wait_ms": wait_ms}
            if lease_ms is not None:
                body["lease_ms"] = lease_ms
            try:
                messages = list(_fetch(client, path, body))
                show(out, messages)
                if ack and messages:
                    acknowledge(client, out, path, [message["ack_id"] for message in messages])
            except (UnreachableError, ProblemError) as exc:
                if not follow or (isinstance(exc, ProblemError) and exc.status not in PASSING):
                    raise
                out.note(f"{exc.message}; trying again")
                time.sleep(max(_PAUSE_S, (exc.retry_after_s or 0.0) if isinstance(exc, ProblemError) else 0.0))
                continue
            left = None if left is None else left - len(messages)
            if not messages and not follow:
                break
    if not out.as_json and most is None and not follow and left == 0:
        out.note("there may be more: --max, or --follow")


def _fetch(client: "Client", path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The messages; `raw` is each as one line of JSON in which no number was rounded and no key moved."""
    import json

    import msgspec

    answer = client.send("POST", f"{path}/pull", json=body, timeout_s=body["wait_ms"] / 1000 + _SLACK_S)
    for fields in msgspec.json.decode(answer.content, type=dict[str, list[dict[str, msgspec.Raw]]])["messages"]:
        line = msgspec.json.encode(fields).replace(b"\r", b" ").replace(b"\n", b" ")
        yield {**json.loads(line), "raw": line.decode(), "shown": bytes(fields["payload"]).decode()}


def show(out: "Output", messages: list[dict[str, Any]]) -> None:
    """Messages as people read them, or one a line."""
    for message in messages:
        if out.as_json:
            out.json_line(message["raw"])
        else:
            again = f"  attempt {message['attempt']}" if message.get("attempt") else ""
            what = f"{message['event_type']} v{message['version']}"
            out.heading(f"{message['published_at']}  {what}  {message['message_id']}{again}")
            out.content(message["shown"])
    sys.stdout.flush()


def acknowledge(client: "Client", out: "Output", path: str, ack_ids: list[str]) -> None:
    """Say that they are done; a note where their leases are over."""
    try:
        client.call("POST", f"{path}/ack", json={"ack_ids": ack_ids})
    except ProblemError as exc:
        if exc.status != HTTPStatus.CONFLICT:
            raise
        out.note(f"{exc.message}: these {len(ack_ids)} may come again; a longer --lease-ms gives more time")
