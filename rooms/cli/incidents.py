"""List the incidents of the last analysis: `rooms incidents`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from rooms.cli.analytics import open_results
from rooms.cli.context import CliSession, Command, pass_session
from rooms.cli.errors import CliError
from rooms.cli.incomplete import exit_incomplete, incomplete_fields, note_findings, note_incomplete

if TYPE_CHECKING:
    from delivery.analytics.results.reader import Row
    from rooms.db.queries.analytics import Owners

_MAX_CAUSES: Final = 4
_MAX_NAMED: Final = 10
"""Subscriptions of an incident that the table names."""


@click.command(cls=Command)
@pass_session
def incidents(session: CliSession) -> None:
    """List when which subscriptions failed together, and what their failures have in common.

    Begin and end are estimates; the range beside each holds 90 % of the time. An open incident goes
    on. The organisations are shown where PostgreSQL answers.
    """
    found = open_results(session)
    rows = sorted(
        found.rows("incidents"), key=lambda row: (row["began"], row["incident"]), reverse=True
    )
    output = session.output()
    owners = _read_owners(session) if rows else None
    hit = [_organisations(row, owners) for row in rows]
    if output.as_json:
        items = [_document(row, names) for row, names in zip(rows, hit, strict=True)]
        output.document(
            {
                "analysed_at": found.findings_at and found.findings_at.isoformat(),
                "items": items,
                **incomplete_fields(found),
            }
        )
        exit_incomplete(found)
        return
    output.table(
        [
            "began",
            "ended",
            "kind",
            "subscriptions",
            "organisations",
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
                "open" if row.get("open") else _time_cell(row, "ended"),
                row["kind"] + (f", {row['earlier']} before" if row.get("earlier") else ""),
                _named(row["subscriptions"]),
                "" if names is None else len(names),
                row["failures"],
                row["attempts"],
                row.get("late"),
                row.get("sidelined"),
                _values(row["causes"] or ()),
                _values(row.get("changes") or ()),
            ]
            for row, names in zip(rows, hit, strict=True)
        ],
        empty="no correlated failures" if found.findings_at else "no incidents known",
    )
    note_findings(session, found)
    note_incomplete(session, found)
    exit_incomplete(found)


def _read_owners(session: CliSession) -> "Owners | None":
    """Return the owners of subscriptions; None, with a note, if PostgreSQL is away."""
    from rooms.db.queries.analytics import read_owners
    from rooms.errors import RoomsError

    try:
        return read_owners(session.wait_for_database_url())
    except (CliError, RoomsError) as exc:
        session.output().note(f"the organisations are left out: {exc}")
        return None


def _organisations(row: "Row", owners: "Owners | None") -> list[str] | None:
    if owners is None:
        return None
    found = {owners.of_subscription(one) for one in row["subscriptions"]}
    return sorted(str(one) for one in found if one is not None)


def _document(row: "Row", organisations: list[str] | None) -> dict[str, Any]:
    times = {name: value.isoformat() for name, value in row.items() if hasattr(value, "isoformat")}
    changes = [{**change, "at": change["at"].isoformat()} for change in row.get("changes") or ()]
    return {**row, **times, "changes": changes, "organisations": organisations}


def _time_cell(row: "Row", name: str) -> str:
    """Return a time with the half of its range."""
    at = f"{row[name]:%Y-%m-%d %H:%M:%S}"
    low, high = row.get(f"{name}_from"), row.get(f"{name}_to")
    if low is None or high is None:
        return at
    return f"{at}\n± {(high - low).total_seconds() / 2:.0f} s"


def _named(subscriptions: Sequence[str]) -> str:
    more = len(subscriptions) - _MAX_NAMED
    return "\n".join([*subscriptions[:_MAX_NAMED], *([f"and {more} more"] if more > 0 else [])])


def _values(found: Sequence["Row"]) -> str:
    return "\n".join(f"{one['attribute']} {one['value']}" for one in found[:_MAX_CAUSES])
