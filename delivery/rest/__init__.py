"""Handler queues, and what operators ask of sidelines and magazines; the composition root mounts it beside the other routes."""

from typing import Final

from litestar.handlers import HTTPRouteHandler
from litestar.openapi.spec import Tag

from delivery.rest import magazines, queues, sideline, status

ROUTES: Final[tuple[HTTPRouteHandler, ...]] = (*sideline.ROUTES, *magazines.ROUTES, *status.ROUTES, *queues.ROUTES)
TAGS: Final = (
    Tag(name="sideline", description="What could not be delivered, and bringing it back."),
    Tag(name="magazines", description="The stores behind sidelines and handler queues: depth, pointers and counters."),
    Tag(name="queues", description="Messages for handlers in Python processes."),
)
