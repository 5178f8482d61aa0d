"""Attack c-ares: malformed answers of a name server, by UDP, and by TCP after a truncated one.

What must hold: each look-up ends in its time, with vetted addresses or a refusal; no packet for another query is believed;
nothing else is raised, also not on the thread of c-ares; no look-up and no slot is left; the next good name is found.
"""

import asyncio
import logging
import socket
import struct
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from random import Random
from typing import Any, Final, cast

from pycares import _handle_to_channel

from delivery.push.errors import BlockedError, UnresolvableError
from delivery.push.http.dns import DnsResolver, LookupLimits
from delivery.push.http.ssrf import SsrfGuard
from rooms.domain.ids import OrganisationId
from tests.faults.hostile.dns_packets import (
    FORGED,
    GOOD,
    Recipe,
    fits_udp,
    good,
    make_recipe,
)
from tests.faults.hostile.suite import Suite
from tests.support.name_server import Query, parse_query

_ORGANISATIONS: Final = tuple(
    OrganisationId(f"01900000-0000-7000-8000-00000000000{number}") for number in (1, 2)
)
_ALLOWED: Final = ip_network("127.0.0.0/16")
_WELL: Final = "well"
_LOOKUP_S: Final = 1.0
_IDLE_S: Final = 5.0
"""The time after which c-ares must have ended what it began."""
_FIRST_TRY_S: Final = 0.02
_MAX_STREAM: Final = 1 << 18
_STREAMS: Final = ("framed", "cut", "lying length", "byte by byte", "several", "noise", "reset", "closed", "silent")  # fmt: skip
_BYTES_ALONE: Final = 300


