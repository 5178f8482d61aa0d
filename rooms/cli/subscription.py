"""Implement `rooms subscription`: create, change and control subscriptions."""

from collections.abc import Callable, Mapping
from typing import Any

import click

from rooms.cli import approval, ordering, subscription_actions
from rooms.cli.context import CliSession, Group, pass_session, renamed
from rooms.cli.filter import test as filter_test
from rooms.cli.options import (
    CLEARABLE_THROTTLE,
    Paging,
    confirm_or_abort,
    every_option,
    find_room,
    find_subscription,
    paging_options,
    parse_event_types,
    parse_pairs,
    patch_body,
    post_action,
    read_pairs,
    set_fields,
    throttle_options,
)
from rooms.cli.output import Column
from rooms.cli.search import consumers
from rooms.cli.usage import activity
from rooms.domain.state_machine import SubscriptionStatus, SubscriptionType

_CLEARABLE = (
    "event-types",
    "filter",
    "delivery-delay-ms",
    "delivery-delay-multiplier",
    "delivery-attempts",
    "delivery-max-delay-ms",
    "delivery-jitter",
    "message-expiration-ms",
    "headers",
    "terminal-statuses",
    "ignorable-statuses",
    "ordered",
    "cloud-events",
    "event-item",
    "max-receives",
    "ack-by-next-pull",
    *CLEARABLE_THROTTLE,
)


def _endpoint(item: Mapping[str, Any]) -> object:
    """Return the URL, or what a room's owner sees of another's: scheme and host."""
    return item.get("push_url") or item.get("target")


def _status(item: Mapping[str, Any]) -> str:
    change = ", change waits" if item.get("proposal") else ""
    return f"{item.get('status', '')}{change}"


_COLUMNS: Mapping[str, Column] = {
    "name": "name",
    "organisation": "organisation",
    "type": "type",
    "status": _status,
    "push url": _endpoint,
    "event types": "event_types",
    "id": "id",
}
_HTTP_STATUS = click.IntRange(100, 599)


