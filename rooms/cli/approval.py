"""Implement what a room's owner decides about subscriptions of others, and their history.

The commands are in `rooms subscription`; `rooms approve` and `rooms reject` are short forms.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import click

from rooms.cli.context import CliSession, Command, pass_session
from rooms.cli.options import (
    Paging,
    confirm_or_abort,
    find_subscription,
    list_of_subscription,
    paging_options,
    post_action,
    reason_option,
    set_fields,
)

_SHOWN = (
    "organisation",
    "member_id",
    "application",
    "type",
    "target",
    "event_types",
    "backfill",
    "start_at",
)
_COLUMNS = {
    "at": "at",
    "action": "action",
    "status": "status",
    "organisation": "organisation",
    "application": "application",
    "reason": "reason",
    "key": "key_name",
}


def _waiting_values(subscription: Mapping[str, Any]) -> Iterator[str]:
    """Yield, a line each, what an approval would bring into use."""
    name, version = subscription["name"], subscription["version"]
    if subscription.get("proposal"):
        yield f"approving a change of {name}, version {version}:"
        for field, value in subscription["proposal"].items():
            # The owner sees that there is a filter, but not the one that is in use.
            now = "" if field == "filter" else f" instead of {_text(subscription.get(field))}"
            yield f"  {field}: {_text(value)}{now}"
        return
    yield f"approving {name}, version {version}:"
    for field in _SHOWN:
        if subscription.get(field) is not None:
            yield f"  {field}: {_text(subscription[field])}"
    yield f"  filter: {'yes' if subscription.get('filtered') else 'no'}"


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


@click.command(cls=Command)
@click.argument("subscription")
@click.option(
    "--version",
    type=click.IntRange(1),
    help="The version that you looked at.  [default: the present one, which is shown]",
)
@reason_option
@pass_session
def approve(
    session: CliSession, /, *, subscription: str, version: int | None, reason: str | None
) -> None:
    """Approve a pending subscription of another organisation, or a change of an approved one.

    It is refused if the subscription changed after that version.
    """
    with session.client() as client:
        found = find_subscription(client, subscription, foreign=True)
        if version is None:
            for line in _waiting_values(found):
                session.output().note(line)
        body = {"version": version or found["version"], **set_fields(reason=reason)}
        session.output().settings(
            client.call("POST", f"/subscriptions/{found['id']}/approve", json=body)
        )


def _decide(session: CliSession, subscription: str, action: str, reason: str | None) -> None:
    """Decide about the subscription of another organisation, and show it."""
    body = set_fields(reason=reason)
    post_action(session, subscription, action, body, foreign=True, settings=True)


@click.command(cls=Command)
@click.argument("subscription")
@reason_option
@pass_session
def reject(session: CliSession, /, *, subscription: str, reason: str | None) -> None:
    """Reject a pending subscription for good, or a change of an approved one."""
    post_action(
        session, subscription, "reject", set_fields(reason=reason), foreign=True, settings=True
    )


@click.command(cls=Command)
@click.argument("subscription")
@reason_option
@pass_session
def suspend(session: CliSession, /, *, subscription: str, reason: str | None) -> None:
    """Hold the messages of another organisation's subscription until `reinstate`."""
    post_action(
        session, subscription, "suspend", set_fields(reason=reason), foreign=True, settings=True
    )


@click.command(cls=Command)
@click.argument("subscription")
@reason_option
@pass_session
def reinstate(session: CliSession, /, *, subscription: str, reason: str | None) -> None:
    """Resume what `suspend` stopped: held messages are delivered."""
    post_action(
        session, subscription, "reinstate", set_fields(reason=reason), foreign=True, settings=True
    )


@click.command(cls=Command)
@click.argument("subscription")
@reason_option
@click.option("--yes", is_flag=True, help="Do not ask.")
@pass_session
def terminate(session: CliSession, /, *, subscription: str, reason: str | None, yes: bool) -> None:
    """End a subscription to another organisation's room for good, as its owner or subscriber.

    Its unfinished deliveries are cancelled. The history stays.
    """
    with session.client() as client:
        found = find_subscription(client, subscription, foreign=True)
        question = f"Terminate subscription {found['name']!r} and cancel its unfinished deliveries?"
        confirm_or_abort(question, yes=yes)
        session.output().settings(
            client.call(
                "POST", f"/subscriptions/{found['id']}/terminate", json=set_fields(reason=reason)
            )
        )


@click.command("cancel-change", cls=Command)
@click.argument("subscription")
@pass_session
def cancel_change(session: CliSession, /, *, subscription: str) -> None:
    """Take back a change that waits for the approval of the room's owner."""
    with session.client() as client:
        found = find_subscription(client, subscription)
        session.output().settings(client.call("DELETE", f"/subscriptions/{found['id']}/proposal"))


@click.command(cls=Command)
@click.argument("subscription")
@paging_options
@pass_session
def history(session: CliSession, /, *, subscription: str, paging: Paging) -> None:
    """Show who changed a subscription, when and why, newest first.

    With --json each entry also shows what the subscription looked like. Name a deleted
    subscription by its id.
    """
    list_of_subscription(
        session, subscription, "history", _COLUMNS, empty="no changes yet", paging=paging
    )


@click.command(cls=Command)
@click.argument("subscription")
@pass_session
def counts(session: CliSession, /, *, subscription: str) -> None:
    """Count the deliveries of a subscription that wait, are held, leased or sidelined."""
    with session.client() as client:
        found = find_subscription(client, subscription)
        session.output().resource(client.call("GET", f"/subscriptions/{found['id']}/counts"))
