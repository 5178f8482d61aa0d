"""Test TLS of the API: handshakes, client certificates, revocation, and new files under way."""

import asyncio
import socket
import ssl
from contextlib import AsyncExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from rooms.api.server.connections import ConnectionLimits
from rooms.api.server.tls_files import LoadedTls, TlsFileError, TlsFiles, load_tls
from rooms.api.server.tls_listener import TlsListener
from tests.support.certificates import Authority
from tests.support.client_certificates import DAY, ClientCertificateAuthority
from tests.support.http_listener import PUBLISH, answer_from, post
from tests.support.installation import PATIENCE_S
from tests.support.pull_service import until
from tests.support.tls_listener import TlsPlace, tls_connected, tls_served

GET = b"GET /else HTTP/1.1\r\nHost: rooms\r\n\r\n"


async def status(place: TlsPlace, context: ssl.SSLContext, request: bytes = post(PUBLISH)) -> int:
    """Return the status of an answer on a new connection. OSError: TLS refuses the client."""
    async with tls_connected(place, context) as (reader, writer):
        writer.write(request)
        head, _ = await answer_from(reader)
        if not head:
            raise ConnectionResetError
        return int(head.split(b" ")[1])


async def refused(place: TlsPlace, context: ssl.SSLContext) -> str:
    """Return the outcome of a handshake that must fail."""
    before = len(place.handshakes)
    with pytest.raises(OSError):
        await status(place, context)
    await until(lambda: len(place.handshakes) > before)
    assert not place.service.published
    return place.handshakes[-1]


async def test_hot_and_other_requests_are_answered_over_tls(tmp_path: Path) -> None:
    async with (
        tls_served(tmp_path) as place,
        tls_connected(place, place.context()) as (reader, writer),
    ):
        for expected in (202, 404, 202):
            writer.write(GET if expected == 404 else post(PUBLISH, b"x" * 1500))
            head, _ = await answer_from(reader)
            assert int(head.split(b" ")[1]) == expected
        assert place.service.passed_on == 1
        assert place.handshakes == ["done"]


