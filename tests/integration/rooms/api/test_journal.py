"""Test the journal: its chain finds every change of the past, and only its organisation reads it."""

import asyncio
import csv
import io
import json
from datetime import UTC, datetime
from typing import Any

import pytest

from rooms.api.deps import MAX_WAITING_JOURNALS
from rooms.db import journal as records
from rooms.domain.journal import from_document
from tests.integration.rooms.api.conftest import Api
from tests.integration.rooms.api.members import Member, member, revoke, shared_room
from tests.support.installation import until
from tests.support.journal_chain import check_chain

OTHER_HASH = "decode(repeat('ab', 32), 'hex')"


async def written(api: Api, count: int = 6) -> Member:
    """Return a member whose journal has at least so many entries."""
    one = await member(api)
    for number in range(count):
        await api.made("/keys", {"name": f"k{number}", "scopes": ["publish"]}, one.key)
    return one


async def tamper(api: Api, *statements: str) -> None:
    """Run statements as one who owns the database, with the trigger switched off."""
    await api.sql("ALTER TABLE journal DISABLE TRIGGER USER")
    for statement in statements:
        await api.sql(statement)
    await api.sql("ALTER TABLE journal ENABLE TRIGGER USER")


async def verified(api: Api, one: Member) -> dict[str, Any]:
    answer = await api.call("GET", "/journal/verify", one.key)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def listed(api: Api, key: str, query: str = "") -> list[dict[str, Any]]:
    """Return every entry of a list, a small page at a time."""
    found: list[dict[str, Any]] = []
    cursor = ""
    while True:
        answer = await api.call("GET", f"/journal?limit=3{query}{cursor}", key)
        assert answer.status_code == 200, answer.text
        page = answer.json()
        found += page["items"]
        if page["next_cursor"] is None:
            return found
        cursor = f"&cursor={page['next_cursor']}"


@pytest.mark.parametrize("statement", ["UPDATE journal SET reason = 'x'", "DELETE FROM journal"])
async def test_the_journal_is_append_only(api: Api, statement: str) -> None:
    await written(api)
    for refused in (statement, "TRUNCATE journal"):
        with pytest.raises(Exception, match="append-only"):
            await api.sql(refused)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("at", "at + interval '1 us'"),
        ("actor_kind", "'service'"),
        ("actor_id", "id"),
        ("actor_name", "actor_name || 'x'"),
        ("actor_organisation_id", "NULL"),
        ("application", "'x'"),
        ("source", "'192.0.2.1'"),
        ("request_id", "'x'"),
        ("action", "'delete_room'"),
        ("object", "'/v1/rooms'"),
        ("before", "'{}'"),
        ("after", "'{}'"),
        ("outcome", "'refused'"),
        ("reason", "''"),
        ("id", "actor_id"),
        ("hash", OTHER_HASH),
        ("previous_hash", OTHER_HASH),
    ],
)
async def test_a_changed_entry_is_found(api: Api, column: str, value: str) -> None:
    one = await written(api)
    assert (await verified(api, one))["whole"] is True
    where = f"WHERE organisation_id = '{one.id}' AND seq = 4"
    await tamper(api, f"UPDATE journal SET {column} = {value} {where}")
    found = await verified(api, one)
    assert (found["whole"], found["broken_at"]) == (False, 4)


def of(one: Member, seq: object = "4") -> str:
    return f"WHERE organisation_id = '{one.id}' AND seq = {seq}"


async def test_what_is_removed_moved_or_added_is_found(api: Api) -> None:
    """Check each on a journal of its own, with the entry that is named."""
    copied = (
        "organisation_id, {seq}, gen_random_uuid(), at, actor_kind, actor_id, actor_name,"
        " actor_organisation_id, application, source, request_id, action, object, before, after,"
        " outcome, reason, previous_hash, hash"
    )
    heads = "UPDATE journal_heads SET {} WHERE organisation_id = '{}'"
    cases: list[tuple[list[str], int | None]] = [
        (["DELETE FROM journal {at4}"], 4),
        (["DELETE FROM journal {first}"], 1),
        (["DELETE FROM journal {last}"], 7),
        (["DELETE FROM journal {last}", "DELETE FROM journal {at6}"], 6),
        (["DELETE FROM journal {all}"], 1),
        (
            [
                "UPDATE journal SET seq = -1 {at3}",
                "UPDATE journal SET seq = 3 {at4}",
                "UPDATE journal SET seq = 4 WHERE seq = -1",
            ],
            3,
        ),
        (["INSERT INTO journal SELECT " + copied.format(seq="8") + " FROM journal {at4}"], 8),
        (["INSERT INTO journal SELECT " + copied.format(seq="0") + " FROM journal {at4}"], 0),
        ([heads.format("seq = 6", "{id}")], 7),
        ([heads.format("seq = 8", "{id}")], 8),
        ([heads.format(f"hash = {OTHER_HASH}", "{id}")], 7),
        ([heads.format("kept_from = 2", "{id}")], 1),
        ([heads.format("kept_from = 0", "{id}")], 0),
        (["DELETE FROM journal_heads WHERE organisation_id = '{id}'"], 1),
    ]
    for statements, broken_at in cases:
        one = await written(api)
        names = {
            "id": one.id,
            "at3": of(one, 3),
            "at4": of(one),
            "at6": of(one, 6),
            "first": of(one, 1),
            "last": of(one, 7),
            "all": f"WHERE organisation_id = '{one.id}'",
        }
        assert (await verified(api, one))["last"] == 7
        await tamper(api, *(statement.format(**names) for statement in statements))
        found = await verified(api, one)
        assert (found["whole"], found["broken_at"]) == (False, broken_at), statements
        assert found["problem"]


