"""Implement `rooms dev`: run everything on this machine under one supervisor.

The counters of all processes are files in shared memory, if the system has a folder there. They are
memory-mapped: on a full file system, a page without a block ends its process by SIGBUS.
"""

import hashlib
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from rooms.cli.address import local_url
from rooms.cli.context import API_KEY_FILE, DATABASE_URL_FILE, CliSession, Command, pass_session
from rooms.cli.errors import CliError
from rooms.cli.module_loading import module_loading
from rooms.domain.role import Role

if TYPE_CHECKING:
    from rooms.local import Child, Started
    from rooms.settings import Settings

ADMIN_KEY_NAME: Final = "rooms-dev"
LOOPBACK: Final = "127.0.0.0/8,::1/128"
SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - folders in it have mode 0700


def metrics_dir(data: Path, shared_memory: Path = SHARED_MEMORY) -> Path:
    """Return the folder for counters. Its name depends only on `data`: a restart finds it."""
    if not (shared_memory.is_dir() and os.access(shared_memory, os.W_OK | os.X_OK)):
        return data / "run" / "metrics"
    name = hashlib.sha256(os.fsencode(data.absolute())).hexdigest()[:16]
    return shared_memory / f"rooms-metrics-{os.geteuid()}-{name}"


def reset_metrics_dir(folder: Path) -> None:
    """Recreate the folder. Counters of dead processes would otherwise be added to new ones."""
    remove_metrics_dir(folder)
    try:
        folder.mkdir(mode=0o700, parents=True)
    except FileExistsError as exc:
        raise CliError(
            f"{folder} exists and cannot be replaced: remove it, or choose another ROOMS_DATA"
        ) from exc


def ensure_metrics_dir(folder: Path) -> None:
    """Create the folder if something removed it, as logind does at the end of a session.

    CliError: it is another user's.
    """
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
        raise CliError(f"{folder} is another user's: remove it, or choose another ROOMS_DATA")


def remove_metrics_dir(folder: Path) -> None:
    """Remove the folder, if it exists."""
    shutil.rmtree(folder, ignore_errors=True)


@dataclass(slots=True)
class DevContext:
    """Hold the files that `rooms dev` writes: database address, admin key and counters."""

    data: Path
    key: str = ""
    shared_memory: Path = SHARED_MEMORY
    on_terminal: bool = False
    """A person sees the output: only then a link to sign in is made."""
    sign_in: str = ""
    """The path of that link; empty: there is none."""
    holds_data_dir: bool = False
    """True once the folder is locked: until then another supervisor may use it."""

    @property
    def metrics(self) -> Path:
        return metrics_dir(self.data, self.shared_memory)

    @property
    def key_file(self) -> Path:
        return self.data / API_KEY_FILE

    def prepare(self, url: str) -> None:
        """Migrate the database and write the files. Called while the data folder is locked."""
        with module_loading():
            from rooms.cli.database import admin_key, create_sign_in_link, migrate_database
            from rooms.local.pidfile import write_private

        self.holds_data_dir = True
        reset_metrics_dir(self.metrics)
        migrate_database(url)
        stored_key = self._read_key()
        self.key = admin_key(url, ADMIN_KEY_NAME, stored_key)
        if self.key != stored_key:
            write_private(self.key_file, f"{self.key}\n")
        self.key_file.chmod(0o600)
        if self.on_terminal:
            self.sign_in = create_sign_in_link(url, self.key, [Role.PLATFORM, Role.OWNER])
        write_private(self.data / DATABASE_URL_FILE, f"{url}\n")

    def clean_up(self) -> None:
        """Remove the database address and the counters, once every process has stopped."""
        if self.holds_data_dir:
            remove_metrics_dir(self.metrics)
            (self.data / DATABASE_URL_FILE).unlink(missing_ok=True)

    def _read_key(self) -> str | None:
        with suppress(FileNotFoundError, UnicodeDecodeError):
            return self.key_file.read_text(encoding="ascii").strip() or None
        return None


def children_environment(environment: Mapping[str, str], context: DevContext) -> dict[str, str]:
    """Return the environment of the children: loopback webhooks allowed, shared counters."""
    targets = ",".join(filter(None, (environment.get("ROOMS_ALLOW_TARGETS"), LOOPBACK)))
    return {
        **environment,
        "ROOMS_ALLOW_TARGETS": targets,
        "ROOMS_DATA": str(context.data),
        "PROMETHEUS_MULTIPROC_DIR": str(context.metrics),
        "PYTHONUNBUFFERED": "1",
    }


