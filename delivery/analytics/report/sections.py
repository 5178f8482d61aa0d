"""Write the sections of the report that are text: what fails now, the worst, each subscription."""

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from html import escape
from typing import Any, Final

from delivery.analytics.report import captions
from delivery.analytics.report.data import (
    MAX_SECTIONS,
    HourlyFailures,
    Row,
    Subscriber,
    SubscriptionNames,
)
from delivery.analytics.report.formats import (
    age_text,
    count_text,
    percent_text,
    range_text,
    seconds_text,
    span_text,
    step_text,
    time_text,
)
from delivery.analytics.report.live import MARKS, LiveStatus, utc_time
from delivery.analytics.report.outages import Outage, by_cost, problems
from rooms.domain.usage import COUNTERS, UsageRow
from rooms.safe_text import terminal_safe

_MAX_PROBLEMS: Final = 10
_MAX_TIMES: Final = 6
_MAX_NAMES: Final = 6
_MAX_NOW: Final = 50
_STRIP_HEIGHT: Final = 56
_BAR: Final = 7
_UNIT: Final = re.compile(r"(\d) (ms|s|min|h|d|%|UTC)(?![\w])")


def now_section(names: SubscriptionNames, live: LiveStatus | None, log_end: datetime | None) -> str:
    """Return what fails now, by the service; without one, what failed at the end of the log."""
    going_on = [outage for outage in names.outages if outage.is_open]
    if live is None:
        at = "" if log_end is None else f" ({time_text(log_end)} UTC)"
        note = (
            f"No service answered. This is how it was at the end of the log{at}, "
            "which may be long ago."
        )
        shown = "".join(_outage_html(outage, names) for outage in going_on)
        title = "What failed at the end of the log"
        nothing = "<p class='well'>✓ No outage went on when the log ended.</p>"
        return _section("now", title, f"<p class='soft'>{html_text(note)}</p>{shown or nothing}")
    failing = live.failing
    rest = live.total - len(live.troubled)
    note = (
        f"The service at {live.url} said so at {live.at:%Y-%m-%d %H:%M:%S} UTC, "
        "of the organisation of the key that was used."
    )
    body = f"<p class='soft'>{html_text(note)}</p>"
    if live.parts_down:
        body += f"<p class='wrong'>✕ Down: {html_text(', '.join(live.parts_down))}.</p>"
    if failing:
        body += _table(
            ("", "subscription", "since", "waits", "last error"),
            (_live_row(one, live, names) for one in failing[:_MAX_NOW]),
            "Subscriptions that fail now",
            stacked=True,
        )
    elif rest <= 0:
        body += "<p class='well'>✓ Every subscription is healthy.</p>"
    hidden = max(len(failing) - _MAX_NOW, 0) + max(rest, 0)
    if hidden:
        body += f"<p class='soft'>{hidden:,} more: <code>rooms status</code> lists them.</p>"
    if resting := live.resting:
        waiting = sum(one["sidelined"] for one in resting)
        said = (
            f"{count_text(len(resting), 'subscription works', 'subscriptions work')} again, with "
            f"{count_text(waiting, 'delivery', 'deliveries')} still in the sideline."
        )
        body += f"<p>○ {said}</p>"
    if going_on:
        body += "<h3>Outages that go on</h3>"
        body += "".join(_outage_html(outage, names) for outage in going_on)
    return _section("now", "What fails now", body)


def worst_section(outages: Sequence[Outage], names: SubscriptionNames) -> str:
    """Return the outages that are over, as problems, those that cost most first."""
    title = "The worst of the period"
    groups = problems(outages)
    if not groups:
        return _section("worst", title, "<p>There were no incidents that are over.</p>")
    most = max(sum(one.failures for one in group) for group in groups)
    shown = "".join(_problem_html(group, names, most) for group in groups[:_MAX_PROBLEMS])
    more = sum(map(len, groups[_MAX_PROBLEMS:]))
    rest = f"<p class='soft'>{more:,} more outages: <code>rooms incidents</code> lists all.</p>"
    order = (
        "By what they cost: deliveries that were late or sidelined, then failed attempts. "
        "Outages of the same subscriptions and cause are together. "
        "A bar compares failed attempts with those of the first."
    )
    return _section("worst", title, f"<p class='soft'>{order}</p>{shown}{rest if more > 0 else ''}")


