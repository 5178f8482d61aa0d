"""Test the client of rate tokens: which lanes it asks for."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from delivery.push.endpoints import Endpoint
from delivery.push.lane import Lane
from delivery.push.rate_limit import TokenClient
from rooms.db.queue.throttle import SharedLaneState, TokenGrant, TokenRequest
from rooms.domain.ids import SubscriptionId
from tests.support.push_worker import StoppedClock
from tests.unit.delivery.push.test_endpoints import RECORD, SEAL, TASK

RATE_PER_S = 0.001


class Bucket:
    """Grant the first token at once, and the next one after 1,000 s."""

    def __init__(self) -> None:
        self.granted = 0

    async def take_tokens(
        self, requests: Sequence[TokenRequest]
    ) -> dict[SubscriptionId, TokenGrant]:
        self.granted += 1
        return {one.subscription: TokenGrant(1, 1 / RATE_PER_S) for one in requests}


def limited_lane(clock: StoppedClock) -> Lane:
    policy = replace(RECORD.throttle, rate_per_s=RATE_PER_S, rate_burst=1)
    return Lane(Endpoint(replace(RECORD, throttle=policy), SEAL), slots=4, now=clock.monotonic())


async def test_a_new_lane_does_not_wait_for_the_next_token_of_the_one_before_it() -> None:
    """A lane without tasks is removed after a minute, and its next token may be much later."""
    clock, bucket = StoppedClock(), Bucket()
    client = TokenClient(cast("SharedLaneState", bucket), clock=clock)
    former = limited_lane(clock)
    former.enqueue([TASK, TASK], clock.monotonic())
    client.request_tokens(former)
    assert await client.next_lanes() == [former]
    former.drain()  # its subscription was paused
    clock.ahead_s += 61
    lane = limited_lane(clock)
    lane.enqueue([TASK], clock.monotonic())
    client.request_tokens(lane)
    async with asyncio.timeout(5):
        assert await client.next_lanes() == [lane]
    assert (lane.tokens, bucket.granted) == (1, 2)