def children(settings: "Settings", prepare: Callable[[], None] | None = None) -> "list[Child]":
    """Return the processes in the order in which they stop, the API first.

    `prepare` is called before each start of one of them.
    """
    from rooms.local import Child, http_ready

    if settings.plain_port == "closed":
        raise CliError(
            "ROOMS_PLAIN_PORT=closed: `rooms dev` checks the API on its plain port; keep it on"
            " loopback, or run `rooms serve`"
        )
    python = [sys.executable, "-m", "rooms"]
    return [
        Child(
            name="serve",
            argv=[*python, "serve"],
            listens_on=(settings.listen_host, settings.listen_port),
            ready=http_ready(f"{local_url(settings)}/health/ready"),
            prepare=prepare,
        ),
        *(
            Child(name=name, argv=[*python, name], prepare=prepare)
            for name in ("worker", *(("relay",) if settings.uses_relay else ()), "upkeep")
        ),
    ]


def sign_in_command(settings: "Settings", data: Path) -> str:
    """Return the command that prints a link to sign in.

    It works in another terminal, where the environment of this one is not set. `data`: the folder
    of the key.
    """
    from rooms.settings import read_settings

    usual = read_settings({})
    environment = []
    if data != usual.data.absolute():
        environment.append(f"ROOMS_DATA={shlex.quote(os.fspath(data))}")
    if (url := local_url(settings)) != local_url(usual):
        environment.append(f"ROOMS_URL={url}")
    return " ".join([*environment, f"{command_name()} sign-in"])


def command_name() -> str:
    """Return how another terminal calls `rooms`: by its path where it is not on PATH."""
    if shutil.which("rooms") is not None:
        return "rooms"
    program = Path(sys.executable).parent / "rooms"
    here = Path.cwd()
    return shlex.quote(os.fspath(program.relative_to(here) if here in program.parents else program))


def banner(
    settings: "Settings", context: DevContext, started: "Started", *, with_key: bool
) -> list[tuple[str, str]]:
    """Return the lines (heading, text) to show once the service is ready.

    `with_key`: show the key itself, and the link to sign in. Only for a terminal, because files and
    pipes are kept and read by others.
    """
    url = local_url(settings)
    sign_in = sign_in_command(settings, context.data)
    database = "embedded PostgreSQL" if settings.database_url is None else "DATABASE_URL"
    broker = " and BROKER_URL" if settings.uses_relay else ""
    return [
        ("Address", url),
        (
            "Console",
            f"{url}{context.sign_in}  (works once, for 15 minutes; then: {sign_in})"
            if with_key and context.sign_in
            else f"{sign_in}   (prints a link that works once)",
        ),
        ("API docs", f"{url}/schema"),
        (
            "Admin key",
            f"{context.key}  (in {context.key_file})" if with_key else f"in {context.key_file}",
        ),
        ("Data", f"{context.data}  ({database}{broker})"),
        ("Logs", str(started.log_dir)),
        (
            "Webhooks",
            f"may go to this machine ({LOOPBACK}); ROOMS_ALLOW_TARGETS allows other networks",
        ),
        ("Next", f"{command_name()} listen   (in another terminal: receives and shows webhooks)"),
        ("", f'curl -H "Authorization: Bearer $(cat {context.key_file})" {url}/v1/rooms'),
    ]


@click.command(cls=Command)
@pass_session
def dev(session: CliSession) -> None:
    """Run PostgreSQL, the API, a worker and the maintenance tasks, until Ctrl-C.

    With DATABASE_URL set, no PostgreSQL is started.
    """
    supervise(session, session.settings(), os.environ)


def supervise(
    session: CliSession,
    settings: "Settings",
    environment: Mapping[str, str],
    *,
    foundations: "Sequence[Child]" = (),
) -> None:
    """Run everything until a signal stops it. `foundations` start first and stop last."""
    import asyncio

    from rooms.local import EmbeddedError, Supervisor

    session.warn_of_unknown_settings()
    on_terminal = sys.stdout.isatty() and not session.as_json
    context = DevContext(settings.data.absolute(), on_terminal=on_terminal)
    try:
        context.data.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as exc:
        raise CliError(
            f"{context.data} cannot be created: {exc.strerror}; set ROOMS_DATA to another folder"
        ) from exc

    def report_ready(started: "Started") -> None:
        rows = banner(settings, context, started, with_key=on_terminal)
        if session.as_json:
            session.output().document(
                {
                    "url": local_url(settings),
                    "key_file": str(context.key_file),
                    "data": str(context.data),
                    "sign_in": sign_in_command(settings, context.data),
                }
            )
            return
        click.secho(f"\nRooms is ready ({started.took_s:.1f} s)\n", bold=True, fg="green")
        for heading, text in rows:
            click.echo(f"  {click.style(heading.ljust(10), bold=True)} {text}")
        click.echo("\nCtrl-C stops it.\n")

    supervisor = Supervisor(
        data=context.data,
        foundations=foundations,
        children=children(settings, lambda: ensure_metrics_dir(context.metrics)),
        environment=children_environment(environment, context),
        database_url=settings.database_url,
        migrate=context.prepare,
        on_ready=report_ready,
    )
    try:
        asyncio.run(supervisor.run())
    except EmbeddedError as exc:
        raise CliError(str(exc)) from exc
    finally:
        context.clean_up()
