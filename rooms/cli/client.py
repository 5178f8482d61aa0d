"""Call the service's API, and translate its answers and failures into values and CliErrors."""

import ssl
import time
from collections.abc import Iterator, Mapping
from json import dumps
from math import isfinite
from typing import Any, Self

import click

from rooms.cli.address import is_loopback
from rooms.cli.errors import CliError, ProblemError, UnreachableError
from rooms.cli.http_library import httpx

MAX_PAGE = 200
_TIMEOUT_S = 30.0
_EXPORT_TIMEOUT_S = 90.0
"""The service itself waits nearly a minute for a part of an export."""
_CONNECT_TIMEOUT_S = 5.0
_SUCCESS = range(200, 300)
_TOO_MANY = 429
_MAX_WAITS = 5
_MAX_WAIT_S = 60.0


class ApiClient:
    """Hold one connection to the service. Raises ProblemError and UnreachableError."""

    def __init__(self, url: str, key: str) -> None:
        self.url = url.rstrip("/")
        try:
            self._http = httpx.Client(
                base_url=f"{self.url}/v1",
                headers={
                    "Authorization": f"Bearer {key}",
                    "Accept": "application/json",
                    "User-Agent": "rooms",
                },
                timeout=httpx.Timeout(_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S),
                # Loading trusted authorities takes longer than the call; http needs none.
                verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                if url.lower().startswith("http://")
                else True,
                # A proxy from the environment cannot reach this machine's loopback.
                trust_env=not is_loopback(url),
            )
        except (httpx.InvalidURL, ValueError) as exc:
            raise CliError(f"{url} is not a valid address: {exc}") from exc

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._http.close()

    def send(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        json: object = None,
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = _TIMEOUT_S,
    ) -> httpx.Response:
        """Send one request and return its answer. Raise a CliError if it is not a success.

        `body` is JSON already; `json` is a value to encode.
        """
        sent = {name: str(value) for name, value in (params or {}).items() if value is not None}
        extra = dict(headers or {})
        if json is not None:
            body = _encode_json(json)
        if body is not None:
            extra["Content-Type"] = "application/json"
        try:
            answer = self._http.request(
                method,
                path,
                content=body,
                params=sent,
                headers=extra,
                timeout=httpx.Timeout(timeout_s, connect=_CONNECT_TIMEOUT_S),
            )
        except (
            httpx.InvalidURL,
            httpx.UnsupportedProtocol,
            httpx.LocalProtocolError,
            UnicodeEncodeError,
        ) as exc:
            raise CliError(f"the request to {self.url} cannot be made: {exc}") from exc
        except httpx.ConnectError as exc:
            raise UnreachableError(self._unreachable_message(exc), may_have_arrived=False) from exc
        except httpx.TimeoutException as exc:
            raise UnreachableError(f"{self.url} did not answer in time ({method} {path})") from exc
        except httpx.HTTPError as exc:
            raise UnreachableError(
                f"{self.url} closed the connection before it answered: {exc}"
            ) from exc
        if answer.status_code not in _SUCCESS:
            raise ProblemError(answer.status_code, _problem(answer), _retry_after_s(answer))
        return answer

    def stream_lines(self, path: str, params: Mapping[str, Any]) -> Iterator[str]:
        """Yield the lines of a streamed answer. Raise UnreachableError after 30 s without data.

        Only line feeds end a line: messages may contain other characters that Unicode counts as
        line ends.
        """
        rest = b""
        for chunk in self.stream_bytes(path, params):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                yield line.removesuffix(b"\r").decode()
        if rest:
            yield rest.decode()

    def stream_bytes(
        self, path: str, params: Mapping[str, Any], *, timeout_s: float = _TIMEOUT_S
    ) -> Iterator[bytes]:
        """Yield a streamed answer as it comes.

        Raise UnreachableError after `timeout_s` without data, and where the answer breaks off.
        """
        timeout = httpx.Timeout(timeout_s, connect=_CONNECT_TIMEOUT_S)
        sent = {name: value for name, value in params.items() if value is not None}
        try:
            with self._http.stream("GET", path, params=sent, timeout=timeout) as answer:
                if answer.status_code not in _SUCCESS:
                    answer.read()
                    raise ProblemError(answer.status_code, _problem(answer), _retry_after_s(answer))
                yield from answer.iter_bytes()
        except httpx.ConnectError as exc:
            raise UnreachableError(self._unreachable_message(exc)) from exc
        except httpx.HTTPError as exc:
            raise UnreachableError(f"{self.url} closed the connection: {exc}") from exc

    def stream_export(self, path: str, params: Mapping[str, Any]) -> Iterator[bytes]:
        """Yield an exported file as it comes, as `stream_bytes` does."""
        return self.stream_bytes(path, params, timeout_s=_EXPORT_TIMEOUT_S)

    def call(self, method: str, path: str, **extra: Any) -> Any:
        """Send a request and return the decoded JSON of its answer, or None if it has no body."""
        answer = self.send(method, path, **extra)
        if not answer.content:
            return None
        try:
            return answer.json()
        except ValueError as exc:
            raise CliError(
                f"{self.url} is not a Rooms service: {method} {path} returned no JSON"
            ) from exc

    def page(
        self,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        limit: int = MAX_PAGE,
        cursor: str | None = None,
        whole: bool,
    ) -> dict[str, Any]:
        """Return one page {items, next_cursor, …}, or with `whole` every page as one.

        What the list says beside its items is of the last page.
        """
        given = dict(params or {})
        page = self.call("GET", path, params={**given, "limit": limit, "cursor": cursor})
        items, following = list(page["items"]), page.get("next_cursor")
        while whole and following:
            page = self._next_page(path, given, following)
            items += page["items"]
            following = page.get("next_cursor")
        return {**page, "items": items, "next_cursor": following}

    def iter_items(
        self, path: str, params: Mapping[str, Any] | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yield every item of a list, page by page."""
        given = dict(params or {})
        page = self.call("GET", path, params={**given, "limit": MAX_PAGE})
        yield from page["items"]
        while cursor := page.get("next_cursor"):
            page = self._next_page(path, given, cursor)
            yield from page["items"]

    def _next_page(self, path: str, params: Mapping[str, Any], cursor: str) -> Any:
        """Return a later page of a list; where it is refused for now, wait and ask again."""
        given = {**params, "limit": MAX_PAGE, "cursor": cursor}
        for _ in range(_MAX_WAITS):
            try:
                return self.call("GET", path, params=given)
            except ProblemError as exc:
                if exc.status != _TOO_MANY:
                    raise
                time.sleep(min(max(exc.retry_after_s or 1.0, 1.0), _MAX_WAIT_S))
        return self.call("GET", path, params=given)

    def _unreachable_message(self, exc: httpx.ConnectError) -> str:
        hint = (
            "start it with `make run`, or name another address by --url"
            if is_loopback(self.url)
            else "is the address right?"
        )
        reason = (
            ""
            if isinstance(exc.__cause__, ConnectionRefusedError) or "refused" in str(exc)
            else f" ({exc})"
        )
        return f"no answer at {self.url}{reason}: {hint}"


def _encode_json(value: object) -> bytes:
    try:
        return dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as exc:
        raise click.UsageError("the input is not UTF-8") from exc
    except ValueError as exc:
        fields = value.items() if isinstance(value, dict) else ()
        wrong = [name for name, given in fields if isinstance(given, float) and not isfinite(given)]
        raise click.UsageError(
            f"{', '.join(wrong) or 'the input'}: inf and nan are not JSON numbers"
        ) from exc


def _problem(answer: httpx.Response) -> dict[str, Any]:
    try:
        found = answer.json()
    except ValueError:
        found = None
    if isinstance(found, dict):
        return found
    return {"title": answer.reason_phrase or "refused", "detail": answer.text[:500]}


def _retry_after_s(answer: httpx.Response) -> float | None:
    value = answer.headers.get("retry-after", "")
    return float(value) if value.isdecimal() else None
