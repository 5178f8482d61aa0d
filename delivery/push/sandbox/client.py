"""Send deliveries that may have crashed their workers, and find out which of them do."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, Self

from delivery.push.errors import (
    AttemptCrashedError,
    ClaimExpiredError,
    ResourceShortageError,
    SandboxDiedError,
    SandboxUnavailableError,
)
from rooms.db.queue.broker_claims import DeliveryVersion
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
_MAX_REMEMBERED: Final = 10_000
_UNAVAILABLE_S: Final = 60.0
"""The time without a sandbox after a claim was spent on waiting for its start."""


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
        start_before: float,
    ) -> AttemptResult: ...

    async def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class _StartableSandbox:
    """Hold a sandbox, and the time (monotonic seconds) before which no start is waited for."""

    process: DeliverySandbox
    unavailable_until: float = -math.inf


class SandboxClient:
    """Send from a shared sandbox, after a crash from a single one; an async context manager."""

    def __init__(
        self, *, create_sandbox: Callable[[], DeliverySandbox], fallback: Sender, clock: Clock
    ) -> None:
        """Configure the client. `fallback` sends if the shared sandbox cannot be started."""
        self._shared_sandbox = _StartableSandbox(create_sandbox())
        self._single_sandboxes: Sequence[_StartableSandbox] = [
            _StartableSandbox(create_sandbox()) for _ in range(_SINGLE_SANDBOXES)
        ]
        self._free_singles = list(self._single_sandboxes)
        self._shared_slots = FairSlots(
            _MAX_SHARED_ATTEMPTS, max_per_tenant=_MAX_SHARED_ATTEMPTS // _SHARE
        )
        self._single_slots = FairSlots(
            _SINGLE_SANDBOXES, max_per_tenant=_SINGLE_SANDBOXES // _SHARE
        )
        self._deaths: dict[DeliveryVersion, int] = {}
        """The single sandboxes that died with a delivery since the shared one did, oldest first.

        A hang may take a whole claim, so the count goes on with the next one.
        """
        self._fallback = fallback
        self._clock = clock

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.gather(
            *(one.process.close() for one in (self._shared_sandbox, *self._single_sandboxes))
        )

    async def send(
        self,
        target: PushUrl,
        headers: bytes,
        body: bytes,
        *,
        version: DeliveryVersion,
        organisation: OrganisationId,
        timeout_s: float,
        start_before: float,
    ) -> AttemptResult:
        """Make one attempt at this version, which begins before `start_before` (monotonic seconds).

        AttemptCrashedError: it crashed a single sandbox each time, in this call and in those
        before. SandboxDiedError: a sandbox died in this call, and no other was ready in time.
        ClaimExpiredError: there was no time for any attempt. ResourceShortageError: nothing was
        attempted, also where no single sandbox can be started for a version that has killed one.
        The delivery must be claimed again.
        """

        async def send_from(sandbox: _StartableSandbox) -> AttemptResult:
            if self._clock.monotonic() < sandbox.unavailable_until:
                raise SandboxUnavailableError("it could not be started before")
            try:
                result = await sandbox.process.send(
                    target,
                    headers,
                    body,
                    organisation=organisation,
                    timeout_s=timeout_s,
                    start_before=start_before,
                )
            except SandboxUnavailableError:
                if self._clock.monotonic() >= start_before:
                    # The next claim must not be spent on waiting for this process, too.
                    sandbox.unavailable_until = self._clock.monotonic() + _UNAVAILABLE_S
                raise
            sandbox.unavailable_until = -math.inf
            return result

        died_before = self._deaths.get(version)
        try:
            try:
                self._check_deadline(start_before)
                result = await self._send_sandboxed(version, organisation, send_from, start_before)
            except SandboxUnavailableError as exc:
                self._check_deadline(start_before)
                if version in self._deaths:
                    # It may kill the worker as it did the sandbox, with all that is in progress.
                    raise ResourceShortageError(f"no sandbox for one task: {exc}") from exc
                _log.warning(
                    "a delivery that may crash its worker is sent without sandbox: %s", exc
                )
                result = await self._fallback.send(
                    target, headers, body, organisation=organisation, timeout_s=timeout_s
                )
        except AttemptCrashedError:
            self._deaths.pop(version, None)
            raise
        except (ClaimExpiredError, ResourceShortageError) as exc:
            if self._deaths.get(version) == died_before:
                raise
            raise SandboxDiedError(str(exc)) from exc
        self._deaths.pop(version, None)
        return result

    async def _send_sandboxed(
        self,
        version: DeliveryVersion,
        organisation: OrganisationId,
        send_from: Callable[[_StartableSandbox], Awaitable[AttemptResult]],
        start_before: float,
    ) -> AttemptResult:
        if version not in self._deaths:
            async with self._shared_slots.slot(organisation):
                self._check_deadline(start_before)
                try:
                    return await send_from(self._shared_sandbox)
                except AttemptCrashedError as exc:
                    self._record_deaths(version, 0)
                    _log.warning("sending again from a single sandbox: %s", exc)
        async with self._single_slots.slot(organisation):
            sandbox = self._take_single()
            try:
                while True:
                    self._check_deadline(start_before)
                    try:
                        return await send_from(sandbox)
                    except AttemptCrashedError as exc:
                        deaths = self._deaths.get(version, 0) + 1
                        if deaths >= MAX_CRASHES:
                            raise
                        self._record_deaths(version, deaths)
                        _log.warning("sending once more from a single sandbox: %s", exc)
            finally:
                self._free_singles.append(sandbox)

    def _take_single(self) -> _StartableSandbox:
        """Take the free single sandbox that was used last, and could be started if possible."""
        taken = min(reversed(self._free_singles), key=lambda one: one.unavailable_until)
        self._free_singles.remove(taken)
        return taken

    def _record_deaths(self, version: DeliveryVersion, count: int) -> None:
        self._deaths.pop(version, None)
        self._deaths[version] = count
        if len(self._deaths) > _MAX_REMEMBERED:
            del self._deaths[next(iter(self._deaths))]

    def _check_deadline(self, start_before: float) -> None:
        if self._clock.monotonic() >= start_before:
            raise ClaimExpiredError("the claim runs out before an attempt would end")
