"""Draw when a delivery is attempted: by the rule that the workers follow."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from litestar import Response, get

from delivery.push.retry import decide_retry
from rooms.console.api_client import segment
from rooms.console.page import HOME, PageDep
from rooms.domain.attempt import AttemptResult
from rooms.domain.retry_policy import Retry, RetryPolicy

PATH: Final = f"{HOME}/retry-schedule"
MAX_DRAWN: Final = 100
"""So many attempts are drawn; a policy may have more."""
_FAILED: Final = AttemptResult(
    status=500, error=None, detail="", body_head=b"", retry_after=None, latency_ms=0.0
)
_BOUNDS: Final = {
    "delivery_delay_ms": 30 * 86_400_000.0,
    "delivery_delay_multiplier": 100.0,
    "delivery_attempts": 1000.0,
    "delivery_max_delay_ms": 30 * 86_400_000.0,
    "delivery_jitter": 1.0,
}
"""The largest value of each field."""


@dataclass(frozen=True, slots=True)
class RetrySchedule:
    """Hold the earliest and the latest time of each attempt, in seconds after the first one."""

    times_s: tuple[tuple[float, float], ...]
    attempts: int
    """All attempts, with the first one and those that are not drawn."""

    @property
    def last_s(self) -> tuple[float, float]:
        """Return when the last drawn attempt is made."""
        return self.times_s[-1]


def read_schedule(
    values: Mapping[str, Any], room: Mapping[str, Any] | None = None
) -> RetrySchedule | None:
    """Return the schedule of settings, numbers or what was typed; None: some are no numbers.

    `room`: the values that hold where a setting is empty.
    """
    found: dict[str, float] = {}
    for name, most in _BOUNDS.items():
        value = values.get(name)
        if value in {None, ""} and room is not None:
            value = room.get(name)
        if value in {None, ""}:
            continue
        try:
            number = float(str(value))
        except ValueError:
            return None
        if not 0 <= number <= most:
            return None
        found[name] = number
    if "delivery_delay_ms" not in found or "delivery_attempts" not in found:
        return None
    cap = found.get("delivery_max_delay_ms")
    policy = RetryPolicy(
        delay_ms=int(found["delivery_delay_ms"]),
        multiplier=max(1.0, found.get("delivery_delay_multiplier", 1.0)),
        attempts=int(found["delivery_attempts"]),
        max_delay_ms=None if cap is None else int(cap),
        jitter=found.get("delivery_jitter", 0.0),
    )
    return RetrySchedule(_times(policy), policy.attempts + 1)


def _times(policy: RetryPolicy) -> tuple[tuple[float, float], ...]:
    times, early, late = [(0.0, 0.0)], 0.0, 0.0
    for attempt in range(min(policy.attempts, MAX_DRAWN - 1)):
        early += _wait_s(policy, attempt, 0.0)
        late += _wait_s(policy, attempt, 1.0)
        times.append((early, late))
    return tuple(times)


def _wait_s(policy: RetryPolicy, attempt: int, random: float) -> float:
    decision = decide_retry(_FAILED, attempt, policy, now_ms=0, random=random)
    return decision.delay_ms / 1000 if isinstance(decision, Retry) else 0.0


@get(PATH)
async def show_schedule(page: PageDep) -> Response[str]:
    """Draw the schedule of the settings in the address, and of a room where they are empty."""
    room_id = page.query("room")
    room = None if room_id is None else await page.api.get(f"/rooms/{segment(room_id)}")
    values = {name: page.query(name) or "" for name in _BOUNDS}
    return page.render("retry_schedule.html", schedule=read_schedule(values, room), values=values)


ROUTES: Final = (show_schedule,)
