"""Answer OPTIONS with the methods of each path."""

from collections.abc import Sequence

from litestar import Response, route
from litestar.enums import HttpMethod
from litestar.handlers import HTTPRouteHandler


def options_handlers(routes: Sequence[HTTPRouteHandler]) -> list[HTTPRouteHandler]:
    """Return handlers of OPTIONS; Litestar's name only the methods of a path's first handler."""
    methods: dict[str, set[str]] = {}
    for handler in routes:
        for path in handler.paths:
            methods.setdefault(path, {HttpMethod.OPTIONS.value}).update(handler.http_methods)

    def answering(path: str, allowed: str) -> HTTPRouteHandler:
        @route(
            path,
            http_method=HttpMethod.OPTIONS,
            status_code=204,
            include_in_schema=False,
            sync_to_thread=False,
        )
        def options() -> Response[None]:
            return Response(None, headers={"Allow": allowed})

        return options

    return [answering(path, ", ".join(sorted(found))) for path, found in methods.items()]
