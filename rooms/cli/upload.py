"""A file of messages on its way into a room, batch by batch, each under a key of its own.

The key is made of the prefix and the byte at which the batch begins: whoever sends the same file again sends the same
batches under the same keys, and the service answers for those it has with what it answered before.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from typing import Any, Final

from rooms.cli.client import Client
from rooms.cli.errors import CliError, ProblemError, UnreachableError
from rooms.cli.ndjson import Batch

RETRIES: Final = 5
_LONGEST_PAUSE_S: Final = 30.0
_FIRST_PAUSE_S: Final = 0.5
_TIMEOUT_S: Final = 120.0
_PASSING: Final = {
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.BAD_GATEWAY,
    HTTPStatus.SERVICE_UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT,
}
_INDEX: Final = re.compile(r"messages(?:\[|/)(\d+)\]?")


class UploadError(CliError):
    """The upload stopped. Everything before `line` is published; from there on it can be taken up again."""

    def __init__(self, cause: CliError, batch: Batch, *, published: int, prefix: str) -> None:
        self.cause = cause
        self.batch = batch
        self.published = published
        self.prefix = prefix
        super().__init__(f"lines {batch.lines[0]} to {batch.lines[-1]} were not accepted: {cause.message}")

    @property
    def line(self) -> int:
        """The first line that is not known to be published."""
        return self.batch.lines[0]

    def problems(self) -> list[tuple[int | None, str, str]]:
        """(line, field, what is wrong with it), as far as the service named them."""
        found = []
        for field, message in self.cause.fields if isinstance(self.cause, ProblemError) else []:
            index = _INDEX.search(field)
            known = index is not None and int(index[1]) < len(self.batch.lines)
            line = self.batch.lines[int(index[1])] if index is not None and known else None
            found.append((line, field[index.end() :].lstrip("./") if index is not None and known else field, message))
        return found

    def describe(self) -> dict[str, Any]:
        return {
            **self.cause.describe(),
            "lines": [self.batch.lines[0], self.batch.lines[-1]],
            "errors": [{"line": line, "field": field, "message": text} for line, field, text in self.problems()],
            "published": self.published,
            "from_line": self.line,
            "idempotency_prefix": self.prefix,
        }

    def lines(self) -> list[str]:
        told = self.problems()
        detail = [] if told else self.cause.lines()[1:]
        where = [f"line {line}: {field}: {text}" if line else f"{field}: {text}" for line, field, text in told]
        return [self.message, *detail, *where, *self._way_on()]

    def _way_on(self) -> list[str]:
        before = f"{self.published} messages are published" if self.published else "nothing of this run is published"
        resume = f"--idempotency-prefix {self.prefix} --from-line {self.line}"
        if isinstance(self.cause, ProblemError) and self.cause.status == HTTPStatus.CONFLICT:
            return [
                f"{before}. This part of the file was published before, cut or worded differently:",
                "use the same --batch-size again, or --again to publish all of it once more",
            ]
        if isinstance(self.cause, ProblemError) and self.cause.status not in _PASSING:
            return [f"{before}. Mend these lines, then go on with: {resume}"]
        return [f"{before}. The same command again doubles nothing; to skip what is done: {resume}"]


def upload(
    client: Client,
    path: str,
    parts: Iterable[Batch],
    *,
    prefix: str,
    pause: Callable[[float], None],
    warn: Callable[[str], None],
) -> Iterator[tuple[Batch, bool]]:
    """Send every batch in order; yields each with whether it was published by an earlier run already.

    What passes (the service is away, busy or starting again) is tried RETRIES times. Raises UploadError.
    """
    published = 0
    for batch in parts:
        try:
            repeated = _send(client, path, batch, key=f"{prefix}-{batch.offset}", pause=pause, warn=warn)
        except CliError as exc:
            raise UploadError(exc, batch, published=published, prefix=prefix) from exc
        published += len(batch.messages)
        yield batch, repeated


def _send(
    client: Client, path: str, batch: Batch, *, key: str, pause: Callable[[float], None], warn: Callable[[str], None]
) -> bool:
    wait_s = _FIRST_PAUSE_S
    for left in range(RETRIES, -1, -1):
        asked_s = None
        try:
            answer = client.send("POST", path, body=batch.body, headers={"Idempotency-Key": key}, timeout_s=_TIMEOUT_S)
        except UnreachableError as exc:
            if not left:
                raise
            said = exc.message
        except ProblemError as exc:
            if not left or exc.status not in _PASSING:
                raise
            said, asked_s = exc.message, exc.retry_after_s
        else:
            return bool(answer.headers.get("idempotent-replayed") == "true")
        wait_s = min(_LONGEST_PAUSE_S, max(wait_s * 2, asked_s or 0.0))
        warn(f"lines {batch.lines[0]} to {batch.lines[-1]}: {said}; again in {wait_s:g} s")
        pause(wait_s)
    raise AssertionError("the last try returns or raises")
