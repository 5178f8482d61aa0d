"""Define the errors of the analysis.

AnalysisError            what happened, where, and what to do, in up to three lines
├── NoJavaError          there is no Java to run Spark on
├── SparkFailedError     Spark failed; its log is named
├── LocalFailedError     the engine of small logs failed
├── NoSegmentsError      there are no segments at the address
├── StateError           the state of an earlier run cannot be used
└── CollisionError       two names have the same key
"""

from rooms.errors import DeliveryError


class AnalysisError(DeliveryError):
    """Report in up to three lines why the analysis cannot continue: what, where, what to do."""

    def __init__(self, what: str, *, where: str | None = None, remedy: str | None = None) -> None:
        """Join the lines that are given."""
        super().__init__("\n".join(line for line in (what, where, remedy) if line))


class NoJavaError(AnalysisError):
    """Report that there is no Java to run Spark on."""


class SparkFailedError(AnalysisError):
    """Report that Spark failed; its log has the reason."""


class LocalFailedError(AnalysisError):
    """Report that the engine in this process failed, or could not read a segment."""


class NoSegmentsError(AnalysisError):
    """Report that there are no segments at the address, or all are set aside."""

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        remedy: str | None = None,
        is_incomplete: bool = False,
    ) -> None:
        """`is_incomplete`: there are segments, and all are set aside."""
        self.is_incomplete = is_incomplete
        super().__init__(what, where=where, remedy=remedy)


class StateError(AnalysisError):
    """Report that the state of an earlier run cannot be used; `--full` starts over."""


class CollisionError(AnalysisError):
    """Report that two names have the same key, so the tables would mix them up."""


def name_collision(what: str, first: str, second: str) -> CollisionError:
    """Return the error about two names of one kind."""
    return CollisionError(
        f"two names of one {what} have the same key by chance: {first}, {second}",
        remedy="delete the folder `state` of the tables: the next run makes other keys",
    )
