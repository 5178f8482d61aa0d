"""List the incidents of the last analysis: `rooms incidents`."""

from typing import TYPE_CHECKING, Any, Final

import click

from rooms.cli.analytics import open_results
from rooms.cli.context import CliSession, Command, pass_session

if TYPE_CHECKING:
    from delivery.analytics.results.reader import Row

_MAX_CAUSES: Final = 4


@click.command(cls=Command)
@pass_session
def incidents(session: CliSession) -> None:
    """List when which subscriptions failed together, and what their failures have in common."""
    found = open_results(session)
    rows = sorted(
        found.rows("incidents"), key=lambda row: (row["began"], row["incident"]), reverse=True
    )
    output = session.output()
    if output.as_json:
        items = [_incident_document(row) for row in rows]
        output.document({"analysed_at": found.at.isoformat(), "items": items})
        return
    output.table(
        [
            "began",
            "ended",
            "kind",
            "subscriptions",
            "failures",
            "attempts",
            "late",
            "sidelined",
            "in common",
            "changed before",
        ],
        [
            [
                _time_cell(row, "began"),
                "open" if row["open"] else _time_cell(row, "ended"),
                row["kind"] + (f", {row['earlier']} before" if row["earlier"] else ""),
                "\n".join(row["subscriptions"]),
                row["failures"],
                row["attempts"],
                row["late"],
                row["sidelined"],
                "\n".join(
                    f"{cause['attribute']} {cause['value']}"
                    for cause in (row["causes"] or [])[:_MAX_CAUSES]
                ),
                "\n".join(
                    f"{change['attribute']} {change['value']}" for change in row["changes"] or []
                ),
            ]
            for row in rows
        ],
        empty="no correlated failures",
    )
    output.note(f"as of {found.at:%Y-%m-%d %H:%M:%S} UTC; `rooms analyze` updates it")


def _incident_document(row: "Row") -> dict[str, Any]:
    times = {name: value.isoformat() for name, value in row.items() if hasattr(value, "isoformat")}
    changes = [{**change, "at": change["at"].isoformat()} for change in row["changes"] or []]
    return {**row, **times, "changes": changes}


def _time_cell(row: "Row", name: str) -> str:
    """Return a time with the half of its range."""
    low, high = row[f"{name}_from"], row[f"{name}_to"]
    return f"{row[name]:%Y-%m-%d %H:%M:%S}\n± {(high - low).total_seconds() / 2:.0f} s"
