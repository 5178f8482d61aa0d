"""`rooms subscription`: who gets the messages of a room."""

from collections.abc import Callable
from typing import Any

import click

from rooms.cli.fields import changes, given, interests, paged, pairs, read_json, sure
from rooms.cli.lane_options import CLEARABLE, lane_options
from rooms.cli.references import find_room, find_subscription
from rooms.cli.session import Group, Session, pass_session

_CLEARABLE = (
    "event-types",
    "filter",
    "delivery-delay-ms",
    "delivery-delay-multiplier",
    "delivery-attempts",
    "headers",
    "terminal-statuses",
    "ignorable-statuses",
    "ordered",
    "cloud-events",
    "max-receives",
    *CLEARABLE,
)
_COLUMNS = {
    "name": "name",
    "type": "type",
    "status": "status",
    "push url": "push_url",
    "event types": "event_types",
    "id": "id",
}
_KEY_COLUMNS = {
    "ordering key": "ordering_key",
    "state": "state",
    "since": "since",
    "waiting": "waiting",
    "head": "head",
}
_STATUS = click.IntRange(100, 599)


def _settings(command: Callable[..., Any]) -> Callable[..., Any]:
    """What both a new subscription and a changed one may say."""
    for option in reversed(
        [
            click.option("--push-url", help="Where to call (PUSH)."),
            click.option(
                "--event-type",
                "event_types",
                metavar="NAME[:1,2]",
                callback=interests,
                multiple=True,
                help="Only this type; may come again.",
            ),
            click.option("--filter", metavar="CEL", help="Only messages for which this expression is true."),
            click.option(
                "--ordered/--not-ordered",
                "ordered",
                default=None,
                help="One after the other for each ordering key; what fails keeps back what stands behind it.",
            ),
            click.option("--delivery-delay-ms", type=click.IntRange(0), help="In place of the room's."),
            click.option("--delivery-delay-multiplier", type=click.FloatRange(0), help="In place of the room's."),
            click.option("--delivery-attempts", type=click.IntRange(0), help="In place of the room's."),
            click.option(
                "--header",
                "headers",
                metavar="NAME=VALUE",
                callback=pairs,
                multiple=True,
                help="Sent with each webhook; may come again.",
            ),
            click.option(
                "--terminal-status", "terminal_statuses", type=_STATUS, multiple=True, help="Sideline at once."
            ),
            click.option(
                "--ignorable-status", "ignorable_statuses", type=_STATUS, multiple=True, help="Drop the message."
            ),
            click.option("--max-receives", type=click.IntRange(1), help="Leases before it is sidelined (PULL)."),
            click.option("--cloud-events/--no-cloud-events", default=None, help="CloudEvents binary mode (PUSH)."),
        ]
    ):
        command = option(command)
    return lane_options(command)


def _body(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in given(**fields).items()}


@click.group(cls=Group)
def subscription() -> None:
    """Who gets the messages of a room, PUSH or PULL. A SUBSCRIPTION is an id, or ROOM/NAME."""


@subscription.command()
@click.argument("room")
@click.argument("name")
@click.option(
    "--type",
    "kind",
    type=click.Choice(["PUSH", "PULL"], case_sensitive=False),
    help="[PUSH where there is a --push-url, else PULL]",
)
@click.option("--native", is_flag=True, default=None, help="PULL: read at the broker, by a user of its own.")
@_settings
@pass_session
def create(session: Session, /, *, room: str, name: str, kind: str | None, **fields: Any) -> None:
    """Subscribe to a room. The signing secret, or the password of a native one, is shown this once."""
    kind = kind or ("PUSH" if fields["push_url"] else "PULL")
    with session.client() as client:
        found = find_room(client, room)
        body = {"name": name, "type": kind, **_body(fields)}
        session.output().resource(client.call("POST", f"/rooms/{found['id']}/subscriptions", json=body))


@subscription.command("list")
@click.argument("room")
@paged
@pass_session
def list_subscriptions(session: Session, /, *, room: str, limit: int, cursor: str | None, whole: bool) -> None:
    """The subscriptions of a room."""
    with session.client() as client:
        found = find_room(client, room)
        page = client.page(f"/rooms/{found['id']}/subscriptions", limit=limit, cursor=cursor, whole=whole)
    session.output().listing(page, _COLUMNS, empty="no subscriptions yet: `rooms subscription create ROOM NAME`")


@subscription.command()
@click.argument("subscription")
@pass_session
def show(session: Session, /, *, subscription: str) -> None:
    """One subscription."""
    with session.client() as client:
        session.output().resource(find_subscription(client, subscription))


