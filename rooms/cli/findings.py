"""Show the findings of the last analysis: `rooms incidents`, `reconcile` and `retry-advice`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from rooms.cli.analytics import (
    exit_incomplete,
    incomplete_fields,
    note_findings,
    note_incomplete,
    open_results,
)
from rooms.cli.context import CliSession, Command, pass_session, renamed
from rooms.cli.errors import CliError
from rooms.cli.options import parse_id
from rooms.cli.output import Output
from rooms.domain.retry_policy import advised_settings

if TYPE_CHECKING:
    from delivery.analytics.results.reader import Reconciliation, Row
    from rooms.db.queries.analytics import Owners

_MAX_CAUSES: Final = 4
_MAX_NAMED: Final = 10
"""Subscriptions of an incident that the table names."""
EXIT_LOST: Final = 1
_AGES_SHOWN: Final = 20
_ROOM_COLUMNS: Final = frozenset({"lost", "missing", "stuck", "never_enqueued"})
"""Columns of rooms that are shown even if all are 0."""
_TIME: Final = "%Y-%m-%d %H:%M:%S"
_MINUTE_S: Final = 60
_HOUR_S: Final = 3600
_DAY_S: Final = 86_400


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
    """Return a time with its range, which may be far longer to one side."""
    at, low, high = row[name], row.get(f"{name}_from"), row.get(f"{name}_to")
    text = f"{at:{_TIME}}"
    if low is None or high is None:
        return text
    if low.date() == high.date() == at.date():
        return f"{text}\n{low:%H:%M:%S} to {high:%H:%M:%S}"
    return f"{text}\n{low:{_TIME}}\nto {high:{_TIME}}"


def _named(subscriptions: Sequence[str]) -> str:
    more = len(subscriptions) - _MAX_NAMED
    return "\n".join([*subscriptions[:_MAX_NAMED], *([f"and {more} more"] if more > 0 else [])])


def _values(found: Sequence["Row"]) -> str:
    return "\n".join(f"{one['attribute']} {one['value']}" for one in found[:_MAX_CAUSES])


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

    books = read_reconciliation(found.each_row, is_incomplete=found.is_incomplete)
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
            names = [
                name
                for name in next(iter(books.rooms.values()))
                if name in _ROOM_COLUMNS or any(of[name] for of in books.rooms.values())
            ]
            output.table(
                ["room", *(name.replace("_", " ") for name in names)],
                [[room, *(of[name] for name in names)] for room, of in books.rooms.items()],
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


@click.command("retry-advice", cls=Command)
@click.argument("subscription_id", required=False)
@click.option(
    "--apply", "chosen", metavar="SUB", help="Show the advice for this subscription, then apply it."
)
@pass_session
def retry_advice(
    session: CliSession, /, *, subscription_id: str | None, chosen: str | None
) -> None:
    """Recommend retry settings for one subscription, or for all.

    Recommends nothing where a simulation of the current policy does not reproduce the measurements.
    """
    wanted_id = chosen or subscription_id
    one = None if wanted_id is None else parse_id(wanted_id)
    results = open_results(session)
    # It needs the packages for whose absence opening the results has an error.
    from delivery.analytics.results.by_organisation import advice_body

    found = [advice_body(row) for row in results.rows("advice")]
    if one is not None:
        found = [advice for advice in found if advice["subscription_id"] == one]
        if results.findings_at is None:
            raise CliError(
                "there is no advice yet: `rooms analyze` publishes its books first, then the advice"
            )
        if not found:
            raise CliError(
                f"there is no advice for {one}: it has too few failures, or was not analysed yet"
            )
    output = session.output()
    if chosen is None:
        if output.as_json:
            output.document({"items": found, **incomplete_fields(results)})
        else:
            _show_advice_table(output, found)
            note_findings(session, results)
            note_incomplete(session, results)
        exit_incomplete(results)
        return
    note_incomplete(session, results)
    _apply_advice(session, found[0])


advise = renamed(retry_advice, "advise", "retry-advice")


def _apply_advice(session: CliSession, advice: dict[str, Any]) -> None:
    """Set all that was promised, in one request, unless the subscription changes meanwhile."""
    policy = advice["recommended"]
    if not advice["reproduced"]:
        raise CliError("nothing is recommended: the simulation does not reproduce the measurements")
    if policy is None:
        raise CliError("nothing is recommended: no other policy is surely better")
    if advice["held_up"] is False:
        raise CliError(
            "not applied: a policy chosen on the first part of the log did not keep its promise on "
            "the rest. Analyse a longer log, or set the policy with `rooms subscription change`"
        )
    output = session.output()
    if not output.as_json:
        _show_advice_table(output, [advice])
    path = f"/subscriptions/{advice['subscription_id']}"
    with session.client() as client:
        version = client.call("GET", path)["version"]
        changed = client.call("PATCH", path, json={"version": version, **advised_settings(policy)})
    if output.as_json:
        output.document({"advice": advice, "subscription": changed})
        return
    output.line(f"applied to {changed['name']}")


def _show_advice_table(output: Output, found: list[dict[str, Any]]) -> None:
    output.table(
        [
            "subscription",
            "",
            "waits",
            "redeliveries",
            "delivered",
            "attempts",
            "mean wait",
            "p95 wait",
        ],
        [
            [
                advice["subscription_id"] if which == "now" else "",
                which,
                *_policy_cells(policy),
                *_effect_cells(effect, advice["expected_range"] if which == "better" else None),
            ]
            for advice in found
            for which, policy, effect in (
                ("now", advice["deployed"], advice["measured"]),
                ("simulated", None, advice["replayed"]),
                ("better", advice["recommended"], advice["expected"]),
            )
            if policy is not None or effect is not None
        ],
        empty="no subscription has enough failures for advice",
    )
    for advice in found:
        if advice["recommended"] is not None and advice["held_up"] is False:
            output.note(
                f"{advice['subscription_id']}: a policy chosen on the first part of the log did "
                "not keep its promise on the rest"
            )


def _policy_cells(policy: dict[str, Any] | None) -> list[object]:
    if policy is None:
        return ["", ""]
    waits = f"{policy['delay_ms'] / 1000:g} s * {policy['multiplier']:g}^n"
    if policy["max_delay_ms"] is not None:
        waits += f", at most {policy['max_delay_ms'] / 1000:g} s"
    if policy["jitter"]:
        waits += f", +- {policy['jitter']:.0%}"
    return [waits, policy["redeliveries"]]


def _effect_cells(effect: dict[str, Any] | None, intervals: dict[str, Any] | None) -> list[object]:
    """Return the cells of an effect, each with its interval below."""
    if effect is None or effect["delivered"] is None:
        return ["", "", "", ""]
    formats = {
        "delivered": "{:.2%}",
        "attempts": "{:.2f}",
        "mean_wait_s": "{:.1f} s",
        "p95_wait_s": "{:.1f} s",
    }
    cells: list[object] = []
    for name, shown in formats.items():
        cell = "-" if effect[name] is None else shown.format(effect[name])
        if intervals and name in intervals:
            low, high = intervals[name]["low"], intervals[name]["high"]
            cell += f"\n{shown.format(low)} to {shown.format(high)}"
        cells.append(cell)
    return cells
