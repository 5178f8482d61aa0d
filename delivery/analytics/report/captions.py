"""Describe each chart of the report in one or two sentences."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from delivery.analytics.report.data import (
    LOST,
    MAX_SHOWN,
    OPEN,
    OUTCOMES,
    RETRIED,
    SIDELINED,
    History,
    Retries,
    Row,
    SubscriptionNames,
)
from delivery.analytics.report.formats import (
    bucket_text,
    count_text,
    join_list,
    percent_range_text,
    percent_text,
    policy_text,
    seconds_text,
    step_text,
)
from delivery.analytics.report.outages import Outage
from delivery.analytics.results.reader import Reconciliation
from delivery.analytics.sealing.errors import set_aside_lines

_MAX_CAUSES: Final = 2
_ATTRIBUTES: Final = {"target_host": "host", "http_status": "status", "error_class": "error"}
_MIN_ATTEMPTS: Final = 10
"""Attempts from which the success rate of a retry is mentioned."""
_MAX_SEGMENTS: Final = 20
"""Segments that are listed as set aside."""


def reconciliation_caption(reconciliation: Reconciliation) -> str:
    """State whether any delivery is lost."""
    if reconciliation.is_balanced:
        text = (
            "Nothing is lost: every expected delivery exists, and the outcome of each one is known."
        )
        return f"{text} {reconciliation.stuck:,} are stuck." if reconciliation.stuck else text
    wrong = [
        (reconciliation.lost, "lost"),
        (reconciliation.missing, "missing"),
        (reconciliation.stuck, "stuck"),
        (reconciliation.log_rows_missing, "log rows missing"),
        (reconciliation.holes, "with a hole of the log, or unexplained"),
        (reconciliation.contradictions, "created twice, or beyond what was expected"),
        (reconciliation.unanchored, "of messages whose publish is not in the log"),
    ]
    found = ", ".join(f"{count:,} {what}" for count, what in wrong if count)
    if reconciliation.is_incomplete:
        text = "The result is incomplete: segments are set aside, and their rows are in no figure."
        return f"{text} In the others: {found}." if found else text
    return f"The totals do not match: {found}."


def findings_caption(at: datetime, findings_at: datetime | None) -> str:
    """State the time of outages and retry advice, where it is not that of the analysis."""
    if findings_at is None:
        return " Outages and retry advice are not computed yet."
    if findings_at == at:
        return ""
    return f" Outages and retry advice are of {findings_at:%Y-%m-%d %H:%M:%S}."


def set_aside_caption(found: Sequence[Mapping[str, Any]], total: int) -> str:
    """Name the segments that were not read, in lines."""
    return "\n".join(set_aside_lines(found, total, limit=_MAX_SEGMENTS)) if total else ""


def history_caption(history: History) -> str:
    """Summarise deliveries by outcome."""
    total = history.total()
    if not total:
        return "There were no deliveries."
    parts = [
        f"{percent_text(history.total(outcome) / total)} {outcome}"
        for outcome in OUTCOMES
        if history.total(outcome)
    ]
    text = (
        f"{count_text(total, 'delivery', 'deliveries')} by time of publish, "
        f"{step_text(history.step_s)} a bar: {join_list(parts)}."
    )
    late = max(
        history.buckets, key=lambda bucket: bucket.outcomes[RETRIED] + bucket.outcomes[SIDELINED]
    )
    if worst := late.outcomes[RETRIED] + late.outcomes[SIDELINED]:
        text += (
            f" Most retries and sidelined deliveries are among those published at "
            f"{bucket_text(late.at, history.step_s)}: {worst:,} of {sum(late.outcomes.values()):,}."
        )
    if history.total(LOST):
        text += f" {history.total(LOST):,} are lost."
    return (
        text if not history.total(OPEN) else f"{text} {history.total(OPEN):,} are not finished yet."
    )


def latency_caption(history: History) -> str:
    """State the usual latency, and when it was worst."""
    worst = history.worst_bucket("p99")
    if worst is None:
        return "Nothing was delivered."
    usual = sorted(
        bucket.latency_s["p50"] for bucket in history.buckets if "p50" in bucket.latency_s
    )
    return (
        f"From publish to delivery, including retries. The typical median is "
        f"{seconds_text(usual[len(usual) // 2])}. The 99th percentile was highest for messages "
        f"published at {bucket_text(worst.at, history.step_s)}: "
        f"{seconds_text(worst.latency_s['p99'])}."
    )


def timeline_caption(names: SubscriptionNames) -> str:
    """Count the outages by kind."""
    if not names.outages:
        return "There were no incidents."
    kinds = [outage.kind for outage in names.outages]
    parts = [
        count_text(kinds.count(kind), one, several)
        for kind, one, several in (
            ("shared", "outage of several subscriptions", "outages of several subscriptions"),
            ("single", "outage of a single subscription", "outages of single subscriptions"),
            (
                "chronic",
                "subscription that fails most of the time",
                "subscriptions that fail most of the time",
            ),
        )
        if kind in kinds
    ]
    text = f"{join_list(parts)}."
    hidden = len({one for row in names.outages for one in row.subscriptions}) - MAX_SHOWN
    if any(outage.is_open or outage.went_on for outage in names.outages):
        text += " An arrow marks what goes on at the end of the log."
    return text + (f" {hidden:,} more subscriptions are not shown." if hidden > 0 else "")


def cost_caption(outages: Sequence[Outage]) -> str:
    """State what outages have cost."""
    failures, attempts = (
        sum(one.failures for one in outages),
        sum(one.attempts for one in outages),
    )
    cost = [
        count_text(count, f"delivery {what}", f"deliveries {what}")
        for count, what in (
            (sum(one.sidelined or 0 for one in outages), "sidelined"),
            (sum(one.late or 0 for one in outages), "late"),
        )
        if count
    ]
    failed = f"{failures:,} of {count_text(attempts, 'attempt', 'attempts')} failed"
    return f"{'; '.join([*cost, failed])}."


def causes_caption(outage: Outage, names: SubscriptionNames) -> str:
    """State how typical its causes are of the failures, and what changed right before them."""
    causes = [
        f"{cause_name(cause, names)} ({percent_text(cause['inside'])} of these failures, "
        f"{percent_text(cause['outside'])} elsewhere)"
        for cause in outage.causes[:_MAX_CAUSES]
    ]
    text = (
        f"In common: {join_list(causes)}."
        if causes
        else "The failures have nothing specific in common."
    )
    changes = [
        f"{change['attribute'].replace('_', ' ')} {change['value']} at {change['at']:%H:%M:%S}"
        for change in outage.changes[:_MAX_CAUSES]
    ]
    if changes:
        text += f" First used right before it: {join_list(changes)}."
    return text


def cause_name(cause: Row, names: SubscriptionNames) -> str:
    """Return the attribute of a cause with its value; a room by its name, where it is known."""
    attribute, value = cause["attribute"], cause["value"]
    if attribute == "room_id":
        return f"room {names.rooms.get(value, value)}"
    return f"{_ATTRIBUTES.get(attribute, attribute.replace('_', ' '))} {value}"


def cofailure_caption(names: SubscriptionNames) -> str:
    """Name the pair that shares most bad minutes."""
    if not names.pairs:
        return "No two subscriptions had bad minutes together."
    significant = sum(bool(pair["significant"]) for pair in names.pairs)
    best = max(names.pairs, key=lambda pair: (pair["jaccard"], pair["bad_both"]))
    pair = join_list([names.label(best[side]) for side in ("first_id", "second_id")])
    text = (
        "Each number is the share of bad minutes in common, in percent. "
        "In a bad minute at least two attempts, and half of all, fail. "
        f"{pair} share most, "
        f"{best['bad_both']:,} of {best['bad_first'] + best['bad_second'] - best['bad_both']:,}."
    )
    if significant:
        return (
            f"{text} A frame marks pairs that chance does not explain "
            f"({significant:,} of {len(names.pairs):,})."
        )
    return (
        f"{text} The log is too short to distinguish any of these {len(names.pairs):,} pairs from "
        "chance. Incidents do not depend on these pairs."
    )


def success_caption(retries: Retries) -> str:
    """State the success rates of first attempts and retries."""
    if not retries.attempts:
        return "No webhook was called."
    first = retries.attempts[0]
    text = (
        f"{percent_text(first.share)} of "
        f"{count_text(first.attempts, 'first attempt', 'first attempts')} succeed"
    )
    later = [step for step in retries.attempts[1:] if step.attempts >= _MIN_ATTEMPTS]
    if not later:
        return f"{text}; there were almost no retries."
    best, worst = max(later, key=lambda one: one.share), min(later, key=lambda one: one.share)
    text += f"; the most successful retry is number {best.attempt} ({percent_text(best.share)})"
    if worst is not best:
        text += f", the least successful number {worst.attempt} ({percent_text(worst.share)})"
    return f"{text}. Each bar shows the number of attempts and the 95 % interval of its rate."


def advice_caption(advice: Row, names: SubscriptionNames) -> str:
    """Compare the deployed retry policy with the recommended one, with its intervals."""
    text = (
        f"{names.label(advice['subscription_id'])}: now {_policy(advice, 'deployed')}: "
        f"{percent_text(advice['measured_delivered'])} delivered with "
        f"{advice['measured_attempts']:.2f} attempts each."
    )
    if advice["recommended_delivered"] is None:
        return f"{text} There is no recommendation."
    text += (
        f" Recommended: {_policy(advice, 'recommended')}. It would deliver {_promise(advice)}, "
        f"with {advice['recommended_attempts']:.2f} attempts and a mean wait of "
        f"{seconds_text(advice['recommended_mean_wait_s'])}."
    )
    tested = {
        None: "",
        True: " The later part of the log confirms this.",
        False: " The later part of the log does not confirm this: do not apply it.",
    }
    return f"{text}{tested[advice['held_up']]}"


def _promise(advice: Row) -> str:
    share = percent_text(advice["recommended_delivered"])
    low, high = (advice.get(f"recommended_delivered_{end}") for end in ("low", "high"))
    if low is None or high is None:
        return share
    between = percent_range_text(low, high)
    return share if between == share else f"{share} ({between} in nine of ten periods)"


def _policy(advice: Row, prefix: str) -> str:
    return policy_text(
        advice[f"{prefix}_delay_ms"],
        advice[f"{prefix}_multiplier"],
        advice[f"{prefix}_redeliveries"],
        advice.get(f"{prefix}_max_delay_ms"),
    )
