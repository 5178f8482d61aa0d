"""Test `rooms journal verify --compare` on the API: a past that was rehashed is found."""

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from rooms.domain.journal import ChainedEntry, chain_entries, from_document
from tests.integration.rooms.api.conftest import Api, open_api
from tests.integration.rooms.api.members import Member, member
from tests.support.cli_runner import Terminal
from tests.support.fake_api import Answer, FakeRooms, Seen, serving

FORGED = 4


@pytest.fixture
async def api(database: str) -> AsyncIterator[Api]:
    async with open_api(database) as opened:
        yield opened


async def make_entries(api: Api, one: Member, count: int) -> None:
    for number in range(count):
        await api.made("/keys", {"name": f"k{number}", "scopes": ["publish"]}, one.key)


async def export(api: Api, one: Member) -> str:
    answer = await api.call("GET", "/journal/export", one.key)
    assert answer.status_code == 200, answer.text
    return answer.text


def rehashed(entries: list[ChainedEntry]) -> list[ChainedEntry]:
    """Return the chain as it were if another had caused the entry `FORGED`."""
    kept, later = entries[: FORGED - 1], [one.entry for one in entries[FORGED - 1 :]]
    later[0] = dataclasses.replace(later[0], actor_name="another")
    return [*kept, *chain_entries(later, kept[-1].seq, kept[-1].hash)]


async def rewrite(api: Api, one: Member, chain: list[ChainedEntry]) -> None:
    """Store the chain and its head as the owner of the database can."""
    await api.sql("ALTER TABLE journal DISABLE TRIGGER USER")
    for link in chain[FORGED - 1 :]:
        await api.sql(
            "UPDATE journal SET actor_name = %s, previous_hash = %s, hash = %s"
            " WHERE organisation_id = %s AND seq = %s",
            *(link.entry.actor_name, link.previous_hash, link.hash, one.id, link.seq),
        )
    await api.sql("ALTER TABLE journal ENABLE TRIGGER USER")
    await api.sql(
        "UPDATE journal_heads SET previous_hash = %s, hash = %s"
        " WHERE organisation_id = %s AND seq = %s",
        *(chain[-1].previous_hash, chain[-1].hash, one.id, chain[-1].seq),
    )


async def verify(api: Api, one: Member, path: Path, *options: str) -> Result:
    """Run the command in a thread, with requests that this loop sends to the API."""
    loop = asyncio.get_running_loop()

    def pass_on(seen: Seen) -> Answer:
        calling = api.call(seen.method, seen.path.removeprefix("/v1"), one.key, params=seen.query)
        answer = asyncio.run_coroutine_threadsafe(calling, loop).result()
        return answer.status_code, answer.content

    with serving() as server:
        server.current = FakeRooms(interfere=pass_on)
        url = f"http://127.0.0.1:{server.server_address[1]}"
        terminal = Terminal(path.parent, {"ROOMS_URL": url, "ROOMS_API_KEY": one.key})
        command = ("--json", "journal", "verify", str(path), *options)
        return await asyncio.to_thread(terminal.run, *command)


def report(result: Result) -> tuple[int, bool, int | None, str | None]:
    found: dict[str, Any] = json.loads(result.stdout)
    return result.exit_code, found["whole"], found["broken_at"], found["problem"]


async def test_a_rehashed_past_is_found_by_an_older_export(api: Api, tmp_path: Path) -> None:
    one = await member(api)
    await make_entries(api, one, 5)
    older = tmp_path / "older.ndjson"
    older.write_text(await export(api, one))
    await make_entries(api, one, 2)
    whole = (0, True, None, None)
    assert report(await verify(api, one, older, "--compare")) == whole

    entries = [from_document(json.loads(line)) for line in (await export(api, one)).splitlines()]
    assert [link.seq for link in entries] == list(range(1, 9))
    await rewrite(api, one, rehashed(entries))
    service = (await api.call("GET", "/journal/verify", one.key)).json()
    assert (service["whole"], service["last"]) == (True, 8), "the chain itself shows nothing"
    listed = (await api.call("GET", "/journal?actor=another", one.key)).json()["items"]
    assert [entry["seq"] for entry in listed] == [FORGED]

    assert report(await verify(api, one, older)) == whole
    lines = older.read_text().splitlines()
    found = (1, False, len(lines), "is not in the service's journal")
    assert report(await verify(api, one, older, "--compare")) == found
    before = tmp_path / "before.ndjson"
    before.write_text("\n".join(lines[: FORGED - 1]) + "\n")
    assert report(await verify(api, one, before, "--compare")) == whole
    newer = tmp_path / "newer.ndjson"
    newer.write_text(await export(api, one))
    assert report(await verify(api, one, newer, "--compare")) == whole
