"""Provide options and arguments that several commands share, and resolve names to resources.

A room is named by id or name, a subscription by id or ROOM/NAME, a message by id or ROOM/ID, an
organisation by id, name or member id.
"""

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, TypedDict
from urllib.parse import quote

import click

from rooms.cli.errors import CliError, ProblemError
from rooms.cli.input_files import check_size, open_input, read_input
from rooms.cli.unknown_names import suggested
from rooms.domain.state_machine import ENDED_STATUSES, State
from rooms.safe_text import terminal_safe

if TYPE_CHECKING:
    from rooms.cli.client import ApiClient
    from rooms.cli.context import CliSession

CLEARABLE_THROTTLE: Final = (
    "max-concurrency",
    "timeout-ms",
    "rate-per-s",
    "rate-burst",
    "circuit-failures",
    "circuit-window-ms",
    "circuit-open-ms",
    "drain-per-s",
    "disable-after-ms",
)
_UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_MAX_ROOM = 0x7FFF_FFFF
_MAX_FILE: Final = 65_536


def set_fields(**values: object) -> dict[str, Any]:
    """Return the fields that were given."""
    return {name: value for name, value in values.items() if value is not None and value != ()}


def cleared_fields(names: Sequence[str]) -> dict[str, None]:
    """Return a body that removes these fields."""
    return {name.replace("-", "_"): None for name in names}


def patch_body(fields: dict[str, Any], clear: Sequence[str]) -> dict[str, Any]:
    """Return the body of a PATCH. Raise a usage error if it is empty or contradicts itself."""
    empty = cleared_fields(clear)
    if both := sorted(empty.keys() & fields.keys()):
        raise click.UsageError(f"{', '.join(both)}: set or clear it, not both")
    if not fields and not empty:
        raise click.UsageError("nothing to change")
    return {**fields, **empty}


