"""Call the HTTP API in the process, as the person who signed in."""

import asyncio
from collections.abc import AsyncIterator, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any, Final, Self
from urllib.parse import quote, urlencode

import msgspec

from rooms.api.fast_routes import App
from rooms.publishing.number_bounds import decode_json

MAX_ANSWER_BYTES: Final = 32 * 1024 * 1024
"""No answer of the API is larger; it bounds what a page holds in memory."""
_CHUNKS_HELD: Final = 8
_FORWARDED: Final = frozenset({b"x-request-id", b"host", b"x-forwarded-for"})
_BAD_REQUEST: Final = 400


class ApiProblemError(Exception):
    """Say that the API refused a call: status and problem details (RFC 9457)."""

    def __init__(self, status: int, problem: Mapping[str, Any]) -> None:
        super().__init__(str(problem.get("detail") or problem.get("title") or status))
        self.status = status
        self.problem = problem

    @property
    def fields(self) -> dict[str, str]:
        """Return the message of each wrong field."""
        return {one["field"]: one["message"] for one in self.problem.get("errors", ())}


class InProcessApi:
    """Call the routes of `/v1` with one key, on behalf of one request of a browser."""

    def __init__(self, app: App, scope: MutableMapping[str, Any], key: str | None) -> None:
        self._app = app
        self._outer = scope
        self._headers = [header for header in scope["headers"] if header[0] in _FORWARDED]
        if key is not None:
            self._headers.append((b"authorization", b"Bearer " + key.encode()))

    async def get(self, path: str, /, **query: Any) -> Any:
        """Return the JSON of an answer; parameters that are None are left out. ApiProblemError."""
        return await self.call("GET", path, query=query)

    async def post(self, path: str, body: Any = None, /, **query: Any) -> Any:
        """Return the JSON of an answer. ApiProblemError."""
        return await self.call("POST", path, body=body, query=query)

    async def patch(self, path: str, body: Any, /, **query: Any) -> Any:
        """Return the JSON of an answer. ApiProblemError."""
        return await self.call("PATCH", path, body=body, query=query)

    async def put(self, path: str, body: Any, /, **query: Any) -> Any:
        """Return the JSON of an answer. ApiProblemError."""
        return await self.call("PUT", path, body=body, query=query)

    async def delete(self, path: str, /, **query: Any) -> Any:
        """Return the JSON of an answer. ApiProblemError."""
        return await self.call("DELETE", path, query=query)

    async def call(
        self, method: str, path: str, *, body: Any = None, query: Mapping[str, Any] | None = None
    ) -> Any:
        """Call `/v1` + path; `body` is sent as JSON. Return the answer's JSON, None if it has none.

        ApiProblemError.
        """
        status, content = await self.send(
            method, path, body=None if body is None else msgspec.json.encode(body), query=query
        )
        document = decode_json(content) if content else None
        if status >= _BAD_REQUEST:
            raise ApiProblemError(status, document if isinstance(document, dict) else {})
        return document

    async def send(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, bytes]:
        """Call `/v1` + path with the bytes of a body; return the status and the answer's bytes."""
        scope = self._scope(method, path, body, query, headers)
        answer = _Answer(body or b"")
        await self._app(scope, answer.receive, answer.send)
        if "auth" in scope:
            # The server bounds connections by their organisation.
            self._outer["auth"] = scope["auth"]
        return answer.status, b"".join(answer.chunks)

    async def stream(self, path: str, /, **query: Any) -> AsyncIterator[bytes]:
        """Return the chunks of an answer of any length; few of them are held at a time.

        ApiProblemError.
        """
        answer = _StreamedAnswer()
        scope = self._scope("GET", path, None, query, None)
        task = asyncio.create_task(answer.run(self._app, scope))
        chunks = _Chunks(answer, task)
        await answer.begun.wait()
        if answer.status >= _BAD_REQUEST:
            content = b"".join([chunk async for chunk in chunks])
            document = decode_json(content) if content else None
            raise ApiProblemError(answer.status, document if isinstance(document, dict) else {})
        return chunks

    def _scope(
        self,
        method: str,
        path: str,
        body: bytes | None,
        query: Mapping[str, Any] | None,
        headers: Mapping[str, str] | None,
    ) -> dict[str, Any]:
        sent = list(self._headers)
        if body is not None:
            sent += [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        sent += [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
        given = {name: _text(value) for name, value in (query or {}).items() if value is not None}
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": self._outer.get("scheme", "http"),
            "path": f"/v1{path}",
            "raw_path": f"/v1{quote(path, safe='/-._~%')}".encode(),
            "query_string": urlencode(given).encode(),
            "root_path": "",
            "headers": sent,
            "client": self._outer.get("client"),
            "server": self._outer.get("server"),
            "state": {},
            "extensions": {},
        }


class _Answer:
    """Collect what an ASGI application sends."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._size = 0
        self.status = 500
        self.chunks: list[bytes] = []

    async def receive(self) -> dict[str, Any]:
        """Pass the body on, which is all there is."""
        body, self._body = self._body, b""
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Mapping[str, Any]) -> None:
        """Take a part of the answer. ValueError: it is larger than any answer of the API."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            return
        chunk = message.get("body", b"")
        self._size += len(chunk)
        if self._size > MAX_ANSWER_BYTES:
            raise ValueError("an answer of the API is larger than the console takes")
        self.chunks.append(chunk)


class _StreamedAnswer:
    """Take what an ASGI application sends, no faster than it is read."""

    def __init__(self) -> None:
        self._chunks: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._room = asyncio.Semaphore(_CHUNKS_HELD)
        self._requested = False
        self._over = asyncio.Event()
        self.begun = asyncio.Event()
        self.status = 500

    async def run(self, app: App, scope: dict[str, Any]) -> None:
        """Run the application until its answer was read."""
        try:
            await app(scope, self._receive, self._send)
        finally:
            self.begun.set()
            self._chunks.put_nowait(None)

    async def next_chunk(self) -> bytes | None:
        """Return the next part of the body; None: it has ended."""
        chunk = await self._chunks.get()
        if chunk is None:
            self._over.set()
        else:
            self._room.release()
        return chunk

    async def _receive(self) -> dict[str, Any]:
        if not self._requested:
            self._requested = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self._over.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Mapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.begun.set()
            return
        if message.get("body"):
            await self._room.acquire()
            self._chunks.put_nowait(message["body"])
        if not message.get("more_body", False):
            self._chunks.put_nowait(None)


class _Chunks:
    """Iterate over a body. The application ends when nothing refers to this any more.

    A generator would not do: one that was never begun leaves its application waiting for ever.
    """

    def __init__(self, answer: _StreamedAnswer, task: asyncio.Task[None]) -> None:
        self._answer = answer
        self._task = task

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        chunk = await self._answer.next_chunk()
        if chunk is None:
            await self._task
            raise StopAsyncIteration
        return chunk

    def __del__(self) -> None:
        self._task.cancel()


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def segment(text: object) -> str:
    """Return one part of a path, percent-encoded: a slash in it stays in it."""
    return quote(str(text), safe="")


def wrong_fields(
    error: ApiProblemError | None, shown_as: Mapping[str, str | None] = MappingProxyType({})
) -> dict[str, str]:
    """Return the messages of a problem by field: those about a part of a field stand at it.

    `shown_as`: the inputs of a page for fields with other names, at which they stand as well.
    """
    found: dict[str, str] = {}
    for name, message in (error.fields if error is not None else {}).items():
        root = name.partition(".")[0].partition("[")[0]
        text = message if root == name else f"{name}: {message}"
        found[root] = f"{found[root]}; {text}" if root in found else text
    return found | {
        shown: found[name] for name, shown in shown_as.items() if shown and name in found
    }
