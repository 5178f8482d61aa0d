"""`rooms retention`: what would go."""

from dataclasses import asdict

import click

from rooms.cli.errors import CliError
from rooms.cli.session import Command, Session, pass_session


@click.command(cls=Command)
@click.option("--days", type=click.IntRange(1), help="How long it would be kept.  [default: ROOMS_RETENTION_DAYS]")
@pass_session
def retention(session: Session, /, *, days: int | None) -> None:
    """Tell what retention would take now, straight from DATABASE_URL. Nothing is changed; the upkeep does it by itself."""
    from rooms.composition.retention import prospects
    from rooms.errors import RoomsError

    settings = session.settings()
    try:
        found = prospects(settings, session.answering_database_url(), days=days)
    except RoomsError as exc:
        raise CliError(f"what would go could not be told: {exc}") from exc
    days = settings.retention_days if days is None else days
    output = session.output()
    if output.as_json:
        output.document({"days": days, "prospects": [asdict(one) for one in found]})
        return
    if not days:
        output.line("everything is kept: ROOMS_RETENTION_DAYS is 0")
        return
    rows = [
        [one.label + (" (remains)" if one.kept else ""), one.deliveries, one.stay, one.deliveries - one.stay, one.fate]
        for one in found
    ]
    output.table(["day", "deliveries", "must stay", "ended", "it"], rows, empty=f"nothing is older than {days} days")
