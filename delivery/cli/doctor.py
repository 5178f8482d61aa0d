"""`rooms doctor`: whether what is in PostgreSQL, broker and magazines agrees."""

from typing import TYPE_CHECKING

import click

from rooms.cli.errors import CliError
from rooms.cli.session import Command, Session, pass_session

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delivery.doctor.findings import Finding


@click.command(cls=Command)
@click.option("--repair", is_flag=True, help="Put right what differs.")
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
    """Hold rows, broker and magazines against each other, straight on DATABASE_URL, BROKER_URL and MAGAZINE_URL, while
    everything runs or not. Exit code 1 where something differs that was not put right.
    """
    from rooms.composition.doctor import examine
    from rooms.errors import RoomsError

    try:
        findings = examine(session.settings(), session.database_url(), repair=repair, patience_s=patience_s)
    except RoomsError as exc:
        raise CliError(f"the examination could not be ended: {exc}") from exc
    left = sum(finding.open for finding in findings)
    _tell(session, findings, left, repair=repair)
    return 1 if left else 0


def _tell(session: Session, findings: "Sequence[Finding]", left: int, *, repair: bool) -> None:
    output = session.output()
    if output.as_json:
        told = [
            {
                "part": finding.part,
                "what": finding.what,
                "count": finding.count,
                "mended": finding.mended,
                "under_way": finding.under_way,
                "examples": list(finding.examples),
            }
            for finding in findings
        ]
        output.document({"open": left, "repair": repair, "findings": told})
        return
    rows = [
        [
            finding.part,
            finding.count,
            finding.what + (" (under way)" if finding.under_way else ""),
            finding.mended,
            ", ".join(finding.examples) or None,
        ]
        for finding in findings
    ]
    if rows:
        output.table(["part", "found", "what", "mended", "for example"], rows)
    if left:
        output.line(f"{left} left as they are" + ("" if repair else ": rooms doctor --repair puts them right"))
    else:
        output.line("row, broker and magazine agree")
