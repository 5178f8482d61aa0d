"""Define the commands that run a process of the service, and those that work on its stores.

Processes: `serve`, `worker`, `upkeep`, `relay`, `standalone` and `handlers`. Stores: `migrate`,
`retention` and `doctor`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC
from typing import TYPE_CHECKING, Any

import click

from rooms.cli.context import CliSession, Command, pass_session
from rooms.cli.errors import CliError
from rooms.cli.module_loading import module_loading

if TYPE_CHECKING:
    from rooms.app.doctor import DoctorReport
    from rooms.cli.output import Output


@click.command(cls=Command)
@pass_session
def serve(session: CliSession) -> None:
    """Run the API on ROOMS_LISTEN, until SIGTERM or Ctrl-C."""
    with module_loading():
        from rooms.app.api import run_api
        from rooms.cli.backends import environment_installation

    joined = environment_installation(session)
    run_api(joined.settings, joined.database_url)


@click.command(cls=Command)
@pass_session
def worker(session: CliSession) -> None:
    """Run a push worker, until SIGTERM or Ctrl-C. Start one for each core."""
    with module_loading():
        from rooms.app.worker import run_worker
        from rooms.cli.backends import environment_installation

    joined = environment_installation(session)
    run_worker(joined.settings, joined.database_url)


@click.command(cls=Command)
@pass_session
def upkeep(session: CliSession) -> None:
    """Run the maintenance tasks, until SIGTERM or Ctrl-C. Several processes share the tasks."""
    with module_loading():
        from rooms.app.maintenance import run_maintenance
        from rooms.cli.backends import environment_installation

    joined = environment_installation(session)
    run_maintenance(joined.settings, joined.database_url)


@click.command(cls=Command)
@pass_session
def relay(session: CliSession) -> None:
    """Run a relay to the broker, until SIGTERM or Ctrl-C. Any number may run.

    Needed only where BROKER_URL is not PostgreSQL.
    """
    with module_loading():
        from rooms.app.relay import run_relay
        from rooms.cli.backends import environment_installation

    joined = environment_installation(session)
    if not joined.settings.uses_relay:
        raise CliError(
            "BROKER_URL is PostgreSQL: workers claim deliveries themselves; no relay is needed"
        )
    run_relay(joined.settings, joined.database_url)


@click.command(cls=Command)
@click.option(
    "--standby", is_flag=True, help="Wait until no other standby is active, then take over."
)
@pass_session
def standalone(session: CliSession, *, standby: bool) -> None:
    """Run API, push worker, maintenance and relay in one process, until SIGTERM or Ctrl-C.

    The relay runs only where BROKER_URL is not PostgreSQL.
    """
    with module_loading():
        from rooms.app.standalone import run_standalone
        from rooms.cli.backends import environment_installation

    joined = environment_installation(session)
    run_standalone(joined.settings, joined.database_url, standby=standby)


@click.command(cls=Command)
@pass_session
def migrate(session: CliSession) -> None:
    """Migrate the database to this version's schema.

    The database is DATABASE_URL, or the embedded one while it runs.
    """
    from rooms.cli.database import migrate_database

    migrate_database(session.wait_for_database_url())
    if session.as_json:
        session.output().document({"migrated": True})
    else:
        session.output().line("the database has this version's schema")


@click.command(cls=Command)
@click.argument("target")
@click.option(
    "--organisation",
    help="Organisation that owns the queues.  "
    "[default, and queues that older versions shared between organisations]",
)
@pass_session
def handlers(session: CliSession, /, *, target: str, organisation: str | None) -> None:
    """Run the handlers of handler queues, until SIGTERM or Ctrl-C.

    TARGET is MODULE:NAME of a delivery.handlers.Handlers instance.
    """
    with module_loading():
        from rooms.app.handlers import load_handlers, run_handlers
        from rooms.cli.backends import environment_installation

    try:
        found = load_handlers(target)
    except ValueError as exc:
        raise CliError(str(exc)) from exc
    joined = environment_installation(session)
    run_handlers(joined.settings, joined.database_url, found, organisation=organisation)


_job_option = click.option(
    "--job",
    "as_job",
    is_flag=True,
    help="Let the maintenance process do it, by a job of the API, and wait for its result.",
)


def _run_as_job(session: CliSession, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Start a job, wait for its end, show it, and return its result. CliError: it failed."""
    from rooms.cli.job import show_accepted_job

    with session.client() as client:
        accepted = client.call("POST", path, json=dict(body))
        found = show_accepted_job(session, client, accepted, follow=True)
    result: Mapping[str, Any] = found["result"]
    return result


