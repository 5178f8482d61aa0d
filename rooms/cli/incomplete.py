"""Mark results that lack segments or findings: their notes, JSON fields and exit code."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from rooms.cli.context import CliSession

if TYPE_CHECKING:
    from delivery.analytics.results.reader import AnalysisTables
    from delivery.analytics.sealing.errors import SetAside

EXIT_INCOMPLETE: Final = 3
_SHOWN: Final = 10


def set_aside_documents(found: Sequence["SetAside"]) -> list[dict[str, Any]]:
    """Return segments that are set aside for JSON."""
    return [one.document() for one in found]


def incomplete_fields(found: "AnalysisTables") -> dict[str, Any]:
    """Return the fields of a JSON document that name what was not read."""
    return {
        "incomplete": found.is_incomplete,
        "set_aside_total": found.set_aside_total,
        "set_aside": list(found.set_aside),
    }


def note_incomplete(session: CliSession, found: "AnalysisTables") -> None:
    """Name segments that were not read, for people."""
    from delivery.analytics.sealing.errors import set_aside_lines

    if not found.is_incomplete or session.as_json:
        return
    output = session.output()
    output.note(
        f"incomplete: {found.set_aside_total} segments are set aside, and not counted as loss"
    )
    for line in set_aside_lines(found.set_aside, found.set_aside_total, limit=_SHOWN):
        output.note(line)


def note_findings(session: CliSession, found: "AnalysisTables") -> None:
    """State the time of incidents and retry advice, which a run publishes after its books."""
    if found.findings_at is None:
        session.output().note(
            "not computed yet: `rooms analyze` publishes its books first; "
            "if none is running, run it again"
        )
        return
    session.output().note(
        f"as of {found.findings_at:%Y-%m-%d %H:%M:%S} UTC; `rooms analyze` updates it"
    )


def exit_incomplete(found: "AnalysisTables") -> None:
    """Exit with code 3 if segments are set aside."""
    if found.is_incomplete:
        click.get_current_context().exit(EXIT_INCOMPLETE)
