"""Implement the commands that start, follow, show and cancel jobs.

`rooms restore`, `clear`, `replay` and `broker resend` start one. `rooms jobs` and `rooms job` show
them.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from rooms.cli.context import CliSession, Command, Group, pass_session, renamed
from rooms.cli.errors import CliError, ProblemError, UnreachableError, is_transient
from rooms.cli.options import (
    Paging,
    confirm_or_abort,
    find_room,
    find_subscription,
    paging_options,
    parse_id,
    set_fields,
)
from rooms.domain.job import JobKind, JobState
from rooms.domain.state_machine import RESTORABLE
from rooms.safe_text import terminal_safe

if TYPE_CHECKING:
    from rooms.cli.client import ApiClient

_POLL_S = 0.5
_PAUSE_S = 1.0
"""Between two requests while the service does not answer."""
_UNFINISHED = {"queued", "running"}
_JOBS_COLUMNS = {
    "subscription": "subscription",
    "job": "id",
    "state": "state",
    "done": "done",
    "total": "total",
    "result": "result",
}


def follow_job(client: "ApiClient", job: dict[str, Any], *, shown: bool) -> dict[str, Any]:
    """Return the job once it has ended. `shown`: with a bar, if standard error is a terminal.

    While the service does not answer, the job is asked for again: it goes on without being watched.
    """
    path = f"/jobs/{job['id']}"
    with _progress_bar(shown=shown) as bar:
        task = bar.add_task(terminal_safe(str(job.get("kind", "job"))), total=None)
        while job["state"] in _UNFINISHED:
            bar.update(task, completed=job.get("done") or 0, total=job.get("total"))
            time.sleep(_POLL_S)
            job = _read_again(client, path)
    return job


def _read_again(client: "ApiClient", path: str) -> dict[str, Any]:
    is_noted = False
    while True:
        try:
            found: dict[str, Any] = client.call("GET", path)
        except (UnreachableError, ProblemError) as exc:
            if not is_transient(exc):
                raise
            if not is_noted:
                click.echo(terminal_safe(f"{exc.message}; asking again"), err=True)
                is_noted = True
            retry_after_s = exc.retry_after_s if isinstance(exc, ProblemError) else None
            time.sleep(max(_PAUSE_S, retry_after_s or 0.0))
        else:
            return found


@contextmanager
def progress_counter(label: str, *, shown: bool) -> Iterator[Callable[[int], None]]:
    """Show a bar without an end. Yield the function that sets its count."""
    with _progress_bar(shown=shown) as bar:
        task = bar.add_task(label, total=None)
        yield lambda count: bar.update(task, completed=count)


def raise_if_failed(job: dict[str, Any]) -> None:
    """Raise CliError if the job failed. A cancelled job did not fail."""
    if job["state"] == "failed":
        raise CliError(f"the job failed: {job.get('error') or 'no reason was recorded'}")


def _progress_bar(*, shown: bool) -> Any:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not (shown and sys.stderr.isatty()),
    )


_STATES = [state.value for state in sorted(RESTORABLE)]


def show_accepted_job(
    session: CliSession, client: "ApiClient", answer: dict[str, Any], *, follow: bool
) -> dict[str, Any]:
    """Show and return the job of a 202; with `follow`, once it has ended. CliError: it failed."""
    if follow or not session.as_json:
        # First of all: the job goes on if this command ends here, and is asked for by its id.
        session.output().note(f"progress: rooms job {answer['job_id']} --follow")
    found: dict[str, Any] = _read_again(client, f"/jobs/{answer['job_id']}")
    if follow:
        found = follow_job(client, found, shown=not session.as_json)
    session.output().resource(found)
    raise_if_failed(found)
    return found


def begin_jobs(
    session: CliSession,
    client: "ApiClient",
    subscriptions: Mapping[str, str],
    action: str,
    body: object = None,
    *,
    follow: bool,
) -> None:
    """Begin the job of an action for each of some subscriptions, and show them as `follow` says.

    `subscriptions`: ids by what they were called. All jobs begin before the first is followed.
    CliError: one of them failed.
    """
    answers = (
        (reference, client.call("POST", f"/subscriptions/{identity}/{action}", json=body))
        for reference, identity in subscriptions.items()
    )
    if len(subscriptions) == 1:
        show_accepted_job(session, client, next(answers)[1], follow=follow)
        return
    output = session.output()
    begun = []
    for reference, answer in answers:
        output.note(f"progress of {reference}: rooms job {answer['job_id']} --follow")
        begun.append((reference, answer["job_id"]))
    jobs = []
    for reference, job_id in begun:
        job = _read_again(client, f"/jobs/{job_id}")
        if follow:
            job = follow_job(client, job, shown=not session.as_json)
        jobs.append({"subscription": reference, **job})
    output.listing({"items": jobs}, _JOBS_COLUMNS, empty="no job was begun")
    for job in jobs:
        raise_if_failed(job)


class _JobGroup(Group):
    """Accept `rooms job ID` as `rooms job show ID`."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.commands:
            args = ["show", *args]
        return super().resolve_command(ctx, args)


@click.group(cls=_JobGroup)
def job() -> None:
    """Show or cancel a job, such as a restore. `rooms job ID` shows it."""


@job.command()
@click.argument("job_id")
@click.option("--follow", is_flag=True, help="Wait for its end, with a progress bar.")
@pass_session
def show(session: CliSession, /, *, job_id: str, follow: bool) -> None:
    """Show the progress of a job. Exit code 1 if it failed."""
    with session.client() as client:
        found = client.call("GET", f"/jobs/{parse_id(job_id)}")
        if follow:
            found = follow_job(client, found, shown=not session.as_json)
    session.output().resource(found)
    raise_if_failed(found)


