"""Implement `rooms pull` and `rooms stream`: receive messages of PULL subscriptions.

Both acknowledge a message after it is shown.
"""

import json
import sys
import time
from collections.abc import Iterator
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import click

from rooms.cli.context import CliSession, Command, pass_session
from rooms.cli.errors import ProblemError, UnreachableError, is_transient
from rooms.cli.options import find_subscription

if TYPE_CHECKING:
    from rooms.cli.client import ApiClient
    from rooms.cli.output import Output

_MAX_PER_PULL = 100
_FOLLOW_WAIT_MS = 20_000
_TIMEOUT_MARGIN_S = 15.0
_PAUSE_S = 1.0
_RETRYABLE_ENDS = {"shutdown", "unavailable"}


@click.command(cls=Command)
@click.argument("subscription")
@click.option(
    "--max",
    "most",
    type=click.IntRange(1),
    help="Stop after this many messages.  [10; with --follow: never]",
)
@click.option("--follow", is_flag=True, help="Wait for more messages, until Ctrl-C.")
@click.option(
    "--ack/--no-ack", default=True, show_default=True, help="Acknowledge messages that were shown."
)
@click.option(
    "--wait-ms", type=click.IntRange(0, 30_000), help="Longest wait of one call for messages."
)
@click.option("--lease-ms", type=click.IntRange(1000), help="Duration of the leases.  [30000]")
@pass_session
def pull(
    session: CliSession,
    /,
    *,
    subscription: str,
    most: int | None,
    follow: bool,
    ack: bool,
    wait_ms: int | None,
    lease_ms: int | None,
) -> None:
    """Receive messages of SUBSCRIPTION (an id, or ROOM/NAME). With --json, one per line.

    A message is acknowledged after it was written. If the output is cut off, the message is
    delivered again.
    """
    out = session.output()
    left = given = most if most is not None or follow else 10
    wait_ms = wait_ms if wait_ms is not None else (_FOLLOW_WAIT_MS if follow else 0)
    with session.client() as client:
        path = f"/subscriptions/{find_subscription(client, subscription)['id']}"
        while left is None or left > 0:
            body = {"max_messages": min(_MAX_PER_PULL, left or _MAX_PER_PULL), "wait_ms": wait_ms}
            if lease_ms is not None:
                body["lease_ms"] = lease_ms
            try:
                messages = list(_fetch(client, path, body))
                show_messages(out, messages)
                if ack and messages:
                    acknowledge(client, out, path, [message["ack_id"] for message in messages])
            except (UnreachableError, ProblemError) as exc:
                if not follow or not is_transient(exc):
                    raise
                out.note(f"{exc.message}; retrying")
                time.sleep(
                    max(
                        _PAUSE_S,
                        (exc.retry_after_s or 0.0) if isinstance(exc, ProblemError) else 0.0,
                    )
                )
                continue
            left = None if left is None else left - len(messages)
            if not messages and not follow:
                break
    if out.as_json or follow:
        return
    if left == given:
        out.note("no message is due")
    elif most is None and left == 0:
        out.note("there may be more: use --max or --follow")


