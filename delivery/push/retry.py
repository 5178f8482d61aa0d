"""Decide what follows from a failed attempt: retry, sideline, drop or expire."""

import math
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Final

from rooms.domain.attempt import AttemptResult
from rooms.domain.retry_policy import Drop, Expire, Retry, RetryDecision, RetryPolicy, Sideline
from rooms.domain.state_machine import Reason

HTTP_GONE: Final = 410
RETRY_AFTER_CAP_MS: Final = 3_600_000
"""The longest wait that `Retry-After` can set if the policy has no cap."""
MAX_DELAY_MS: Final = 10 * 365 * 86_400_000
"""Ten years: the longest wait, because `multiplier ^ n` can exceed what a timestamp can hold."""


def backoff_ms(policy: RetryPolicy, redelivery: int) -> int:
    """Return `delay * multiplier ^ redelivery` in milliseconds, no longer than the policy's cap.

    `redelivery` counts from 0.
    """
    try:
        wait = policy.delay_ms * policy.multiplier**redelivery
    except OverflowError:
        wait = MAX_DELAY_MS if policy.delay_ms else 0
    return round(min(wait, _max_delay_ms(policy)))


def _max_delay_ms(policy: RetryPolicy) -> int:
    return MAX_DELAY_MS if policy.max_delay_ms is None else min(policy.max_delay_ms, MAX_DELAY_MS)


def retry_after_ms(header: str | None, now_ms: int) -> int | None:
    """Return the milliseconds that a `Retry-After` header asks for; None if it is not valid.

    The header holds seconds or an HTTP date (RFC 9110).
    """
    if header is None:
        return None
    text = header.strip()
    if text.isascii() and text.isdigit():
        return min(int(text.lstrip("0")[:10] or "0") * 1000, MAX_DELAY_MS)
    try:
        at = parsedate_to_datetime(text)
    except (ValueError, OverflowError):
        return None
    if at.tzinfo is None:
        at = at.replace(tzinfo=UTC)  # "-0000": the endpoint does not state its zone
    return max(0, round(at.timestamp() * 1000) - now_ms)


def decide_retry(
    result: AttemptResult,
    attempt: int,
    policy: RetryPolicy,
    *,
    now_ms: int,
    left_ms: float = math.inf,
    random: float = 0.5,
) -> RetryDecision:
    """Return what to do after attempt number `attempt` failed (0: the first one).

    Statuses decide before counts: an ignorable one drops, a terminal one (410 always) sidelines at
    once. No retry is made that would be due at or after the expiry, in `left_ms`. `now_ms`: the
    time of day, for a Retry-After with a date. `random`, from 0 to 1, is the jitter's random
    number; 0.5 leaves the formula exact.
    """
    status = result.status
    if status is not None:
        if status in policy.ignorable_statuses and status != HTTP_GONE:
            return Drop()
        if status == HTTP_GONE or status in policy.terminal_statuses:
            return Sideline(reason=Reason.TERMINAL_STATUS, disable_endpoint=status == HTTP_GONE)
    if attempt >= policy.attempts:
        return Sideline(reason=Reason.ATTEMPTS_EXHAUSTED)
    wait = backoff_ms(policy, attempt)
    if policy.jitter:
        wait = min(round(wait * (1 + policy.jitter * (2 * random - 1))), _max_delay_ms(policy))
    asked = retry_after_ms(result.retry_after, now_ms)
    if asked is not None:
        cap = RETRY_AFTER_CAP_MS if policy.max_delay_ms is None else policy.max_delay_ms
        wait = max(wait, min(asked, cap))
    if wait >= left_ms:
        return Expire()
    return Retry(attempt=attempt + 1, delay_ms=wait)
