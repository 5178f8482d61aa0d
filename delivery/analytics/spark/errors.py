"""Define the errors of the analysis.

AnalysisError
├── NoJavaError          there is no Java to run Spark on
├── NoSegmentsError      there are no segments at the address
├── StateError           the state of an earlier run cannot be used
├── FollowError          the stream of new segments ended
└── CollisionError       two names have the same key
"""

from delivery.errors import DeliveryError


class AnalysisError(DeliveryError):
    """The analysis cannot continue."""


class NoJavaError(AnalysisError):
    """There is no Java to run Spark on."""


class NoSegmentsError(AnalysisError):
    """There are no segments at the address."""


class StateError(AnalysisError):
    """The state of an earlier run cannot be used; `--full` starts over."""


class FollowError(AnalysisError):
    """The stream of new segments ended; the tables are those of the last run."""


class CollisionError(AnalysisError):
    """Two names have the same key, so the tables would mix them up."""
