"""Name why a segment is set aside."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final


class Reason(StrEnum):
    """Name why a segment is set aside."""

    DAMAGED = "damaged"
    FOREIGN = "foreign"
    FUTURE = "future"
    EMPTY = "empty"
    UNSEALED = "unsealed"
    RENAMED = "renamed"
    GONE = "gone"


REMEDIES: Final[Mapping[Reason, str]] = {
    Reason.DAMAGED: "restore it from a copy",
    Reason.FOREIGN: "move it out of the folder",
    Reason.FUTURE: "analyse it with the version of Rooms that wrote it, or a later one",
    Reason.EMPTY: "restore it from a copy, or remove it and its manifest",
    Reason.UNSEALED: "`rooms segments seal` makes its manifest",
    Reason.RENAMED: "give it its name and folder back",
    Reason.GONE: "restore it from a copy; or, if it was removed on purpose, use --accept-gone",
}
"""The remedy of each, for people."""
MAX_LISTED: Final = 1000
"""Segments that a result lists; it counts all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAside:
    """A file that is not read. `part`: its hour since 1970; None: unknown.

    `counted`: its rows are in the results nevertheless, from an earlier run. `has_rows`: it can
    have rows of the log, which then are not in the results.
    """

    path: str
    reason: Reason
    detail: str
    part: int | None
    counted: bool = False
    has_rows: bool = True

    def document(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {
            "path": self.path,
            "reason": self.reason.value,
            "detail": self.detail,
            "part": self.part,
            "counted": self.counted,
            "remedy": REMEDIES[self.reason],
        }


def set_aside_lines(found: Sequence[Mapping[str, Any]], total: int, *, limit: int) -> list[str]:
    """Return lines for people about documents of SetAside, the first `limit` of them."""
    lines = [
        f"set aside: {one['path']}: {one['reason']}: {one['detail']}; {one['remedy']}"
        for one in found[:limit]
    ]
    rest = total - len(lines)
    return [*lines, f"and {rest:,} more, listed in latest.json"] if rest > 0 else lines
