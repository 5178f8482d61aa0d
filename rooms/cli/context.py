"""Hold the global options of a command, and create its settings, client and output from them."""

import os
import pwd
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rooms.cli.address import is_local, local_url
from rooms.cli.errors import CliError
from rooms.safe_text import terminal_safe

if TYPE_CHECKING:
    from rooms.cli.client import ApiClient
    from rooms.cli.output import Output
    from rooms.settings import Settings

API_KEY_FILE = "api-key"
DATABASE_URL_FILE = "run/database-url"
_KEY_VARIABLE = "ROOMS_API_KEY"
_MAX_SUMMARY = 200


@dataclass(slots=True)
class CliSession:
    """Hold the global options of one call."""

    url: str | None = None
    key: str | None = None
    as_json: bool = False

    def settings(self) -> "Settings":
        """Read the settings from the environment. Raise a usage error with every problem."""
        from rooms.errors import SettingsError
        from rooms.settings import read_settings

        try:
            return read_settings(os.environ)
        except SettingsError as exc:
            raise click.UsageError("\n".join(exc.problems)) from exc

    def warn_of_unknown_settings(self) -> None:
        """Print which variables are no settings, for commands that run processes of the service."""
        from rooms.unknown_settings import unknown_settings

        for warning in unknown_settings(os.environ):
            click.echo(f"Warning: {terminal_safe(warning)}", err=True)

    def output(self) -> "Output":
        """Return the standard output in the format that the options ask for."""
        from rooms.cli.output import Output

        return Output(as_json=self.as_json)

    def client(self) -> "ApiClient":
        """Return a client of the service, to be used in `with`."""
        from rooms.cli.client import ApiClient

        settings = self.settings()
        url = self.url or local_url(settings)
        if not url.lower().startswith(("http://", "https://")):
            raise click.UsageError(f"--url: {url!r} must begin with http:// or https://")
        return ApiClient(url, self._key(url, settings))

    def wait_for_database_url(self) -> str:
        """Return `database_url` once its server has finished starting."""
        import asyncio

        from rooms.db.readiness import wait_for_postgres
        from rooms.errors import TransientError

        url = self.database_url()
        try:
            asyncio.run(
                wait_for_postgres(url, within_s=self.settings().start_wait_s, only_starting=True)
            )
        except TransientError as exc:
            raise CliError(str(exc)) from exc
        return url

    def database_url(self) -> str:
        """Return DATABASE_URL, or the address of the embedded PostgreSQL while it runs."""
        from rooms.safe_text import log_warnings_safely

        log_warnings_safely()  # warnings may contain text of tenants
        settings = self.settings()
        if settings.database_url is not None:
            return settings.database_url
        path = settings.data / DATABASE_URL_FILE
        try:
            return path.read_text().strip()
        except FileNotFoundError as exc:
            raise CliError(
                "no database: set DATABASE_URL, or start the embedded one with `make run` "
                f"(it writes {path})"
            ) from exc
        except OSError as exc:
            raise CliError(f"{path} cannot be read: {exc.strerror}") from exc

    def _key(self, url: str, settings: "Settings") -> str:
        # click takes an empty variable for one that is not set.
        given = os.environ.get(_KEY_VARIABLE) if self.key is None else self.key
        if given is not None and not given.strip():
            raise click.UsageError(
                f"--key or {_KEY_VARIABLE} is empty: give a key, perhaps the file that it is read "
                f"from is missing. To use the key of the service that `make run` starts here, "
                f"leave the option out and unset the variable"
            )
        if given is not None:
            return given
        path = settings.data / API_KEY_FILE
        # The key in the file belongs to this machine's service: it must not reach another address.
        if is_local(url, settings) and (found := _read(path)):
            return found
        raise CliError(
            f"no API key for {url}: give --key or ROOMS_API_KEY. "
            f"The service that `make run` starts here writes its own to {path}"
        )


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip() or None
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise CliError(f"{path} cannot be read: {exc.strerror}") from exc


def global_options(*, root: bool = False) -> list[click.Parameter]:
    """Create `--url`, `--key` and `--json` for one command.

    Only the root command reads their environment variables. A variable therefore never wins over an
    option before the command's name.
    """

    def remember(ctx: click.Context, parameter: click.Parameter, value: object) -> None:
        session = ctx.ensure_object(CliSession)
        is_given = value is not None if parameter.name == "key" else value
        if is_given and parameter.name:
            setattr(session, parameter.name, value)

    shared: dict[str, Any] = {"expose_value": False, "callback": remember}
    return [
        click.Option(
            ["--url"],
            envvar="ROOMS_URL" if root else None,
            help="Address of the service.  [ROOMS_URL; else from ROOMS_LISTEN]",
            **shared,
        ),
        click.Option(
            ["--key"],
            envvar=_KEY_VARIABLE if root else None,
            help="API key; an empty one is an error.  "
            "[ROOMS_API_KEY; else the file ROOMS_DATA/api-key]",
            **shared,
        ),
        click.Option(
            ["--json", "as_json"],
            is_flag=True,
            help="JSON for programs instead of tables.",
            **shared,
        ),
    ]


class Command(click.Command):
    """Accept the global options after the command's name, too."""

    def __init__(
        self, name: str | None, *, params: list[click.Parameter] | None = None, **extra: Any
    ) -> None:
        super().__init__(name, params=[*(params or []), *global_options()], **extra)


class Group(click.Group):
    """Hold commands for one noun, and accept the global options in every place."""

    command_class = Command

    def __init__(
        self, name: str | None, *, params: list[click.Parameter] | None = None, **extra: Any
    ) -> None:
        super().__init__(name, params=[*(params or []), *global_options()], **extra)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands, each with its whole first sentence. click would cut it off."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [
            (name, command.get_short_help_str(_MAX_SUMMARY))
            for name, command in commands
            if command is not None and not command.hidden
        ]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)


def renamed(command: click.Command, old: str, new: str) -> click.Command:
    """Return a hidden copy of a command under its old name. It writes the new name to stderr.

    `old` and `new` are whole paths without `rooms`, such as `message withdraw`.
    """
    run = command.callback
    assert run is not None

    def notify(*args: Any, **values: Any) -> Any:
        click.echo(f"`rooms {old}` is now `rooms {new}`", err=True)
        return run(*args, **values)

    alias = copy(command)
    alias.name = old.rpartition(" ")[2]
    alias.hidden = True
    alias.callback = notify
    return alias


pass_session = click.make_pass_decorator(CliSession, ensure=True)


def user_name() -> str:
    """Return the name of the process's user, and not the one that the environment claims."""
    identity = os.getuid()
    try:
        return pwd.getpwuid(identity).pw_name
    except KeyError:  # a container may run as a user without a name
        return f"uid {identity}"
