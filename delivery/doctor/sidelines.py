"""The rows of the sidelines and the entries of their magazines."""

from typing import Final

from delivery.doctor.findings import Finding
from delivery.sideline.audit import Audit, Findings
from delivery.sideline.loader import Loader

PART: Final = "sidelines"


class SidelineExamination:
    """Errors are those of the magazines and of PostgreSQL."""

    def __init__(self, audit: Audit, loader: Loader) -> None:
        self._audit = audit
        self._loader = loader

    async def run(self, *, mend: bool) -> list[Finding]:
        """Look, and where something differs look once more: others may have moved it just then."""
        found = await self._audit.examine(_always, mend=False)
        if found.differences:
            again = await self._audit.examine(_always, mend=mend)
            found = Findings(
                lost=min(found.lost, again.lost),
                stale=min(found.stale, again.stale),
                nobodys=min(found.nobodys, again.nobodys),
            )
        if mend and found.lost:
            await self._loader.run(_always)
        said = (
            ("entries that their magazine has lost", found.lost, False),
            ("entries that no row names", found.nobodys, False),
            ("rows of deliveries that rest no longer", found.stale, True),
        )
        return [
            Finding(part=PART, what=what, count=count, mended=count if mend else 0, under_way=under_way)
            for what, count, under_way in said
            if count
        ]


def _always() -> bool:
    return True
