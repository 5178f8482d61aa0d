"""Attempt one delivery: sign and send its request, and decide what follows from the result."""

import logging
from collections.abc import Callable, Sequence
from typing import Final, assert_never

from delivery.push.endpoint_state import EndpointEvent, EndpointSignal, record_result
from delivery.push.endpoints import Endpoint
from delivery.push.errors import AttemptCrashedError, ClaimExpiredError, ResourceShortageError
from delivery.push.event_items import request_body
from delivery.push.lane import Lane
from delivery.push.retry import decide_retry
from delivery.push.sandbox.client import MAX_CRASHES, SandboxClient
from rooms.db.queue.broker_claims import version_of
from rooms.db.queue.outcomes import DeliveryOutcome
from rooms.domain.attempt import AttemptResult, ErrorClass, unexpected_failure
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.retry_policy import Drop, Expire, Retry, RetryPolicy, Sideline
from rooms.domain.state_machine import Reason, State
from rooms.ports import Clock, Sender

_log = logging.getLogger(__name__)

_DELIVERED: Final = State.DELIVERED
"""Read once: in Python 3.11 that is a call, and each delivery would make it."""

AttemptReport = tuple[DeliveryOutcome, Sequence[EndpointEvent]]
"""The outcome for the delivery, and what the attempt showed about the endpoint."""


class AttemptExecutor:
    """Attempt deliveries by the sender, or in a sandbox if they may crash their worker."""

    def __init__(
        self,
        *,
        sender: Sender,
        clock: Clock,
        random: Callable[[], float],
        sandbox: SandboxClient | None = None,
        sandbox_after_crashes: int = 0,
    ) -> None:
        """Configure the attempts.

        `random` returns numbers from 0 to 1, for jitter. `sandbox` attempts the deliveries with
        which `sandbox_after_crashes` workers in a row have died.
        """
        self._sender = sender
        self._sandbox = sandbox
        self._sandbox_after_crashes = sandbox_after_crashes
        self._clock = clock
        self._random = random

    async def attempt(
        self, task: DeliveryTask, lane: Lane, started: float, *, is_probe: bool = False
    ) -> AttemptReport:
        """Attempt a task and adapt its lane.

        ClaimExpiredError, ResourceShortageError: no attempt was made. SandboxDiedError: one was,
        without a result, and the next claim must count it.

        `started`: now, in monotonic seconds. `is_probe`: it is sent to find out whether the open
        circuit can be closed.
        """
        clock, endpoint = self._clock, lane.endpoint
        if task.expires_at <= started:
            return DeliveryOutcome(task=task, state=State.EXPIRED), ()
        try:
            body = request_body(task)
            headers = endpoint.headers(task, body, clock.now_ms() // 1000)
        except (ValueError, AttributeError):
            _log.exception("delivery %s cannot be encoded as a request", task.delivery_id)
            outcome = DeliveryOutcome(
                task=task,
                state=State.SIDELINED,
                reason=Reason.UNREADABLE,
                target_host=endpoint.host,
            )
            return outcome, ()
        try:
            if (
                task.crash_count
                and self._sandbox is not None
                and task.crash_count >= self._sandbox_after_crashes
            ):
                result = await self._sandbox.send(
                    endpoint.url,
                    headers,
                    body,
                    version=version_of(task),
                    organisation=endpoint.organisation,
                    timeout_s=endpoint.timeout_s,
                    start_before=task.deadline - endpoint.timeout_s,
                )
            else:
                result = await self._sender.send(
                    endpoint.url,
                    headers,
                    body,
                    organisation=endpoint.organisation,
                    timeout_s=endpoint.timeout_s,
                )
        except AttemptCrashedError as exc:
            _log.exception(
                "delivery %s crashes every process that attempts it, and is sidelined",
                task.delivery_id,
            )
            lane.on_attempt_done(clock.monotonic(), started=started)
            latency_ms = (clock.monotonic() - started) * 1000
            return _crashed_outcome(task, endpoint, exc, latency_ms), ()
        except (ClaimExpiredError, ResourceShortageError):
            raise
        except Exception as exc:  # noqa: BLE001 - the port forbids it, but a failed slot would block its lane
            _log.exception("the sender failed at delivery %s", task.delivery_id)
            result = unexpected_failure(exc, (clock.monotonic() - started) * 1000)
        result = endpoint.hide_headers(result)
        now = clock.monotonic()
        lane.on_attempt_done(now, started=started)
        events = record_result(
            lane, result, tried=endpoint, is_probe=is_probe, started=started, now=now
        )
        record = lane.endpoint.record  # the policy at the end of the attempt counts
        outcome = DeliveryOutcome(
            task, _DELIVERED, result, 0, None, endpoint.host, record.policy.version
        )
        # A result counts against the endpoint only if its settings are still those of the attempt.
        if (
            result.error is not None
            and self._decide(outcome, result, record.policy)
            and record.version == endpoint.record.version
        ):
            lane.gone_version = record.version
            detail = f"the endpoint answered {result.status}"
            gone = EndpointEvent(signal=EndpointSignal.GONE, endpoint=lane.endpoint, detail=detail)
            events = [*events, gone]
        return outcome, events

    def _decide(self, outcome: DeliveryOutcome, result: AttemptResult, policy: RetryPolicy) -> bool:
        """Apply the retry policy to a failure, and return whether the endpoint is gone."""
        task = outcome.task
        decision = decide_retry(
            result,
            task.attempt,
            policy,
            now_ms=self._clock.now_ms(),
            left_ms=(task.expires_at - self._clock.monotonic()) * 1000,
            random=self._random(),
        )
        match decision:
            case Retry(delay_ms=delay_ms):
                outcome.state, outcome.delay_ms = State.QUEUED, delay_ms
            case Sideline(reason=reason, disable_endpoint=gone):
                outcome.state, outcome.reason = State.SIDELINED, reason
                return gone
            case Drop():
                outcome.state, outcome.reason = State.DROPPED, Reason.IGNORABLE_STATUS
            case Expire():
                outcome.state, outcome.reason = State.EXPIRED, Reason.TOO_LATE
            case _:
                assert_never(decision)
        return False


def _crashed_outcome(
    task: DeliveryTask, endpoint: Endpoint, error: AttemptCrashedError, latency_ms: float
) -> DeliveryOutcome:
    result = AttemptResult(
        status=None,
        error=ErrorClass.PROTOCOL,
        detail=f"the attempt crashed its process {MAX_CRASHES} times in a row; {error}",
        body_head=b"",
        retry_after=None,
        latency_ms=latency_ms,
    )
    return DeliveryOutcome(
        task=task,
        state=State.SIDELINED,
        reason=Reason.STUCK,
        result=result,
        target_host=endpoint.host,
        policy_version=endpoint.record.policy.version,
    )