@subscription.command()
@click.argument("subscription")
@click.option("--name", help="A new name.")
@_settings
@click.option("--clear", type=click.Choice(_CLEARABLE), multiple=True, help="Set a field back to nothing.")
@pass_session
def update(session: Session, /, *, subscription: str, clear: tuple[str, ...], **fields: Any) -> None:
    """Change a subscription; what it is not told stays."""
    body = changes(_body(fields), clear)
    with session.client() as client:
        found = find_subscription(client, subscription)
        session.output().resource(client.call("PATCH", f"/subscriptions/{found['id']}", json=body))


@subscription.command()
@click.argument("subscription")
@click.option("--yes", is_flag=True, help="Do not ask.")
@pass_session
def delete(session: Session, /, *, subscription: str, yes: bool) -> None:
    """Delete a subscription; what it has not got yet is cancelled."""
    with session.client() as client:
        found = find_subscription(client, subscription)
        sure(f"Delete subscription {found['name']!r} with everything that waits for it?", yes=yes)
        answer = client.call("DELETE", f"/subscriptions/{found['id']}")
    if answer is not None:
        session.output().resource(answer)


def _ask(session: Session, reference: str, action: str, body: object = None) -> None:
    with session.client() as client:
        found = find_subscription(client, reference)
        answer = client.call("POST", f"/subscriptions/{found['id']}/{action}", json=body)
    if answer is not None:
        session.output().resource(answer)


@subscription.command()
@click.argument("subscription")
@pass_session
def pause(session: Session, /, *, subscription: str) -> None:
    """Hold everything back until `resume`."""
    _ask(session, subscription, "pause")


@subscription.command()
@click.argument("subscription")
@pass_session
def resume(session: Session, /, *, subscription: str) -> None:
    """Go on after `pause`, after the endpoint was disabled, or without waiting for a probe of its open circuit."""
    _ask(session, subscription, "resume")


@subscription.command()
@click.argument("subscription")
@pass_session
def lane(session: Session, /, *, subscription: str) -> None:
    """How its webhook is called: limits, circuit, what is held."""
    with session.client() as client:
        found = find_subscription(client, subscription)
        session.output().resource(client.call("GET", f"/subscriptions/{found['id']}/lane"))


@subscription.command("rotate-secret")
@click.argument("subscription")
@click.option("--overlap-s", type=click.IntRange(0), help="How long the old one stays valid.")
@pass_session
def rotate_secret(session: Session, /, *, subscription: str, overlap_s: int | None) -> None:
    """Make a new signing secret, shown this once; the old one is valid for a while longer."""
    _ask(session, subscription, "rotate-secret", None if overlap_s is None else {"overlap_s": overlap_s})


@subscription.command("rotate-password")
@click.argument("subscription")
@pass_session
def rotate_password(session: Session, /, *, subscription: str) -> None:
    """Make a new password for a native subscription's reader, shown this once; the old one is over at once."""
    _ask(session, subscription, "rotate-password")


@subscription.command()
@click.argument("subscription")
@pass_session
def test(session: Session, /, *, subscription: str) -> None:
    """Send a ping to the webhook and show its answer."""
    _ask(session, subscription, "test")


@subscription.command("try-filter")
@click.argument("subscription")
@click.argument("payload")
@click.option("--filter", "expression", metavar="CEL", help="Try this one instead of the subscription's.")
@click.option("--header", "headers", metavar="NAME=VALUE", callback=pairs, multiple=True, help="A header of it.")
@click.option("--event-type", help="Its type.")
@click.option("--version", "event_version", type=click.IntRange(1), help="The type's version.")
@click.option("--ordering-key", help="Its ordering key.")
@click.option("--priority", type=click.IntRange(0, 9), help="Its priority.")
@pass_session
def try_filter(session: Session, /, *, subscription: str, payload: str, expression: str | None, **fields: Any) -> None:
    """Whether a message of this PAYLOAD (JSON, or @FILE) would pass the filter; nothing is published."""
    body = {"payload": read_json(payload, "PAYLOAD"), **given(filter=expression, **fields)}
    _ask(session, subscription, "filter/test", body)


@subscription.command()
@click.argument("subscription")
@click.option("--parked", is_flag=True, help="Only those whose first delivery is sidelined.")
@paged
@pass_session
def keys(session: Session, /, *, subscription: str, parked: bool, limit: int, cursor: str | None, whole: bool) -> None:
    """Ordering keys that something is under way of."""
    with session.client() as client:
        found = find_subscription(client, subscription)
        page = client.page(
            f"/subscriptions/{found['id']}/ordering-keys",
            params=given(parked="true" if parked else None),
            limit=limit,
            cursor=cursor,
            whole=whole,
        )
    session.output().listing(page, _KEY_COLUMNS, empty="nothing is under way of any ordering key")


@subscription.command()
@click.argument("subscription")
@click.argument("ordering_key")
@pass_session
def skip(session: Session, /, *, subscription: str, ordering_key: str) -> None:
    """Go on with an ordering key although its first delivery is sidelined; that one stays where it is."""
    _ask(session, subscription, "ordering-keys/skip", {"ordering_key": ordering_key})
