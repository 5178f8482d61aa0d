"""`rooms incidents`, `reconcile` and `advise`: what the last analysis has found, read from its tables."""

from typing import TYPE_CHECKING, Any

import click

from delivery.cli.extra import explained, need_arrow
from rooms.cli.errors import CliError
from rooms.cli.output import Output
from rooms.cli.references import identity
from rooms.cli.session import Command, Session, pass_session

if TYPE_CHECKING:
    from delivery.findings.published import Published

LOST = 1


def published(session: Session) -> "Published":
    """The tables of the last analysis. CliError where there are none."""
    need_arrow()
    from delivery.findings.analyst import tables
    from delivery.findings.published import Published

    with explained():
        return Published.open(tables(session.settings().analysis))


@click.command(cls=Command)
@pass_session
def incidents(session: Session) -> None:
    """When which subscriptions failed together, and what their failures have in common."""
    found = published(session)
    rows = sorted(found.rows("incidents"), key=lambda row: (row["began"], row["incident"]), reverse=True)
    output = session.output()
    if output.as_json:
        items = [{**row, "began": row["began"].isoformat(), "ended": row["ended"].isoformat()} for row in rows]
        output.document({"analysed_at": found.at.isoformat(), "items": items})
        return
    output.table(
        ["began", "ended", "kind", "subscriptions", "failures", "attempts", "in common"],
        [
            [
                f"{row['began']:%Y-%m-%d %H:%M}",
                f"{row['ended']:%Y-%m-%d %H:%M}",
                row["kind"],
                "\n".join(row["subscriptions"]),
                row["failures"],
                row["attempts"],
                "\n".join(f"{cause['attribute']} {cause['value']}" for cause in (row["causes"] or [])[:4]),
            ]
            for row in rows
        ],
        empty="nothing failed together",
    )
    output.note(f"as of {found.at:%Y-%m-%d %H:%M:%S} UTC; `rooms analyze` looks again")


@click.command(cls=Command)
@click.pass_context
@pass_session
def reconcile(session: Session, ctx: click.Context, /) -> None:
    """Hold what was published against what became of it. Exit code 1 where anything is lost.

    Lost is also a delivery that should have been made and was not, and the books do not close where rows of the log
    itself are missing: that exits with 1 as well.
    """
    from delivery.findings.books import books_of

    found = published(session)
    books = books_of(found.rows)
    output = session.output()
    told = {"analysed_at": found.at.isoformat(), **books.told()}
    if output.as_json:
        output.document(told)
    else:
        shown = [
            (name, value) for name, value in told.items() if isinstance(value, int) and not isinstance(value, bool)
        ]
        output.table(
            ["", "deliveries"], [[name.replace("_", " "), value] for name, value in shown if value or name == "lost"]
        )
        if books.rooms:
            output.table(
                ["room", "lost", "missing", "without a beginning"],
                [[room, of["lost"], of["missing"], of["never_enqueued"]] for room, of in books.rooms.items()],
            )
        output.note(_verdict(books.closed))
    if not books.closed:
        ctx.exit(LOST)


def _verdict(closed: bool) -> str:
    return "nothing is lost: every delivery is accounted for" if closed else "the books do not close"


@click.command(cls=Command)
@click.argument("subscription_id", required=False)
@click.option("--apply", "chosen", metavar="SUB", help="Show it for this subscription, then set it.")
@pass_session
def advise(session: Session, /, *, subscription_id: str | None, chosen: str | None) -> None:
    """How retries should be set, held against how they are: of one subscription, or of all.

    Nothing is recommended where the replay of the policy that is set does not give what was measured.
    """
    from delivery.findings.shares import advice_of

    wanted = chosen or subscription_id
    one = None if wanted is None else identity(wanted)
    found = [advice_of(row) for row in published(session).rows("advice")]
    if one is not None:
        found = [advice for advice in found if advice["subscription_id"] == one]
        if not found:
            raise CliError(f"there is no advice about {one}: it has not failed enough, or not been analysed")
    output = session.output()
    if chosen is None:
        if output.as_json:
            output.document({"items": found})
            return
        _table(output, found)
        return
    _apply(session, found[0])


def _apply(session: Session, advice: dict[str, Any]) -> None:
    policy = advice["recommended"]
    if not advice["reproduced"] or policy is None:
        raise CliError("nothing is recommended: the replay does not give what was measured")
    output = session.output()
    if not output.as_json:
        _table(output, [advice])
    overrides = {
        "delivery_delay_ms": round(policy["delay_ms"]),
        "delivery_delay_multiplier": policy["multiplier"],
        "delivery_attempts": policy["redeliveries"],
    }
    with session.client() as client:
        changed = client.call("PATCH", f"/subscriptions/{advice['subscription_id']}", json=overrides)
    if output.as_json:
        output.document({"advice": advice, "subscription": changed})
        return
    output.line(f"set on {changed['name']}")


def _table(output: Output, found: list[dict[str, Any]]) -> None:
    output.table(
        ["subscription", "", "first wait", "growth", "redeliveries", "delivered", "attempts", "mean wait", "p95 wait"],
        [
            [advice["subscription_id"] if which == "now" else "", which, *_policy(policy), *_effect(effect)]
            for advice in found
            for which, policy, effect in (
                ("now", advice["deployed"], advice["measured"]),
                ("replayed", None, advice["replayed"]),
                ("better", advice["recommended"], advice["expected"]),
            )
            if policy is not None or effect is not None
        ],
        empty="no subscription has failed enough for advice",
    )


def _policy(policy: dict[str, Any] | None) -> list[object]:
    if policy is None:
        return ["", "", ""]
    return [f"{policy['delay_ms'] / 1000:g} s", f"{policy['multiplier']:g}", policy["redeliveries"]]


def _effect(effect: dict[str, Any] | None) -> list[object]:
    if effect is None or effect["delivered"] is None:
        return ["", "", "", ""]
    waits = ["-" if effect[name] is None else f"{effect[name]:.1f} s" for name in ("mean_wait_s", "p95_wait_s")]
    return [f"{effect['delivered']:.2%}", f"{effect['attempts']:.2f}", *waits]
