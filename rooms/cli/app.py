"""Define the root command `rooms`: its commands, their lazy loading, and its exit codes."""

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final, NoReturn

import click

from rooms.cli.context import CliSession, global_options
from rooms.cli.errors import CliError, print_error
from rooms.errors import SettingsError, TransientError

EXIT_INTERRUPTED: Final = 130
EXIT_FAILED: Final = 1

_SERVICE: Final = "The service"
_SETTING_UP: Final = "Setting up"
_SHARING: Final = "Sharing"
_MESSAGES: Final = "Messages"
_DELIVERY: Final = "Delivery"
_ANALYSIS: Final = "Analytics"


@dataclass(frozen=True, slots=True)
class CommandSpec:
    """Describe a command without loading it. `target` is `module:attribute`."""

    name: str
    target: str
    summary: str
    section: str

    def load(self) -> click.Command:
        """Import the command."""
        module, _, attribute = self.target.partition(":")
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command


class RootGroup(click.Group):
    """Implement `rooms`: load commands on demand, and turn errors into messages and exit codes."""

    def __init__(
        self, name: str, commands: Iterable[CommandSpec], renamed: Iterable[CommandSpec] = ()
    ) -> None:
        super().__init__(
            name,
            params=[
                *global_options(root=True),
                click.Option(
                    ["--version"],
                    is_flag=True,
                    is_eager=True,
                    expose_value=False,
                    callback=_show_version,
                ),
            ],
            help="Pub/sub with rooms: signed webhooks with retries, and queues to pull from.",
            context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
        )
        self.specs = {spec.name: spec for spec in commands}
        self._renamed = {spec.name: spec for spec in renamed}

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(self.specs)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's signature
        spec = self.specs.get(cmd_name) or self._renamed.get(cmd_name)
        return None if spec is None else spec.load()

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.NoSuchCommand as exc:
            # click looks for similar names among the commands that are loaded, which are none.
            raise click.NoSuchCommand(exc.command_name, possibilities=self.specs, ctx=ctx) from exc

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's signature
        sections: dict[str, list[tuple[str, str]]] = {}
        for spec in self.specs.values():
            sections.setdefault(spec.section, []).append((spec.name, spec.summary))
        for section, rows in sections.items():
            with formatter.section(section):
                formatter.write_dl(rows)

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any
    ) -> NoReturn:
        """Run the command and exit. Errors are shown without traceback, a closed pipe is silent."""
        extra["standalone_mode"] = False
        session = extra.setdefault("obj", CliSession())
        try:
            code = super().main(args, prog_name, **extra)
            sys.stdout.flush()
        except (click.Abort, KeyboardInterrupt) as exc:
            # click also aborts when a prompt reaches the end of the input.
            sys.exit(EXIT_FAILED if isinstance(exc.__cause__, EOFError) else EXIT_INTERRUPTED)
        except click.ClickException as exc:
            print_error(exc, as_json=session.as_json)
            sys.exit(exc.exit_code)
        except (TransientError, SettingsError) as exc:
            print_error(CliError(str(exc)), as_json=session.as_json)
            sys.exit(EXIT_FAILED)
        except BrokenPipeError:
            _discard_stdout()
            sys.exit(EXIT_FAILED)
        sys.exit(code if isinstance(code, int) else 0)


def _discard_stdout() -> None:
    # The interpreter flushes stdout again at exit, which would raise the same error.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _show_version(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:  # noqa: ARG001 - click's callback
    if value:
        from importlib.metadata import version

        click.echo(f"rooms {version('rooms')}")
        ctx.exit()


def _section(section: str, *commands: tuple[str, str, str]) -> tuple[CommandSpec, ...]:
    return tuple(CommandSpec(name, target, summary, section) for name, target, summary in commands)


