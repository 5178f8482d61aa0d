"""The stores beside PostgreSQL: whether each answers, and what to do about one that does not."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

from delivery.doctor.findings import Finding
from rooms.errors import TransientError

PATIENCE_S: Final = 10.0
"""How long a store may take to answer: a connection and one request, both slow."""

Probe = Callable[[], Awaitable[object]]

_MEANWHILE: Final[Mapping[str, str]] = {
    "broker": "copies wait in PostgreSQL until it is back, and nothing is lost",
    "election": "no duty of the upkeep moves to another process until it is back",
    "magazines": "what is sidelined waits in PostgreSQL until it is back, and handler queues take nothing",
}


class StoreExamination:
    """Asks all stores at the same time."""

    def __init__(self, probes: Mapping[str, Probe], addresses: Mapping[str, str], logs: Mapping[str, str]) -> None:
        """By part: how to ask it, its address, and the log file of one that is kept on this machine."""
        self._probes = probes
        self._addresses = addresses
        self._logs = logs

    async def run(self) -> Sequence[Finding]:
        """Return a finding for each store that does not answer."""
        found = await asyncio.gather(*(self._ask(part, probe) for part, probe in self._probes.items()))
        return [finding for finding in found if finding is not None]

    async def _ask(self, part: str, probe: Probe) -> Finding | None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                await probe()
        except TimeoutError:
            return self.away(part, f"no answer within {PATIENCE_S:g} s")
        except TransientError as exc:
            return self.away(part, str(exc))
        return None

    def away(self, part: str, reason: str) -> Finding:
        """Return the finding for a store that does not answer."""
        address = self._addresses[part]
        return Finding(
            part=part,
            what=f"{address} does not answer: {reason}",
            count=1,
            away=True,
            advice=f"{_MEANWHILE[part]}. {self._remedy(part, address)}",
        )

    def _remedy(self, part: str, address: str) -> str:
        if part in self._logs:
            return (
                f"See {self._logs[part]}. `make run-full` starts it again when its process ends, `make full-up` where "
                "nothing keeps it; a process that hangs must be ended"
            )
        return f"Start the server at {address} and see its log; is the network open from here?"