def parse_pairs(
    ctx: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> dict[str, str] | None:
    """Parse values of the form NAME=VALUE as a click callback. Return None if there are none."""
    found = {}
    for number, value in enumerate(values, 1):
        name, equals, content = value.partition("=")
        if not equals or not name.strip():
            # The value may be a secret.
            raise click.BadParameter(
                f"number {number} does not have the form NAME=VALUE", ctx, parameter
            )
        found[name.strip()] = content
    return found or None


def read_pairs(
    ctx: click.Context, parameter: click.Parameter, path: str | None
) -> dict[str, str] | None:
    """Parse lines of the form NAME=VALUE of a file as a click callback. None: there are none."""
    return parse_pairs(ctx, parameter, read_lines(ctx, parameter, path))


def read_lines(ctx: click.Context, parameter: click.Parameter, path: str | None) -> tuple[str, ...]:
    """Return the lines of a file that are not empty, as a click callback; `-`: standard input."""
    if path is None:
        return ()
    try:
        content = _read_standard_input() if path == "-" else read_input(path, _MAX_FILE)
        lines = content.decode().splitlines()
    except (CliError, UnicodeDecodeError) as exc:
        raise click.BadParameter(str(exc), ctx, parameter) from exc
    return tuple(filter(None, map(str.strip, lines)))


def _read_standard_input() -> bytes:
    content = sys.stdin.buffer.read(_MAX_FILE + 1)
    return check_size("standard input", content, _MAX_FILE)


def parse_event_types(
    ctx: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> list[dict[str, Any]] | None:
    """Parse values of the form NAME or NAME:1,2 (versions) as a click callback.

    Return None if there are none.
    """
    found: list[dict[str, Any]] = []
    for value in values:
        name, colon, versions = value.partition(":")
        numbers = versions.split(",") if colon else []
        if not name or not all(number.isascii() and number.isdigit() for number in numbers):
            raise click.BadParameter(
                f"{value!r} has neither the form NAME nor NAME:1,2", ctx, parameter
            )
        found.append(
            {"name": name, **({"versions": [int(number) for number in numbers]} if numbers else {})}
        )
    return found or None


class Paging(TypedDict):
    """Hold which part of a list is wanted, as `ApiClient.page` takes it."""

    limit: int
    cursor: str | None
    whole: bool


def paging_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--limit`, `--cursor` and `--all`, which the command gets as `paging`."""

    @wraps(command)
    def run(*given: Any, limit: int, cursor: str | None, whole: bool, **named: Any) -> Any:
        return command(*given, paging=Paging(limit=limit, cursor=cursor, whole=whole), **named)

    decorated: Callable[..., Any] = run
    for option in (
        click.option("--all", "whole", is_flag=True, help="All pages."),
        click.option("--cursor", help="Cursor from the previous page."),
        click.option(
            "--limit",
            type=click.IntRange(1, 200),
            default=50,
            show_default=True,
            help="Items per page.",
        ),
    ):
        decorated = option(decorated)
    return decorated


def filter_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the filters of message and delivery lists, each named as its query parameter."""
    states = click.Choice([state.value for state in State])
    for option in (
        click.option("--until", help="Published before this time (RFC 3339)."),
        click.option("--since", help="Published at this time or later (RFC 3339)."),
        click.option("--correlation-id", help="Only this correlation id."),
        click.option(
            "--state", type=states, help="Only deliveries in this state, or messages that have one."
        ),
        click.option(
            "--version", type=click.IntRange(1), help="Only this version of the event type."
        ),
        click.option("--event-type", help="Only this event type."),
    ):
        command = option(command)
    return command


def parse_time(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Check an RFC 3339 time with an offset as a click callback; return its text."""
    from datetime import datetime

    if value is None:
        return None
    try:
        has_offset = datetime.fromisoformat(value).tzinfo is not None
    except ValueError:
        has_offset = False
    if not has_offset:
        raise click.BadParameter(f"{value!r} is no time like 2026-01-31T12:00:00Z", ctx, parameter)
    return value


every_option = click.option(
    "--all", "every", is_flag=True, help="Also fields that are not set, or are off."
)
reason_option = click.option("--reason", help="Why; kept in the history.")


def confirm_or_abort(question: str, *, yes: bool) -> None:
    """Ask for confirmation. Raise CliError if the answer is no. `yes` skips the question."""
    if yes:
        return
    click.echo(f"{terminal_safe(question)} [y/N] ", nl=False, err=True)
    if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
        raise CliError("nothing was changed")


def read_argument(text: str, source: str) -> bytes:
    """Return what an argument says, or the content of the file that it names (`@PATH`).

    CliError: the file cannot be read.
    """
    if not text.startswith("@"):
        return text.encode("utf-8", "surrogateescape")
    try:
        with open_input(text[1:]) as file:
            return file.read()
    except OSError as exc:
        raise CliError(f"{source}: {text[1:]} cannot be read: {exc.strerror}") from exc


def read_json(text: str, source: str) -> Any:
    """Decode JSON from the command line, or from a file (`@PATH`)."""
    import json

    content = read_argument(text, source)
    try:
        return json.loads(content.decode())
    except (ValueError, RecursionError) as exc:
        raise click.UsageError(f"{source} is not JSON: {exc}") from exc


def throttle_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the limits for webhook calls, each named as its field of the request."""
    for option in (
        click.option(
            "--disable-after-ms",
            type=click.IntRange(0),
            help="Disable the endpoint after this long with failures only; 0: never.",
        ),
        click.option(
            "--drain-per-s",
            type=click.FloatRange(0),
            help="Rate at which held messages are released; 0: at once.",
        ),
        click.option(
            "--circuit-open-ms",
            type=click.IntRange(100),
            help="Milliseconds the circuit stays open before each probe.",
        ),
        click.option(
            "--circuit-window-ms",
            type=click.IntRange(1),
            help="Milliseconds within which the failures count.",
        ),
        click.option(
            "--circuit-failures",
            type=click.IntRange(0),
            help="Consecutive failures that open the circuit; 0: never.",
        ),
        click.option(
            "--rate-burst", type=click.IntRange(1), help="Calls allowed at once after a pause."
        ),
        click.option(
            "--rate-per-s", type=click.FloatRange(0), help="Most calls per second; 0: no limit."
        ),
        click.option("--timeout-ms", type=click.IntRange(1), help="Timeout of one webhook call."),
        click.option(
            "--max-concurrency",
            type=click.IntRange(1, 1000),
            help="Concurrent calls, in each worker.",
        ),
    ):
        command = option(command)
    return command


def parse_id(text: str) -> str:
    """Return an id as part of a path. Raise a usage error if it is not an id."""
    if not _UUID.fullmatch(text):
        raise click.UsageError(f"{text!r} is not an id")
    return text.lower()


def path_segment(text: str) -> str:
    """Return a name, quoted as one part of a path."""
    return quote(text, safe="")


def find_room(client: "ApiClient", reference: str) -> dict[str, Any]:
    """Return the room with this id or name. Digits are tried as an id first, then as a name."""
    if reference.isascii() and reference.isdigit() and int(reference) <= _MAX_ROOM:
        try:
            found: dict[str, Any] = client.call("GET", f"/rooms/{int(reference)}")
        except ProblemError as exc:
            if exc.status != HTTPStatus.NOT_FOUND:
                raise
        else:
            return found
    for query in ({"name": reference}, {"name": reference, "shared": "true"}):
        rooms = [one for one in client.iter_items("/rooms", query) if one["name"] == reference]
        if rooms:
            return _only(rooms, f"rooms {reference!r}", owner="organisation_id")
    listed = [
        {**entry, "id": entry["room_id"]}
        for entry in client.iter_items("/directory", {"name": reference})
        if entry["name"] == reference
    ]
    if listed:
        entry = _only(listed, f"rooms {reference!r}", owner="owner")
        note = f"room {entry['id']}, {reference}, of {entry['owner']}"
        click.echo(terminal_safe(note), err=True)
        try:
            in_directory: dict[str, Any] = client.call("GET", f"/rooms/{entry['id']}")
        except ProblemError as exc:
            if exc.status != HTTPStatus.NOT_FOUND:
                raise
            raise CliError(
                f"the room {reference!r} is listed, but this key may not read it: only keys of"
                f" {entry['owner']}, and of organisations that it grants access, may"
            ) from exc
        return in_directory
    raise CliError(
        f"there is no room {reference!r}; `rooms room list` shows the rooms of this key, "
        f"`rooms directory` those of others{suggested(client, '/rooms', reference)}"
    )


def find_subscription(
    client: "ApiClient", reference: str, *, foreign: bool = False
) -> dict[str, Any]:
    """Return the subscription with this id, or this `room/name`.

    Each organisation may have one of the name, and ended ones besides. Preferred are those of the
    room's owner, or with `foreign` those of others, and of these the one that has not ended. Raise
    CliError if several are left.
    """
    if _UUID.fullmatch(reference):
        found: dict[str, Any] = client.call("GET", f"/subscriptions/{reference.lower()}")
        return found
    room_reference, slash, name = reference.partition("/")
    if not slash or not room_reference or not name:
        raise click.UsageError(f"{reference!r} is neither a subscription id nor ROOM/NAME")
    room = find_room(client, room_reference)
    named = [
        one
        for one in client.iter_items(f"/rooms/{room['id']}/subscriptions", {"name": name})
        if one["name"] == name
    ]
    owner = room.get("organisation_id")
    if not named:
        near = suggested(client, f"/rooms/{room['id']}/subscriptions", name)
        raise CliError(
            f"room {room['name']!r} has no subscription {name!r}; `rooms subscription list"
            f" {room['name']}` shows them{near}"
        )
    preferred = [one for one in named if (one.get("organisation_id") != owner) is foreign] or named
    living = [one for one in preferred if one.get("status") not in ENDED_STATUSES]
    return _only(
        living or preferred, f"subscriptions {name!r} to {room['name']!r}", owner="organisation"
    )


def find_organisation(client: "ApiClient", reference: str) -> dict[str, Any]:
    """Return the organisation with this id, name or member id. Needs the scope `platform`."""
    if _UUID.fullmatch(reference):
        found: dict[str, Any] = client.call("GET", f"/organisations/{reference.lower()}")
        return found
    for query in ("name", "member_id"):
        for organisation in client.iter_items("/organisations", {query: reference}):
            if organisation[query] == reference:
                return organisation
    near = suggested(client, "/organisations", reference)
    raise CliError(
        f"there is no organisation {reference!r}; `rooms organisation list` shows them{near}"
    )


def _only(found: Sequence[dict[str, Any]], what: str, *, owner: str) -> dict[str, Any]:
    if len(found) == 1:
        return found[0]
    listed = ", ".join(f"{one['id']} ({one.get(owner)})" for one in found)
    raise CliError(f"there are {len(found)} {what}; name one by its id: {listed}")


def message_path(client: "ApiClient", reference: str) -> str:
    """Return the path of the message with this id, or this `room/id` with the publisher's own id.

    The service finds the publisher's own id, so a key that may only publish is enough.
    """
    room_reference, slash, own = reference.partition("/")
    if not slash:
        return f"/messages/{parse_id(reference)}"
    room = find_room(client, room_reference)
    return f"/rooms/{room['id']}/messages/by-id/{quote(own, safe='')}"


def find_message(client: "ApiClient", reference: str) -> str:
    """Return the id of the message with this id, or this `room/id` with the publisher's own id."""
    room_reference, slash, own = reference.partition("/")
    if not slash:
        return parse_id(reference)
    room = find_room(client, room_reference)
    for message in client.iter_items(f"/rooms/{room['id']}/messages", {"id": own}):
        return str(message["id"])
    raise CliError(
        f"room {room['name']!r} has no message with the publisher's id {own!r}; `rooms messages"
        f" {room['name']}` lists them, and `rooms search` finds also those of other rooms"
    )


def list_of_subscription(
    session: "CliSession",
    subscription: str,
    resource: str,
    columns: Mapping[str, str],
    *,
    empty: str,
    paging: Paging,
    **wanted: Any,
) -> None:
    """Show a list below a subscription; `wanted` are its filters, without those that are None.

    An id is not looked up: of a deleted subscription only the history is left.
    """
    with session.client() as client:
        if _UUID.fullmatch(subscription):
            identity = subscription.lower()
        else:
            identity = find_subscription(client, subscription)["id"]
        path = f"/subscriptions/{identity}/{resource}"
        page = client.page(path, params=set_fields(**wanted), **paging)
    session.output().listing(page, columns, empty=empty)


subscriptions_argument = click.argument(
    "subscriptions", metavar="SUBSCRIPTION...", nargs=-1, required=True
)


def find_subscriptions(client: "ApiClient", references: Iterable[str]) -> dict[str, str]:
    """Return the id of each subscription by what it was called. CliError: one does not exist.

    So nothing begins for the first where the name of the last is misspelt.
    """
    return {one: str(find_subscription(client, one)["id"]) for one in references}


def post_action(
    session: "CliSession",
    subscription: str,
    action: str,
    body: object = None,
    *,
    foreign: bool = False,
    settings: bool = False,
) -> None:
    """Call POST on a resource below a subscription, and show the answer, if there is one.

    `foreign`: a name means the subscription of another organisation than the room's. `settings`:
    the answer is the subscription.
    """
    with session.client() as client:
        found = find_subscription(client, subscription, foreign=foreign)
        answer = client.call("POST", f"/subscriptions/{found['id']}/{action}", json=body)
    if answer is not None and settings:
        session.output().settings(answer)
    elif answer is not None:
        session.output().resource(answer)
