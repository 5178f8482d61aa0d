"""What an examination found."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """`count` things of a part that differ, and how many of them were `mended` (0 where nobody asked for it).

    `examples`: a few of them by id. What is `under_way` will be put right by the upkeep in its own time, and is no fault.
    """

    part: str
    what: str
    count: int
    mended: int = 0
    under_way: bool = False
    examples: Sequence[str] = field(default_factory=tuple)

    @property
    def open(self) -> int:
        """What is left to be put right."""
        return 0 if self.under_way else self.count - self.mended
