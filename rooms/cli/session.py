"""What one call of the command line goes by: the global options, the settings, and what is made of both."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rooms.cli.address import is_local, local_url
from rooms.cli.errors import CliError

if TYPE_CHECKING:
    from rooms.cli.client import Client
    from rooms.cli.output import Output
    from rooms.settings import Settings

API_KEY_FILE = "api-key"
DATABASE_URL_FILE = "run/database-url"


@dataclass(slots=True)
class Session:
    """The global options as they come in, and what they lead to."""

    url: str | None = None
    key: str | None = None
    as_json: bool = False

    def settings(self) -> "Settings":
        """The environment's settings. SettingsError becomes a usage error that lists every problem."""
        from rooms.errors import SettingsError
        from rooms.settings import read_settings

        try:
            return read_settings(os.environ)
        except SettingsError as exc:
            raise click.UsageError("\n".join(exc.problems)) from exc

    def output(self) -> "Output":
        from rooms.cli.output import Output

        return Output(as_json=self.as_json)

    def client(self) -> "Client":
        """The service's client, to be used in `with`."""
        from rooms.cli.client import Client

        settings = self.settings()
        url = self.url or local_url(settings)
        if not url.lower().startswith(("http://", "https://")):
            raise click.UsageError(f"--url: {url!r} begins with neither http:// nor https://")
        return Client(url, self._key(url, settings))

    def answering_database_url(self) -> str:
        """`database_url`, once its server does not say any more that it is starting; that is waited for as at a start."""
        import asyncio

        from rooms.errors import TransientError
        from rooms.storage.startup import wait_for_postgres

        url = self.database_url()
        try:
            asyncio.run(wait_for_postgres(url, within_s=self.settings().start_wait_s, only_starting=True))
        except TransientError as exc:
            raise CliError(str(exc)) from exc
        return url

    def database_url(self) -> str:
        """DATABASE_URL, or the embedded PostgreSQL's while it runs."""
        from rooms.log_lines import warn_safely

        warn_safely()  # what works on the database warns of what tenants have in it
        settings = self.settings()
        if settings.database_url is not None:
            return settings.database_url
        path = settings.data / DATABASE_URL_FILE
        try:
            return path.read_text().strip()
        except FileNotFoundError as exc:
            raise CliError(
                f"no database: set DATABASE_URL, or start the embedded one with `make run` (it writes {path})"
            ) from exc
        except OSError as exc:
            raise CliError(f"{path} cannot be read: {exc.strerror}") from exc

    def _key(self, url: str, settings: "Settings") -> str:
        if self.key:
            return self.key
        path = settings.data / API_KEY_FILE
        # The key in the file opens the service of this machine, so no other address gets to see it.
        if is_local(url, settings) and (found := _read(path)):
            return found
        raise CliError(
            f"no API key for {url}: give --key or ROOMS_API_KEY. The service that `make run` starts here leaves its own in {path}"
        )


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip() or None
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise CliError(f"{path} cannot be read: {exc.strerror}") from exc


def global_options(*, root: bool = False) -> list[click.Parameter]:
    """`--url`, `--key` and `--json`, made anew for each command that takes them. The environment counts at the root alone,
    so that it never wins over an option that stands in front.
    """

    def remember(ctx: click.Context, parameter: click.Parameter, value: object) -> None:
        session = ctx.ensure_object(Session)
        if value and parameter.name:
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
            envvar="ROOMS_API_KEY" if root else None,
            help="API key.  [ROOMS_API_KEY; else the file ROOMS_DATA/api-key]",
            **shared,
        ),
        click.Option(["--json", "as_json"], is_flag=True, help="JSON for programs instead of tables.", **shared),
    ]


class Command(click.Command):
    """A command that also takes the global options behind its name."""

    def __init__(self, name: str | None, *, params: list[click.Parameter] | None = None, **extra: Any) -> None:
        super().__init__(name, params=[*(params or []), *global_options()], **extra)


class Group(click.Group):
    """A noun with verbs, which take the global options in every place."""

    command_class = Command

    def __init__(self, name: str | None, *, params: list[click.Parameter] | None = None, **extra: Any) -> None:
        super().__init__(name, params=[*(params or []), *global_options()], **extra)


pass_session = click.make_pass_decorator(Session, ensure=True)
