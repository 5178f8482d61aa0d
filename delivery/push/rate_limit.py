"""Get rate tokens for the lanes of this worker, from the buckets that all workers share.

A lane takes only the tokens that it can use at once, so no worker keeps tokens that another needs.
Two busy workers get about half of the rate each. Together they never start more attempts than the
burst plus rate times seconds, by PostgreSQL's clock. Tokens that a worker takes and does not use,
because it dies or the lane is closed at that moment, are lost.
"""

import asyncio
import math
from contextlib import suppress
from typing import Final

from delivery.push.lane import Lane
from rooms.db.queue.throttle import SharedLaneState, TokenRequest
from rooms.domain.ids import SubscriptionId
from rooms.errors import StorageRefusedError, StorageUnavailableError
from rooms.outages import OUTAGES
from rooms.ports import Clock

_RATE_OUTAGE: Final = "requests for rate tokens failed"
_MIN_WAIT_S: Final = 0.01
_RETRY_S: Final = 0.5


class TokenClient:
    """Take tokens from the shared buckets for the lanes that need them."""

    def __init__(self, shared_lanes: SharedLaneState, *, clock: Clock) -> None:
        self._shared_lanes = shared_lanes
        self._clock = clock
        self._waiting_lanes: dict[SubscriptionId, Lane] = {}
        self._next_at = math.inf
        """The time of the first token that is awaited."""
        self._wake = asyncio.Event()

    def request_tokens(self, lane: Lane) -> None:
        """Take tokens for a lane that has tasks and free slots."""
        # A lane that was removed may be there still, until the time of its next token.
        if self._waiting_lanes.get(lane.subscription_id) is not lane:
            self._waiting_lanes[lane.subscription_id] = lane
            self._wake.set()
        elif lane.next_token_at < self._next_at:  # its rate was changed
            self._wake.set()

    async def next_lanes(self) -> list[Lane]:
        """Wait until some of the lanes have got tokens, and return those."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._pause_s()):
                    await self._wake.wait()
            self._wake.clear()
            try:
                lanes = await self._take_tokens()
            except (StorageUnavailableError, StorageRefusedError) as exc:
                OUTAGES.record_failure(exc, _RATE_OUTAGE)
                await asyncio.sleep(_RETRY_S)
            else:
                OUTAGES.record_success(_RATE_OUTAGE)
                if lanes:
                    return lanes

    def _pause_s(self) -> float | None:
        waiting = self._waiting_lanes.values()
        self._next_at = min((lane.next_token_at for lane in waiting), default=math.inf)
        return max(_MIN_WAIT_S, self._next_at - self._clock.monotonic()) if waiting else None

    async def _take_tokens(self) -> list[Lane]:
        now = self._clock.monotonic()
        requests: dict[SubscriptionId, TokenRequest] = {}
        for subscription_id, lane in list(self._waiting_lanes.items()):
            policy, missing = lane.endpoint.record.throttle, lane.missing_tokens()
            if not missing or policy.rate_per_s is None:
                del self._waiting_lanes[subscription_id]
            elif lane.next_token_at <= now:
                requests[subscription_id] = TokenRequest(
                    subscription_id, missing, policy.rate_per_s, policy.rate_burst
                )
        if not requests:
            return []
        grants = await self._shared_lanes.take_tokens(list(requests.values()))
        now = self._clock.monotonic()
        got = []
        for subscription_id, grant in grants.items():
            lane, request = self._waiting_lanes[subscription_id], requests[subscription_id]
            policy = lane.endpoint.record.throttle
            if (policy.rate_per_s, policy.rate_burst) == (request.per_s, request.burst):
                lane.next_token_at = now + grant.next_token_s
            if lane.tokens is not None and grant.tokens:
                lane.tokens += grant.tokens
                got.append(lane)
        return got