def directory_section(names: SubscriptionNames) -> str:
    """Return the table of subscriptions, with a link to the section of each."""
    rows = (
        (
            _link(one),
            html_text(one.organisation or ""),
            html_text(one.host or ""),
            f"{one.attempts:,}",
            f"{one.failures:,}",
            percent_text(one.failures / one.attempts) if one.attempts else "",
        )
        for one in names.worst(MAX_SECTIONS)
    )
    heads = ("subscription", "organisation", "host", "attempts", "failed", "share")
    hidden = len(names.subscribers) - MAX_SECTIONS
    rest = (
        f"<p class='soft'>{hidden:,} more, with fewer failures: "
        "<code>rooms report --subscription ID</code> writes the page of one.</p>"
    )
    return _section(
        "subscriptions",
        "Subscriptions",
        _table(heads, rows, "Subscriptions, most failures first", numbers=3)
        + (rest if hidden > 0 else ""),
    )


def subscription_section(
    one: Subscriber,
    names: SubscriptionNames,
    hourly: HourlyFailures | None,
    advice: Row | None,
    *,
    back_link: bool,
) -> str:
    """Return all about one subscription."""
    facts = [
        ("id", f"<code>{html_text(one.id)}</code>"),
        ("room id", "" if one.room is None else str(one.room)),
        ("organisation", html_text(one.organisation or "")),
        ("host", html_text(one.host or "")),
        ("attempts", f"{one.attempts:,}"),
        (
            "failed",
            html_text(f"{one.failures:,} ({percent_text(one.failures / one.attempts)})")
            if one.attempts
            else "0",
        ),
    ]
    body = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in facts if value)
    body = f"<dl>{body}</dl>{_strip(one, hourly)}"
    outages = [outage for outage in names.outages if one.id in outage.subscriptions]
    if outages:
        ranked = [outage for outage in outages if outage.is_open] + by_cost(outages)
        items = "".join(
            f"<li>{_when(outage)}: {html_text(captions.cost_caption([outage]))}</li>"
            for outage in ranked[:_MAX_TIMES]
        )
        more = len(ranked) - _MAX_TIMES
        rest = f"<li>and {more:,} more</li>" if more > 0 else ""
        body += f"<h4>Outages, the worst first</h4><ul>{items}{rest}</ul>"
    if advice is not None:
        body += f"<h4>Retries</h4><p>{html_text(captions.advice_caption(advice, names))}</p>"
    if back_link:
        title = f"<h3><bdi>{html_text(one.label)}</bdi></h3>"
        body = f"{title}{body}<p class='up'><a href='#subscriptions'>All subscriptions</a></p>"
    return f"<section class='card' id='{escape(one.anchor)}'>{body}</section>"


def now_of_subscription(
    found: Mapping[str, Any] | None,
    live: LiveStatus | None,
    names: SubscriptionNames,
    identity: str,
) -> str:
    """Return the present state of one subscription, for a page of its own."""
    if live is None:
        return ""
    if found is None:
        said = f"✓ Healthy at {live.at:%Y-%m-%d %H:%M:%S} UTC, or not of the key's organisation."
        body = f"<p>{said}</p>"
    else:
        heads = ("", "subscription", "since", "waits", "last error")
        body = _table(heads, [_live_row(found, live, names)], f"State of {identity}", stacked=True)
    return _section("now", "Now", body)


def troubled_of(live: LiveStatus | None, identity: str) -> Mapping[str, Any] | None:
    """Return what the service says of a subscription; None if it is healthy."""
    found = live.troubled if live else ()
    return next((one for one in found if one["subscription_id"] == identity), None)


def ages_section(ages: Sequence[Mapping[str, Any]], names: SubscriptionNames) -> str:
    """Return the open deliveries, those that wait longest first; empty if there are none."""
    if not ages:
        return ""
    heads = ("outcome", "since, UTC", "room", "subscription", "oldest delivery", "deliveries")
    rows = (
        (
            html_text(row["outcome"].replace("_", " ")),
            "" if row["oldest_since"] is None else time_text(row["oldest_since"]),
            str(row["room_id"]),
            _subscription_link(row["subscription_id"], names),
            f"<code>{html_text(row['oldest_delivery_id'] or '')}</code>",
            f"{row['deliveries']:,}",
        )
        for row in ages
    )
    return _section(
        "ages",
        "Open deliveries, the oldest first",
        _table(heads, rows, "Open deliveries", numbers=1),
    )