async def test_an_edited_export_is_found(api: Api) -> None:
    """Check that each changed line of an export breaks its chain at this line."""
    one = await written(api)
    lines = (await api.call("GET", "/journal/export", one.key)).text.splitlines()
    entries = [from_document(json.loads(line)) for line in lines]
    assert check_chain(entries) is None
    assert [entry.seq for entry in entries] == list(range(1, 8))
    for number in range(7):
        forged = json.loads(lines[number])
        forged["actor_name"] = "another"
        altered = [*entries[:number], from_document(forged), *entries[number + 1 :]]
        broken = check_chain(altered)
        assert broken is not None
        assert broken.seq == number + 1


async def test_writers_in_two_processes_keep_the_chain(api: Api, elsewhere: Api) -> None:
    one = await member(api)

    async def write(through: Api, number: int) -> None:
        body = {"name": f"k{number}", "scopes": ["publish"]}
        answer = await through.call("POST", "/keys", one.key, json=body)
        assert answer.status_code == 201
        refused = await through.call("DELETE", "/rooms/1", one.key)
        assert refused.status_code == 404
        assert (await verified(through, one))["whole"] is True

    await asyncio.gather(*(write((api, elsewhere)[n % 2], n) for n in range(16)))
    found = await verified(api, one)
    assert found["whole"] is True
    assert found["entries"] == found["last"] >= 17


async def test_an_export_is_the_list(api: Api) -> None:
    one = await written(api)
    formulas = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", 'a"b,c\n=1']
    room = await shared_room(api, one)
    for text in formulas:
        answer = await api.call("PATCH", f"/rooms/{room}", one.key, json={"description": text})
        assert answer.status_code == 200
    await api.sql(  # names of keys are narrow; those of organisations reach the journal too
        "UPDATE api_keys SET name = '=cmd()' WHERE organisation_id = %s AND name = 'first'", one.id
    )
    api.services.keys.forget()
    await api.call("PATCH", f"/rooms/{room}", one.key, json={"description": "x"})
    entries = (await listed(api, one.key))[::-1]
    lines = (await api.call("GET", "/journal/export", one.key)).text.splitlines()
    exported = [json.loads(line) for line in lines]
    for entry in exported:
        entry["at"] = entry["at"].replace("+00:00", "Z")
    assert exported == entries
    answer = await api.call("GET", "/journal/export?format=csv", one.key)
    assert answer.headers["content-type"].startswith("text/csv")
    assert "attachment" in answer.headers["content-disposition"]
    rows = list(csv.DictReader(io.StringIO(answer.text, newline="")))
    assert [row["id"] for row in rows] == [one["id"] for one in entries]
    assert [row["hash"] for row in rows] == [one["hash"] for one in entries]
    assert rows[-1]["actor_name"] == "'=cmd()"
    for row in rows:
        assert not [cell for cell in row.values() if cell.startswith(("=", "+", "-", "@", "\t"))]
    afters = [entry["after"] for entry in entries if entry["action"] == "change_room"]
    assert [after["description"] for after in afters] == [*formulas, "x"]


