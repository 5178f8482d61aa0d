"""Test every command against a service whose every text attacks the terminal."""

import functools
import json
from collections.abc import Iterator
from typing import Final

import click
import pytest

from rooms.cli import build_cli
from tests.support.cli_runner import Terminal
from tests.support.fake_api import Answer, FakeRooms, Seen
from tests.support.hostile_answers import ID, TIME, HostileAnswers
from tests.unit.rooms.test_safe_text import COMMANDS as WITH_ANSWERS_OF_THEIR_OWN
from tests.unit.rooms.test_safe_text import HOSTILE, assert_harmless

COMMANDS: Final[dict[str, tuple[str, ...]]] = {
    "approve": (ID,),
    "broker resend": (),
    "browse": (ID,),
    "clear": ("1000", "--yes"),
    "cluster shards": (),
    "directory": (),
    "event-type add-version": ("1000", "made", "--schema", "{}"),
    "event-type create": ("1000", "made"),
    "event-type delete": ("1000", "made"),
    "event-type show": ("1000", "made"),
    "filter test": (ID, "{}"),
    "govstack disable": ("1000",),
    "govstack enable": ("1000",),
    "govstack endpoint clear": (),
    "govstack endpoint set": ("https://example.com/{member}",),
    "govstack endpoint show": (),
    "govstack show": ("1000",),
    "grant create": ("1000", "publish", ID),
    "grant list": ("1000",),
    "grant revoke": ("1000", ID),
    "job cancel": (ID,),
    "job show": (ID,),
    "journal list": (),
    "key create": ("--name", "k", "--scope", "publish"),
    "key list": (),
    "key revoke": (ID,),
    "key rotate": (ID,),
    "key show": (ID,),
    "key update": (ID, "--name", "k"),
    "magazine list": (),
    "magazine show": ("orders",),
    "magazine sweep": ("orders",),
    "ordering skip": (ID, "k"),
    "organisation create": ("o",),
    "organisation delete": (ID, "--yes"),
    "organisation key create": (ID, "--name", "k", "--scope", "publish"),
    "organisation list": (),
    "organisation resume": (ID,),
    "organisation show": (ID,),
    "organisation suspend": (ID,),
    "organisation update": (ID, "--name", "o"),
    "portal-link": (ID,),
    "publish": ("1000", "made", "{}"),
    "queue create": ("orders",),
    "queue delete": ("orders", "--yes"),
    "queue purge": ("orders", "--yes"),
    "queue send": ("orders", "{}"),
    "queue set": ("orders", "--concurrency", "1"),
    "quota set": ("--room", "1000", "--messages-per-s", "1"),
    "quota show": (),
    "receipt get": (ID,),
    "reject": (ID,),
    "replay": (ID, "--since", TIME),
    "room counts": ("1000",),
    "room create": ("orders",),
    "room delete": ("1000", "--yes"),
    "room update": ("1000", "--description", "x"),
    "search": (ID,),
    "session end": (ID,),
    "session list": (),
    "session people": (),
    "sideline overview": (),
    "sideline purge": (ID, "--yes"),
    "sideline schedule": (ID,),
    "sideline show": (ID,),
    "sign-in": (),
    "signing-key list": (),
    "signing-key revoke": (ID,),
    "signing-key show": (ID,),
    "subscription activity": (ID,),
    "subscription approve": (ID,),
    "subscription cancel-change": (ID,),
    "subscription clear": (ID, "--yes"),
    "subscription consumers": (ID,),
    "subscription counts": (ID,),
    "subscription create": ("1000", "s"),
    "subscription delete": (ID, "--yes"),
    "subscription history": (ID,),
    "subscription reinstate": (ID,),
    "subscription reject": (ID,),
    "subscription resume": (ID,),
    "subscription retry": (ID,),
    "subscription rotate-password": (ID,),
    "subscription rotate-secret": (ID,),
    "subscription skip-to-now": (ID, "--yes"),
    "subscription suspend": (ID,),
    "subscription terminate": (ID, "--yes"),
    "subscription update": (ID, "--name", "s"),
    "usage last-hour": (),
    "usage list": (),
    "whoami": (),
}
"""The arguments of each command that asks the service, beside those of `test_safe_text`."""
SHOWS_NOTHING: Final = {
    "event-type delete", "govstack endpoint clear", "grant revoke", "queue purge", "session end",
    "signing-key revoke",
}  # fmt: skip
"""They show only what was done, and no text of the answer. What they show of a refusal is tested."""
ANOTHER_NAME: Final = {
    "message move", "message withdraw", "subscription keys", "subscription skip",
    "subscription try-filter",
}  # fmt: skip
"""Former names of commands that are tested by their present ones."""
PROCESSES: Final = {
    "dev", "full down", "full keep", "full run", "full up", "handlers", "relay", "serve",
    "standalone", "upkeep", "worker",
}  # fmt: skip
"""They run the service, and write its logs: `test_no_log_record_forges_another`."""
ON_THE_DATABASE: Final = {
    "doctor", "migrate", "receipt-key rotate", "retention", "secret-key prune", "secret-key rotate", "secret-key status",
}  # fmt: skip
"""They ask no service."""
ON_SEGMENTS: Final = {
    "analyze", "incidents", "reconcile", "report", "retry-advice", "segments seal",
}  # fmt: skip
"""They read files that `rooms export` wrote."""
WITHOUT_A_SERVICE: Final = {"signing-key generate", "journal verify", "receipt verify"}
TO_PROGRAMS: Final = {"export", "journal export", "usage export"}
"""They pass bytes on unchanged, and escape only on a terminal: `test_journal.py`."""
OF_ITS_OWN: Final = {"listen", "signing-key register"}
"""A receiver of webhooks: `test_no_webhook_prints_control_characters`; it reads a key's file."""
EXCEPTED: Final = (
    ANOTHER_NAME | PROCESSES | ON_THE_DATABASE | ON_SEGMENTS | WITHOUT_A_SERVICE | TO_PROGRAMS
) | OF_ITS_OWN


