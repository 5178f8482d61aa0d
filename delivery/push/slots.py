"""Run the slots of the lanes: each attempts its lane's tasks and passes on the results.

A slot is an asyncio task. Idle ones are kept, because starting a task costs as much as a signature.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Final

from delivery.push.attempt import AttemptExecutor, AttemptReport
from delivery.push.endpoint_state import EndpointEventQueue, EndpointSignal
from delivery.push.errors import ClaimExpiredError, ResourceShortageError, SandboxDiedError
from delivery.push.lane import Lane
from delivery.push.lanes import Lanes
from delivery.push.outcome_writer import OutcomeWriter
from delivery.push.rate_limit import TokenClient
from delivery.push.unsent import UnsentHandler
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.state_machine import Reason, State
from rooms.ports import Clock

_log = logging.getLogger(__name__)

_MAX_IDLE_SLOTS: Final = 512
"""The slots that are kept without a lane; further ones end."""
SHORTAGE_PAUSE_S: Final = 0.5
"""The time before a task that lacked a file is released: it would be claimed again at once.

It is so short that its lane does not count as saturated.
"""


class SlotPool:
    """Start slots for lanes, and keep idle ones for the next lane."""

    def __init__(
        self,
        attempts: AttemptExecutor,
        *,
        lanes: Lanes,
        outcome_writer: OutcomeWriter,
        unsent: UnsentHandler,
        events: EndpointEventQueue,
        token_client: TokenClient,
        clock: Clock,
        wake: asyncio.Event,
        forget: Callable[[DeliveryTask], None],
    ) -> None:
        """Configure the slots.

        `wake` is set when an endpoint event must be written. `forget` gets a task without outcome
        whose slot failed or whose sandbox died: its claim ends by itself, and so counts as lost.
        """
        self._attempts = attempts
        self._lanes = lanes
        self._outcome_writer = outcome_writer
        self._unsent = unsent
        self._events = events
        self._token_client = token_client
        self._clock = clock
        self._wake = wake
        self._forget = forget
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle: list[asyncio.Future[Lane]] = []
        self._draining = False

    def start(self, lane: Lane) -> None:
        """Start slots for the lane's waiting tasks, as many as it allows."""
        for _ in range(lane.free_slots()):
            if self._idle:
                lane.busy += 1
                self._idle.pop().set_result(lane)
            else:
                self._spawn(lane, self._run_slot(lane))
        if lane.tokens is not None and lane.missing_tokens():
            self._token_client.request_tokens(lane)

    def start_probe(self, lane: Lane, task: DeliveryTask) -> None:
        """Attempt a probe, although the lane's circuit is open."""
        self._spawn(lane, self._run_probe(lane, task))

    async def drain(self, within_s: float) -> None:
        """Wait `within_s` seconds at most for attempts in progress to end, then cancel them."""
        self._draining = True
        idle, self._idle = self._idle, []
        for slot in idle:
            slot.cancel()
        try:
            if self._tasks:
                _, late = await asyncio.wait(self._tasks, timeout=within_s)
                for task in late:
                    task.cancel()
                await asyncio.gather(*late, return_exceptions=True)
        finally:
            self._draining = False

    def _spawn(self, lane: Lane, slot: Coroutine[None, None, None]) -> None:
        lane.busy += 1
        task = asyncio.create_task(slot)
        self._tasks.add(task)
        task.add_done_callback(self._on_slot_done)

    def _on_slot_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error(
                "a slot failed; its task is claimed again when the claim ends", exc_info=error
            )

    async def _run_slot(self, lane: Lane) -> None:
        while True:
            try:
                while (task := lane.dequeue()) is not None:
                    self._lanes.on_task_dequeued(lane)
                    now = self._clock.monotonic()
                    if lane.claim_too_short(task, now):
                        self._unsent.release_later([task])
                        continue
                    try:
                        self._record(lane, await self._attempts.attempt(task, lane, now))
                    except ClaimExpiredError as exc:
                        self._return_claim(task, exc)
                    except ResourceShortageError:
                        await self._release_after_pause(lane, task, now)
                    except Exception:
                        self._forget(task)
                        raise
                    # A success may have raised the lane's limit.
                    if lane.waiting and lane.busy < lane.slots:
                        self.start(lane)
            finally:
                lane.busy -= 1
                if lane.tokens is not None and lane.missing_tokens():
                    self._token_client.request_tokens(lane)
            if self._draining or len(self._idle) >= _MAX_IDLE_SLOTS:
                return
            # An idle slot must not keep a removed lane in memory.
            del lane
            next_lane: asyncio.Future[Lane] = asyncio.get_running_loop().create_future()
            self._idle.append(next_lane)
            lane = await next_lane

    async def _run_probe(self, lane: Lane, task: DeliveryTask) -> None:
        now = self._clock.monotonic()
        try:
            self._record(lane, await self._attempts.attempt(task, lane, now, is_probe=True))
        except ClaimExpiredError as exc:
            self._return_claim(task, exc)
        except ResourceShortageError:
            await self._release_after_pause(lane, task, now)
        except Exception:
            self._forget(task)
            raise
        finally:
            lane.busy -= 1

    def _return_claim(self, task: DeliveryTask, error: ClaimExpiredError) -> None:
        if isinstance(error, SandboxDiedError):
            self._forget(task)
        else:
            self._unsent.release_later([task])

    async def _release_after_pause(self, lane: Lane, task: DeliveryTask, started: float) -> None:
        """Release a task without an attempt; its slot is in use until then."""
        try:
            await asyncio.sleep(SHORTAGE_PAUSE_S)
        finally:
            lane.on_attempt_done(self._clock.monotonic(), started=started)
            self._unsent.release_later([task])

    def _record(self, lane: Lane, report: AttemptReport) -> None:
        outcome, events = report
        for event in events:
            if event.signal is EndpointSignal.CIRCUIT_OPENED:
                self._unsent.settle_all(lane.drain(), State.HELD, Reason.CIRCUIT_OPEN)
                self._lanes.on_task_dequeued(lane)
            self._events.add(event)
            self._wake.set()
        self._outcome_writer.add(outcome)
