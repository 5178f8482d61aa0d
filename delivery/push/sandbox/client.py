"""Send deliveries that may have crashed their workers, and find out which of them do."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final, Protocol, Self

from delivery.push.errors import AttemptCrashedError, ClaimExpiredError, SandboxUnavailableError
from rooms.domain.attempt import AttemptResult
from rooms.domain.ids import OrganisationId
from rooms.domain.push_url import PushUrl
from rooms.fair_slots import FairSlots
from rooms.ports import Clock, Sender

_log = logging.getLogger(__name__)

MAX_CRASHES: Final = 3
"""After this many crashes of a single sandbox the delivery is given up."""
_MAX_SHARED_ATTEMPTS: Final = 32
_SINGLE_SANDBOXES: Final = 4
_SHARE: Final = 2
"""An organisation has at most this part of the places, a half: its endpoints may all hang."""


class DeliverySandbox(Protocol):
    """Send from a process that may crash, as `SandboxProcess` does."""

    async def send(
        self,
        target: PushUrl,
        headers: bytes,
        body: bytes,
        *,
        organisation: OrganisationId,
        timeout_s: float,
    ) -> AttemptResult: ...

    async def close(self) -> None: ...


class SandboxClient:
    """Send from a shared sandbox, after a crash from a single one; an async context manager."""

    def __init__(
        self, *, create_sandbox: Callable[[], DeliverySandbox], fallback: Sender, clock: Clock
    ) -> None:
        """Configure the client. `fallback` sends if no sandbox process can be started."""
        self._shared_sandbox = create_sandbox()
        self._single_sandboxes: Sequence[DeliverySandbox] = [
            create_sandbox() for _ in range(_SINGLE_SANDBOXES)
        ]
        self._free_singles = list(self._single_sandboxes)
        self._shared_slots = FairSlots(
            _MAX_SHARED_ATTEMPTS, max_per_tenant=_MAX_SHARED_ATTEMPTS // _SHARE
        )
        self._single_slots = FairSlots(
            _SINGLE_SANDBOXES, max_per_tenant=_SINGLE_SANDBOXES // _SHARE
        )
        self._fallback = fallback
        self._clock = clock

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.gather(
            *(sandbox.close() for sandbox in (self._shared_sandbox, *self._single_sandboxes))
        )

    async def send(
        self,
        target: PushUrl,
        headers: bytes,
        body: bytes,
        *,
        organisation: OrganisationId,
        timeout_s: float,
        start_before: float,
    ) -> AttemptResult:
        """Make one attempt, which begins before `start_before` (monotonic seconds).

        AttemptCrashedError: it crashed a single sandbox each time. ClaimExpiredError: no sandbox
        was free before `start_before`, so the delivery must be claimed again.
        """
        try:
            return await self._send_sandboxed(
                target,
                headers,
                body,
                organisation=organisation,
                timeout_s=timeout_s,
                start_before=start_before,
            )
        except SandboxUnavailableError as exc:
            _log.warning("a delivery that may crash its worker is sent without sandbox: %s", exc)
            return await self._fallback.send(
                target, headers, body, organisation=organisation, timeout_s=timeout_s
            )

    async def _send_sandboxed(
        self,
        target: PushUrl,
        headers: bytes,
        body: bytes,
        *,
        organisation: OrganisationId,
        timeout_s: float,
        start_before: float,
    ) -> AttemptResult:
        async with self._shared_slots.slot(organisation):
            self._check_deadline(start_before)
            try:
                return await self._shared_sandbox.send(
                    target, headers, body, organisation=organisation, timeout_s=timeout_s
                )
            except AttemptCrashedError as exc:
                _log.warning("sending again from a single sandbox: %s", exc)
        async with self._single_slots.slot(organisation):
            sandbox = self._free_singles.pop()
            try:
                self._check_deadline(start_before)
                for _ in range(MAX_CRASHES - 1):
                    try:
                        return await sandbox.send(
                            target, headers, body, organisation=organisation, timeout_s=timeout_s
                        )
                    except AttemptCrashedError as exc:
                        _log.warning("sending once more from a single sandbox: %s", exc)
                return await sandbox.send(
                    target, headers, body, organisation=organisation, timeout_s=timeout_s
                )
            finally:
                self._free_singles.append(sandbox)

    def _check_deadline(self, start_before: float) -> None:
        if self._clock.monotonic() >= start_before:
            raise ClaimExpiredError("the claim runs out before an attempt would end")
