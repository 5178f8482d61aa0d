"""The errors of the command line:

click.ClickException
└── CliError              exit code 1
    ├── ProblemError      the service answered with problem details
    └── UnreachableError  the service did not answer
"""

import json
import sys
from collections.abc import Mapping
from typing import Any

import click

from rooms.terminal import json_safe, terminal_safe


class CliError(click.ClickException):
    """Something that the person at the terminal can do something about."""

    def describe(self) -> dict[str, Any]:
        """The error as JSON."""
        return {"title": self.message}

    def lines(self) -> list[str]:
        """The error for people, the first line being the gist."""
        return self.message.splitlines()


class UnreachableError(CliError):
    """Nothing answers at the address, or it went away before it answered."""


class ProblemError(CliError):
    """The service refused: RFC 9457 problem details, or whatever came in their place."""

    def __init__(self, status: int, problem: Mapping[str, Any], retry_after_s: float | None = None) -> None:
        self.status = status
        self.problem = dict(problem)
        self.retry_after_s = retry_after_s
        super().__init__(str(problem.get("title") or f"HTTP {status}"))

    @property
    def fields(self) -> list[tuple[str, str]]:
        """(field, what is wrong with it), as far as the problem names fields."""
        errors = self.problem.get("errors")
        found = []
        for error in errors if isinstance(errors, list) else []:
            if isinstance(error, Mapping):
                where = error.get("field") or error.get("path") or error.get("pointer") or ""
                found.append((str(where), str(error.get("message") or error.get("detail") or "")))
        return found

    def describe(self) -> dict[str, Any]:
        return {"status": self.status, **self.problem}

    def lines(self) -> list[str]:
        detail = self.problem.get("detail")
        fields = [f"{field}: {message}" if field else message for field, message in self.fields]
        # The detail of wrong fields says the same in one line.
        told = detail and detail != self.message and not (fields and all(line in str(detail) for line in fields))
        return [f"{self.message} ({self.status})", *([str(detail)] if told else []), *fields]


def show(error: click.ClickException, *, as_json: bool) -> None:
    """Tell it on standard error: a line of JSON for programs, lines for people."""
    if as_json:
        described = error.describe() if isinstance(error, CliError) else {"title": error.format_message()}
        print(json_safe(json.dumps(described, ensure_ascii=False)), file=sys.stderr)
        return
    first, *rest = [terminal_safe(line) for line in _lines(error)] or [""]
    click.secho(f"Error: {first}", fg="red", err=True)
    for line in rest:
        click.echo(f"  {line}", err=True)


def _lines(error: click.ClickException) -> list[str]:
    if isinstance(error, CliError):
        return error.lines()
    told = error.format_message().splitlines()
    ctx = error.ctx if isinstance(error, click.UsageError) else None
    return told if ctx is None else [*told, f"`{ctx.command_path} --help` tells more"]
