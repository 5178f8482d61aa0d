"""What an examination found."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """`count` things of a part that differ, and how many of them were `mended` (0 where nobody asked for it).

    `examples`: a few of them by id. What is `under_way` will be put right by the upkeep in its own time, and is no fault.
    `away`: the part does not answer, so nothing is known of it, and a repair is refused. `advice`: what the operator can do;
    `since`: when the oldest of them came.
    """

    part: str
    what: str
    count: int
    mended: int = 0
    under_way: bool = False
    away: bool = False
    examples: Sequence[str] = field(default_factory=tuple)
    advice: str = ""
    since: datetime | None = None

    @property
    def open(self) -> int:
        """What is left to be put right."""
        return 0 if self.under_way else self.count - self.mended