def _fetch(client: "ApiClient", path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the messages. `raw` is one line of JSON with the numbers and keys as published."""
    import json

    import msgspec

    answer = client.send(
        "POST", f"{path}/pull", json=body, timeout_s=body["wait_ms"] / 1000 + _TIMEOUT_MARGIN_S
    )
    for fields in msgspec.json.decode(answer.content, type=dict[str, list[dict[str, msgspec.Raw]]])[
        "messages"
    ]:
        line = msgspec.json.encode(fields).replace(b"\r", b" ").replace(b"\n", b" ")
        yield {**json.loads(line), "raw": line.decode(), "shown": bytes(fields["payload"]).decode()}


def show_messages(out: "Output", messages: list[dict[str, Any]]) -> None:
    """Write messages for people, or one per line for programs."""
    for message in messages:
        if out.as_json:
            out.json_line(message["raw"])
        else:
            again = f"  attempt {message['attempt']}" if message.get("attempt") else ""
            what = f"{message['event_type']} v{message['version']}"
            out.heading(
                f"{message['published_at']}  {what}  {message['message_id']}{again}{_keys(message)}"
            )
            out.content(message["shown"])
    sys.stdout.flush()


def _keys(message: dict[str, Any]) -> str:
    """Return the keys of a message that has some, and whether it was replayed."""
    parts = []
    if "ordering_key" in message:
        number = f" #{message['sequence']}" if "sequence" in message else ""
        parts.append(f"  key {message['ordering_key']}{number}")
    if "business_key" in message:
        parts.append(f"  business key {message['business_key']}")
    if message.get("replayed"):
        parts.append("  replayed")
    return "".join(parts)


def acknowledge(client: "ApiClient", out: "Output", path: str, ack_ids: list[str]) -> None:
    """Acknowledge messages. Write a note if their leases have expired."""
    try:
        client.call("POST", f"{path}/ack", json={"ack_ids": ack_ids})
    except ProblemError as exc:
        if exc.status != HTTPStatus.CONFLICT:
            raise
        out.note(
            f"{exc.message}: these {len(ack_ids)} may be delivered again; "
            "a longer --lease-ms gives more time"
        )


@click.command(cls=Command)
@click.argument("subscription", nargs=-1, required=True)
@click.option(
    "--max", "most", type=click.IntRange(1), help="Stop after this many messages.  [never]"
)
@click.option(
    "--ack/--no-ack", default=True, show_default=True, help="Acknowledge messages that were shown."
)
@click.option("--browse", is_flag=True, help="Show waiting and new messages without leasing them.")
@click.option(
    "--credit",
    type=click.IntRange(1, 10_000),
    help="Most messages in flight at a time.",
)
@click.option("--lease-ms", type=click.IntRange(1000), help="Duration of the leases.")
@click.option(
    "--priority", type=click.IntRange(0, 9), help="Priority of this consumer: 9 is served first."
)
@click.option("--event-type", multiple=True, help="Only this event type; repeatable.")
@click.option(
    "--header",
    multiple=True,
    metavar="NAME:VALUE",
    help="Only messages with this header; repeatable.",
)
@click.option(
    "--payload",
    multiple=True,
    metavar="PATH:VALUE",
    help="Only messages with this value at this path (a.b) of the payload; repeatable.",
)
@click.option("--for-ms", type=click.IntRange(1), help="Stop after this long.")
@pass_session
def stream(
    session: CliSession,
    /,
    *,
    subscription: tuple[str, ...],
    most: int | None,
    ack: bool,
    browse: bool,
    **options: Any,
) -> None:
    """Receive the messages of each SUBSCRIPTION (an id, or ROOM/NAME) continuously.

    With --json, one per line.
    """
    out = session.output()
    with session.client() as client:
        found = [str(find_subscription(client, reference)["id"]) for reference in subscription]
        query = {name: value for name, value in options.items() if value is not None}
        if browse:
            query["browse"] = "true"
        left = most
        while left is None or left > 0:
            try:
                for message in _read_messages(client, {**query, "subscription": found}):
                    show_messages(out, [message])
                    if ack and not browse:
                        acknowledge(
                            client,
                            out,
                            f"/subscriptions/{message['subscription_id']}",
                            [message["ack_id"]],
                        )
                    left = None if left is None else left - 1
                    if left == 0:
                        return
                return
            except (UnreachableError, ProblemError) as exc:
                if not is_transient(exc):
                    raise
                out.note(f"{exc.message}; retrying")
                time.sleep(_PAUSE_S)


def _read_messages(client: "ApiClient", query: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield messages until the stream ends. Raise UnreachableError if a new request may resume."""
    name, data = "", []
    for line in client.stream_lines("/stream", query):
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            data.append(line.removeprefix("data: "))
        elif not line and data:
            text = " ".join(data)
            fields, data = json.loads(text), []
            if name == "end":
                if fields["reason"] in _RETRYABLE_ENDS:
                    raise UnreachableError(f"the stream ended ({fields['reason']})")
                return
            yield {**fields, "raw": text, "shown": _raw_payload(text)}
    raise UnreachableError("the stream was cut off")


def _raw_payload(text: str) -> str:
    """Return the payload as it was published, with its numbers and keys unchanged."""
    import msgspec

    return bytes(msgspec.json.decode(text, type=dict[str, msgspec.Raw])["payload"]).decode()
