"""The errors of the analysis:

AnalysisError
├── NoJavaError          there is no Java to run Spark on
├── NoSegmentsError      nothing to analyse at the address
├── StateError           what an earlier run left behind cannot be used
├── FollowError          the stream of new segments ended
└── CollisionError       two names have one key; the tables would mix them up
"""

from delivery.errors import DeliveryError


class AnalysisError(DeliveryError):
    """The analysis cannot go on."""


class NoJavaError(AnalysisError):
    """There is no Java to run Spark on."""


class NoSegmentsError(AnalysisError):
    """There is nothing to analyse."""


class StateError(AnalysisError):
    """What an earlier run left behind cannot be used; `--full` starts over."""


class FollowError(AnalysisError):
    """The stream of new segments ended; the tables are those of the last run."""


class CollisionError(AnalysisError):
    """Two names have one key."""
