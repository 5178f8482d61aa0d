"""`rooms doctor`: whether what is in PostgreSQL, broker and magazines agrees."""

from datetime import UTC
from typing import TYPE_CHECKING

import click

from rooms.cli.errors import CliError
from rooms.cli.session import Command, Session, pass_session

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rooms.cli.output import Output
    from rooms.composition.doctor import Examination


@click.command(cls=Command)
@click.option("--repair", is_flag=True, help="Put right what differs; refused while any store does not answer.")
@click.option(
    "--patience",
    "patience_s",
    type=click.FloatRange(0),
    default=10.0,
    show_default=True,
    help="Seconds for which a queue must hold too little before that counts.",
)
@pass_session
def doctor(session: Session, /, *, repair: bool, patience_s: float) -> int:
    """Hold rows, broker and magazines against each other, straight on the stores that the running processes have on record,
    while everything runs or not. Exit code 1 where something differs that was not put right, or a store does not answer.
    """
    from rooms.cli.backends import running_installation
    from rooms.composition.doctor import examine
    from rooms.errors import RoomsError

    installation = running_installation(session)
    if repair and installation.mixed:
        raise CliError("nothing was repaired: the processes run on different stores. " + "; ".join(installation.mixed))
    try:
        examination = examine(
            installation.settings,
            installation.database_url,
            repair=repair,
            patience_s=patience_s,
            logs=installation.logs,
        )
    except RoomsError as exc:
        raise CliError(f"the examination could not be ended: {exc}") from exc
    left = sum(finding.open for finding in examination.findings) + len(installation.mixed)
    output = session.output()
    if output.as_json:
        output.document(_document(examination, installation.mixed, installation.notes, left, repair=repair))
    else:
        _report(output, examination, installation.mixed, left, repair=repair)
        for note in installation.notes:
            output.note(note)
    return 1 if left else 0


def _document(
    examination: "Examination", mixed: "Sequence[str]", notes: "Sequence[str]", left: int, *, repair: bool
) -> dict[str, object]:
    findings = [
        {
            "part": finding.part,
            "what": finding.what,
            "count": finding.count,
            "mended": finding.mended,
            "under_way": finding.under_way,
            "away": finding.away,
            "since": None if finding.since is None else finding.since.isoformat(),
            "examples": list(finding.examples),
            "advice": finding.advice or None,
        }
        for finding in examination.findings
    ]
    return {
        "open": left,
        "repair": repair,
        "repair_refused": examination.refused,
        "mixed": list(mixed),
        "notes": list(notes),
        "findings": findings,
    }


def _report(output: "Output", examination: "Examination", mixed: "Sequence[str]", left: int, *, repair: bool) -> None:
    findings = examination.findings
    rows = [
        [
            finding.part,
            finding.count,
            finding.what
            + (f", since {finding.since.astimezone(UTC):%Y-%m-%d %H:%M} UTC" if finding.since is not None else "")
            + (" (under way)" if finding.under_way and not finding.advice else ""),
            finding.mended,
            ", ".join(finding.examples) or None,
        ]
        for finding in findings
    ]
    if rows:
        output.table(["part", "found", "what", "mended", "for example"], rows)
    for finding in findings:
        if finding.advice:
            output.line(f"{finding.part}: {finding.advice}")
    for line in mixed:
        output.line(f"the processes run on different stores: {line}")
    away = sorted({finding.part for finding in findings if finding.away})
    differing = sum(finding.open for finding in findings if not finding.away)
    if examination.refused:
        output.line(f"nothing was repaired: {', '.join(away)} does not answer, and a repair needs every store")
    elif away:
        output.line(f"{', '.join(away)} could not be examined")
    if differing:
        hint = (
            "" if repair else ": rooms doctor --repair puts them right" + (" once every store answers" if away else "")
        )
        output.line(f"{differing} left as they are{hint}")
    elif not left:
        output.line("row, broker and magazine agree")
