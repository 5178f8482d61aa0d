"""Test headers of proxies that come several times, which only bytes on a socket can show."""

from collections.abc import Mapping
from typing import Any

import pytest

from rooms.domain.principal import Principal
from tests.support.http_listener import PUBLISH, answer_from, connected, post, served


@pytest.mark.parametrize("name", ["X-GovStack-Client", "x-forwarded-client-cert"])
@pytest.mark.parametrize("path", [PUBLISH, "/else"])
async def test_a_header_that_names_a_client_may_come_once(name: str, path: str) -> None:
    async with served() as place, connected(place) as (reader, writer):
        body = b""
        for times, status in ((1, 202 if path == PUBLISH else 404), (2, 400)):
            writer.write(post(path, b"{}", *[f"{name}: SE/GOV/{n}" for n in range(times)]))
            head, body = await answer_from(reader)
            assert head.startswith(b"HTTP/1.1 %d " % status)
        assert b"may come once" in body


async def test_several_lines_of_addresses_are_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with served() as place, connected(place) as (reader, writer):
        seen: list[bytes | None] = []
        admit = place.service.admit

        async def noting(headers: Mapping[bytes, bytes], *more: Any) -> Principal:
            seen.append(headers.get(b"x-forwarded-for"))
            return await admit(headers, *more)

        monkeypatch.setattr(place.protocols[0].app, "_authenticate", noting)
        lines = ["X-Forwarded-For: 192.0.2.1", "A: b", "X-Forwarded-For: 192.0.2.2,192.0.2.3"]
        for given in ([], lines[:1], lines):
            writer.write(post(PUBLISH, b"{}", *given))
            assert (await answer_from(reader))[0].startswith(b"HTTP/1.1 202")
        assert seen == [None, b"192.0.2.1", b"192.0.2.1, 192.0.2.2,192.0.2.3"]
