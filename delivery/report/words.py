"""Words: what is seen in each chart, said in a sentence or two."""

from datetime import datetime
from typing import Final

from delivery.findings.books import Books
from delivery.report.charts import span
from delivery.report.company import Company, Row
from delivery.report.history import ASIDE, FATES, LOST, OPEN, RETRIED, History
from delivery.report.retries import Retries

_SHOWN: Final = 4
"""Names that a sentence has room for."""
_SENTENCES: Final = 10
"""Incidents that are told in words."""
_TELLING: Final = 10
"""Attempts from which a retry's share is worth a word."""
_MINUTE_S: Final = 60
_HOUR_S: Final = 3600
_DAY_S: Final = 86_400


def of_books(books: Books) -> str:
    """Whether anything is lost."""
    if books.closed:
        return "Nothing is lost: every delivery that was to be made is there, and what became of it is known."
    wrong = [
        (books.lost, "lost"),
        (books.log_rows_missing, "rows of the log missing"),
        (books.doubtful, "without a beginning, or left over"),
    ]
    return f"The books do not close: {', '.join(f'{count:,} {what}' for count, what in wrong if count)}."


def of_history(told: History) -> str:
    """How many went well, and how."""
    total = told.total()
    if not total:
        return "There were no deliveries."
    parts = [f"{_percent(told.total(fate) / total)} {fate}" for fate in FATES if told.total(fate)]
    text = f"{_many(total, 'delivery', 'deliveries')} by the time of their publish, {span(told.step_s)} a bar: {_listed(parts)}."
    late = max(told.moments, key=lambda moment: moment.fates[RETRIED] + moment.fates[ASIDE])
    if worst := late.fates[RETRIED] + late.fates[ASIDE]:
        text += f" Most needed more than one attempt among those published at {_clock(late.at, told)}: {worst:,} of {sum(late.fates.values()):,}."
    if told.total(LOST):
        text += f" {told.total(LOST):,} are lost."
    return text if not told.total(OPEN) else f"{text} {told.total(OPEN):,} are not over yet."


def of_latency(told: History) -> str:
    """What most waited, and the worst."""
    worst = told.worst("p99")
    if worst is None:
        return "Nothing was delivered."
    usual = sorted(moment.took_s["p50"] for moment in told.moments if "p50" in moment.took_s)
    return (
        f"From publish to delivery, retries included: in half of the time half of the deliveries took no more than {_seconds(usual[len(usual) // 2])}. "
        f"The slowest hundredth was worst for what was published at {_clock(worst.at, told)}: {_seconds(worst.took_s['p99'])} and more."
    )


def of_timeline(told: Company) -> str:
    """How many incidents there were."""
    shared, others = told.shared(), len(told.incidents)
    if not others:
        return "Nothing failed for long, neither together nor alone."
    chronic = sum(incident["kind"] == "chronic" for incident in told.incidents)
    alone = others - len(shared) - chronic
    parts = [f"{len(shared)} times several subscriptions failed together"] if shared else []
    parts += [f"{alone} times one failed alone"] if alone else []
    parts += [f"{chronic} fail most of the time"] if chronic else []
    text = _listed(parts)
    hidden = len({one for row in told.incidents for one in row["subscriptions"]}) - len(told.failing())
    return f"{text[0].upper()}{text[1:]}." + (f" {hidden} more subscriptions are not drawn." if hidden > 0 else "")


def of_incidents(told: Company) -> list[str]:
    """A sentence for each of the worst, those of several subscriptions first."""
    ranked = sorted(told.incidents, key=lambda row: (row["kind"] != "shared", -row["failures"], row["began"]))
    chosen = sorted(ranked[:_SENTENCES], key=lambda row: (row["began"], row["incident"]))
    more = len(ranked) - len(chosen)
    return [of_incident(row, told) for row in chosen] + (
        [f"{more} more: `rooms incidents` lists them all."] if more else []
    )


def of_incident(incident: Row, told: Company) -> str:
    """Who failed when, and what it has in common."""
    names = [told.subscribers[one].name for one in incident["subscriptions"]]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN + 1 else ""
    who = ", ".join(names[:_SHOWN]) + more if more else _listed(names)
    began, ended = incident["began"], incident["ended"]
    until = f"{ended:%H:%M}" if ended.date() == began.date() else f"{ended:%Y-%m-%d %H:%M}"
    failed = (
        "fails again and again" if incident["kind"] == "chronic" else "failed together" if len(names) > 1 else "failed"
    )
    text = (
        f"{who} {failed} from {began:%Y-%m-%d %H:%M} to {until} UTC: "
        f"{incident['failures']:,} of {_many(incident['attempts'], 'attempt', 'attempts')}."
    )
    causes = [
        f"{cause['attribute'].replace('_', ' ')} {cause['value']} ({_percent(cause['inside'])} of these failures, {_percent(cause['outside'])} elsewhere)"
        for cause in sorted(incident["causes"] or (), key=lambda cause: (-round(cause["inside"], 2), -cause["z"]))[:2]
    ]
    return (
        f"{text} In common: {_listed(causes)}."
        if causes
        else f"{text} They have nothing in common that others have not."
    )