@dataclass(frozen=True, slots=True)
class Script:
    """Hold how a name is answered, query by query. None: silence. `stream`: how TCP behaves."""

    packets: tuple[tuple[Recipe, ...] | None, ...]
    stream: str
    stream_packets: tuple[Recipe, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """Hold names that are looked up at the same time, with their scripts."""

    names: dict[str, Script]


def _script(rng: Random) -> Script:
    def datagrams() -> tuple[Recipe, ...] | None:
        if rng.random() < 0.1:
            return None
        made = [make_recipe(rng) for _ in range(rng.choice((1, 1, 1, 2, 5)))]
        if rng.random() < 0.3:
            made.append(Recipe("truncated", rng.randrange(2), 0))
        return tuple(made)

    return Script(
        packets=tuple(datagrams() for _ in range(rng.choice((1, 1, 2, 4)))),
        stream=rng.choice(_STREAMS),
        stream_packets=tuple(make_recipe(rng) for _ in range(rng.choice((1, 1, 3)))),
    )


def generate(rng: Random) -> Case:
    """Make some names with scripts."""
    number = rng.choice((1, 1, 3, 12))
    return Case({f"{at}-{rng.randrange(10_000)}.test": _script(rng) for at in range(number)})


class _Server(asyncio.DatagramProtocol):
    """Answer on one port of 127.0.0.1, by UDP and TCP, as the case says; other names well."""

    def __init__(self) -> None:
        self.case = Case({})
        self.asked = Counter[str]()
        self.streams = set[asyncio.Task[None]]()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        query = parse_query(data)
        script = self.case.names.get(query.name)
        if script is None:
            self._transport.sendto(good(query), addr)
            return
        recipes = script.packets[self.asked[query.name] % len(script.packets)]
        self.asked[query.name] += 1
        for recipe in recipes or ():
            packet = recipe.packet(query)
            if fits_udp(packet):
                self._transport.sendto(packet, addr)

    async def serve_stream(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Answer what comes on a TCP connection until either side ends it."""
        task = asyncio.current_task()
        assert task is not None
        self.streams.add(task)
        task.add_done_callback(self.streams.discard)
        try:
            with suppress(OSError, asyncio.IncompleteReadError):
                while True:
                    size = int.from_bytes(await reader.readexactly(2), "big")
                    query = parse_query(await reader.readexactly(size))
                    script = self.case.names.get(query.name)
                    if script is None:
                        writer.write(_framed(good(query)))
                    elif not await self._answer(script, query, writer):
                        return
        finally:
            writer.close()

    async def _answer(self, script: Script, query: Query, writer: asyncio.StreamWriter) -> bool:
        """Answer one query by TCP; return whether the connection goes on."""
        packets = [recipe.packet(query) for recipe in script.stream_packets]
        framed = b"".join(map(_framed, packets))[:_MAX_STREAM]
        match script.stream:
            case "framed" | "several":
                writer.write(framed)
            case "cut":
                writer.write(framed[: len(framed) * 2 // 3])
                return False
            case "lying length":
                writer.write(b"\xff\xff" + packets[0] + b"\0\0" + framed)
            case "byte by byte":
                for byte in framed[:_BYTES_ALONE]:
                    writer.write(bytes([byte]))
                    await asyncio.sleep(0)
                    if writer.is_closing():
                        return False
                writer.write(framed[_BYTES_ALONE:])
            case "noise":
                writer.write(packets[0])
            case "reset":
                linger = struct.pack("ii", 1, 0)
                found = cast("socket.socket", writer.get_extra_info("socket"))
                found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                writer.transport.abort()
                return False
            case "closed":
                return False
            case _:
                return True
        await writer.drain()
        return True


def _vetted(text: str) -> bool:
    address = ip_address(text)
    return address in _ALLOWED or address.is_global


def _framed(packet: bytes) -> bytes:
    return len(packet).to_bytes(2, "big") + packet


@asynccontextmanager
async def _serving() -> AsyncIterator[tuple[_Server, str]]:
    """Run the server on a port of 127.0.0.1 that is free for UDP and TCP."""
    loop = asyncio.get_running_loop()
    server = _Server()
    listener = await asyncio.start_server(server.serve_stream, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    transport, _ = await loop.create_datagram_endpoint(
        lambda: server, local_addr=("127.0.0.1", port)
    )
    try:
        yield server, f"127.0.0.1:{port}"
    finally:
        transport.close()
        listener.close()
        for task in list(server.streams):
            task.cancel()
        await asyncio.gather(*server.streams, return_exceptions=True)


class _Watched:
    """Count the look-ups in progress, and note what is neither addresses nor an OSError."""

    def __init__(self, resolver: DnsResolver) -> None:
        self._resolver = resolver
        self.running = 0
        self.wrong = list[str]()

    async def __call__(self, host: str) -> Sequence[str]:
        self.running += 1
        try:
            found = await self._resolver(host)
            for text in found:
                ip_address(text)
                if text == FORGED:
                    self.wrong.append(f"{host}: a packet for another query was believed")
        except (OSError, asyncio.CancelledError):
            raise
        except BaseException as exc:
            self.wrong.append(f"{host}: {exc!r}")
            raise
        finally:
            self.running -= 1
        return found


class _Errors(logging.Handler):
    def __init__(self, wrong: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._wrong = wrong

    def emit(self, record: logging.LogRecord) -> None:
        self._wrong.append(record.getMessage())


@contextmanager
def _noting_errors(wrong: list[str]) -> Iterator[None]:
    """Note what is logged as an error, and what a callback on the thread of c-ares raises."""
    log, handler, hook = logging.getLogger("delivery"), _Errors(wrong), sys.unraisablehook

    def note(unraisable: Any) -> None:
        wrong.append(f"unraisable: {unraisable.exc_value!r}")

    log.addHandler(handler)
    sys.unraisablehook = note
    try:
        yield
    finally:
        sys.unraisablehook = hook
        log.removeHandler(handler)


@asynccontextmanager
async def target(_database_url: str) -> AsyncIterator[Callable[[Case], Awaitable[str]]]:
    """Attack one resolver, and the guard of webhook targets above it, with all cases."""
    number, now = 0, [0.0]
    async with _serving() as (server, address):
        resolver = DnsResolver(servers=[address], first_try_s=_FIRST_TRY_S, cache_s=_FIRST_TRY_S)
        watched = _Watched(resolver)
        limits = LookupLimits(total=8, per_organisation=8, deadline_s=_LOOKUP_S, wait_s=_IDLE_S)
        guard = SsrfGuard((_ALLOWED,), resolver=watched, limits=limits, clock=lambda: now[0])

        async def look_up(host: str, organisation: OrganisationId) -> str:
            try:
                found = await guard.resolve(host, 80, organisation)
            except BlockedError:
                return "blocked"
            except UnresolvableError as exc:
                return "late" if "no answer in time" in str(exc) else "unresolvable"
            assert found
            assert all(map(_vetted, found)), found
            return "found"

        async def run(case: Case) -> str:
            nonlocal number
            number += 1
            server.case, server.asked = case, Counter()
            outcomes = await asyncio.gather(
                *(look_up(host, one) for host in case.names for one in _ORGANISATIONS)
            )
            channel = resolver._channel
            assert channel is not None
            assert await asyncio.to_thread(channel.wait, _IDLE_S), "c-ares goes on without end"
            assert await guard.resolve(f"{_WELL}-{number}.test", 80, _ORGANISATIONS[1]) == (GOOD,)
            assert await asyncio.to_thread(channel.wait, _IDLE_S)
            now[0] += 1
            assert watched.wrong == []
            assert (watched.running, guard.active_organisations, guard._pending) == (0, 0, {})
            assert guard._lookups._total_slots._value == limits.total
            assert channel not in _handle_to_channel.values(), "a callback is left"
            return "+".join(sorted(set(outcomes)))

        with _noting_errors(watched.wrong):
            try:
                yield run
            finally:
                resolver.close()


SUITE: Final = Suite(name="dns-answers", cases=40, generate=generate, target=target)
