"""Kill every Python process that calls a webhook whose path ends in `/poison`."""

import os
import signal
from typing import Final

from delivery.push.http.client import HttpSender
from rooms.domain.attempt import AttemptResult
from rooms.domain.ids import OrganisationId
from rooms.domain.push_url import PushUrl

_SEND: Final = HttpSender.send


async def _poisoned(
    sender: HttpSender,
    target: PushUrl,
    headers: bytes,
    body: bytes,
    *,
    organisation: OrganisationId,
    timeout_s: float,
) -> AttemptResult:
    if target.path.endswith("/poison"):
        os.kill(os.getpid(), signal.SIGKILL)
    return await _SEND(
        sender, target, headers, body, organisation=organisation, timeout_s=timeout_s
    )


setattr(HttpSender, _SEND.__name__, _poisoned)
