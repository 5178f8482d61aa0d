"""What follows from a failed attempt: one pure function over rows A1 and A3 to A8."""

from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Final

from rooms.domain.attempt import Answer
from rooms.domain.policy import Decision, Drop, Expire, Retry, RetryPolicy, Sideline
from rooms.domain.states import Reason

GONE: Final = 410
RETRY_AFTER_CAP_MS: Final = 3_600_000
"""What a `Retry-After` may ask for at most where the policy has no cap of its own."""
LONGEST_MS: Final = 10 * 365 * 86_400_000
"""Ten years: where `multiplier ^ n` grows past what a timestamp can hold, the wait ends here."""


def backoff_ms(policy: RetryPolicy, redelivery: int) -> int:
    """`T(n) = delay * multiplier ^ n` in milliseconds for n = `redelivery` from 0, no longer than the policy's cap."""
    try:
        wait = policy.delay_ms * policy.multiplier**redelivery
    except OverflowError:
        wait = LONGEST_MS if policy.delay_ms else 0
    return round(min(wait, _longest_ms(policy)))


def _longest_ms(policy: RetryPolicy) -> int:
    return LONGEST_MS if policy.max_delay_ms is None else min(policy.max_delay_ms, LONGEST_MS)


def retry_after_ms(header: str | None, now_ms: int) -> int | None:
    """How long a `Retry-After` (seconds or an HTTP date, RFC 9110) asks to wait; None where it says nothing usable."""
    if header is None:
        return None
    text = header.strip()
    if text.isascii() and text.isdigit():
        return min(int(text.lstrip("0")[:10] or "0") * 1000, LONGEST_MS)
    try:
        at = parsedate_to_datetime(text)
    except (ValueError, OverflowError):
        return None
    if at.tzinfo is None:
        at = at.replace(tzinfo=UTC)  # "-0000": a zone that the endpoint does not tell
    return max(0, round(at.timestamp() * 1000) - now_ms)


def decide(
    failure: Answer, attempt: int, policy: RetryPolicy, *, now_ms: int, expires_ms: int | None, draw: float = 0.5
) -> Decision:
    """What to do after attempt number `attempt` (0: the first try) failed.

    `draw`, from 0 to 1, is the jitter's random number; 0.5 leaves the formula exact. Statuses decide before counts:
    an ignorable one drops, a terminal one (410 always) sidelines at once. A retry that would come due at or after the
    expiry is not made.
    """
    status = failure.status
    if status is not None:
        if status in policy.ignorable_statuses and status != GONE:
            return Drop()
        if status == GONE or status in policy.terminal_statuses:
            return Sideline(reason=Reason.TERMINAL_STATUS, disable_endpoint=status == GONE)
    if attempt >= policy.attempts:
        return Sideline(reason=Reason.ATTEMPTS_EXHAUSTED)
    wait = backoff_ms(policy, attempt)
    if policy.jitter:
        wait = min(round(wait * (1 + policy.jitter * (2 * draw - 1))), _longest_ms(policy))
    asked = retry_after_ms(failure.retry_after, now_ms)
    if asked is not None:
        cap = RETRY_AFTER_CAP_MS if policy.max_delay_ms is None else policy.max_delay_ms
        wait = max(wait, min(asked, cap))
    if expires_ms is not None and now_ms + wait >= expires_ms:
        return Expire()
    return Retry(attempt=attempt + 1, delay_ms=wait)
