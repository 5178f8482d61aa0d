"""Test `rooms journal`: filters, exports, and the proof of a chain with and without the service."""

import io
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from rooms.cli.output import write_export
from rooms.domain.ids import OrganisationId
from rooms.domain.journal import (
    FIRST_HASH,
    ActorKind,
    ChainedEntry,
    JournalEntry,
    Outcome,
    entry_hash,
    to_document,
)
from tests.support.cli_runner import Terminal
from tests.support.fake_api import Answer, FakeRooms, Seen, problem
from tests.support.sleep_recorder import recorded_pauses

NORTH = OrganisationId("01900000-0000-7000-8000-0000000000a1")


def chain(length: int) -> list[dict[str, Any]]:
    """Return the documents of a whole chain."""
    found, previous = [], FIRST_HASH
    for seq in range(1, length + 1):
        entry = JournalEntry(
            id=f"01900000-0000-7000-8000-{seq:012x}",
            organisation_id=NORTH,
            at=datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=seq),
            actor_kind=ActorKind.KEY,
            actor_id=None,
            actor_name="ci",
            actor_organisation_id=NORTH,
            application=None,
            source="192.0.2.1",
            request_id="r",
            action="create_room",
            object=f"/v1/rooms/{seq}",
            before=None,
            after={"name": "öffnen", "factor": 1.5},
            outcome=Outcome.SUCCEEDED,
            reason=None,
        )
        new = entry_hash(previous, seq, entry.canonical())
        found.append(
            to_document(ChainedEntry(seq=seq, previous_hash=previous, hash=new, entry=entry))
        )
        previous = new
    return found


def write(path: Path, documents: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(one) + "\n" for one in documents))
    return str(path)


def serve(fake: FakeRooms, documents: list[dict[str, Any]], **verification: Any) -> None:
    """Let the service have this journal, of which it says that it is whole."""
    report = {
        "whole": True,
        "entries": len(documents),
        "first": documents[0]["seq"] if documents else None,
        "last": documents[-1]["seq"] if documents else None,
        "head_hash": documents[-1]["hash"] if documents else None,
        "broken_at": None,
        "problem": None,
        **verification,
    }
    lines = "".join(json.dumps(one) + "\n" for one in documents).encode()

    def interfere(seen: Seen) -> Answer | None:
        match seen.path:
            case "/v1/journal/verify":
                return 200, report
            case "/v1/journal/export":
                return 200, lines
            case "/v1/journal":
                since, until = seen.query["since"], seen.query["until"]
                found = [one for one in documents if since <= one["at"] < until]
                return 200, {"items": found, "next_cursor": None}
            case _:
                return None

    fake.interfere = interfere


def test_the_list_passes_its_filters(terminal: Terminal, fake: FakeRooms) -> None:
    fake.journal += chain(2)
    shown = terminal.done(
        *("journal", "list", "--actor", "ci", "--action", "create_room", "--object", "/v1/rooms"),
        *("--outcome", "succeeded", "--since", "2026-01-01T00:00:00Z", "--organisation", "*"),
    )
    assert "/v1/rooms/2" in shown
    query = fake.requests[-1].query
    assert (
        query.items()
        >= {
            "actor": "ci",
            "action": "create_room",
            "object": "/v1/rooms",
            "outcome": "succeeded",
            "since": "2026-01-01T00:00:00Z",
            "organisation_id": "*",
        }.items()
    )
    assert "until" not in query


def test_another_organisation_goes_by_its_name(terminal: Terminal, fake: FakeRooms) -> None:
    fake.organisations.append({"id": NORTH, "name": "north", "member_id": None})
    terminal.done("journal", "list", "--organisation", "north")
    assert fake.requests[-1].query["organisation_id"] == NORTH


def test_an_export_goes_to_a_file_or_to_standard_output(
    terminal: Terminal, fake: FakeRooms, tmp_path: Path
) -> None:
    documents = chain(3)
    serve(fake, documents)
    out = tmp_path / "north.ndjson"
    terminal.done("journal", "export", "--out", str(out))
    assert [json.loads(line) for line in out.read_text().splitlines()] == documents
    assert terminal.done("journal", "export") == out.read_text()
    assert fake.requests[-1].query == {"format": "ndjson"}
    terminal.done("journal", "export", "--format", "csv")
    assert fake.requests[-1].query == {"format": "csv"}