def _subscription_link(identity: str | None, names: SubscriptionNames) -> str:
    found = None if identity is None else names.subscribers.get(identity)
    return html_text(identity or "") if found is None else _link(found)


def usage_section(usage: Sequence[UsageRow]) -> str:
    """Return the section of usage; empty if there is none."""
    if not usage:
        return ""
    counters = (name.replace("_", " ") for name in COUNTERS)
    heads = ("organisation", "", "application", "room", "", *counters)
    rows = (
        (
            html_text(row.organisation_name or ""),
            html_text(row.organisation_id or ""),
            html_text(row.application or ""),
            html_text(row.room_name or ""),
            str(row.room_id or ""),
            *(f"{row.counts[name]:,}" for name in COUNTERS),
        )
        for row in usage
    )
    return _section(
        "usage",
        f"Usage since {usage[0].start:%Y-%m-%d}",
        _table(heads, rows, "Usage", numbers=len(COUNTERS)),
    )


def _live_row(
    one: Mapping[str, Any], live: LiveStatus, names: SubscriptionNames
) -> tuple[str, ...]:
    identity, condition = one["subscription_id"], one["condition"]
    since = utc_time(one["since"])
    waits = [
        count_text(count, what, what)
        for what, count in (
            ("due", one["due"]),
            ("retried", one["retrying"]),
            ("held", sum(one["held"].values())),
            ("sidelined", one["sidelined"]),
        )
        if count
    ]
    known = names.subscribers.get(identity)
    label = f"<bdi>{html_text(one['room'])}/{html_text(one['name'])}</bdi>"
    mark = f"{MARKS.get(condition, '▲')} {condition.replace('_', ' ')}"
    return (
        f"<span class='mark {'wrong' if MARKS.get(condition) == '✕' else ''}'>{mark}</span>",
        label
        if known is None or not known.has_section
        else f"<a href='#{escape(known.anchor)}'>{label}</a>",
        html_text(f"{time_text(since)}, {age_text(since, live.at)}"),
        ", ".join(waits) or "-",
        html_text(one["last_error"] or "-"),
    )


def _outage_html(outage: Outage, names: SubscriptionNames) -> str:
    """Return the card of an outage that goes on."""
    before = ""
    if outage.earlier:
        before = f" It has happened {count_text(outage.earlier, 'time', 'times')} before."
    return (
        f"<article class='card' id='{outage.anchor}'><h3>{_title([outage], names)}</h3>"
        f"<p><b>{_when(outage)}</b></p><p>{_who(outage, names)}</p>"
        f"<p>{html_text(captions.cost_caption([outage]) + before)}</p>"
        f"<p class='soft'>{html_text(captions.causes_caption(outage, names))}</p></article>"
    )


def _problem_html(group: Sequence[Outage], names: SubscriptionNames, most: int) -> str:
    """Return the card of outages that are over and one problem, the worst of them first."""
    worst = group[0]
    share = max(100 * sum(one.failures for one in group) / max(most, 1), 1)
    times = f"<p><b>{_when(worst)}</b></p>"
    if len(group) > 1:
        shown = sorted(group[:_MAX_TIMES], key=lambda one: one.began)
        more = len(group) - len(shown)
        rest = f"<li>and {more:,} more</li>" if more > 0 else ""
        times = f"<ul class='times'>{''.join(f'<li>{_when(one)}</li>' for one in shown)}{rest}</ul>"
    return (
        f"<article class='card' id='{worst.anchor}'><h3>{_title(group, names)}</h3>"
        f"<div class='meter' style='width:{share:.1f}%'></div>"
        f"<p>{html_text(captions.cost_caption(group))} {_who(worst, names)}</p>{times}"
        f"<p class='soft'>{html_text(captions.causes_caption(worst, names))}</p></article>"
    )


def _title(group: Sequence[Outage], names: SubscriptionNames) -> str:
    """Return what failed, how often, and the cause."""
    outage = group[0]
    what = (
        names.label(outage.subscriptions[0])
        if len(outage.subscriptions) == 1
        else count_text(len(outage.subscriptions), "subscription", "subscriptions")
    )
    kinds = {"shared": "failed together", "chronic": "failing most of the time"}
    said = f"{what} {kinds.get(outage.kind, 'failed')}"
    if len(group) > 1:
        said += f", {len(group):,} times"
    if outage.causes:
        said += f": {captions.cause_name(outage.causes[0], names)}"
    return html_text(said)


