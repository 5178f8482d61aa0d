"""The command line as a test calls it: in this process, its environment made for it."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from rooms.cli import build_cli

_OURS = (
    "ROOMS_URL",
    "ROOMS_API_KEY",
    "ROOMS_LISTEN",
    "ROOMS_DATA",
    "ROOMS_ALLOW_TARGETS",
    "ROOMS_LANE_CONCURRENCY",
    "DATABASE_URL",
    "BROKER_URL",
    "ELECTION_URL",
    "MAGAZINE_URL",
    "ROOMS_FARM",
    "ROOMS_CLIENT",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
    "http_proxy",
    "https_proxy",
    "all_proxy",
)


@dataclass(slots=True)
class Terminal:
    """Runs commands; `data` is their ROOMS_DATA."""

    data: Path
    environment: dict[str, str] = field(default_factory=dict)

    def run(self, *arguments: str, stdin: bytes | str | None = None, **environment: str) -> Result:
        """One command, however it ends."""
        given = {"ROOMS_DATA": str(self.data), **self.environment, **environment}
        runner = CliRunner(env={**dict.fromkeys(_OURS), **given})
        return runner.invoke(build_cli(), list(arguments), input=stdin, prog_name="rooms")

    def done(self, *arguments: str, stdin: bytes | str | None = None, **environment: str) -> str:
        """Return the standard output of a command that succeeds."""
        result = self.run(*arguments, stdin=stdin, **environment)
        assert result.exit_code == 0, result.output
        return result.stdout

    def json(self, *arguments: str, stdin: bytes | str | None = None, **environment: str) -> Any:
        """The one JSON document that a command writes."""
        return json.loads(self.done("--json", *arguments, stdin=stdin, **environment))

    def lines(self, *arguments: str, **environment: str) -> list[Any]:
        """The JSON documents that a command writes, one a line."""
        return [
            json.loads(line) for line in self.done("--json", *arguments, **environment).splitlines()
        ]
