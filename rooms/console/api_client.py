"""Call the HTTP API in the process, as the person who signed in."""

from collections.abc import Mapping, MutableMapping
from typing import Any, Final
from urllib.parse import quote, urlencode

import msgspec

from rooms.api.fast_routes import App

MAX_ANSWER_BYTES: Final = 32 * 1024 * 1024
"""No answer of the API is larger; it bounds what a page holds in memory."""
_FORWARDED: Final = frozenset({b"x-request-id", b"host"})
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


class ApiClient:
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
        document = msgspec.json.decode(content) if content else None
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
        sent = list(self._headers)
        if body is not None:
            sent += [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        sent += [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
        given = {name: _text(value) for name, value in (query or {}).items() if value is not None}
        answer = _Answer(body or b"")
        scope: dict[str, Any] = {
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
        await self._app(scope, answer.receive, answer.send)
        if "auth" in scope:
            # The server bounds connections by their organisation.
            self._outer["auth"] = scope["auth"]
        return answer.status, b"".join(answer.chunks)


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


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def segment(text: object) -> str:
    """Return one part of a path, percent-encoded: a slash in it stays in it."""
    return quote(str(text), safe="")