COMMANDS: Final = (
    *_section(
        _SERVICE,
        ("dev", "rooms.cli.dev:dev", "Run everything on this machine, PostgreSQL included."),
        ("full", "rooms.cli.full:full", "The same, with Artemis and ZooKeeper."),
        ("serve", "rooms.app.cli:serve", "Run only the API."),
        ("worker", "rooms.app.cli:worker", "Run only a push worker."),
        ("relay", "rooms.app.cli:relay", "Run only a relay, where BROKER_URL is not PostgreSQL."),
        ("upkeep", "rooms.app.cli:upkeep", "Run only the maintenance tasks."),
        ("standalone", "rooms.app.cli:standalone", "Run all of these in one process."),
        ("handlers", "rooms.app.cli:handlers", "Run the handlers of handler queues."),
        ("migrate", "rooms.app.cli:migrate", "Migrate the database to this version's schema."),
        ("cluster", "rooms.cli.cluster:cluster", "Show members and leader; number of shards."),
        ("broker", "rooms.cli.job:broker", "Send deliveries again that a broker has lost."),
        ("retention", "rooms.app.cli:retention", "Preview what retention would delete."),
        ("secret-key", "rooms.cli.secret_key:secret_key", "Rotate the key that seals secrets."),
        ("doctor", "rooms.app.cli:doctor", "Check (and repair) consistency."),
    ),
    *_section(
        _SETTING_UP,
        ("whoami", "rooms.cli.session:whoami", "Show the own organisation and key."),
        ("sign-in", "rooms.cli.session:sign_in", "Print a link to sign in to the console."),
        ("session", "rooms.cli.session:session_group", "People who are signed in to the console."),
        ("portal-link", "rooms.cli.session:portal_link", "Print a link to some subscriptions."),
        ("key", "rooms.cli.key:key", "API keys, by the service or in the database."),
        ("room", "rooms.cli.room:room", "Rooms and their retry policy."),
        ("event-type", "rooms.cli.event_type:event_type", "Event types and their schemas."),
        ("subscription", "rooms.cli.subscription:subscription", "PUSH and PULL subscriptions."),
        ("filter", "rooms.cli.filter:filter_group", "Test the filter of a subscription."),
    ),
    *_section(
        _SHARING,
        ("organisation", "rooms.cli.organisation:organisation", "Members of the installation."),
        ("directory", "rooms.cli.grant:directory", "List rooms that others share."),
        ("grant", "rooms.cli.grant:grant", "Allow others to publish or subscribe."),
        ("approve", "rooms.cli.approval:approve", "Approve a subscription, or its change."),
        ("reject", "rooms.cli.approval:reject", "Reject a subscription, or its change."),
        ("govstack", "rooms.cli.govstack:govstack", "Rooms on GovStack's interfaces."),
        ("journal", "rooms.cli.journal:journal", "List, export and verify the changes."),
        ("usage", "rooms.cli.usage:usage", "Count what was published and delivered, by the hour."),
        ("quota", "rooms.cli.quota:quota", "Limit what organisations and rooms use."),
        ("signing-key", "rooms.cli.signing_key:signing_key", "Keys that sign your messages."),
        ("receipt", "rooms.cli.receipt:receipt", "Get and verify signed receipts of messages."),
        ("receipt-key", "rooms.cli.receipt:receipt_key", "Rotate the key of receipts."),
    ),
    *_section(
        _MESSAGES,
        ("publish", "rooms.cli.publish:publish", "Publish a message, or a file of messages."),
        ("pull", "rooms.cli.pull:pull", "Receive and acknowledge messages (PULL)."),
        ("stream", "rooms.cli.pull:stream", "Receive messages continuously (PULL)."),
        ("browse", "rooms.cli.search:browse", "Look at a queue without taking (PULL)."),
        ("listen", "rooms.cli.listen:listen", "Receive, verify and show webhooks here."),
        ("messages", "rooms.cli.message:messages", "List the messages of a room."),
        ("search", "rooms.cli.search:search", "Find anything by id, name or key."),
        ("message", "rooms.cli.message:message", "Show, cancel or reschedule a message."),
        ("timeline", "rooms.cli.message:timeline", "Show every step of a message in order."),
        ("deliveries", "rooms.cli.message:deliveries", "List the deliveries of a subscription."),
        ("redeliver", "rooms.cli.message:redeliver", "Send one delivery again."),
        ("restore", "rooms.cli.job:restore", "Queue unfinished or ended deliveries again."),
        ("clear", "rooms.cli.job:clear", "Cancel the unfinished deliveries of a room."),
        ("replay", "rooms.cli.job:replay", "Deliver past messages to a subscription."),
        ("jobs", "rooms.cli.job:jobs", "List jobs."),
        ("job", "rooms.cli.job:job", "Show or cancel a job."),
    ),
    *_section(
        _DELIVERY,
        ("status", "rooms.cli.status:status", "Health, backlog and failing subscriptions."),
        ("sideline", "rooms.cli.sideline:sideline", "Failed deliveries: list, retry, delete."),
        ("ordering", "rooms.cli.ordering:ordering", "List ordering keys, and unblock one."),
        ("queue", "rooms.cli.handler_queue:queue", "Create, configure and use handler queues."),
        ("magazine", "rooms.cli.magazine:magazine", "The stores of sidelined deliveries."),
    ),
    *_section(
        _ANALYSIS,
        ("export", "rooms.cli.analytics:export", "Export the delivery log as Parquet."),
        ("segments", "rooms.cli.segments:segments", "Seal segments that come from elsewhere."),
        ("analyze", "rooms.cli.analytics:analyze", "Export the log, and analyse what is new."),
        ("incidents", "rooms.cli.findings:incidents", "List correlated failures and causes."),
        ("reconcile", "rooms.cli.findings:reconcile", "Check that no delivery was lost."),
        ("retry-advice", "rooms.cli.findings:retry_advice", "Recommend retry settings."),
        ("report", "rooms.cli.report:report", "Write the results as an HTML page."),
    ),
)

RENAMED: Final = _section(
    "",
    ("buckets", "rooms.cli.cluster:buckets", ""),
    ("journey", "rooms.cli.message:journey", ""),
    ("advise", "rooms.cli.findings:advise", ""),
    ("recover", "rooms.cli.job:recover", ""),
)
"""The former names of commands. They are not listed, and go with the next minor release."""