async def test_a_body_of_many_records_arrives_whole(tmp_path: Path) -> None:
    async with tls_served(tmp_path) as place:
        body = bytes(range(256)) * 2000
        request = (
            b"POST /else HTTP/1.1\r\nHost: rooms\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        async with tls_connected(place, place.context()) as (reader, writer):
            writer.write(request)
            _, found = await answer_from(reader)
        assert found == f"POST /else {body!r}".encode()


async def test_a_certificate_is_optional_or_required(tmp_path: Path) -> None:
    async with tls_served(tmp_path) as place:
        assert await status(place, place.context()) == 202
        assert await status(place, place.context(place.members.issue())) == 202
        certificates = place.service.certificates
        assert certificates[0] is None
        assert certificates[1] is not None
        assert certificates[1].identity is not None
        assert certificates[1].identity.member_id == "SE/GOV/1"
    async with tls_served(tmp_path, required=True) as place:
        assert await refused(place, place.context()) == "no_certificate"
        assert await status(place, place.context(place.members.issue())) == 202


@pytest.mark.parametrize("crl", [False, True])
async def test_a_certificate_must_be_valid_now_and_of_a_trusted_authority(
    tmp_path: Path, *, crl: bool
) -> None:
    members = ClientCertificateAuthority()
    revocations = members.revocation_list() if crl else None
    async with tls_served(tmp_path, members=members, crl=revocations) as place:
        other = ClientCertificateAuthority()
        assert await status(place, place.context(members.issue())) == 202
        place.service.published.clear()
        expired = members.issue(starts=-2 * DAY, ends=-DAY)
        assert await refused(place, place.context(expired)) == "expired"
        future = members.issue(starts=DAY, ends=2 * DAY)
        assert await refused(place, place.context(future)) == "not_yet_valid"
        assert await refused(place, place.context(other.issue())) == "untrusted"
        assert len(place.connections) == 0


async def test_a_revoked_certificate_is_refused(tmp_path: Path) -> None:
    members = ClientCertificateAuthority()
    good, bad = members.issue(), members.issue()
    async with tls_served(tmp_path, members=members, crl=members.revocation_list(bad)) as place:
        assert await refused(place, place.context(bad)) == "revoked"
        assert await status(place, place.context(good)) == 202
        assert await status(place, place.context()) == 202


@pytest.mark.parametrize("lists", ["expired", "of another authority"])
async def test_without_a_fresh_list_no_certificate_is_accepted(tmp_path: Path, lists: str) -> None:
    members = ClientCertificateAuthority()
    other = ClientCertificateAuthority("others")
    crl = members.revocation_list(ends=-DAY) if lists == "expired" else other.revocation_list()
    async with tls_served(tmp_path, members=members, crl=crl) as place:
        assert await refused(place, place.context(members.issue())) == "revocation_list"
        assert await status(place, place.context()) == 202


async def test_a_certificate_among_the_lists_is_not_trusted(tmp_path: Path) -> None:
    """Lists come by plain HTTP, as they are signed."""
    members, other = ClientCertificateAuthority(), ClientCertificateAuthority("others")
    crl = members.revocation_list() + other.revocation_list() + other.pem
    async with tls_served(tmp_path, members=members, crl=crl) as place:
        assert await refused(place, place.context(other.issue())) == "untrusted"
        assert await status(place, place.context(members.issue())) == 202


@pytest.mark.parametrize(
    "name", ["rooms test members", "Rooms Test MEMBERS", " rooms  test\tmembers "]
)
async def test_a_list_with_a_wrong_signature_is_refused(tmp_path: Path, name: str) -> None:
    """It would end the connections of others' certificates.

    OpenSSL would use it for each name that it takes for the same, and refuse all certificates.
    """
    members, forger = ClientCertificateAuthority(), ClientCertificateAuthority(name)
    good = members.issue()
    async with tls_served(tmp_path, members=members, crl=members.revocation_list()) as place:
        context = place.context(good)
        async with tls_connected(place, context) as (reader, writer):
            seen = len(place.reports)
            (tmp_path / "crl.pem").write_bytes(forger.revocation_list(good))
            await until(lambda: len(place.reports) > seen)
            assert place.reports[-1] is None
            writer.write(post(PUBLISH))
            assert (await answer_from(reader))[0].startswith(b"HTTP/1.1 202")
        assert await status(place, context) == 202
        files = TlsFiles(
            cert=tmp_path / "chain.pem",
            key=tmp_path / "key.pem",
            client_ca=tmp_path / "members.pem",
            client_crl=tmp_path / "crl.pem",
        )
        with pytest.raises(TlsFileError, match="has a wrong signature"):
            load_tls(files)


async def test_versions_before_1_2_are_refused(tmp_path: Path) -> None:
    async with tls_served(tmp_path) as place:
        for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
            context = place.context(place.members.issue())
            context.minimum_version = context.maximum_version = version
            assert await status(place, context) == 202
        place.service.published.clear()
        old = place.context()
        old.set_ciphers("ALL:@SECLEVEL=0")
        with pytest.warns(DeprecationWarning, match=r"TLSv1_1 is deprecated"):
            old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
        assert await refused(place, old) == "protocol"


async def test_plain_http_on_the_tls_port_gets_no_answer(tmp_path: Path) -> None:
    async with tls_served(tmp_path) as place, asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection(*place.address)
        writer.write(post(PUBLISH))
        assert b"HTTP/1.1" not in await reader.read()
        writer.close()
        await until(lambda: place.handshakes == ["protocol"])
        assert not place.service.published


async def test_a_client_that_begins_no_handshake_is_closed(tmp_path: Path) -> None:
    bounds = ConnectionLimits(head_timeout_s=0.2)
    async with tls_served(tmp_path, bounds=bounds) as place, asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection(*place.address)
        assert await reader.read() == b""
        writer.close()
        await until(lambda: place.handshakes == ["timeout"])
        await until(lambda: len(place.connections) == 0)


async def test_a_client_that_says_nothing_after_its_handshake_is_closed(tmp_path: Path) -> None:
    bounds = ConnectionLimits(head_timeout_s=0.2)
    async with (
        tls_served(tmp_path, bounds=bounds) as place,
        tls_connected(place, place.context()) as (reader, _),
    ):
        assert await reader.read() == b""
        assert place.closed == ["slow_request"]


async def test_handshakes_count_among_all_connections(tmp_path: Path) -> None:
    """Check that the oldest handshake makes room, and clients with a key keep their places."""
    bounds = ConnectionLimits(connections=8, unauthenticated=4, per_address=0)
    async with tls_served(tmp_path, bounds=bounds) as place, AsyncExitStack() as stack:
        known = await stack.enter_async_context(tls_connected(place, place.context()))
        known[1].write(post(PUBLISH))
        assert (await answer_from(known[0]))[0].startswith(b"HTTP/1.1 202")
        silent = []
        for _ in range(10):
            opened = socket.create_connection(place.address)
            stack.callback(opened.close)
            silent.append(opened)
            await until(lambda: len(place.connections) == min(1 + len(silent), 5))
        await until(lambda: place.closed == ["unauthenticated"] * 6)
        assert await status(place, place.context()) == 202
        known[1].write(post(PUBLISH))
        assert (await answer_from(known[0]))[0].startswith(b"HTTP/1.1 202")


async def test_one_address_has_a_share_of_the_handshakes(tmp_path: Path) -> None:
    bounds = ConnectionLimits(per_address=2)
    async with tls_served(tmp_path, bounds=bounds) as place, AsyncExitStack() as stack:
        for _ in range(3):
            opened = socket.create_connection(place.address)
            stack.callback(opened.close)
        await until(lambda: place.closed == ["per_address"])
        assert len(place.connections) == 2


async def test_new_files_are_used_without_losing_a_request(tmp_path: Path) -> None:
    """Check that every request of a client that reconnects and one that stays is answered."""
    async with (
        tls_served(tmp_path) as place,
        tls_connected(place, place.context()) as (reader, writer),
    ):
        first = place.context()
        for _ in range(5):
            Authority().write(tmp_path)  # another authority, certificate and key
            seen = len(place.reports)
            while len(place.reports) == seen or place.reports[-1] is None:
                writer.write(post(PUBLISH))
                assert (await answer_from(reader))[0].startswith(b"HTTP/1.1 202")
            assert await status(place, place.context()) == 202
        with pytest.raises(ssl.SSLCertVerificationError):
            await status(place, first)


@pytest.mark.parametrize("name", ["chain.pem", "key.pem", "members.pem", "crl.pem"])
async def test_a_broken_file_keeps_the_former_ones(tmp_path: Path, name: str) -> None:
    members = ClientCertificateAuthority()
    async with tls_served(tmp_path, members=members, crl=members.revocation_list()) as place:
        good, context = (tmp_path / name).read_bytes(), place.context(members.issue())
        for broken in (b"", b"-----BEGIN NONSENSE-----\n", None):
            if broken is None:
                (tmp_path / name).unlink()
            else:
                (tmp_path / name).write_bytes(broken)
            seen = len(place.reports)
            await until(lambda seen=seen: len(place.reports) > seen)  # type: ignore[misc]
            assert place.reports[-1] is None
            assert await status(place, context) == 202
        (tmp_path / name).write_bytes(good)
        await until(lambda: place.reports[-1] is not None)
        assert await status(place, context) == 202


@pytest.mark.parametrize("error", [TlsFileError("too many open files"), RuntimeError("other")])
async def test_files_that_could_not_be_read_are_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Check that new files are used though nothing changes after the failure."""
    attempts = 0

    def failing(files: TlsFiles) -> LoadedTls:
        nonlocal attempts
        attempts += 1
        if attempts < 3:
            raise error
        return load_tls(files)

    async with tls_served(tmp_path) as place:
        monkeypatch.setattr("rooms.api.server.tls_listener.load_tls", failing)
        Authority().write(tmp_path)
        await until(lambda: len(place.reports) == 3)
        assert [report is None for report in place.reports] == [False, True, False]
        assert await status(place, place.context()) == 202


async def test_no_connection_outlives_an_unexpected_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A certificate that OpenSSL takes may be one that nothing else can read."""
    async with tls_served(tmp_path) as place:
        context = place.context(place.members.issue())

        def fail(*_: object) -> None:
            raise RuntimeError("an odd certificate")

        monkeypatch.setattr(TlsListener, "certificate_of", fail)
        assert await refused(place, context) == "closed"
        assert len(place.connections) == 0


async def test_a_handshake_under_way_does_not_outlive_its_authority(tmp_path: Path) -> None:
    async with tls_served(tmp_path) as place:
        context = place.context(place.members.issue())
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = context.wrap_bio(incoming, outgoing, server_hostname="localhost")
        reader, writer = await asyncio.open_connection(*place.address)
        with suppress(ssl.SSLWantReadError):
            client.do_handshake()
        writer.write(outgoing.read())
        incoming.write(await reader.read(65536))
        (tmp_path / "members.pem").write_bytes(ClientCertificateAuthority().pem)
        await until(lambda: len(place.reports) == 2)
        while True:
            try:
                client.do_handshake()
                break
            except ssl.SSLWantReadError:
                writer.write(outgoing.read())
                more = await reader.read(65536)
                if not more:
                    break
                incoming.write(more)
        await until(lambda: place.handshakes == ["closed"])
        writer.close()


async def test_a_new_list_closes_what_it_revokes_and_nothing_else(tmp_path: Path) -> None:
    members = ClientCertificateAuthority()
    good, bad = members.issue(), members.issue()
    async with (
        tls_served(tmp_path, members=members, crl=members.revocation_list()) as place,
        tls_connected(place, place.context(good)) as kept,
        tls_connected(place, place.context(bad)) as (reader, writer),
    ):
        writer.write(post("/v1/subscriptions/s/pull", b"wait"))
        await place.service.waiting.wait()
        (tmp_path / "crl.pem").write_bytes(members.revocation_list(bad))
        await place.service.gone.wait()
        with suppress(OSError):
            assert await reader.read() == b""
        assert await refused(place, place.context(bad)) == "revoked"
        kept[1].write(post(PUBLISH))
        assert (await answer_from(kept[0]))[0].startswith(b"HTTP/1.1 202")
        assert place.closed == ["certificate"]


async def test_a_check_that_fails_is_not_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = ClientCertificateAuthority()
    bad = members.issue()
    check, failures = TlsListener._close_ended, [RuntimeError("planted")]

    def fail_once(self: TlsListener, connections: Any) -> None:
        if failures:
            raise failures.pop()
        check(self, connections)

    monkeypatch.setattr(TlsListener, "_close_ended", fail_once)
    async with (
        tls_served(tmp_path, members=members, crl=members.revocation_list()) as place,
        tls_connected(place, place.context(bad)) as (reader, writer),
    ):
        await until(lambda: not failures)
        writer.write(post("/v1/subscriptions/s/pull", b"wait"))
        await place.service.waiting.wait()
        (tmp_path / "crl.pem").write_bytes(members.revocation_list(bad))
        await place.service.gone.wait()
        del reader


async def test_a_connection_ends_with_its_certificate(tmp_path: Path) -> None:
    async with tls_served(tmp_path) as place:
        soon = place.members.issue(ends=timedelta(seconds=2))
        async with tls_connected(place, place.context(soon)) as (reader, writer):
            writer.write(post("/v1/subscriptions/s/pull", b"wait"))
            await place.service.waiting.wait()
            await place.service.gone.wait()
            assert place.closed == ["certificate"]
            del reader


async def test_other_authorities_close_connections_after_their_answers(tmp_path: Path) -> None:
    async with (
        tls_served(tmp_path) as place,
        tls_connected(place, place.context(place.members.issue())) as (reader, writer),
        tls_connected(place, place.context()) as anonymous,
    ):
        former = place.context(place.members.issue())
        writer.write(post(PUBLISH, b"wait"))
        await place.service.waiting.wait()
        (tmp_path / "members.pem").write_bytes(ClientCertificateAuthority().pem)
        await until(lambda: len(place.reports) == 2)
        place.service.opened.set()
        head, _ = await answer_from(reader)
        assert head.startswith(b"HTTP/1.1 202")
        assert b"connection: close" in head
        assert await reader.read() == b""
        anonymous[1].write(post(PUBLISH))
        assert (await answer_from(anonymous[0]))[0].startswith(b"HTTP/1.1 202")
        place.service.published.clear()
        assert await refused(place, former) == "untrusted"


async def test_the_plain_port_may_be_closed(tmp_path: Path) -> None:
    async with tls_served(tmp_path) as place:
        assert len(place.server.servers) == 1
    async with tls_served(tmp_path, is_plain=True) as place:
        plain, tls = (server.sockets[0].getsockname() for server in place.server.servers)
        assert plain != tls
        reader, writer = await asyncio.open_connection(*plain)
        writer.write(post(PUBLISH))
        assert (await answer_from(reader))[0].startswith(b"HTTP/1.1 202")
        assert len(place.connections) == 1
        writer.close()
