"""A client that requests an answer, and disconnects before the answer has ended."""

from collections.abc import Awaitable, Callable
from typing import Any

from litestar import Litestar, get
from litestar.response import Stream


async def request_and_leave(
    make_stream: Callable[[], Stream], leaves: Callable[[], Awaitable[object]]
) -> None:
    """Request a stream, and disconnect once `leaves` has ended; return after the service has."""

    @get("/")
    async def answer() -> Stream:
        return make_stream()

    requested = False

    async def receive() -> dict[str, object]:
        nonlocal requested
        if not requested:
            requested = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await leaves()
        return {"type": "http.disconnect"}

    async def send(_: object) -> None:
        pass

    scope: Any = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET",
        "scheme": "http", "path": "/", "raw_path": b"/", "query_string": b"", "root_path": "",
        "headers": [], "client": None, "server": None, "state": {}, "extensions": {},
    }  # fmt: skip
    # Its own logging would hide from tests what is logged.
    app = Litestar([answer], openapi_config=None, logging_config=None)
    await app(scope, receive, send)  # type: ignore[arg-type]