def _subscription_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the fields that a new subscription and a changed one share."""
    for option in reversed(
        [
            click.option("--push-url", help="URL of the webhook (PUSH)."),
            click.option(
                "--event-type",
                "event_types",
                metavar="NAME[:1,2]",
                callback=parse_event_types,
                multiple=True,
                help="Only this event type; repeatable.",
            ),
            click.option(
                "--filter", metavar="CEL", help="Only messages for which this expression is true."
            ),
            click.option(
                "--ordered/--not-ordered",
                "ordered",
                default=None,
                help="Deliver the messages of an ordering key one after the other. "
                "A failure blocks later messages of its key.",
            ),
            click.option(
                "--delivery-delay-ms",
                type=click.IntRange(0),
                help="Overrides the setting of the room.",
            ),
            click.option(
                "--delivery-delay-multiplier",
                type=click.FloatRange(0),
                help="Overrides the setting of the room.",
            ),
            click.option(
                "--delivery-attempts",
                type=click.IntRange(0),
                help="Overrides the setting of the room.",
            ),
            click.option(
                "--delivery-max-delay-ms",
                type=click.IntRange(0),
                help="Longest wait. Overrides the setting of the room.",
            ),
            click.option(
                "--delivery-jitter",
                type=click.FloatRange(0, 1),
                help="Random share of each wait. Overrides the setting of the room.",
            ),
            click.option(
                "--message-expiration-ms",
                type=click.IntRange(1),
                help="Lifetime of its deliveries: at most that of the room's messages.",
            ),
            click.option(
                "--header",
                "headers",
                metavar="NAME=VALUE",
                callback=parse_pairs,
                multiple=True,
                help="Header of each webhook; repeatable. Other users of this machine see it: give "
                "secrets by --headers-file.",
            ),
            click.option(
                "--headers-file",
                "headers_of_file",
                metavar="FILE",
                callback=read_pairs,
                help="File with a header NAME=VALUE a line; - is standard input.",
            ),
            click.option(
                "--terminal-status",
                "terminal_statuses",
                type=_HTTP_STATUS,
                multiple=True,
                help="Response status that sidelines at once; repeatable.",
            ),
            click.option(
                "--ignorable-status",
                "ignorable_statuses",
                type=_HTTP_STATUS,
                multiple=True,
                help="Response status that drops the message; repeatable.",
            ),
            click.option(
                "--max-receives",
                type=click.IntRange(1),
                help="Leases before a message is sidelined (PULL).",
            ),
            click.option(
                "--cloud-events/--no-cloud-events",
                default=None,
                help="Send CloudEvents in binary mode (PUSH).",
            ),
            click.option(
                "--event-item/--no-event-item",
                default=None,
                help="Send GovStack's EventItem as the body (PUSH).",
            ),
            click.option(
                "--ack-by-next-pull/--no-ack-by-next-pull",
                default=None,
                help="A pull by GovStack's first interface acknowledges its key's last one (PULL).",
            ),
        ]
    ):
        command = option(command)
    return throttle_options(command)


def _request_body(fields: dict[str, Any]) -> dict[str, Any]:
    of_file = fields.pop("headers_of_file")
    if of_file is not None:
        fields["headers"] = {**(fields["headers"] or {}), **of_file}
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in set_fields(**fields).items()
    }


@click.group(cls=Group)
def subscription() -> None:
    """Create, change and control subscriptions. SUBSCRIPTION is an id, or ROOM/NAME."""


@subscription.command()
@click.argument("room")
@click.argument("name")
@click.option(
    "--type",
    "kind",
    type=click.Choice(["PUSH", "PULL"], case_sensitive=False),
    help="[default: PUSH with --push-url, else PULL]",
)
@click.option(
    "--native",
    is_flag=True,
    default=None,
    help="PULL: consumed at the broker, by a user of its own.",
)
@click.option(
    "--backfill",
    is_flag=True,
    default=None,
    help="Where the owner must approve: then also deliver what is published until then.",
)
@click.option(
    "--start-at",
    metavar="TIME",
    help="Also deliver what was published from this past time on (RFC 3339).",
)
@_subscription_options
@pass_session
def create(
    session: CliSession, /, *, room: str, name: str, kind: str | None, **fields: Any
) -> None:
    """Create a subscription to a room, of your organisation or of another.

    In another organisation's room it may be pending until the owner approves. Its signing secret,
    or the password of a native one, is shown only this once.
    """
    kind = kind or ("PUSH" if fields["push_url"] else "PULL")
    with session.client() as client:
        found = find_room(client, room)
        body = {"name": name, "type": kind, **_request_body(fields)}
        session.output().settings(
            client.call("POST", f"/rooms/{found['id']}/subscriptions", json=body)
        )


@subscription.command("list")
@click.argument("room", required=False)
@click.option(
    "--status",
    type=click.Choice([one.value for one in SubscriptionStatus]),
    help="Only with this status; pending: also with a change that waits for approval.",
)
@click.option("--contains", help="Only those whose name contains this.")
@click.option(
    "--type",
    "kind",
    type=click.Choice([one.value for one in SubscriptionType], case_sensitive=False),
    help="Only of this type.",
)
@click.option(
    "--of-others", is_flag=True, help="Without ROOM: those of others to your own rooms instead."
)
@paging_options
@pass_session
def list_subscriptions(
    session: CliSession,
    /,
    *,
    room: str | None,
    status: str | None,
    contains: str | None,
    kind: str | None,
    of_others: bool,
    paging: Paging,
) -> None:
    """List the subscriptions of a room; without ROOM, those of your organisation in all rooms.

    The owner of a room sees those of other organisations in part. `--of-others --status pending`
    lists all that waits for your approval.
    """
    if room is not None and of_others:
        raise click.UsageError("--of-others is for all rooms: leave out ROOM")
    params = {
        "status": status,
        "contains": contains,
        "type": kind,
        "role": "owner" if of_others else None,
    }
    with session.client() as client:
        path = "/subscriptions"
        if room is not None:
            path = f"/rooms/{find_room(client, room)['id']}/subscriptions"
        page = client.page(path, params=params, **paging)
    session.output().listing(
        page, _COLUMNS, empty="no subscriptions yet: `rooms subscription create ROOM NAME`"
    )


@subscription.command()
@click.argument("subscription")
@every_option
@pass_session
def show(session: CliSession, /, *, subscription: str, every: bool) -> None:
    """Show one subscription: what is set."""
    with session.client() as client:
        session.output().settings(find_subscription(client, subscription), every=every)


@subscription.command()
@click.argument("subscription")
@click.option("--name", help="A new name.")
@_subscription_options
@click.option(
    "--clear", type=click.Choice(_CLEARABLE), multiple=True, help="Remove the value of a field."
)
@pass_session
def update(
    session: CliSession, /, *, subscription: str, clear: tuple[str, ...], **fields: Any
) -> None:
    """Change a subscription. Fields that are not given stay as they are."""
    body = patch_body(_request_body(fields), clear)
    with session.client() as client:
        found = find_subscription(client, subscription)
        session.output().settings(client.call("PATCH", f"/subscriptions/{found['id']}", json=body))


@subscription.command()
@click.argument("subscription")
@click.option("--yes", is_flag=True, help="Do not ask.")
@pass_session
def delete(session: CliSession, /, *, subscription: str, yes: bool) -> None:
    """Delete a subscription and cancel its unfinished deliveries."""
    with session.client() as client:
        found = find_subscription(client, subscription)
        confirm_or_abort(
            f"Delete subscription {found['name']!r} and cancel its unfinished deliveries?", yes=yes
        )
        answer = client.call("DELETE", f"/subscriptions/{found['id']}")
    if answer is not None:
        session.output().resource(answer)


@subscription.command()
@click.argument("subscription")
@pass_session
def lane(session: CliSession, /, *, subscription: str) -> None:
    """Show how the webhook is called: limits, circuit, and held deliveries."""
    with session.client() as client:
        found = find_subscription(client, subscription)
        session.output().resource(client.call("GET", f"/subscriptions/{found['id']}/lane"))


@subscription.command("rotate-secret")
@click.argument("subscription")
@click.option(
    "--overlap-s", type=click.IntRange(0), help="Seconds that the old secret stays valid."
)
@pass_session
def rotate_secret(session: CliSession, /, *, subscription: str, overlap_s: int | None) -> None:
    """Create a new signing secret, shown only this once.

    The old secret stays valid for a while.
    """
    post_action(
        session,
        subscription,
        "rotate-secret",
        None if overlap_s is None else {"overlap_s": overlap_s},
    )


@subscription.command("rotate-password")
@click.argument("subscription")
@pass_session
def rotate_password(session: CliSession, /, *, subscription: str) -> None:
    """Create a new password for the reader of a native subscription, shown only this once.

    The old password stops working at once.
    """
    post_action(session, subscription, "rotate-password")


@subscription.command()
@click.argument("subscription")
@pass_session
def test(session: CliSession, /, *, subscription: str) -> None:
    """Send a test event to the webhook, and show its answer."""
    post_action(session, subscription, "test")


for command in (
    approval.approve,
    approval.reject,
    approval.suspend,
    approval.reinstate,
    approval.terminate,
    approval.cancel_change,
    approval.history,
    approval.counts,
    subscription_actions.clear,
    subscription_actions.skip_to_now,
    subscription_actions.retry,
    subscription_actions.pause,
    subscription_actions.resume,
    activity,
    consumers,
):
    subscription.add_command(command)
subscription.add_command(renamed(filter_test, "subscription try-filter", "filter test"))
subscription.add_command(renamed(ordering.keys, "subscription keys", "ordering keys"))
subscription.add_command(renamed(ordering.skip, "subscription skip", "ordering skip"))