async def test_filters_and_pages(api: Api) -> None:
    one = await written(api)
    room = await shared_room(api, one)
    other_key = await api.made("/keys", {"name": "second", "scopes": ["manage"]}, one.key)
    middle = datetime.now(UTC)
    await api.call("PATCH", f"/rooms/{room}", other_key["key"], json={"description": "x"})
    await api.call("DELETE", f"/rooms/{room}", other_key["key"])
    await api.call("POST", "/keys", other_key["key"], json={"name": "x", "scopes": ["publish"]})

    async def everything_written() -> list[dict[str, Any]]:
        found = await listed(api, one.key)
        return found if len(found) == 16 else []

    everything = await until(everything_written, "the refusals, which are written later")
    assert sorted(entry["seq"] for entry in everything) == list(range(1, 17))
    assert [entry["at"] for entry in everything] == sorted(
        (entry["at"] for entry in everything), reverse=True
    )
    moment = middle.isoformat().replace("+", "%2B")
    for query, wanted in (
        ("actor=second", lambda e: e["actor_name"] == "second"),
        ("action=create_key", lambda e: e["action"] == "create_key"),
        (f"object=/v1/rooms/{room}", lambda e: e["object"].startswith(f"/v1/rooms/{room}")),
        ("object=%25", lambda _: False),
        ("outcome=refused", lambda e: e["outcome"] == "refused"),
        ("outcome=failed", lambda _: False),
        (f"since={moment}", lambda e: datetime.fromisoformat(e["at"]) >= middle),
        (f"until={moment}", lambda e: datetime.fromisoformat(e["at"]) < middle),
        (
            "actor=second&outcome=refused&action=delete_room",
            lambda e: (
                (e["actor_name"], e["outcome"], e["action"]) == ("second", "refused", "delete_room")
            ),
        ),
    ):
        found = await listed(api, one.key, f"&{query}")
        assert found == [entry for entry in everything if wanted(entry)], query
    assert await listed(api, one.key, f"&since={moment}") != []
    refused = await api.call("GET", "/journal?outcome=x", one.key)
    assert refused.status_code == 422


async def test_another_organisation_never_appears(api: Api) -> None:
    one, other = await written(api, 3), await written(api, 3)
    room = await shared_room(api, one)
    given = await api.made(
        f"/rooms/{room}/grants", {"organisation_id": other.id, "kind": "publish"}, one.key
    )
    await revoke(api, one, room, given["id"])
    audit = await api.made("/keys", {"name": "audit", "scopes": ["audit"]}, one.key)
    for key in (one.key, audit["key"]):
        own = await listed(api, key)
        assert {entry["organisation_id"] for entry in own} == {one.id}
    cursor = (await api.call("GET", "/journal?limit=1", one.key)).json()["next_cursor"]
    theirs = (await api.call("GET", f"/journal?cursor={cursor}", other.key)).json()["items"]
    assert {entry["organisation_id"] for entry in theirs} == {other.id}
    answers = set()
    for path in ("/journal", "/journal/export", "/journal/verify"):
        for wanted in (other.id, "*", "00000000-0000-7000-8000-000000000000", "x"):
            for key in (one.key, audit["key"]):
                refused = await api.call("GET", f"{path}?organisation_id={wanted}", key)
                answers.add((refused.status_code, refused.json()["detail"]))
    assert len(answers) == 1
    assert answers.pop()[0] == 403
    found = await api.call("GET", f"/journal?organisation_id={other.id}", "platform")
    assert {entry["organisation_id"] for entry in found.json()["items"]} == {other.id}
    every = await api.call("GET", "/journal?organisation_id=*&limit=200", "platform")
    assert {one.id, other.id} <= {entry["organisation_id"] for entry in every.json()["items"]}


async def test_large_and_strange_bodies_are_kept_in_a_bounded_form(api: Api) -> None:
    """Check that what was accepted is in the journal, whatever JSON it was."""
    one = await member(api)
    room = await shared_room(api, one)
    strange = {
        "minimum": 123456789012345678901234567890,
        "maximum": 1e300,
        "enum": [0.1, -0.0, 1e22, 2**63, "\U0001f600\u2028</script>", {"secret": "x"}],
        "description": "x" * 20_000,
    }
    for name in ("minimum", "maximum", "enum", "description"):
        body = {"name": f"type-{name}", "schema": {name: strange[name]}}
        answer = await api.call("POST", f"/rooms/{room}/event-types", one.key, json=body)
        assert answer.status_code == 201, answer.text
    found = await verified(api, one)
    assert found["whole"] is True, found
    entries = await listed(api, one.key, "&action=create_event_type")
    assert len(entries[0]["after"]["cut"]) < 200
    assert {entry["after"].get("name") for entry in entries} >= {"type-enum", "type-minimum"}


async def test_an_organisation_has_one_journal_verified_at_a_time(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a client which asks again and again, and leaves, does not busy the process."""
    one, may_end = await written(api), asyncio.Event()
    verify, running, most = records.verify_chain, 0, 0

    async def wait_and_verify(*args: Any) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await may_end.wait()
        found = await verify(*args)
        running -= 1
        return found

    monkeypatch.setattr(records, "verify_chain", wait_and_verify)
    calls = [
        asyncio.create_task(api.call("GET", "/journal/verify", one.key))
        for _ in range(2 + MAX_WAITING_JOURNALS)
    ]
    refused, _ = await asyncio.wait(calls, timeout=10, return_when=asyncio.FIRST_COMPLETED)
    may_end.set()
    answers = await asyncio.gather(*calls)
    assert most == 1
    assert [one.result().status_code for one in refused] == [429]
    assert sorted(answer.status_code for answer in answers) == [200] * 11 + [429]
