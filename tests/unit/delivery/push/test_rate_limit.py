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
    """Grant the first token at once, and the next one after the time that the rate needs."""

    def __init__(self) -> None:
        self.granted = 0
        self.asked = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def take_tokens(
        self, requests: Sequence[TokenRequest]
    ) -> dict[SubscriptionId, TokenGrant]:
        self.granted += 1
        self.asked.set()
        await self.may_answer.wait()
        return {one.subscription: TokenGrant(1, 1 / one.per_s) for one in requests}


def limited(rate_per_s: float = RATE_PER_S) -> Endpoint:
    policy = replace(RECORD.throttle, rate_per_s=rate_per_s, rate_burst=1)
    return Endpoint(replace(RECORD, throttle=policy), SEAL)


def limited_lane(clock: StoppedClock) -> Lane:
    return Lane(limited(), slots=4, now=clock.monotonic())


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


async def test_a_changed_rate_does_not_wait_for_the_next_token_of_the_former_one() -> None:
    clock, bucket = StoppedClock(), Bucket()
    client, lane = TokenClient(cast("SharedLaneState", bucket), clock=clock), limited_lane(clock)
    lane.enqueue([TASK, TASK], clock.monotonic())
    client.request_tokens(lane)
    assert await client.next_lanes() == [lane]
    waiting = asyncio.create_task(client.next_lanes())
    await asyncio.sleep(0)  # it waits for the next token
    lane.update(limited(50.0), clock.monotonic())
    client.request_tokens(lane)
    async with asyncio.timeout(5):
        assert await waiting == [lane]
    assert (lane.tokens, bucket.granted) == (2, 2)
    assert lane.next_token_at == clock.monotonic() + 1 / 50


async def test_a_rate_that_changes_during_a_request_counts_from_then_on() -> None:
    clock, bucket = StoppedClock(), Bucket()
    client, lane = TokenClient(cast("SharedLaneState", bucket), clock=clock), limited_lane(clock)
    lane.enqueue([TASK, TASK], clock.monotonic())
    bucket.may_answer.clear()
    client.request_tokens(lane)
    waiting = asyncio.create_task(client.next_lanes())
    await bucket.asked.wait()
    lane.update(limited(50.0), clock.monotonic())
    bucket.may_answer.set()
    assert await waiting == [lane]
    assert lane.next_token_at == clock.monotonic()
