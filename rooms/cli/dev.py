"""`rooms dev`: everything on this machine under one supervisor."""

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rooms.cli.address import local_url
from rooms.cli.counts import MEMORY, clear, counts_folder, lay_out
from rooms.cli.errors import CliError
from rooms.cli.private import write_private
from rooms.cli.session import API_KEY_FILE, DATABASE_URL_FILE, Command, Session, pass_session

if TYPE_CHECKING:
    from rooms.embedded import Child, Started
    from rooms.settings import Settings

ADMIN_KEY_NAME = "rooms-dev"
LOOPBACK = "127.0.0.0/8,::1/128"


@dataclass(slots=True)
class Ground:
    """What there is beside the records: the way to the database and the admin key in the data folder, and the metrics' files."""

    data: Path
    key: str = ""
    memory: Path = MEMORY
    owned: bool = False
    """True once the folder is known to be ours: until then another supervisor may be at work in it."""

    @property
    def metrics(self) -> Path:
        return counts_folder(self.data, self.memory)

    @property
    def key_file(self) -> Path:
        return self.data / API_KEY_FILE

    def prepare(self, url: str) -> None:
        """Bring the database up to date and lay out the files. Called while the data folder is held."""
        from rooms.cli.database import admin_key, migrated

        self.owned = True
        lay_out(self.metrics)
        migrated(url)
        known = self._known()
        self.key = admin_key(url, ADMIN_KEY_NAME, known)
        if self.key != known:
            write_private(self.key_file, self.key)
        self.key_file.chmod(0o600)
        write_private(self.data / DATABASE_URL_FILE, url)

    def leave(self) -> None:
        """Everything is down: nobody should look for the database, and nothing is counted."""
        if self.owned:
            clear(self.metrics)
            (self.data / DATABASE_URL_FILE).unlink(missing_ok=True)

    def _known(self) -> str | None:
        with suppress(FileNotFoundError, UnicodeDecodeError):
            return self.key_file.read_text(encoding="ascii").strip() or None
        return None


def children_environment(environment: Mapping[str, str], ground: Ground) -> dict[str, str]:
    """The environment of the children: webhooks to loopback are allowed, metrics are counted over all processes."""
    targets = ",".join(filter(None, (environment.get("ROOMS_ALLOW_TARGETS"), LOOPBACK)))
    return {
        **environment,
        "ROOMS_ALLOW_TARGETS": targets,
        "ROOMS_DATA": str(ground.data),
        "PROMETHEUS_MULTIPROC_DIR": str(ground.metrics),
        "PYTHONUNBUFFERED": "1",
    }


def children(settings: "Settings") -> "list[Child]":
    """The processes, in the order in which they stop: first nothing new comes in."""
    from rooms.embedded import Child, http_ready

    python = [sys.executable, "-m", "rooms"]
    return [
        Child(name="serve", argv=[*python, "serve"], ready=http_ready(f"{local_url(settings)}/health/ready")),
        Child(name="worker", argv=[*python, "worker"]),
        *([Child(name="relay", argv=[*python, "relay"])] if settings.relayed else []),
        Child(name="upkeep", argv=[*python, "upkeep"]),
    ]


def banner(settings: "Settings", ground: Ground, started: "Started", *, with_key: bool) -> list[tuple[str, str]]:
    """Return what a person needs to know first: (heading, text). `with_key`: the key itself, for a terminal only, as what
    goes to a file or a pipe is kept and read by others.
    """
    url = local_url(settings)
    database = "embedded PostgreSQL" if settings.database_url is None else "DATABASE_URL"
    broker = " and BROKER_URL" if settings.relayed else ""
    return [
        ("Address", url),
        ("API docs", f"{url}/schema"),
        ("Admin key", f"{ground.key}  (in {ground.key_file})" if with_key else f"in {ground.key_file}"),
        ("Data", f"{ground.data}  ({database}{broker})"),
        ("Logs", str(started.logs)),
        ("Webhooks", f"may go to this machine too ({LOOPBACK}); ROOMS_ALLOW_TARGETS opens other private networks"),
        ("Next", "rooms listen   (in another terminal: receives webhooks, and shows them)"),
        ("", f'curl -H "Authorization: Bearer $(cat {ground.key_file})" {url}/v1/rooms'),
    ]


@click.command(cls=Command)
@pass_session
def dev(session: Session) -> None:
    """Run PostgreSQL (without DATABASE_URL), the API, a worker and the upkeep, until Ctrl-C."""
    supervise(session, session.settings(), os.environ)


def supervise(
    session: Session, settings: "Settings", environment: Mapping[str, str], *, foundations: "Sequence[Child]" = ()
) -> None:
    """Run everything of these settings until it is told to stop; `foundations` are what it stands on."""
    import asyncio

    from rooms.embedded import EmbeddedError, Supervisor

    ground = Ground(settings.data.absolute())
    try:
        ground.data.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as exc:
        raise CliError(f"{ground.data} cannot be made: {exc.strerror}; ROOMS_DATA names another folder") from exc

    def tell(started: "Started") -> None:
        rows = banner(settings, ground, started, with_key=sys.stdout.isatty())
        if session.as_json:
            session.output().document(
                {"url": local_url(settings), "key_file": str(ground.key_file), "data": str(ground.data)}
            )
            return
        click.secho(f"\nRooms is ready ({started.took_s:.1f} s)\n", bold=True, fg="green")
        for heading, text in rows:
            click.echo(f"  {click.style(heading.ljust(10), bold=True)} {text}")
        click.echo("\nCtrl-C stops it.\n")

    supervisor = Supervisor(
        data=ground.data,
        foundations=foundations,
        children=children(settings),
        environment=children_environment(environment, ground),
        database_url=settings.database_url,
        migrate=ground.prepare,
        on_ready=tell,
    )
    try:
        asyncio.run(supervisor.run())
    except EmbeddedError as exc:
        raise CliError(str(exc)) from exc
    finally:
        ground.leave()
