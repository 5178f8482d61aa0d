"""The root of the command line: commands that load when they are called, and one way for all of them to end."""

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NoReturn

import click

from rooms.cli.errors import CliError, show
from rooms.cli.session import Session, global_options
from rooms.errors import TransientError

INTERRUPTED = 130
FAILED = 1


@dataclass(frozen=True, slots=True)
class Mount:
    """A command by name: where it lives (`module:attribute`), and what the help says without loading it."""

    name: str
    target: str
    summary: str
    section: str = "Operating"

    def load(self) -> click.Command:
        """Import it."""
        module, _, attribute = self.target.partition(":")
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command


class RootGroup(click.Group):
    """`rooms` itself."""

    def __init__(self, name: str, mounts: Iterable[Mount]) -> None:
        super().__init__(
            name,
            params=[
                *global_options(root=True),
                click.Option(["--version"], is_flag=True, is_eager=True, expose_value=False, callback=_show_version),
            ],
            help="Pub/sub with rooms: signed webhooks that come again, and queues to pull from.",
            context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
        )
        self.mounts = {mount.name: mount for mount in mounts}

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - the signature is click\'s
        return list(self.mounts)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - the signature is click\'s
        mount = self.mounts.get(cmd_name)
        return None if mount is None else mount.load()

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - the signature is click\'s
        sections: dict[str, list[tuple[str, str]]] = {}
        for mount in self.mounts.values():
            sections.setdefault(mount.section, []).append((mount.name, mount.summary))
        for section, rows in sections.items():
            with formatter.section(section):
                formatter.write_dl(rows)

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any
    ) -> NoReturn:
        """Run, then exit: errors are shown without a traceback, Ctrl-C is 130, a closed pipe is silent."""
        extra["standalone_mode"] = False
        session = extra.setdefault("obj", Session())
        try:
            code = super().main(args, prog_name, **extra)
            sys.stdout.flush()
        except (click.Abort, KeyboardInterrupt) as exc:
            # click also calls it an abort when a question met the end of the input.
            sys.exit(FAILED if isinstance(exc.__cause__, EOFError) else INTERRUPTED)
        except click.ClickException as exc:
            show(exc, as_json=session.as_json)
            sys.exit(exc.exit_code)
        except TransientError as exc:
            show(CliError(str(exc)), as_json=session.as_json)
            sys.exit(FAILED)
        except BrokenPipeError:
            _silence()
            sys.exit(FAILED)
        sys.exit(code if isinstance(code, int) else 0)


def _silence() -> None:
    # The interpreter flushes once more at its end, and would complain again.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _show_version(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:  # noqa: ARG001 - click's callback
    if value:
        from importlib.metadata import version

        click.echo(f"rooms {version('rooms')}")
        ctx.exit()