def of_heat(told: Company) -> str:
    """Which pairs share most."""
    if not told.pairs:
        return "No two subscriptions had bad minutes together."
    sure = sum(bool(pair["significant"]) for pair in told.pairs)
    best = max(told.pairs, key=lambda pair: (pair["jaccard"], pair["bad_both"]))
    pair = _listed([told.subscribers[best[side]].name for side in ("first_id", "second_id")])
    text = (
        f"The redder, the more of their bad minutes (half of the attempts fail, two at least) two subscriptions share; {pair} share most, "
        f"{best['bad_both']} of {best['bad_first'] + best['bad_second'] - best['bad_both']}."
    )
    if sure:
        return f"{text} A dot: more than chance explains ({sure} of {len(told.pairs)} pairs)."
    return f"{text} The log is too short to tell any of these {len(told.pairs)} pairs from chance; the incidents go by minutes."


def of_hazard(told: Retries) -> str:
    """What a retry is worth."""
    if not told.steps:
        return "No webhook was called."
    first = told.steps[0]
    text = f"{_percent(first.share)} of {_many(first.attempts, 'first try', 'first tries')} succeed"
    later = [step for step in told.steps[1:] if step.attempts >= _TELLING]
    if not later:
        return f"{text}; there were hardly any retries."
    best, worst = max(later, key=lambda one: one.share), min(later, key=lambda one: one.share)
    text += f"; of retries the best is number {best.attempt} ({_percent(best.share)})"
    if worst is not best:
        text += f", the least worth number {worst.attempt} ({_percent(worst.share)})"
    return f"{text}. Above each bar the number of attempts; the line is the range in which the true share lies (95 %)."


def of_front(advice: Row, told: Company) -> str:
    """What is set, what would be better, and what that would change."""
    name = told.subscribers[advice["subscription_id"]].label if advice["subscription_id"] in told.subscribers else "It"
    now = f"{name}: {_policy(advice, 'deployed')} delivered {advice['measured_delivered']:.1%} with {advice['measured_attempts']:.2f} attempts each"
    if advice["recommended_delivered"] is None:
        return f"{now}; nothing else is recommended."
    better = (
        f"{_policy(advice, 'recommended')} would deliver {advice['recommended_delivered']:.1%} with {advice['recommended_attempts']:.2f} attempts "
        f"and a mean wait of {_seconds(advice['recommended_mean_wait_s'])}"
    )
    tested = {
        None: "",
        True: " On the later part of the log the choice held up.",
        False: " On the later part of the log the choice did not hold up.",
    }
    return f"{now}; {better}. Each point is a policy that no other one beats.{tested[advice['held_up']]}"


def _policy(advice: Row, prefix: str) -> str:
    count = advice[f"{prefix}_redeliveries"]
    if not count:
        return "no retries"
    return f"{_many(count, 'retry', 'retries')}, first after {_seconds(advice[f'{prefix}_delay_ms'] / 1e3)}, each wait {advice[f'{prefix}_multiplier']:g} times the last,"


def _many(count: int, one: str, several: str) -> str:
    return f"{count:,} {one if count == 1 else several}"


def _percent(share: float) -> str:
    tenths = round(share * 1000)
    if tenths % 1000 == 0 and share not in {0.0, 1.0}:
        return "over 99.9 %" if tenths else "under 0.1 %"
    whole = tenths % 1000 == 0 or 100 <= tenths < 995  # noqa: PLR2004 - from 10 to 99.5 % nobody needs tenths
    return f"{share:.0%}".replace("%", " %") if whole else f"{share:.1%}".replace("%", " %")


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 2 * _MINUTE_S:
        return f"{seconds:.3g} s"
    return f"{seconds / _MINUTE_S:.0f} min" if seconds < 2 * _HOUR_S else f"{seconds / _HOUR_S:.1f} h"


def _clock(at: datetime, told: History) -> str:
    if told.step_s >= _DAY_S:
        return f"{at:%Y-%m-%d}"
    return f"{at:%H:%M:%S}" if told.step_s < _MINUTE_S else f"{at:%Y-%m-%d %H:%M}"


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
