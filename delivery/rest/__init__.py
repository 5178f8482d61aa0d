"""Handler queues, and what operators ask of sidelines, magazines and the analysis; the composition root mounts it beside the other routes."""

from typing import Final

from litestar.handlers import HTTPRouteHandler
from litestar.openapi.spec import Tag

from delivery.rest import analysis, magazines, queue_sideline, queues, schedule, sideline, status

ROUTES: Final[tuple[HTTPRouteHandler, ...]] = (
    *sideline.ROUTES,
    *schedule.ROUTES,
    *magazines.ROUTES,
    *status.ROUTES,
    *queues.ROUTES,
    *queue_sideline.ROUTES,
    *analysis.ROUTES,
)
TAGS: Final = (
    Tag(name="sideline", description="What could not be delivered, and bringing it back."),
    Tag(name="magazines", description="The stores behind sidelines and handler queues: depth, pointers and counters."),
    Tag(name="queues", description="Messages for handlers in Python processes."),
    Tag(name="analysis", description="What the analysis of the log has found: lost, failing together, retries."),
)
