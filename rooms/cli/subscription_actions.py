"""Implement the commands that pause, resume, retry and clear subscriptions.

They are in `rooms subscription`.
"""

from collections.abc import Callable
from typing import Any

import click

from rooms.cli.context import CliSession, Command, pass_session
from rooms.cli.errors import CliError
from rooms.cli.job import begin_jobs, show_accepted_job
from rooms.cli.options import (
    confirm_or_abort,
    find_subscription,
    find_subscriptions,
    post_action,
    subscriptions_argument,
)

_RESUMED_COLUMNS = {"subscription": "subscription", "status": "status", "reason": "status_reason"}


def _clearing_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of commands that end what waits."""
    for option in (
        click.option("--follow", is_flag=True, help="Wait for the end, with a progress bar."),
        click.option("--yes", is_flag=True, help="Do not ask."),
        click.option("--confirm", help="Name of the subscription. Like --yes, but checked."),
    ):
        command = option(command)
    return command


@click.command(cls=Command)
@click.argument("subscription")
@_clearing_options
@pass_session
def clear(session: CliSession, /, *, subscription: str, **options: Any) -> None:
    """Cancel every unfinished delivery of a subscription, also those that are due later.

    Messages published after this, and the sideline, stay as they are.
    """
    question = "Cancel every unfinished delivery of subscription {!r}?"
    _end_waiting(session, subscription, "clear", question, **options)


@click.command("skip-to-now", cls=Command)
@click.argument("subscription")
@_clearing_options
@pass_session
def skip_to_now(session: CliSession, /, *, subscription: str, **options: Any) -> None:
    """Cancel the deliveries of a subscription that are due by now, and go on with later ones.

    Sidelined deliveries stay sidelined, and block their ordering keys no longer.
    """
    question = "Cancel the deliveries of subscription {!r} that are due by now?"
    _end_waiting(session, subscription, "skip-to-now", question, **options)


def _end_waiting(
    session: CliSession,
    subscription: str,
    action: str,
    question: str,
    *,
    confirm: str | None,
    yes: bool,
    follow: bool,
) -> None:
    with session.client() as client:
        found = find_subscription(client, subscription)
        if confirm is not None and confirm != found["name"]:
            raise CliError(
                f"the subscription's name is {found['name']!r}, not {confirm!r}: "
                "nothing was changed"
            )
        confirm_or_abort(question.format(found["name"]), yes=yes or confirm is not None)
        path = f"/subscriptions/{found['id']}/{action}"
        answer = client.call("POST", path, params={"confirm": found["name"]})
        show_accepted_job(session, client, answer, follow=follow)


@click.command(cls=Command)
@subscriptions_argument
@click.option("--follow", is_flag=True, help="Wait for the end, with a progress bar.")
@pass_session
def retry(session: CliSession, /, *, subscriptions: tuple[str, ...], follow: bool) -> None:
    """Retry now what waits for its next attempt, after the endpoint was mended.

    Messages that are due later themselves, and held deliveries, wait on. If one SUBSCRIPTION does
    not exist, nothing is retried.
    """
    with session.client() as client:
        found = find_subscriptions(client, subscriptions)
        begin_jobs(session, client, found, "retry", follow=follow)


@click.command(cls=Command)
@click.argument("subscription")
@pass_session
def pause(session: CliSession, /, *, subscription: str) -> None:
    """Hold all deliveries until `resume`."""
    post_action(session, subscription, "pause", settings=True)


@click.command(cls=Command)
@subscriptions_argument
@pass_session
def resume(session: CliSession, /, *, subscriptions: tuple[str, ...]) -> None:
    """Resume deliveries after `pause`, or after the endpoint was disabled.

    Also closes an open circuit without waiting for its next probe. If one SUBSCRIPTION does not
    exist, none is resumed.
    """
    with session.client() as client:
        found = find_subscriptions(client, subscriptions)
        resumed = {
            name: client.call("POST", f"/subscriptions/{identity}/resume")
            for name, identity in found.items()
        }
    output = session.output()
    if len(resumed) == 1:
        output.settings(*resumed.values())
        return
    rows = [{"subscription": name, **answer} for name, answer in resumed.items()]
    output.listing({"items": rows}, _RESUMED_COLUMNS, empty="none was resumed")
