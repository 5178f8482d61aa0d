"""Attempts: the slots of the lanes at work, and what each answer means for its delivery."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Final, Protocol, assert_never

from delivery.backoff import decide
from delivery.endpoint import Endpoint
from delivery.errors import AttemptCrashedError, AttemptLateError
from delivery.health import Notice, Word, examine
from delivery.isolation.sender import TRIES, IsolatedSender
from delivery.lane import Lane
from rooms.domain.attempt import Answer, ErrorClass
from rooms.domain.copy import Copy
from rooms.domain.policy import Drop, Expire, Retry, Sideline
from rooms.domain.states import Reason, State
from rooms.ports import Clock, Sender
from rooms.storage.outcomes import Outcome

_log = logging.getLogger(__name__)

_DELIVERED: Final = State.DELIVERED
"""Looked up once: in Python 3.11 that is a call, and this one is made for each delivery."""
_SPARE: Final = 512
"""Slots that wait for a lane to work for; more than that many end."""


class Desk(Protocol):
    """Where attempts report."""

    def settle(self, outcome: Outcome) -> None:
        """An attempt has come to its end."""

    def give_back(self, copy: Copy) -> None:
        """No attempt was made."""

    def emptier(self, lane: Lane) -> None:
        """A slot of the lane has taken its next copy."""

    def tell(self, lane: Lane, notice: Notice) -> None:
        """An attempt has shown something about the endpoint."""

    def thirsty(self, lane: Lane) -> None:
        """The lane could do more if its rate allowed it."""


class Attempts:
    """Starts slots and keeps their tasks, also of some that have nothing to do: to begin a task costs as much as a signature.
    `draw` gives random numbers from 0 to 1, for jitter.

    `isolated` attempts what was in the hands of so many workers that died, `isolate_after` of them running.
    """

    def __init__(
        self,
        *,
        sender: Sender,
        clock: Clock,
        draw: Callable[[], float],
        isolated: IsolatedSender | None = None,
        isolate_after: int = 0,
    ) -> None:
        self._sender = sender
        self._isolated = isolated
        self._isolate_after = isolate_after
        self._clock = clock
        self._draw = draw
        self._slots: set[asyncio.Task[None]] = set()
        self._spare: list[asyncio.Future[tuple[Lane, Desk]]] = []
        self._ending = False

    def start(self, lane: Lane, desk: Desk) -> None:
        """Put slots of the lane to work, as many as it has for what waits. Each leaves it when the lane is empty."""
        for _ in range(lane.startable()):
            if self._spare:
                lane.busy += 1
                self._spare.pop().set_result((lane, desk))
            else:
                self._begin(lane, self._work(lane, desk))
        if lane.tokens is not None and lane.thirst():
            desk.thirsty(lane)

    def probe(self, lane: Lane, copy: Copy, desk: Desk) -> None:
        """Attempt this one, although the lane's circuit is open."""
        self._begin(lane, self._probe(copy, lane, desk))

    def _begin(self, lane: Lane, work: Coroutine[None, None, None]) -> None:
        lane.busy += 1
        task = asyncio.create_task(work)
        self._slots.add(task)
        task.add_done_callback(self._ended)

    async def finish(self, within_s: float) -> None:
        """Let attempts under way end, `within_s` seconds at most; what is still under way then is cut off."""
        self._ending = True
        spare, self._spare = self._spare, []
        for slot in spare:
            slot.cancel()
        try:
            if self._slots:
                _, late = await asyncio.wait(self._slots, timeout=within_s)
                for task in late:
                    task.cancel()
                await asyncio.gather(*late, return_exceptions=True)
        finally:
            self._ending = False

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._slots.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a slot broke; its copy comes back when the claim ends", exc_info=error)

    async def _work(self, lane: Lane, desk: Desk) -> None:
        while True:
            try:
                while (copy := lane.take()) is not None:
                    desk.emptier(lane)
                    if lane.too_late(copy, self._clock.monotonic()):
                        desk.give_back(copy)
                    else:
                        try:
                            desk.settle(await self._attempt(copy, lane, desk))
                        except AttemptLateError:
                            desk.give_back(copy)
                        # A success may have earned the lane more slots.
                        if lane.waiting and lane.busy < lane.slots:
                            self.start(lane, desk)
            finally:
                lane.busy -= 1
                if lane.tokens is not None and lane.thirst():
                    desk.thirsty(lane)
            if self._ending or len(self._spare) >= _SPARE:
                return
            # A lane that nobody knows any more is not to be kept by who worked for it last.
            del lane, desk
            spare: asyncio.Future[tuple[Lane, Desk]] = asyncio.get_running_loop().create_future()
            self._spare.append(spare)
            lane, desk = await spare

    async def _probe(self, copy: Copy, lane: Lane, desk: Desk) -> None:
        try:
            desk.settle(await self._attempt(copy, lane, desk))
        except AttemptLateError:
            desk.give_back(copy)
        finally:
            lane.busy -= 1

    async def _attempt(self, copy: Copy, lane: Lane, desk: Desk) -> Outcome:
        clock, endpoint = self._clock, lane.endpoint
        now_ms = clock.now_ms()
        if copy.expires_ms is not None and copy.expires_ms <= now_ms:
            return Outcome(copy=copy, to=State.EXPIRED)
        try:
            headers = endpoint.headers(copy, now_ms // 1000)
        except (ValueError, AttributeError):
            _log.exception("no request can be made of delivery %s", copy.delivery_id)
            return Outcome(copy=copy, to=State.SIDELINED, reason=Reason.UNREADABLE, host=endpoint.host)
        started = clock.monotonic()
        try:
            if copy.abandoned and self._isolated is not None and copy.abandoned >= self._isolate_after:
                until = copy.deadline - endpoint.timeout_s
                answer = await self._isolated.send(
                    endpoint.target,
                    headers,
                    copy.payload,
                    organisation=endpoint.organisation,
                    timeout_s=endpoint.timeout_s,
                    until=until,
                )
            else:
                answer = await self._sender.send(
                    endpoint.target,
                    headers,
                    copy.payload,
                    organisation=endpoint.organisation,
                    timeout_s=endpoint.timeout_s,
                )
        except AttemptCrashedError as exc:
            _log.exception("delivery %s kills whoever attempts it, and is put aside", copy.delivery_id)
            lane.freed(clock.monotonic(), started=started)
            return self._stuck(copy, endpoint, exc, (clock.monotonic() - started) * 1000)
        except AttemptLateError:
            raise
        except Exception as exc:  # noqa: BLE001 - the port forbids it, but a slot that broke would leave its lane waiting
            _log.exception("the sender failed at delivery %s", copy.delivery_id)
            answer = Answer(
                status=None,
                error=ErrorClass.PROTOCOL,
                detail=f"the sender failed: {type(exc).__name__}",
                body_head=b"",
                retry_after=None,
                latency_ms=(clock.monotonic() - started) * 1000,
            )
        now = clock.monotonic()
        lane.freed(now, started=started)
        examine(lane, copy, answer, started=started, now=now, tell=desk.tell)
        return self._judge(copy, endpoint, answer, lane, desk)

    def _stuck(self, copy: Copy, endpoint: Endpoint, error: AttemptCrashedError, latency_ms: float) -> Outcome:
        answer = Answer(
            status=None,
            error=ErrorClass.PROTOCOL,
            detail=f"the attempt killed its process {TRIES} times running; {error}",
            body_head=b"",
            retry_after=None,
            latency_ms=latency_ms,
        )
        return Outcome(
            copy=copy,
            to=State.SIDELINED,
            reason=Reason.STUCK,
            answer=answer,
            host=endpoint.host,
            policy_version=endpoint.record.policy.version,
        )

    def _judge(self, copy: Copy, endpoint: Endpoint, answer: Answer, lane: Lane, desk: Desk) -> Outcome:
        record = lane.endpoint.record  # the policy is read when the attempt has failed, not when it began
        outcome = Outcome(copy, _DELIVERED, answer, 0, None, endpoint.host, record.policy.version)
        if answer.error is None:
            return outcome
        decision = decide(
            answer,
            copy.attempt,
            record.policy,
            now_ms=self._clock.now_ms(),
            expires_ms=copy.expires_ms,
            draw=self._draw(),
        )
        match decision:
            case Retry(delay_ms=delay_ms):
                outcome.to, outcome.delay_ms = State.QUEUED, delay_ms
            case Sideline(reason=reason, disable_endpoint=disable):
                outcome.to, outcome.reason = State.SIDELINED, reason
                # An answer to settings that have changed since says nothing about the endpoint of today.
                if disable and record.version == endpoint.record.version:
                    lane.gone = record.version
                    detail = f"the endpoint answered {answer.status}"
                    desk.tell(lane, Notice(word=Word.GONE, endpoint=lane.endpoint, detail=detail))
            case Drop():
                outcome.to, outcome.reason = State.DROPPED, Reason.IGNORABLE_STATUS
            case Expire():
                outcome.to, outcome.reason = State.EXPIRED, Reason.TOO_LATE
            case _:
                assert_never(decision)
        return outcome
