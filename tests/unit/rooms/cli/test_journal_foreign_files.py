"""Test `rooms journal verify` with exports that attack the terminal, or are broken."""

import json
from pathlib import Path
from typing import Any

import pytest

from rooms.domain.journal import FIRST_HASH, entry_hash, from_document, to_document
from tests.support.cli_runner import Terminal
from tests.support.fake_api import FakeRooms
from tests.support.foreign_files import (
    CONTENTS,
    PLACES,
    assert_refused,
    bounded_memory,
    make_foreign_file,
)
from tests.unit.rooms.cli.test_journal import chain, serve, write
from tests.unit.rooms.test_safe_text import HOSTILE, assert_harmless

LONG = HOSTILE * 2_000
TEXTS = ("id", "actor_id", "actor_name", "actor_organisation_id", "application", "source", "request_id", "action", "object", "before", "after", "reason")  # fmt: skip


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rooms.cli.input_files.WRITER_S", 0.01)


def rehashed(document: dict[str, Any]) -> dict[str, Any]:
    """Return the entry with the hash of its content, as a forger of a whole chain makes it."""
    chained = from_document(document)
    found = entry_hash(chained.previous_hash, chained.seq, chained.entry.canonical())
    return {**document, "hash": found.hex()}


def test_no_field_of_an_entry_controls_the_terminal(terminal: Terminal, tmp_path: Path) -> None:
    (document,) = chain(1)
    hostile = {**document, **dict.fromkeys(TEXTS, HOSTILE), "after": {HOSTILE: [HOSTILE]}}
    whole = write(tmp_path / "whole", [rehashed(hostile)])
    broken = write(tmp_path / "broken", [hostile])
    for options in ([], ["--json"]):
        for path, code in ((whole, 0), (broken, 1)):
            result = terminal.run(*options, "journal", "verify", path)
            assert result.exit_code == code, result.output
            assert_harmless(result.stdout)
            assert_harmless(result.stderr)


@pytest.mark.parametrize("field", ["seq", "at", "actor_kind", "outcome", "previous_hash", "hash"])
@pytest.mark.parametrize("value", [LONG, [LONG], 10**400, None, 1.5, True], ids=range(6))
def test_a_wrong_value_is_named_by_its_field_and_not_shown(
    terminal: Terminal, tmp_path: Path, field: str, value: object
) -> None:
    (document,) = chain(1)
    path = write(tmp_path / "x", [{**document, field: value}])
    wrong = f"{path}, line 1: not an entry of an NDJSON export (its field {field} has a wrong value"
    assert_refused(terminal.run("journal", "verify", path), wrong)


def test_an_unknown_field_is_not_shown_whole(terminal: Terminal, tmp_path: Path) -> None:
    (document,) = chain(1)
    path = write(tmp_path / "x", [{**document, LONG: 1}])
    assert_refused(terminal.run("journal", "verify", path), "line 1: ", "unknown field 'x")


@pytest.mark.parametrize("field", ["seq", "id", "hash"])
def test_a_missing_field_is_named(terminal: Terminal, tmp_path: Path, field: str) -> None:
    (document,) = chain(1)
    del document[field]
    result = terminal.run("journal", "verify", write(tmp_path / "x", [document]))
    assert_refused(result, f"line 1: not an entry of an NDJSON export (it has no field {field})")


@pytest.mark.parametrize("kind", [*CONTENTS, *PLACES])
def test_any_file_is_refused(terminal: Terminal, tmp_path: Path, kind: str) -> None:
    path = make_foreign_file(tmp_path, kind)
    with bounded_memory():
        result = terminal.run("journal", "verify", str(path))
    assert_refused(result, "evil\\x1b[2J")


@pytest.mark.parametrize("depth", [100, 990, 20_000])
def test_a_deep_entry_is_no_traceback(terminal: Terminal, tmp_path: Path, depth: int) -> None:
    (document,) = chain(1)
    text = json.dumps({**document, "after": "DEEP"})
    path = tmp_path / "x"
    path.write_text(text.replace('"DEEP"', "[" * depth + "]" * depth))
    result = terminal.run("journal", "verify", str(path))
    if result.stdout:
        assert (result.exit_code, result.stdout[:15]) == (1, "broken: entry 1")
    else:
        assert_refused(result, f"{path}, line 1: ")


@pytest.mark.parametrize("at", ["2026-01-01T00:00:00", "0001-01-01T00:00:00+14:00"])
def test_a_time_without_a_place_in_utc_is_refused(
    terminal: Terminal, tmp_path: Path, at: str
) -> None:
    """Check that a hash over a time does not depend on the time zone of who verifies it."""
    (document,) = chain(1)
    path = write(tmp_path / "x", [{**document, "at": at}])
    assert_refused(terminal.run("journal", "verify", path), "its field at has a wrong value")


@pytest.mark.parametrize(
    "fields",
    [
        {"at": "9999-12-31T23:59:59.999999+00:00"},
        {"at": "0001-01-01T00:00:00+00:00"},
        {"organisation_id": "\ud800"},
        {"organisation_id": {HOSTILE: 1}},
    ],
    ids=str,
)
def test_an_export_that_is_compared_may_be_forged(
    terminal: Terminal, fake: FakeRooms, tmp_path: Path, fields: dict[str, Any]
) -> None:
    (document,) = chain(1)
    serve(fake, [document])
    forged = rehashed({**document, **fields})
    path = tmp_path / "x"
    path.write_text(json.dumps(forged))
    result = terminal.run("journal", "verify", str(path), "--compare")
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 1
    assert_harmless(result.stdout)
    assert_harmless(result.stderr)


def test_the_forger_of_these_tests_makes_whole_chains() -> None:
    (document,) = chain(1)
    assert rehashed(document) == document
    assert to_document(from_document(document)) == document
    assert document["previous_hash"] == FIRST_HASH.hex()
