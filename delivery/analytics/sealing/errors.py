"""Define the errors of sealing and checking, and name why a segment is set aside.

SegmentsError                  what happened, where, and what to do, in three lines
├── ManifestError              a manifest is damaged, or of a later version
├── ContentError               a file is no segment that this version can read
└── BusyError                  another process works on the folder
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from rooms.errors import DeliveryError

_MAX_DETAIL: Final = 300


class SegmentsError(DeliveryError):
    """Report in up to three lines why segments cannot be used: what, where, what to do."""

    def __init__(self, what: str, *, where: str | None = None, remedy: str | None = None) -> None:
        """Join the lines that are given."""
        self.what = what
        super().__init__("\n".join(line for line in (what, where, remedy) if line))


class ManifestError(SegmentsError):
    """Report that a manifest is damaged, or of a later version."""

    def __init__(self, what: str, *, is_later: bool = False) -> None:
        """`is_later`: a later version of Rooms wrote it."""
        self.is_later = is_later
        super().__init__(what)


class ContentError(SegmentsError):
    """Report that a file is no segment that this version can read."""

    def __init__(self, reason: str, what: str) -> None:
        """`reason`: a value of `check.Reason`."""
        self.reason = reason
        # A file may have names and values of any length.
        super().__init__(what if len(what) <= _MAX_DETAIL else f"{what[:_MAX_DETAIL]}…")


class BusyError(SegmentsError):
    """Report that another process works on the folder."""


class SetAsideReason(StrEnum):
    """Name why a segment is set aside."""

    DAMAGED = "damaged"
    FOREIGN = "foreign"
    FUTURE = "future"
    EMPTY = "empty"
    UNSEALED = "unsealed"
    RENAMED = "renamed"
    GONE = "gone"


REMEDIES: Final[Mapping[SetAsideReason, str]] = {
    SetAsideReason.DAMAGED: "restore it from a copy",
    SetAsideReason.FOREIGN: "move it out of the folder",
    SetAsideReason.FUTURE: "analyse it with the version of Rooms that wrote it, or a later one",
    SetAsideReason.EMPTY: "restore it from a copy, or remove it and its manifest",
    SetAsideReason.UNSEALED: "`rooms segments seal` makes its manifest",
    SetAsideReason.RENAMED: "give it its name and folder back",
    SetAsideReason.GONE: (
        "restore it from a copy; or, if it was removed on purpose, use --accept-gone"
    ),
}
"""The remedy of each, for people."""
MAX_LISTED: Final = 1000
"""Segments that a result lists; it counts all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAside:
    """Name a file that is not read. `part`: its hour since 1970; None: unknown.

    `counted`: its rows are in the results nevertheless, from an earlier run. `has_rows`: it can
    have rows of the log, which then are not in the results.
    """

    path: str
    reason: SetAsideReason
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
