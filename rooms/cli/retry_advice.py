"""Implement `rooms retry-advice`: show how retries should be set, and set them."""

from typing import Any

import click

from rooms.cli.analytics import open_results
from rooms.cli.context import CliSession, Command, pass_session, renamed
from rooms.cli.errors import CliError
from rooms.cli.incomplete import exit_incomplete, incomplete_fields, note_findings, note_incomplete
from rooms.cli.options import parse_id
from rooms.cli.output import Output
from rooms.domain.retry_policy import advised_settings


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
