"""Implement `rooms reconcile`: what was published against what became of it."""

from typing import TYPE_CHECKING, Any, Final

import click

from rooms.cli.analytics import open_results
from rooms.cli.context import CliSession, Command, pass_session
from rooms.cli.incomplete import exit_incomplete, incomplete_fields, note_incomplete

if TYPE_CHECKING:
    from delivery.analytics.results.reader import Reconciliation

EXIT_LOST: Final = 1
_AGES_SHOWN: Final = 20
_MINUTE_S: Final = 60
_HOUR_S: Final = 3600
_DAY_S: Final = 86_400


@click.command(cls=Command)
@pass_session
def reconcile(session: CliSession, /) -> None:
    """Compare published messages with their outcomes. Exit code 1 if any delivery is lost.

    A delivery that was never created also counts, as missing. The exit code is also 1 if rows of
    the log itself are missing or create a delivery twice: the totals then do not match. It is 3 if
    segments are set aside, and nothing is lost in the others.
    """
    found = open_results(session)
    from delivery.analytics.results.reader import oldest_first, read_reconciliation

    books = read_reconciliation(found.rows, is_incomplete=found.is_incomplete)
    ages = oldest_first(found.rows("ages"))
    output = session.output()
    if output.as_json:
        output.document(
            {
                "analysed_at": found.at.isoformat(),
                **books.describe(),
                "ages": [_age_document(row) for row in ages],
                **incomplete_fields(found),
            }
        )
    else:
        shown = [
            (name, value)
            for name, value in books.describe().items()
            if isinstance(value, int) and not isinstance(value, bool)
        ]
        output.table(
            ["", "deliveries"],
            [[name.replace("_", " "), value] for name, value in shown if value or name == "lost"],
        )
        if books.rooms:
            output.table(
                ["room", "lost", "missing", "stuck", "never enqueued"],
                [
                    [room, of["lost"], of["missing"], of["stuck"], of["never_enqueued"]]
                    for room, of in books.rooms.items()
                ],
            )
        if ages:
            output.table(
                ["open", "deliveries", "oldest", "room", "subscription"],
                [
                    [
                        row["outcome"].replace("_", " "),
                        row["deliveries"],
                        _age_text(row["oldest_age_s"]),
                        row["room_id"],
                        row["subscription_id"] or "",
                    ]
                    for row in ages[:_AGES_SHOWN]
                ],
            )
        note_incomplete(session, found)
        output.note(f"{_format_balance(books)} (as of {found.at.isoformat(timespec='seconds')})")
    if books.has_losses or not (books.is_balanced or books.is_incomplete):
        click.get_current_context().exit(EXIT_LOST)
    exit_incomplete(found)


def _age_document(row: Any) -> dict[str, Any]:
    since = row["oldest_since"]
    return {**row, "oldest_since": None if since is None else since.isoformat()}


def _age_text(seconds: float | None) -> str:
    if seconds is None:
        return ""
    for unit, name in ((_DAY_S, "d"), (_HOUR_S, "h"), (_MINUTE_S, "min")):
        if seconds >= unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds:.0f} s"


def _format_balance(books: "Reconciliation") -> str:
    if books.has_losses:
        return f"{books.lost} lost, {books.missing} missing: the totals do not match"
    if books.is_incomplete:
        return "nothing that was read is lost"
    if not books.is_balanced:
        if books.contradictions and not (books.log_rows_missing or books.holes):
            return "nothing is lost, but rows contradict each other: the totals do not match"
        return "nothing is lost, but rows of the log are missing: the totals do not match"
    if books.stuck:
        return f"nothing is lost, but {books.stuck} deliveries are stuck"
    return "nothing is lost: every delivery is accounted for"
