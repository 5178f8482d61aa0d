"""The rows of the sidelines and the entries of their magazines."""

from collections.abc import Callable
from typing import Final

from delivery.doctor.findings import Finding
from delivery.sideline.audit import Audit, Findings
from delivery.sideline.loader import Loader

PART: Final = "sidelines"


class SidelineExamination:
    """Errors are those of the magazines and of PostgreSQL."""

    def __init__(self, audit: Callable[[], Audit], loader: Loader) -> None:
        """`audit` makes a new one for each look: one that has looked skips what it has seen."""
        self._audit = audit
        self._loader = loader

    async def run(self, *, mend: bool) -> list[Finding]:
        """Look, and where something differs look once more: others may have moved it just then."""
        found = await self._look()
        if found.differences:
            found = _both(found, await self._look())
        left = found
        if mend and found.differences:
            await self._audit().examine(_always, mend=True)
            await self._loader.run(_always)
            left = _both(found, await self._look())
        said = (
            ("entries that their magazine has lost", "lost", False),
            ("entries that no row names", "nobodys", False),
            ("rows of deliveries that rest no longer", "stale", True),
        )
        return [
            Finding(part=PART, what=what, count=count, mended=count - getattr(left, field), under_way=under_way)
            for what, field, under_way in said
            if (count := getattr(found, field))
        ]

    async def _look(self) -> Findings:
        return await self._audit().examine(_always, mend=False)


def _both(one: Findings, other: Findings) -> Findings:
    """What two looks have found."""
    return Findings(
        lost=min(one.lost, other.lost), stale=min(one.stale, other.stale), nobodys=min(one.nobodys, other.nobodys)
    )


def _always() -> bool:
    return True
