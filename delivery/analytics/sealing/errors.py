"""Define the errors of sealing and checking.

SegmentsError                  what happened, where, and what to do, in three lines
├── ManifestError              a manifest is damaged, or of a later version
├── ContentError               a file is no segment that this version can read
└── BusyError                  another process works on the folder
"""

from delivery.errors import DeliveryError


class SegmentsError(DeliveryError):
    """Segments cannot be used. The text has up to three lines: what, where, what to do."""

    def __init__(self, what: str, *, where: str | None = None, remedy: str | None = None) -> None:
        """Join the lines that are given."""
        self.what = what
        super().__init__("\n".join(line for line in (what, where, remedy) if line))


class ManifestError(SegmentsError):
    """A manifest is damaged, or of a later version."""

    def __init__(self, what: str, *, is_later: bool = False) -> None:
        """`is_later`: a later version of Rooms wrote it."""
        self.is_later = is_later
        super().__init__(what)


class ContentError(SegmentsError):
    """A file is no segment that this version can read."""

    def __init__(self, reason: str, what: str) -> None:
        """`reason`: a value of `check.Reason`."""
        self.reason = reason
        super().__init__(what)


class BusyError(SegmentsError):
    """Another process works on the folder."""
