"""A keep-alive connection to the API, with as little of a client as can be: one request, then its answer."""

import asyncio
from typing import Self, cast

import httptools

_TIMEOUT_S = 60.0


class BrokenError(Exception):
    """The connection was closed, or said nothing for a minute, in the middle of an exchange."""


class Connection(asyncio.Protocol):
    """Open it with `open`; then one `exchange` at a time."""

    def __init__(self) -> None:
        self._answered: asyncio.Future[tuple[int, bytes]] | None = None

    @classmethod
    async def open(cls, host: str, port: int) -> Self:
        _, connection = await asyncio.get_running_loop().create_connection(cls, host, port)
        return connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not descend from asyncio's.
        self._transport = cast("asyncio.Transport", transport)

    async def exchange(self, request: bytes) -> tuple[int, bytes]:
        """Status and body of the answer. Raises BrokenError."""
        loop = asyncio.get_running_loop()
        self._answered = loop.create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._body = b""
        limit = loop.call_later(_TIMEOUT_S, self._transport.abort)
        self._transport.write(request)
        try:
            return await self._answered
        finally:
            limit.cancel()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_result((self._parser.get_status_code(), self._body))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(
                BrokenError("the connection was lost before its answer came")
            )

    def close(self) -> None:
        self._transport.close()


def post_head(host: str, port: int, path: str, key: str) -> bytes:
    """The head of a JSON POST up to the value of Content-Length."""
    lines = (
        f"POST /v1{path} HTTP/1.1",
        f"Host: {host}:{port}",
        f"Authorization: Bearer {key}",
        "Content-Type: application/json",
        "Content-Length: ",
    )
    return "\r\n".join(lines).encode("ascii")


def post(head: bytes, body: bytes) -> bytes:
    """The whole request."""
    return b"%b%d\r\n\r\n%b" % (head, len(body), body)