@click.command(cls=Command)
@click.option(
    "--days",
    type=click.IntRange(1),
    help="Days to keep.  [default: ROOMS_RETENTION_DAYS]",
)
@_job_option
@pass_session
def retention(session: CliSession, /, *, days: int | None, as_job: bool) -> None:
    """Preview what retention would delete now. Changes nothing.

    Reads DATABASE_URL directly, unless --job is given. The maintenance tasks (`rooms upkeep`)
    delete expired days by themselves.
    """
    if as_job:
        _run_as_job(session, "/retention-preview", {"days": days})
        return
    from rooms.app.maintenance import preview_retention
    from rooms.errors import RoomsError

    settings = session.settings()
    try:
        found = preview_retention(settings, session.wait_for_database_url(), days=days)
    except RoomsError as exc:
        raise CliError(f"retention could not be previewed: {exc}") from exc
    days = settings.retention_days if days is None else days
    output = session.output()
    if output.as_json:
        output.document({"days": days, "prospects": [asdict(one) for one in found]})
        return
    if not days:
        output.line("retention is off: ROOMS_RETENTION_DAYS is 0")
        return
    rows = [
        [
            one.label + (" (remains)" if one.kept else ""),
            one.deliveries,
            one.stay,
            one.deliveries - one.stay,
            one.fate,
        ]
        for one in found
    ]
    output.table(
        ["day", "deliveries", "kept", "ended", "result"],
        rows,
        empty=f"nothing is older than {days} days",
    )


@click.command(cls=Command)
@click.option(
    "--repair",
    is_flag=True,
    help="Repair differences. Refused while any store does not answer.",
)
@click.option(
    "--patience",
    "patience_s",
    type=click.FloatRange(0),
    default=10.0,
    show_default=True,
    help="Seconds that a queue may lack messages before this counts as a difference.",
)
@_job_option
@pass_session
def doctor(session: CliSession, /, *, repair: bool, patience_s: float, as_job: bool) -> int:
    """Check (and with --repair, repair) that database, broker and magazines agree.

    Connects to the stores that the running processes use, unless --job is given. Works while the
    service runs, and while it is stopped. Exit code 1 if a difference remains, or if a store does
    not answer.
    """
    if as_job:
        return 1 if _run_as_job(session, "/doctor", {"repair": repair})["open"] else 0
    from rooms.app.doctor import run_checks
    from rooms.cli.backends import running_installation
    from rooms.errors import RoomsError

    installation = running_installation(session)
    if repair and installation.mixed:
        raise CliError(
            "nothing was repaired: the processes run on different stores. "
            + "; ".join(installation.mixed)
        )
    try:
        report = run_checks(
            installation.settings,
            installation.database_url,
            repair=repair,
            grace_s=patience_s,
            logs=installation.logs,
        )
    except RoomsError as exc:
        raise CliError(f"the check could not be completed: {exc}") from exc
    left = sum(finding.open_count for finding in report.findings) + len(installation.mixed)
    output = session.output()
    if output.as_json:
        output.document(
            _to_document(report, installation.mixed, installation.notes, left, repair=repair)
        )
    else:
        _show_report(output, report, installation.mixed, left, repair=repair)
        for note in installation.notes:
            output.note(note)
    return 1 if left else 0


def _to_document(
    report: "DoctorReport",
    mixed: "Sequence[str]",
    notes: "Sequence[str]",
    remaining: int,
    *,
    repair: bool,
) -> dict[str, object]:
    findings = [
        {
            "part": finding.part,
            "what": finding.description,
            "count": finding.count,
            "mended": finding.repaired,
            "under_way": finding.self_healing,
            "away": finding.unavailable,
            "since": None if finding.since is None else finding.since.isoformat(),
            "examples": list(finding.examples),
            "advice": finding.advice or None,
        }
        for finding in report.findings
    ]
    return {
        "open": remaining,
        "repair": repair,
        "repair_refused": report.refused,
        "mixed": list(mixed),
        "notes": list(notes),
        "findings": findings,
    }


def _show_report(
    output: "Output",
    report: "DoctorReport",
    mixed: "Sequence[str]",
    remaining: int,
    *,
    repair: bool,
) -> None:
    findings = report.findings
    rows = [
        [
            finding.part,
            finding.count,
            finding.description
            + (
                f", since {finding.since.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
                if finding.since is not None
                else ""
            )
            + (" (in progress)" if finding.self_healing and not finding.advice else ""),
            finding.repaired,
            ", ".join(finding.examples) or None,
        ]
        for finding in findings
    ]
    if rows:
        output.table(["part", "found", "what", "repaired", "for example"], rows)
    for finding in findings:
        if finding.advice:
            output.line(f"{finding.part}: {finding.advice}")
    for line in mixed:
        output.line(f"the processes run on different stores: {line}")
    unavailable = sorted({finding.part for finding in findings if finding.unavailable})
    differing = sum(finding.open_count for finding in findings if not finding.unavailable)
    if report.refused:
        output.line(
            f"nothing was repaired: {', '.join(unavailable)} does not answer, "
            "and a repair needs every store"
        )
    elif unavailable:
        output.line(f"{', '.join(unavailable)} could not be checked")
    if differing:
        hint = (
            ""
            if repair
            else ": `rooms doctor --repair` repairs them"
            + (" once every store answers" if unavailable else "")
        )
        output.line(f"{differing} not repaired{hint}")
    elif not remaining:
        output.line("database, broker and magazines agree")