def _who(outage: Outage, names: SubscriptionNames) -> str:
    shown = [names.subscribers[one] for one in outage.subscriptions[:_MAX_NAMES]]
    more = len(outage.subscriptions) - len(shown)
    return ", ".join(map(_link, shown)) + (f" and {more:,} more" if more > 0 else "")


def _when(outage: Outage) -> str:
    """Return the period of an outage, with its intervals where they say more."""
    if outage.is_open:
        text = f"since {time_text(outage.began)}, and goes on"
    elif outage.went_on:
        text = f"since {time_text(outage.began)}, and went on when the log ended"
    else:
        length = seconds_text((outage.ended - outage.began).total_seconds())
        text = f"{span_text(outage.began, outage.ended)}, {length}"
    ranges = [
        f"{what} between {range_text(*between, at)}"
        for what, at, between in (
            ("began", outage.began, outage.began_between),
            ("ended", outage.ended, outage.ended_between),
        )
        if between is not None and (between[1] - between[0]).total_seconds() >= 1
    ]
    said = f" <span class='soft'>({'; '.join(ranges)})</span>" if ranges else ""
    return f"{html_text(text)}{said}"


def _strip(one: Subscriber, hourly: HourlyFailures | None) -> str:
    """Return bars of attempts over time, with failed ones at the foot."""
    if hourly is None or one.id not in hourly.counts:
        return ""
    tried, failed = hourly.counts[one.id]
    most = int(tried.max(initial=0))
    if not most:
        return ""
    width = len(tried) * _BAR
    bars = []
    for place, (attempts, failures) in enumerate(zip(tried.tolist(), failed.tolist(), strict=True)):
        for count, kind in ((attempts, "well-bar"), (failures, "wrong-bar")):
            if count:
                height = max(round(_STRIP_HEIGHT * count / most, 1), 1.5)
                bars.append(
                    f"<rect class='{kind}' x='{place * _BAR}' y='{_STRIP_HEIGHT - height:g}' "
                    f"width='{_BAR - 1}' height='{height:g}'/>"
                )
    label = (
        f"Attempts {step_text(hourly.step_s)} a bar, from {time_text(hourly.began)} UTC; "
        f"the foot of a bar: failed. The highest bar is {most:,}."
    )
    return (
        f"<div class='chart'><svg class='strip' role='img' aria-label='{label}' "
        f"viewBox='0 0 {width} {_STRIP_HEIGHT}' width='{width}' height='{_STRIP_HEIGHT}'>"
        f"{''.join(bars)}</svg></div><p class='soft'>{label}</p>"
    )


def _link(one: Subscriber) -> str:
    return _linked(f"<bdi>{html_text(one.label)}</bdi>", one)


def _linked(label: str, one: Subscriber | None) -> str:
    """Return the label with a link to the section of the subscription, if it has one."""
    if one is None or not one.has_section:
        return label
    return f"<a href='#{escape(one.anchor)}'>{label}</a>"


def _section(anchor: str, title: str, body: str) -> str:
    return f"<section id='{anchor}'><h2>{html_text(title)}</h2>{body}</section>"


def _table(
    heads: Sequence[str],
    rows: Iterator[Sequence[str]] | Sequence[Sequence[str]],
    label: str,
    *,
    numbers: int = 0,
    stacked: bool = False,
) -> str:
    """Return a table of HTML cells; the last `numbers` columns are right-aligned.

    `stacked`: on a narrow screen the cells of a row are below each other.
    """
    first_number = len(heads) - numbers

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=num' if place >= first_number else ''} data-head='{heads[place]}'>"
            f"{cell}</{tag}>"
            for place, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return (
        f"<div class='scroll' tabindex='0' role='region' aria-label='{html_text(label)}'>"
        f"<table{' class=stacked' if stacked else ''}>"
        f"<thead><tr>{cells('th', heads)}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def html_text(value: str) -> str:
    """Return text escaped for HTML, with numbers that do not part from their units."""
    return _UNIT.sub(r"\1&nbsp;\2", escape(terminal_safe(value)))
