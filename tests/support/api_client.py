"""A client of a running API, with a look into its database."""

import ssl
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import psycopg


def plain_client(**options: Any) -> httpx.Client:
    """Open a client for http addresses: to read trusted authorities takes longer than many calls."""
    return httpx.Client(verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), **options)


def is_live(url: str) -> bool:
    """Return whether a process at this address answers that it is live."""
    with suppress(httpx.TransportError), plain_client() as http:
        return http.get(f"{url}/health/live").status_code == httpx.codes.OK
    return False


@dataclass(slots=True)
class Client:
    """Speaks to the API by the key in `http`'s headers."""

    http: httpx.Client = field(default_factory=lambda: plain_client(timeout=60))

    @property
    def database_url(self) -> str:
        """Where its records are."""
        raise AttributeError("database_url")

    def call(self, method: str, path: str, body: Any = None, **more: Any) -> httpx.Response:
        """One request under /v1 with a JSON body."""
        if body is not None:
            more["json"] = body
        return self.http.request(method, f"/v1{path}", **more)

    def get(self, path: str, **query: Any) -> Any:
        """Return the body of a GET under /v1 that is answered with 200."""
        answer = self.call("GET", path, params=query)
        assert answer.status_code == httpx.codes.OK, answer.text
        return answer.json()

    def post(self, path: str, body: Any = None, **more: Any) -> Any:
        """Return the body of a POST under /v1 that is answered with 2xx."""
        answer = self.call("POST", path, body, **more)
        assert answer.is_success, f"{answer.status_code} {answer.text}"
        return answer.json()

    def rows(self, statement: str, *values: Any, **named: Any) -> list[tuple[Any, ...]]:
        """Return the rows of one database query."""
        with psycopg.connect(self.database_url) as connection:
            return connection.execute(statement.encode(), named or values or None).fetchall()

    def hasten(self, job: str) -> None:
        """Let a deletion be as old as if whatever knew nothing of it had ended, which is waited for otherwise."""
        aged = (
            "UPDATE jobs SET created_at = created_at - interval '1 min' WHERE id = %s RETURNING 1"
        )
        assert self.rows(aged, job) == [(1,)]

    def metric(self, name: str, *labels: str) -> float:
        """The sum of a metric's samples that carry each of `labels`, written `name="value"`."""
        answer = self.http.get("/metrics")
        assert answer.status_code == httpx.codes.OK, answer.text
        total = 0.0
        for line in answer.text.splitlines():
            sample, _, value = line.rpartition(" ")
            if sample.partition("{")[0] == name and all(label in sample for label in labels):
                total += float(value)
        return total
