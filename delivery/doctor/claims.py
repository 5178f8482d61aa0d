"""Copies that whoever claims them dies with."""

from typing import Final

from delivery.doctor.findings import Finding
from rooms.storage.abandoned import Abandoned

PART: Final = "claims"
SUSPECT: Final = 3
HOPELESS: Final = 10
"""So many workers running died with a copy in hand: whatever is meant to find the guilty does not find this one."""
_EXAMPLES: Final = 5


class ClaimExamination:
    """Looks through the outbox. Errors are those of `Abandoned`."""

    def __init__(self, abandoned: Abandoned) -> None:
        self._abandoned = abandoned

    async def run(self, *, mend: bool) -> list[Finding]:
        """Tell of them; with `mend` those that are hopeless are sidelined as `stuck`."""
        found = await self._abandoned.look(SUSPECT)
        hopeless = [step for step, count in found if count >= HOPELESS]
        suspects = [step for step, count in found if count < HOPELESS]
        told = []
        if suspects:
            told.append(
                Finding(
                    part=PART,
                    what=f"in the hands of {SUSPECT} workers running or more when those died",
                    count=len(suspects),
                    under_way=True,
                    examples=[identity for identity, _, _ in suspects[:_EXAMPLES]],
                )
            )
        if hopeless:
            told.append(
                Finding(
                    part=PART,
                    what=f"in the hands of {HOPELESS} workers running or more when those died; repair puts them aside",
                    count=len(hopeless),
                    mended=await self._abandoned.end(hopeless) if mend else 0,
                    examples=[identity for identity, _, _ in hopeless[:_EXAMPLES]],
                )
            )
        return told
