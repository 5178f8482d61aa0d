"""With this folder on PYTHONPATH, every process of Python dies of a webhook whose path ends in `/poison`."""

import os
import signal
from typing import Final

from delivery.sender import HttpSender
from rooms.domain.attempt import Answer
from rooms.domain.ids import OrganisationId
from rooms.domain.target import Target

_SEND: Final = HttpSender.send


async def _poisoned(
    sender: HttpSender, target: Target, headers: bytes, body: bytes, *, organisation: OrganisationId, timeout_s: float
) -> Answer:
    if target.path.endswith("/poison"):
        os.kill(os.getpid(), signal.SIGKILL)
    return await _SEND(sender, target, headers, body, organisation=organisation, timeout_s=timeout_s)


setattr(HttpSender, _SEND.__name__, _poisoned)
