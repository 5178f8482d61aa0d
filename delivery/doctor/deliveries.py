"""Every delivery and its work row."""

from collections import defaultdict
from collections.abc import Callable
from typing import Final

from delivery.doctor.findings import Finding
from rooms.storage.standing import START, TABLES, Fault, Misplaced, Position, Standing

PART: Final = "deliveries"
EXAMPLES: Final = 5
_SAID: Final = {
    Fault.MISSING: "unfinished or sidelined, and without the row that somebody would take it up by",
    Fault.OTHER_STEP: "with a work row of another step than theirs",
    Fault.SURPLUS: "with a work row that their state does not mean",
    Fault.NO_MESSAGE: "waiting, and their message is not there",
}


class DeliveryExamination:
    """Walks over all of them. Errors are those of `Standing`."""

    def __init__(self, standing: Standing, mended: Callable[[], None]) -> None:
        """`mended` is told after each batch that was put right: there may be work now."""
        self._standing = standing
        self._mended = mended

    async def run(self, *, mend: bool) -> list[Finding]:
        """Look at every delivery, then at every work row."""
        counts: defaultdict[Fault, int] = defaultdict(int)
        mended: defaultdict[Fault, int] = defaultdict(int)
        examples: defaultdict[Fault, list[str]] = defaultdict(list)
        after: Position | None = START
        while after is not None:
            found, _, after = await self._standing.look(after)
            by_fault: defaultdict[Fault, list[Misplaced]] = defaultdict(list)
            for one in found:
                by_fault[one.fault].append(one)
            for fault, ones in by_fault.items():
                counts[fault] += len(ones)
                examples[fault] += [one.delivery_id for one in ones[: EXAMPLES - len(examples[fault])]]
                if mend:
                    mended[fault] += await self._standing.mend(ones)
                    self._mended()
        told = [
            Finding(part=PART, what=_SAID[fault], count=count, mended=mended[fault], examples=examples[fault])
            for fault, count in counts.items()
        ]
        return [*told, *[finding for table in TABLES for finding in await self._nobodys(table, mend=mend)]]

    async def _nobodys(self, table: str, *, mend: bool) -> list[Finding]:
        count = mended = 0
        examples: list[str] = []
        after: Position | None = START
        while after is not None:
            found, after = await self._standing.nobodys(table, after)
            count += len(found)
            examples += [identity for _, identity in found[: EXAMPLES - len(examples)]]
            if mend and found:
                mended += await self._standing.forget(table, found)
        said = f"rows of {table} without a delivery"
        return [Finding(part=PART, what=said, count=count, mended=mended, examples=examples)] if count else []
