"""`rooms stream`: messages of PULL subscriptions as they come, each acknowledged once it is shown."""

import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from rooms.cli.errors import ProblemError, UnreachableError
from rooms.cli.pull import PASSING, acknowledge, show
from rooms.cli.references import find_subscription
from rooms.cli.session import Command, Session, pass_session

if TYPE_CHECKING:
    from rooms.cli.client import Client

_PAUSE_S = 1.0
_COME_AGAIN = {"shutdown", "unavailable"}


@click.command(cls=Command)
@click.argument("subscription", nargs=-1, required=True)
@click.option("--max", "most", type=click.IntRange(1), help="End after so many.  [never]")
@click.option("--ack/--no-ack", default=True, show_default=True, help="Acknowledge what was shown.")
@click.option("--browse", is_flag=True, help="Show what waits and what comes, take nothing.")
@click.option("--credit", type=click.IntRange(1, 10_000), help="How many messages may be on their way at a time.")
@click.option("--lease-ms", type=click.IntRange(1000), help="How long they are ours.")
@click.option("--priority", type=click.IntRange(0, 9), help="Who goes first: 9 before 0.")
@click.option("--event-type", multiple=True, help="Only this event type; may be repeated.")
@click.option("--header", multiple=True, metavar="NAME:VALUE", help="Only with this header of the publisher.")
@click.option("--payload", multiple=True, metavar="PLACE:VALUE", help="Only with this value at a.place in the payload.")
@click.option("--for-ms", type=click.IntRange(1), help="End after so long.")
@pass_session
def stream(
    session: Session, /, *, subscription: tuple[str, ...], most: int | None, ack: bool, browse: bool, **asked: Any
) -> None:
    """Show the messages of each SUBSCRIPTION (an id, or ROOM/NAME) as they come; with --json, one a line."""
    out = session.output()
    with session.client() as client:
        found = [str(find_subscription(client, reference)["id"]) for reference in subscription]
        query = {name: value for name, value in asked.items() if value is not None}
        if browse:
            query["browse"] = "true"
        left = most
        while left is None or left > 0:
            try:
                for message in _messages(client, {**query, "subscription": found}):
                    show(out, [message])
                    if ack and not browse:
                        acknowledge(client, out, f"/subscriptions/{message['subscription_id']}", [message["ack_id"]])
                    left = None if left is None else left - 1
                    if left == 0:
                        return
                return
            except (UnreachableError, ProblemError) as exc:
                if isinstance(exc, ProblemError) and exc.status not in PASSING:
                    raise
                out.note(f"{exc.message}; trying again")
                time.sleep(_PAUSE_S)


def _messages(client: "Client", query: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Messages until the stream has ended for good. UnreachableError: it may be asked for again."""
    name, data = "", []
    for line in client.lines("/stream", query):
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            data.append(line.removeprefix("data: "))
        elif not line and data:
            text = " ".join(data)
            fields, data = json.loads(text), []
            if name == "end":
                if fields["reason"] in _COME_AGAIN:
                    raise UnreachableError(f"the stream ended ({fields['reason']})")
                return
            yield {**fields, "raw": text, "shown": _payload(text)}
    raise UnreachableError("the stream broke off")


def _payload(text: str) -> str:
    """The payload as it was published: no number rounded, no key moved."""
    import msgspec

    return bytes(msgspec.json.decode(text, type=dict[str, msgspec.Raw])["payload"]).decode()
