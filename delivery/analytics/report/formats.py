"""Write numbers, shares, durations and times as people do: 1,234; 99.2 %; 3 min 20 s."""

import math
from collections.abc import Sequence
from datetime import datetime
from typing import Final

_MINUTE_S: Final = 60
_UNITS: Final = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def count_text(count: int, one: str, several: str) -> str:
    """Return a count with its noun."""
    return f"{count:,} {one if count == 1 else several}"


def percent_text(share: float) -> str:
    """Return a share as percent, with a tenth where it matters: below 10 % and above 90 %."""
    tenths = round(share * 1000)
    if tenths % 1000 == 0 and share not in {0.0, 1.0}:
        return "over 99.9 %" if tenths else "under 0.1 %"
    whole = tenths % 1000 == 0 or 100 <= tenths <= 900  # noqa: PLR2004 - as above
    return f"{share:.0%}".replace("%", " %") if whole else f"{share:.1%}".replace("%", " %")


def percent_range_text(low: float, high: float) -> str:
    """Return an interval of a share."""
    first, last = percent_text(low), percent_text(high)
    return first if first == last else f"{first.removesuffix(' %')} to {last}"


def seconds_text(seconds: float) -> str:
    """Return a duration in its two largest units."""
    if seconds < 0.9995:  # noqa: PLR2004 - a second, after rounding
        return "0 s" if seconds <= 0 else f"{seconds * 1000:.0f} ms"
    if seconds < 10:  # noqa: PLR2004 - tenths matter below ten seconds
        return f"{seconds:.1f} s".replace(".0 s", " s")
    parts: list[str] = []
    rest = round(seconds)
    for length, unit in _UNITS:
        count, rest = divmod(rest, length)
        if count:
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2])


def age_text(at: datetime, now: datetime) -> str:
    """Return how long ago a time was, in whole minutes from ten on."""
    seconds = max((now - at).total_seconds(), 1.0)
    if seconds >= 10 * _MINUTE_S:
        seconds -= seconds % _MINUTE_S
    return f"{seconds_text(seconds)} ago"


def time_text(at: datetime) -> str:
    """Return a time to the minute, UTC."""
    return f"{at:%Y-%m-%d %H:%M}"


def span_text(began: datetime, ended: datetime) -> str:
    """Return from when to when, without repeating the day."""
    until = f"{ended:%H:%M}" if ended.date() == began.date() else time_text(ended)
    return f"{time_text(began)} to {until}"


def range_text(low: datetime, high: datetime, at: datetime) -> str:
    """Return an interval to the second; with its days, if one is not the day of `at`."""
    clock = "%H:%M:%S" if low.date() == high.date() == at.date() else "%Y-%m-%d %H:%M:%S"
    return f"{low:{clock}} and {high:{clock}}"


def bucket_text(at: datetime, step_s: int) -> str:
    """Return a time bucket, as exact as its length."""
    if step_s >= 86_400:  # noqa: PLR2004 - a day
        return f"{at:%Y-%m-%d}"
    return f"{at:%H:%M:%S}" if step_s < _MINUTE_S else time_text(at)


def step_text(seconds: int) -> str:
    """Return the length of a time bucket in words."""
    for unit, name in ((86_400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= unit:
            count = seconds // unit
            article = "an" if name == "hour" else "a"
            return f"{article} {name}" if count == 1 else f"{count} {name}s"
    return "a second" if seconds == 1 else f"{seconds} seconds"


def join_list(parts: Sequence[str]) -> str:
    """Return the parts as a list in a sentence."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def policy_text(delay_ms: float, multiplier: float, redeliveries: int, cap_ms: float | None) -> str:
    """Return a retry policy in words."""
    if not redeliveries:
        return "no retries"
    text = count_text(redeliveries, "retry", "retries")
    text += f", the first after {seconds_text(delay_ms / 1e3)}"
    if redeliveries > 1 and multiplier > 1:
        text += f", each wait {multiplier:g} times the last"
    try:
        longest = delay_ms * multiplier ** (redeliveries - 1)
    except OverflowError:  # a thousand retries are allowed, and a factor of a hundred
        longest = math.inf
    if cap_ms is not None and cap_ms < longest:
        text += f", at most {seconds_text(cap_ms / 1e3)}"
    return text