class _Screen(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


def test_an_export_cannot_control_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    text = '{"reason":"\u009b2J \u202e Zoë"}\r\n{"n":2}\n{"n":3}'
    data = text.encode()
    for size in (1, 7, len(data)):
        chunks = [data[at : at + size] for at in range(0, len(data), size)]
        shown, piped = io.BytesIO(), io.BytesIO()
        with monkeypatch.context() as patched:
            patched.setattr("sys.stdout", screen := _Screen(shown, encoding="utf-8", newline=""))
            write_export(iter(chunks), None)
            screen.flush()
        assert shown.getvalue().decode() == (
            '{"reason":"\\u009b2J \\u202e Zoë"}\n{"n":2}\n{"n":3}\n'
        )
        with monkeypatch.context() as patched:
            patched.setattr("sys.stdout", pipe := io.TextIOWrapper(piped, encoding="utf-8"))
            write_export(iter(chunks), None)
            pipe.flush()
        assert piped.getvalue() == data


def test_a_refused_export_leaves_the_file_as_it_was(
    terminal: Terminal, fake: FakeRooms, tmp_path: Path
) -> None:
    out = tmp_path / "north.ndjson"
    out.write_text("before")
    result = terminal.run("journal", "export", "--out", str(out))
    assert result.exit_code == 1
    assert out.read_text() == "before"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["north.ndjson"]
    assert fake.requests[-1].path == "/v1/journal/export"


def test_the_service_verifies_its_own_chain(terminal: Terminal, fake: FakeRooms) -> None:
    documents = chain(3)
    serve(fake, documents)
    shown = terminal.done("journal", "verify").splitlines()
    assert shown == [
        "whole: 3 entries, 1 to 3",
        f"hash of the last entry: {documents[-1]['hash']}",
    ]
    serve(fake, documents, whole=False, broken_at=2, problem="was changed")
    result = terminal.run("journal", "verify")
    assert (result.exit_code, result.stdout) == (1, "broken: entry 2 was changed\n")


@pytest.mark.parametrize("part", [slice(0, 4), slice(2, 4), slice(1, 2)])
def test_a_part_of_a_chain_is_verified_without_the_service(
    terminal: Terminal, fake: FakeRooms, tmp_path: Path, part: slice
) -> None:
    documents = chain(4)[part]
    report = terminal.json("journal", "verify", write(tmp_path / "x", documents))
    assert report == {
        "whole": True,
        "entries": len(documents),
        "first": documents[0]["seq"],
        "last": documents[-1]["seq"],
        "head_hash": documents[-1]["hash"],
        "broken_at": None,
        "problem": None,
    }
    assert fake.requests == []


@pytest.mark.parametrize(
    ("damage", "seq"),
    [
        (lambda found: found[1].update(actor_name="other"), 2),
        (lambda found: found[1]["after"].update(factor=2), 2),
        (lambda found: found[2].update(at=found[1]["at"]), 3),
        (lambda found: found.pop(1), 2),
        (lambda found: found.insert(1, found[0]), 2),
        (lambda found: found[0].update(previous_hash="11" * 32), 1),
        (lambda found: found[2].update(previous_hash=found[0]["hash"]), 3),
    ],
    ids=["actor", "content", "time", "missing", "twice", "beginning", "link"],
)
def test_a_damaged_file_is_found(terminal: Terminal, tmp_path: Path, damage: Any, seq: int) -> None:
    documents = chain(4)
    damage(documents)
    result = terminal.run("--json", "journal", "verify", write(tmp_path / "x", documents))
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert (report["whole"], report["broken_at"]) == (False, seq)


def test_what_is_no_export_is_refused(terminal: Terminal, tmp_path: Path) -> None:
    (document,) = chain(1)
    path = tmp_path / "x"
    for text in (
        "",
        "{}",
        "[1]",
        "no json",
        json.dumps(document | {"seq": 2**70}),
        json.dumps(document | {"note": "not covered by the hash"}),
        json.dumps(document)[:-1] + ', "reason": "a second one"}',
        "[" * 100_000,
    ):
        path.write_text(text)
        result = terminal.run("journal", "verify", str(path))
        assert result.exit_code == 1, text[:40]
        assert result.stderr.startswith("Error: ")
    missing = terminal.run("journal", "verify", str(tmp_path / "none"))
    assert "cannot be read" in missing.stderr
    assert terminal.run("journal", "verify", "--compare").exit_code == 2


def test_a_file_is_a_part_of_the_services_chain(
    terminal: Terminal, fake: FakeRooms, tmp_path: Path
) -> None:
    documents = chain(5)
    path = write(tmp_path / "x", documents[1:3])
    serve(fake, documents)
    assert terminal.json("journal", "verify", path, "--compare")["whole"] is True
    assert fake.sent("GET", "/v1/journal")[0].query["organisation_id"] == NORTH


def test_a_file_of_another_chain_is_found(
    terminal: Terminal, fake: FakeRooms, tmp_path: Path
) -> None:
    documents = chain(5)
    path = write(tmp_path / "x", documents)
    serve(fake, documents[:4])
    result = terminal.run("journal", "verify", path, "--compare")
    assert result.exit_code == 1
    assert result.stdout == "broken: entry 5 is not in the service's journal\n"
    forged = [one | {"hash": "22" * 32} for one in documents]
    serve(fake, forged)
    assert terminal.run("journal", "verify", path, "--compare").exit_code == 1


def test_a_broken_chain_in_the_service_proves_nothing(
    terminal: Terminal, fake: FakeRooms, tmp_path: Path
) -> None:
    documents = chain(3)
    path = write(tmp_path / "x", documents)
    serve(fake, documents, whole=False, broken_at=2, problem="was changed")
    result = terminal.run("journal", "verify", path, "--compare")
    assert (result.exit_code, result.stdout) == (
        1,
        "broken: entry 2 was changed (in the service)\n",
    )


def test_a_file_older_than_what_is_kept_cannot_be_compared(
    terminal: Terminal, fake: FakeRooms, tmp_path: Path
) -> None:
    documents = chain(5)
    path = write(tmp_path / "x", documents[:2])
    serve(fake, documents[3:])
    result = terminal.run("journal", "verify", path, "--compare")
    assert result.exit_code == 1
    assert "keeps entries from 4 on, and the file ends at 2" in result.stderr


def test_the_table_of_entries_escapes_what_others_wrote(
    terminal: Terminal, fake: FakeRooms
) -> None:
    fake.journal.append({**chain(1)[0], "reason": "\x1b[2J"})
    assert "\x1b" not in terminal.done("journal", "list")
    assert "\x1b" not in terminal.done("--json", "journal", "list")


def serve_pages(fake: FakeRooms, *, refusals: int) -> None:
    """Serve two pages; the second one is refused so often before it is answered."""
    documents = chain(2)
    left = [refusals]

    def interfere(seen: Seen) -> Answer | None:
        if seen.path != "/v1/journal":
            return None
        if "cursor" not in seen.query:
            return 200, {"items": documents[:1], "next_cursor": "second"}
        if left[0]:
            left[0] -= 1
            fake.headers["Retry-After"] = "7"
            return problem(429, "Too many requests", "an organisation has 8 at a time")
        return 200, {"items": documents[1:], "next_cursor": None}

    fake.interfere = interfere


def test_a_later_page_that_is_refused_for_now_is_asked_for_again(
    terminal: Terminal, fake: FakeRooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = recorded_pauses(monkeypatch, "rooms.cli.client")
    serve_pages(fake, refusals=2)
    listed = terminal.json("journal", "list", "--all")["items"]
    assert [one["seq"] for one in listed] == [1, 2]
    assert pauses == [7, 7]


def test_a_list_that_cannot_be_completed_is_an_error_and_no_shorter_list(
    terminal: Terminal, fake: FakeRooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = recorded_pauses(monkeypatch, "rooms.cli.client")
    serve_pages(fake, refusals=1000)
    done = terminal.run("journal", "list", "--all", "--json")
    assert done.exit_code != 0
    assert done.stdout == ""
    assert "8 at a time" in done.stderr
    assert len(pauses) == 5