def leaves(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[str]:
    if not isinstance(command, click.Group):
        yield " ".join(path)
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        inner = command.get_command(context, name)
        assert inner is not None
        yield from leaves(inner, (*path, name))


@functools.cache
def hostile_answers() -> HostileAnswers:
    return HostileAnswers(HOSTILE)


def attack(seen: Seen) -> Answer | None:
    return hostile_answers().answer(seen)


def refuse(_: Seen) -> Answer:
    problem = {
        "title": HOSTILE,
        "detail": HOSTILE,
        "errors": [{"field": HOSTILE, "message": HOSTILE}],
    }
    return 422, json.dumps(problem, ensure_ascii=False).encode()


def test_each_command_is_attacked_or_excepted() -> None:
    every = set(leaves(build_cli()))
    elsewhere = {
        name
        for name in every
        for arguments in WITH_ANSWERS_OF_THEIR_OWN
        if arguments[: len(name.split())] == tuple(name.split())
    }
    assert set(COMMANDS) | EXCEPTED | elsewhere == every
    assert not set(COMMANDS) & EXCEPTED
    assert not (set(COMMANDS) | EXCEPTED) & elsewhere


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_prints_control_characters(
    terminal: Terminal, fake: FakeRooms, name: str
) -> None:
    arguments = (*name.split(), *COMMANDS[name])
    fake.interfere = attack
    shown = ""
    for option in ([], ["--json"]):
        result = terminal.run(*option, *arguments)
        assert not isinstance(result.exception, Exception), result.exception
        assert result.exit_code == 0, result.output
        assert_harmless(result.stdout)
        assert_harmless(result.stderr)
        shown += result.output
    assert ("evil" in shown) is (name not in SHOWS_NOTHING), shown
    fake.interfere = refuse
    result = terminal.run(*arguments)
    assert result.exit_code != 0
    assert "evil" in result.output
    assert_harmless(result.output)
