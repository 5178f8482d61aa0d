"""Options that become fields of a request."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import click

from rooms.cli.errors import CliError
from rooms.domain.states import State
from rooms.terminal import terminal_safe


def given(**values: object) -> dict[str, Any]:
    """The fields that were given."""
    return {name: value for name, value in values.items() if value is not None and value != ()}


def cleared(names: Sequence[str]) -> dict[str, None]:
    """Fields to set back to nothing."""
    return {name.replace("-", "_"): None for name in names}


def changes(fields: dict[str, Any], clear: Sequence[str]) -> dict[str, Any]:
    """The body of a PATCH; a usage error where nothing would change, or a field is both set and cleared."""
    empty = cleared(clear)
    if both := sorted(empty.keys() & fields.keys()):
        raise click.UsageError(f"{', '.join(both)}: either set or cleared, not both")
    if not fields and not empty:
        raise click.UsageError("nothing to change was given")
    return {**fields, **empty}


def pairs(ctx: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str] | None:
    """Values that read `NAME=VALUE`, as an option's callback; None where there are none."""
    found = {}
    for value in values:
        name, equals, content = value.partition("=")
        if not equals or not name.strip():
            raise click.BadParameter(f"{value!r} does not read NAME=VALUE", ctx, parameter)
        found[name.strip()] = content
    return found or None


def interests(ctx: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> list[dict[str, Any]] | None:
    """Values that read `NAME`, or `NAME:1,2` for some of its versions, as an option's callback; None where there are none."""
    found: list[dict[str, Any]] = []
    for value in values:
        name, colon, versions = value.partition(":")
        numbers = versions.split(",") if colon else []
        if not name or not all(number.isascii() and number.isdigit() for number in numbers):
            raise click.BadParameter(f"{value!r} reads neither NAME nor NAME:1,2", ctx, parameter)
        found.append({"name": name, **({"versions": [int(number) for number in numbers]} if numbers else {})})
    return found or None


def paged(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--limit`, `--cursor` and `--all` (as `limit`, `cursor`, `whole`)."""
    for option in (
        click.option("--all", "whole", is_flag=True, help="Every page."),
        click.option("--cursor", help="Where the page before ended."),
        click.option("--limit", type=click.IntRange(1, 200), default=50, show_default=True, help="Items on a page."),
    ):
        command = option(command)
    return command


def filtered(command: Callable[..., Any]) -> Callable[..., Any]:
    """What lists of messages and of deliveries are narrowed by; each option is named as its query parameter."""
    states = click.Choice([state.value for state in State])
    for option in (
        click.option("--until", help="Published before this time (RFC 3339)."),
        click.option("--since", help="Published at this time or later (RFC 3339)."),
        click.option("--correlation-id", help="Only this one."),
        click.option("--state", type=states, help="Only deliveries in it, or messages that have one."),
        click.option("--version", type=click.IntRange(1), help="Only this version of it."),
        click.option("--event-type", help="Only this type."),
    ):
        command = option(command)
    return command


def sure(question: str, *, yes: bool) -> None:
    """Ask a person before something that cannot be undone; `--yes` has answered already."""
    if yes:
        return
    click.echo(f"{terminal_safe(question)} [y/N] ", nl=False, err=True)
    if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
        raise CliError("nothing was changed")


def read_json(text: str, what: str) -> Any:
    """JSON that was typed or is in a file (`@PATH`)."""
    import json
    from pathlib import Path

    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as exc:
            raise CliError(f"{what}: {text[1:]} cannot be read: {exc}") from exc
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise click.UsageError(f"{what} is not JSON: {exc}") from exc