@job.command()
@click.argument("job_id")
@pass_session
def cancel(session: CliSession, /, *, job_id: str) -> None:
    """Stop a restore, clear, replay, resend, shovel or purge before its next step.

    Completed work is not undone.
    """
    with session.client() as client:
        session.output().resource(client.call("POST", f"/jobs/{parse_id(job_id)}/cancel"))


def _follow_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option("--follow", is_flag=True, help="Wait for the end, with a progress bar.")(
        command
    )


@click.command(cls=Command)
@click.argument("room", required=False)
@click.option("--message", help="Only this message, by its id. Instead of ROOM.")
@click.option(
    "--include-expired", is_flag=True, help="Also expired messages. Their lifetime starts again."
)
@click.option("--since", help="Only messages published at this time or later (RFC 3339).")
@click.option(
    "--states",
    type=click.Choice(_STATES),
    multiple=True,
    help="Only deliveries in this state; repeatable.",
)
@_follow_option
@pass_session
def restore(
    session: CliSession,
    /,
    *,
    room: str | None,
    message: str | None,
    include_expired: bool,
    since: str | None,
    states: tuple[str, ...],
    follow: bool,
) -> None:
    """Queue the unfinished deliveries of ROOM, or of one message, again if they lost their place.

    With `--states` (expired, cancelled, dropped), ended deliveries are delivered again, with new
    attempts.
    """
    if (room is None) == (message is None):
        raise click.UsageError("give either ROOM or --message")
    if message is not None and since is not None:
        raise click.UsageError("--since needs ROOM")
    body = set_fields(since=since, states=states) | (
        {"include_expired": True} if include_expired else {}
    )
    with session.client() as client:
        path = (
            f"/rooms/{find_room(client, room)['id']}"
            if room
            else f"/messages/{parse_id(message or '')}"
        )
        show_accepted_job(
            session, client, client.call("POST", f"{path}/restore", json=body), follow=follow
        )


@click.command(cls=Command)
@click.argument("room")
@click.option("--confirm", help="Name of the room. Like --yes, but checked.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@_follow_option
@pass_session
def clear(
    session: CliSession, /, *, room: str, confirm: str | None, yes: bool, follow: bool
) -> None:
    """Cancel every unfinished delivery in ROOM. Sidelines stay as they are."""
    with session.client() as client:
        found = find_room(client, room)
        if confirm is not None and confirm != found["name"]:
            raise CliError(
                f"the room's name is {found['name']!r}, not {confirm!r}: nothing was changed"
            )
        confirm_or_abort(
            f"Cancel every unfinished delivery in room {found['name']!r}?",
            yes=yes or confirm is not None,
        )
        answer = client.call(
            "POST", f"/rooms/{found['id']}/clear", params={"confirm": found["name"]}
        )
        show_accepted_job(session, client, answer, follow=follow)


@click.command(cls=Command)
@click.argument("subscription")
@click.option("--since", help="Start with messages published at this time (RFC 3339).")
@click.option("--from-message", "from_message_id", help="Start with this message.")
@click.option("--until", help="Only messages published before this time (RFC 3339).")
@click.option(
    "--event-type", "event_types", multiple=True, help="Only this event type; repeatable."
)
@click.option(
    "--ordering-key",
    "ordering_keys",
    multiple=True,
    help="Only messages with this ordering key; repeatable.",
)
@click.option(
    "--business-key",
    "business_keys",
    multiple=True,
    help="Only messages with this business key; repeatable.",
)
@click.option(
    "--rate", "rate_per_s", type=click.FloatRange(0, min_open=True), help="Deliveries a second."
)
@click.option(
    "--include-expired", is_flag=True, help="Also expired messages. Their lifetime starts again."
)
@_follow_option
@pass_session
def replay(
    session: CliSession, /, *, subscription: str, include_expired: bool, follow: bool, **wanted: Any
) -> None:
    """Deliver past messages of the room to SUBSCRIPTION, whether or not it has had them before.

    SUBSCRIPTION is an id, or ROOM/NAME.
    """
    if (wanted["since"] is None) == (wanted["from_message_id"] is None):
        raise click.UsageError("give either --since or --from-message")
    body = set_fields(**wanted) | ({"include_expired": True} if include_expired else {})
    with session.client() as client:
        found = find_subscription(client, subscription)
        show_accepted_job(
            session,
            client,
            client.call("POST", f"/subscriptions/{found['id']}/replay", json=body),
            follow=follow,
        )


@click.group(cls=Group)
def broker() -> None:
    """Repair the deliveries in the message broker (BROKER_URL)."""


@broker.command()
@_follow_option
@pass_session
def resend(session: CliSession, /, *, follow: bool) -> None:
    """Send every unfinished delivery to the broker again, after the broker has lost its data."""
    with session.client() as client:
        show_accepted_job(session, client, client.call("POST", "/recover"), follow=follow)


recover = renamed(resend, "recover", "broker resend")


@click.command(cls=Command)
@click.option(
    "--kind", type=click.Choice([kind.value for kind in JobKind]), help="Only jobs of this kind."
)
@click.option(
    "--state",
    type=click.Choice([state.value for state in JobState]),
    help="Only jobs in this state.",
)
@click.option("--room", help="Only jobs on this room.")
@paging_options
@pass_session
def jobs(session: CliSession, /, *, room: str | None, paging: Paging, **wanted: Any) -> None:
    """List jobs, newest first."""
    with session.client() as client:
        room_id = None if room is None else find_room(client, room)["id"]
        page = client.page("/jobs", params=set_fields(**wanted, room_id=room_id), **paging)
    columns = {
        "id": "id",
        "kind": "kind",
        "state": "state",
        "done": "done",
        "total": "total",
        "created": "created_at",
    }
    session.output().listing(page, columns, empty="no jobs")
