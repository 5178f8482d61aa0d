"""Define the errors of the command line.

click.ClickException
└── CliError              exit code 1
    ├── IncompleteError   exit code 3: segments are set aside, and nothing is left to show
    ├── ProblemError      the service answered with problem details
    └── UnreachableError  the service did not answer
"""

import json
import sys
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

import click

from rooms.safe_text import json_safe, terminal_safe

_TRANSIENT_STATUSES: Final = {
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.BAD_GATEWAY,
    HTTPStatus.SERVICE_UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT,
}


class CliError(click.ClickException):
    """Report a problem that the person at the terminal can solve."""

    def describe(self) -> dict[str, Any]:
        """Return the error as JSON."""
        return {"title": self.message}

    def lines(self) -> list[str]:
        """Return the error as lines for people, the summary first."""
        return self.message.splitlines()


class IncompleteError(CliError):
    """Report that there are segments of the log, and that none can be read."""

    exit_code = 3


class UnreachableError(CliError):
    """Report that the service did not answer, or closed the connection before it did.

    `may_have_arrived`: there was a connection, so the service may have done what was asked.
    """

    def __init__(self, message: str, *, may_have_arrived: bool = True) -> None:
        super().__init__(message)
        self.may_have_arrived = may_have_arrived


class ProblemError(CliError):
    """Report that the service refused, with RFC 9457 problem details or other content."""

    def __init__(
        self, status: int, problem: Mapping[str, Any], retry_after_s: float | None = None
    ) -> None:
        self.status = status
        self.problem = dict(problem)
        self.retry_after_s = retry_after_s
        self.advice = ""
        """A last line for people, which the command adds."""
        super().__init__(str(problem.get("title") or f"HTTP {status}"))

    @property
    def fields(self) -> list[tuple[str, str]]:
        """Return (field, problem) for each field that the problem details name."""
        errors = self.problem.get("errors")
        found = []
        for error in errors if isinstance(errors, list) else []:
            if isinstance(error, Mapping):
                where = error.get("field") or error.get("path") or error.get("pointer") or ""
                found.append((str(where), str(error.get("message") or error.get("detail") or "")))
        return found

    @property
    def kind(self) -> str:
        """Return the last part of the problem's type, such as `conflict`."""
        return str(self.problem.get("type") or "").rpartition(":")[2]

    def describe(self) -> dict[str, Any]:
        return {"status": self.status, **self.problem}

    def lines(self) -> list[str]:
        detail = self.problem.get("detail")
        fields = [f"{field}: {message}" if field else message for field, message in self.fields]
        # The detail of invalid fields repeats them in one line.
        show_detail = (
            detail
            and detail != self.message
            and not (fields and all(line in str(detail) for line in fields))
        )
        return [
            f"{self.message} ({self.status})",
            *([str(detail)] if show_detail else []),
            *fields,
            *([self.advice] if self.advice else []),
        ]


def is_transient(error: CliError) -> bool:
    """Return whether the same request may succeed a moment later, as during a restart."""
    return isinstance(error, UnreachableError) or (
        isinstance(error, ProblemError) and error.status in _TRANSIENT_STATUSES
    )


def print_error(error: click.ClickException, *, as_json: bool) -> None:
    """Write the error to standard error: one line of JSON for programs, lines for people."""
    if as_json:
        described = (
            error.describe() if isinstance(error, CliError) else {"title": error.format_message()}
        )
        print(json_safe(json.dumps(described, ensure_ascii=False)), file=sys.stderr)
        return
    first, *rest = [terminal_safe(line) for line in _error_lines(error)] or [""]
    click.secho(f"Error: {first}", fg="red", err=True)
    for line in rest:
        click.echo(f"  {line}", err=True)


def _error_lines(error: click.ClickException) -> list[str]:
    if isinstance(error, CliError):
        return error.lines()
    lines = error.format_message().splitlines()
    ctx = error.ctx if isinstance(error, click.UsageError) else None
    return lines if ctx is None else [*lines, f"`{ctx.command_path} --help` shows its usage"]
