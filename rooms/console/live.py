"""Send the changed part of an open page, as Server-Sent Events.

The process asks its own console for the part every few seconds, with the browser's session, and
sends it when it differs. So a page needs no code to be live, and what a session may no longer see
is not sent: a stream ends when its session does.

Between two parts it sends a beat, `same`. Without one for a while, the script of an open page says
that it is not connected: a network that is gone reports no error.
"""

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import msgspec
from litestar import get
from litestar.response import Stream

from rooms.api.fast_routes import App, end_with_input
from rooms.api.stream_task import in_own_task
from rooms.console.page import DOWNLOAD, FRAGMENT_HEADER, HOME, PORTAL, PageDep
from rooms.console.sessions import is_portal_path
from rooms.errors import FieldProblem, InvalidError, RateLimitedError, UnauthenticatedError

EVERY_S: Final = 5.0
MAX_STREAMS: Final = 200
MAX_STREAMS_OF_SESSION: Final = 8
"""Open pages of one session that are live; more are as they were when they were opened."""
MAX_STREAMS_OF_ORGANISATION: Final = 50
"""So many pages are live for the people of one organisation: others have theirs, too."""
MAX_STREAM_S: Final = 3600.0
"""A stream ends then; the browser opens another one."""
MAX_PAUSE_S: Final = 120.0
BEAT_S: Final = 5.0
"""A stream is never silent for longer, but for the time that a page takes to render.

`static/console.js` waits for four of them."""
_PAUSE_FACTOR: Final = 150
_SAME: Final = b"event: same\ndata: same\n\n"
"""An event, because a script cannot see comments."""
_END: Final = b"event: end\ndata: end\n\n"
_OF_BROWSER: Final = frozenset({b"cookie", b"accept-language", b"x-forwarded-proto"})
"""Headers that decide who looks, and in which language; HTTPS decides the cookie's name."""
_OK: Final = 200
_TRANSIENT: Final = frozenset({429, 503})
"""Too many queries at a time, or one that took too long: the page is asked for again."""
_NO_PAGE: Final = FieldProblem("path", "is no page of the console")


class LiveStreams:
    """Hold the streams of a process."""

    def __init__(self, *, every_s: float = EVERY_S) -> None:
        self._every_s = every_s
        self._of_session: Counter[str] = Counter()
        self._of_organisation: Counter[str] = Counter()
        self._ended = asyncio.Event()
        self.app: App | None = None
        """The console itself."""

    def end(self) -> None:
        """End every stream, and refuse others: the process stops."""
        self._ended.set()

    def open(
        self, scope: Mapping[str, Any], organisation: str, session: str, target: str
    ) -> AsyncGenerator[bytes, None]:
        """Return the events of a page's stream. RateLimitedError, InvalidError."""
        try:
            parts = urlsplit(target)
        except ValueError as exc:
            raise InvalidError(_NO_PAGE) from exc
        path = unquote(parts.path)
        is_page = path == HOME or path.startswith(f"{HOME}/")
        is_same_kind = is_portal_path(path) == is_portal_path(scope["path"])
        if parts.scheme or parts.netloc or not is_page or not is_same_kind:
            raise InvalidError(_NO_PAGE)
        if self._is_full(organisation, session):
            raise RateLimitedError("too many pages of the console are live; reload this one")
        events = self._events(scope, path, parts.query)
        return in_own_task(self._bounded(organisation, session, events))

    def _is_full(self, organisation: str, session: str) -> bool:
        return (
            self._of_session.total() >= MAX_STREAMS
            or self._of_organisation[organisation] >= MAX_STREAMS_OF_ORGANISATION
            or self._of_session[session] >= MAX_STREAMS_OF_SESSION
        )

    async def _bounded(
        self, organisation: str, session: str, events: AsyncGenerator[bytes, None]
    ) -> AsyncGenerator[bytes, None]:
        """Yield events, and count the stream while it lasts."""
        if self._is_full(organisation, session):  # others began since this one was admitted
            yield _END
            return
        counted = ((self._of_organisation, organisation), (self._of_session, session))
        for counter, name in counted:
            counter[name] += 1
        try:
            async with aclosing(events):
                async for event in events:
                    yield event
        finally:
            for counter, name in counted:
                counter[name] -= 1
                if not counter[name]:
                    del counter[name]

    async def _events(
        self, scope: Mapping[str, Any], path: str, query: str
    ) -> AsyncGenerator[bytes, None]:
        last = b""
        loop = asyncio.get_running_loop()
        end = loop.time() + MAX_STREAM_S
        while not self._ended.is_set() and loop.time() < end:
            began = loop.time()
            status, content = await self._fragment(scope, path, query)
            if status not in {_OK, *_TRANSIENT}:
                break
            digest = hashlib.sha256(content).digest()
            if status == _OK and digest != last:
                last = digest
                yield b"data: " + msgspec.json.encode(content.decode()) + b"\n\n"
            else:
                yield _SAME
            # Whatever a page costs, keeping it open costs well below a hundredth of a core.
            pause_s = max(self._every_s, (loop.time() - began) * _PAUSE_FACTOR)
            next_at = loop.time() + min(pause_s, MAX_PAUSE_S)
            while not self._ended.is_set() and (left_s := next_at - loop.time()) > 0:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._ended.wait(), min(left_s, BEAT_S))
                if left_s > BEAT_S:
                    yield _SAME
        yield _END

    async def _fragment(self, scope: Mapping[str, Any], path: str, query: str) -> tuple[int, bytes]:
        assert self.app is not None
        status = 500
        chunks: list[bytes] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Mapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                chunks.append(message.get("body", b""))

        inner = {
            **{name: scope[name] for name in ("type", "asgi", "http_version", "scheme")},
            "method": "GET",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [
                *(one for one in scope["headers"] if one[0] in _OF_BROWSER),
                (FRAGMENT_HEADER, b"live"),
            ],
            "client": scope.get("client"),
            "server": scope.get("server"),
            "state": {},
            "extensions": {},
        }
        await self.app(inner, receive, send)
        return status, b"".join(chunks)


@get([f"{HOME}/live", f"{PORTAL}/live"], opt={DOWNLOAD: True})
async def stream_page(page: PageDep) -> Stream:
    """Stream the live part of a page, `path`, whenever it has changed."""
    if page.viewer is None or page.key is None:
        raise UnauthenticatedError("sign in first")
    streams: LiveStreams = page.request.app.state.live
    viewer, target = page.viewer, page.query("path") or ""
    end_with_input(page.request.scope)
    events = streams.open(page.request.scope, viewer.organisation_id, viewer.session_id, target)
    return Stream(
        events,
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )
