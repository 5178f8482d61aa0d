"""Describe each chart of the report in one or two sentences."""

from datetime import datetime
from typing import Final

from delivery.analytics.report.charts import duration_text
from delivery.analytics.report.data import (
    LOST,
    OPEN,
    OUTCOMES,
    RETRIED,
    SIDELINED,
    History,
    Retries,
    Row,
    SubscriptionNames,
)
from delivery.analytics.results.reader import Reconciliation

_MAX_NAMES: Final = 4
"""Names that fit into a sentence."""
_MAX_INCIDENTS: Final = 10
"""Incidents that are described."""
_MIN_ATTEMPTS: Final = 10
"""Attempts from which the success rate of a retry is mentioned."""
_MINUTE_S: Final = 60
_HOUR_S: Final = 3600
_DAY_S: Final = 86_400


def reconciliation_caption(reconciliation: Reconciliation) -> str:
    """State whether any delivery is lost."""
    if reconciliation.is_balanced:
        return (
            "Nothing is lost: every expected delivery exists, and the outcome of each one is known."
        )
    wrong = [
        (reconciliation.lost, "lost"),
        (reconciliation.log_rows_missing, "log rows missing"),
        (reconciliation.unexplained, "without a start, or unexplained"),
    ]
    found = ", ".join(f"{count:,} {what}" for count, what in wrong if count)
    return f"The totals do not match: {found}."


def history_caption(history: History) -> str:
    """Summarise deliveries by outcome."""
    total = history.total()
    if not total:
        return "There were no deliveries."
    parts = [
        f"{_percent_text(history.total(outcome) / total)} {outcome}"
        for outcome in OUTCOMES
        if history.total(outcome)
    ]
    text = (
        f"{_count_text(total, 'delivery', 'deliveries')} by time of publish, "
        f"{duration_text(history.step_s)} a bar: {_join_list(parts)}."
    )
    late = max(
        history.buckets, key=lambda bucket: bucket.outcomes[RETRIED] + bucket.outcomes[SIDELINED]
    )
    if worst := late.outcomes[RETRIED] + late.outcomes[SIDELINED]:
        text += (
            f" Most retries and sidelined deliveries are among those published at "
            f"{_bucket_text(late.at, history)}: {worst:,} of {sum(late.outcomes.values()):,}."
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
        f"{_seconds_text(usual[len(usual) // 2])}. The 99th percentile was highest for messages "
        f"published at {_bucket_text(worst.at, history)}: {_seconds_text(worst.latency_s['p99'])}."
    )


def timeline_caption(names: SubscriptionNames) -> str:
    """Count the incidents by kind."""
    shared, others = names.shared_incidents(), len(names.incidents)
    if not others:
        return "There were no incidents."
    chronic = sum(incident["kind"] == "chronic" for incident in names.incidents)
    single = others - len(shared) - chronic
    parts = [
        _count_text(count, one, several)
        for count, one, several in (
            (len(shared), "shared incident", "shared incidents"),
            (
                single,
                "incident of a single subscription",
                "incidents of single subscriptions",
            ),
            (
                chronic,
                "subscription that fails most of the time",
                "subscriptions that fail most of the time",
            ),
        )
        if count
    ]
    text = _join_list(parts)
    hidden = len({one for row in names.incidents for one in row["subscriptions"]}) - len(
        names.in_incidents()
    )
    return f"{text}." + (f" {hidden} more subscriptions are not shown." if hidden > 0 else "")


def incident_captions(names: SubscriptionNames) -> list[str]:
    """Describe the worst incidents, those of several subscriptions first."""
    ranked = sorted(
        names.incidents, key=lambda row: (row["kind"] != "shared", -row["failures"], row["began"])
    )
    chosen = sorted(ranked[:_MAX_INCIDENTS], key=lambda row: (row["began"], row["incident"]))
    more = len(ranked) - len(chosen)
    return [incident_caption(row, names) for row in chosen] + (
        [f"{more} more: `rooms incidents` lists all."] if more else []
    )


def incident_caption(incident: Row, subscriptions: SubscriptionNames) -> str:
    """Name the subscriptions that failed, when, and what their failures have in common."""
    names = [subscriptions.subscribers[one].name for one in incident["subscriptions"]]
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES + 1 else ""
    failing = ", ".join(names[:_MAX_NAMES]) + more if more else _join_list(names)
    began, ended = incident["began"], incident["ended"]
    until = f"{ended:%H:%M}" if ended.date() == began.date() else f"{ended:%Y-%m-%d %H:%M}"
    until = f"{until} UTC" + (", and still does" if incident.get("open") else "")
    failed = (
        "fails repeatedly"
        if incident["kind"] == "chronic"
        else "failed together"
        if len(names) > 1
        else "failed"
    )
    text = (
        f"{failing} {failed} from {began:%Y-%m-%d %H:%M} to {until}: "
        f"{incident['failures']:,} of {_count_text(incident['attempts'], 'attempt', 'attempts')}."
    )
    causes = [
        f"{cause['attribute'].replace('_', ' ')} {cause['value']} "
        f"({_percent_text(cause['inside'])} of these failures, "
        f"{_percent_text(cause['outside'])} elsewhere)"
        for cause in (incident["causes"] or ())[:2]
    ]
    return (
        f"{text} In common: {_join_list(causes)}."
        if causes
        else f"{text} They have nothing specific in common."
    )


def cofailure_caption(names: SubscriptionNames) -> str:
    """Name the pair that shares most bad minutes."""
    if not names.pairs:
        return "No two subscriptions had bad minutes together."
    significant = sum(bool(pair["significant"]) for pair in names.pairs)
    best = max(names.pairs, key=lambda pair: (pair["jaccard"], pair["bad_both"]))
    pair = _join_list([names.subscribers[best[side]].name for side in ("first_id", "second_id")])
    text = (
        "Darker red: a larger share of bad minutes in common. "
        "In a bad minute at least two attempts, and half of all, fail. "
        f"{pair} share most, "
        f"{best['bad_both']} of {best['bad_first'] + best['bad_second'] - best['bad_both']}."
    )
    if significant:
        return f"{text} A dot marks significant pairs ({significant} of {len(names.pairs)})."
    return (
        f"{text} The log is too short to distinguish any of these {len(names.pairs)} pairs from "
        "chance. Incidents do not depend on these pairs."
    )


def success_caption(retries: Retries) -> str:
    """State the success rates of first attempts and retries."""
    if not retries.attempts:
        return "No webhook was called."
    first = retries.attempts[0]
    text = (
        f"{_percent_text(first.share)} of "
        f"{_count_text(first.attempts, 'first attempt', 'first attempts')} succeed"
    )
    later = [step for step in retries.attempts[1:] if step.attempts >= _MIN_ATTEMPTS]
    if not later:
        return f"{text}; there were almost no retries."
    best, worst = max(later, key=lambda one: one.share), min(later, key=lambda one: one.share)
    text += f"; the most successful retry is number {best.attempt} ({_percent_text(best.share)})"
    if worst is not best:
        text += f", the least successful number {worst.attempt} ({_percent_text(worst.share)})"
    return f"{text}. Each bar shows the number of attempts and the 95 % interval of its rate."


def advice_caption(advice: Row, names: SubscriptionNames) -> str:
    """Compare the deployed retry policy with the recommended one."""
    name = (
        names.subscribers[advice["subscription_id"]].label
        if advice["subscription_id"] in names.subscribers
        else "This subscription"
    )
    now = (
        f"{name}: {_policy_text(advice, 'deployed')} delivered "
        f"{advice['measured_delivered']:.1%} with {advice['measured_attempts']:.2f} attempts each"
    )
    if advice["recommended_delivered"] is None:
        return f"{now}; there is no recommendation."
    better = (
        f"{_policy_text(advice, 'recommended')} would deliver "
        f"{advice['recommended_delivered']:.1%} with "
        f"{advice['recommended_attempts']:.2f} attempts and a mean wait of "
        f"{_seconds_text(advice['recommended_mean_wait_s'])}"
    )
    tested = {
        None: "",
        True: " The later part of the log confirms this.",
        False: " The later part of the log does not confirm this.",
    }
    front = "Each point is a policy that no other policy beats."
    return f"{now}; {better}. {front}{tested[advice['held_up']]}"


def _policy_text(advice: Row, prefix: str) -> str:
    count = advice[f"{prefix}_redeliveries"]
    if not count:
        return "no retries"
    return (
        f"{_count_text(count, 'retry', 'retries')}, first after "
        f"{_seconds_text(advice[f'{prefix}_delay_ms'] / 1e3)}, "
        f"each wait {advice[f'{prefix}_multiplier']:g} times the last,"
    )


def _count_text(count: int, one: str, several: str) -> str:
    return f"{count:,} {one if count == 1 else several}"


def _percent_text(share: float) -> str:
    tenths = round(share * 1000)
    if tenths % 1000 == 0 and share not in {0.0, 1.0}:
        return "over 99.9 %" if tenths else "under 0.1 %"
    whole = tenths % 1000 == 0 or 100 <= tenths < 995  # noqa: PLR2004 - tenths matter below 10 % and above 99.5 %
    return f"{share:.0%}".replace("%", " %") if whole else f"{share:.1%}".replace("%", " %")


def _seconds_text(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 2 * _MINUTE_S:
        return f"{seconds:.3g} s"
    return (
        f"{seconds / _MINUTE_S:.0f} min" if seconds < 2 * _HOUR_S else f"{seconds / _HOUR_S:.1f} h"
    )


def _bucket_text(at: datetime, history: History) -> str:
    if history.step_s >= _DAY_S:
        return f"{at:%Y-%m-%d}"
    return f"{at:%H:%M:%S}" if history.step_s < _MINUTE_S else f"{at:%Y-%m-%d %H:%M}"


def _join_list(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
