"""CPU of one signed webhook call by sender: ours, pyreqwest, aiohttp, httpx, all against one sink in one run.

    python -m tests.bench.senders [--sends 40000] [--slots 64] [--rounds 3] [--tls]

Each client is a process of its own, on uvloop, with one coroutine a slot that signs and sends in a loop; what counts is
user and system time of that process, over the sends only. Rounds are interleaved and the median is shown. The
sink is nginx answering 204 where it is on PATH, else a small server on httptools.
"""

# ruff: noqa: T201 what a bench measures is printed

import argparse
import asyncio
import json
import os
import resource
import shutil
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from ipaddress import IPv4Network
from pathlib import Path

import uvloop

from delivery.push.http.client import HttpSender
from delivery.push.http.connection import HttpLimits
from delivery.push.http.signing import Signer
from delivery.push.http.ssrf import SsrfGuard
from rooms.domain.ids import OrganisationId
from rooms.domain.push_url import PushUrl
from tests.bench.receiver import Connection, receive, receiving
from tests.bench.service import free_port
from tests.support.certificates import Authority

# Timestamp and signature in, status out.
Call = Callable[[str, str], Awaitable[int]]

BODY = json.dumps({"type": "order.created", "data": {"order": 4711, "note": "x" * 960}}).encode()
ORGANISATION = OrganisationId("0192e4a0-5d1c-7e3a-8000-bbbbbbbbbbbb")
WEBHOOK_ID = "0192e4a0-5d1c-7e3a-8000-0123456789ab"
FIXED = {
    "content-type": "application/json",
    "user-agent": "Rooms/0.1",
    "webhook-id": WEBHOOK_ID,
    "rooms-delivery-attempt": "0",
    "rooms-delivery-delay": "0",
    "rooms-correlation-id": "0192e4a0-5d1c-7e3a-8000-aaaaaaaaaaaa",
    "rooms-event-type": "order.created",
}
NGINX = """
worker_processes 1; daemon off; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 4096; }}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/f;
  uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  keepalive_requests 100000000; keepalive_timeout 300s; client_body_buffer_size 64k;
  server {{ listen 127.0.0.1:{port} {tls}; ssl_certificate {folder}/chain.pem; ssl_certificate_key {folder}/key.pem;
    location / {{ return 204; }} }}
}}
"""


def _headers(timestamp: str, signature: str) -> dict[str, str]:
    return {**FIXED, "webhook-timestamp": timestamp, "webhook-signature": signature}


@asynccontextmanager
async def ours(url: str, authority: str, slots: int) -> AsyncIterator[Call]:
    target = PushUrl.parse(url)
    tls = ssl.create_default_context(cafile=authority)
    limits = HttpLimits(max_connections=slots)
    fixed = "".join(f"{name}: {value}\r\n" for name, value in FIXED.items())
    async with HttpSender(
        SsrfGuard((IPv4Network("127.0.0.0/8"),)), limits=limits, tls=tls
    ) as sender:

        async def call(timestamp: str, signature: str) -> int:
            lines = f"{fixed}webhook-timestamp: {timestamp}\r\nwebhook-signature: {signature}\r\n".encode(
                "ascii"
            )
            answer = await sender.send(target, lines, BODY, organisation=ORGANISATION, timeout_s=10)
            return answer.status or 0

        yield call


@asynccontextmanager
async def by_aiohttp(url: str, authority: str, slots: int) -> AsyncIterator[Call]:
    import aiohttp

    tls = ssl.create_default_context(cafile=authority)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=slots, ssl=tls)
    ) as session:

        async def call(timestamp: str, signature: str) -> int:
            async with session.post(
                url, data=BODY, headers=_headers(timestamp, signature), allow_redirects=False
            ) as answer:
                await answer.read()
                return answer.status

        yield call


@asynccontextmanager
async def by_pyreqwest(url: str, authority: str, slots: int) -> AsyncIterator[Call]:
    from pyreqwest.client import ClientBuilder

    pem = await asyncio.to_thread(Path(authority).read_bytes)
    builder = ClientBuilder().max_connections(slots).add_root_certificate_pem(pem)
    async with builder.build() as client:

        async def call(timestamp: str, signature: str) -> int:
            answer = (
                await client.post(url)
                .headers(_headers(timestamp, signature))
                .body_bytes(BODY)
                .build()
                .send()
            )
            return answer.status

        yield call


@asynccontextmanager
async def by_httpx(url: str, authority: str, slots: int) -> AsyncIterator[Call]:
    import httpx

    tls = ssl.create_default_context(cafile=authority)
    limits = httpx.Limits(max_connections=slots, max_keepalive_connections=slots)
    async with httpx.AsyncClient(limits=limits, verify=tls) as client:

        async def call(timestamp: str, signature: str) -> int:
            answer = await client.post(url, content=BODY, headers=_headers(timestamp, signature))
            return answer.status_code

        yield call


CLIENTS = {"ours": ours, "pyreqwest": by_pyreqwest, "aiohttp": by_aiohttp, "httpx": by_httpx}


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def measure(
    client: str, url: str, authority: str, slots: int, sends: int
) -> dict[str, float]:
    """CPU-µs a send and sends a second, over `sends` calls by `slots` coroutines, connections opened before."""
    signer = Signer((b"k" * 32,))
    async with CLIENTS[client](url, authority, slots) as call:

        async def slot(count: int) -> None:
            for _ in range(count):
                now = int(time.time())
                signature = signer.sign(WEBHOOK_ID, now, BODY)
                status = await call(str(now), signature)
                if status != 204:
                    raise RuntimeError(f"{client}: the sink answered {status}")

        await asyncio.gather(*(slot(20) for _ in range(slots)))
        cpu_s, wall_s = _cpu_s(), time.perf_counter()
        await asyncio.gather(*(slot(sends // slots) for _ in range(slots)))
        cpu_s, wall_s = _cpu_s() - cpu_s, time.perf_counter() - wall_s
    done = sends // slots * slots
    return {"cpu_us": cpu_s / done * 1e6, "per_s": done / wall_s}


class _Connection(Connection):
    def on_message_complete(self) -> None:
        self.transport.write(b"HTTP/1.1 204 No Content\r\n\r\n")


async def _serve(port: int, folder: Path, *, tls: bool) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER) if tls else None
    if context is not None:
        context.load_cert_chain(folder / "chain.pem", folder / "key.pem")
    await receive(_Connection, port, tls=context)


@contextmanager
def sink(folder: Path, *, tls: bool) -> Iterator[tuple[str, str]]:
    """Return the kind of the sink, and its URL."""
    port = free_port()
    nginx = shutil.which("nginx")
    if nginx is not None:
        config = folder / "nginx.conf"
        config.write_text(NGINX.format(folder=folder, port=port, tls="ssl" if tls else ""))
        command = [nginx, "-p", str(folder), "-c", str(config), "-e", str(folder / "error.log")]
    else:
        command = [
            sys.executable,
            "-m",
            __spec__.name,
            "--serve",
            str(port),
            "--folder",
            str(folder),
        ]
        command += ["--tls"] if tls else []
    with receiving(command, port):
        yield (
            ("nginx" if nginx else "httptools"),
            f"http{'s' if tls else ''}://127.0.0.1:{port}/hook",
        )


def compare(*, sends: int, slots: int, rounds: int, tls: bool, clients: list[str]) -> None:
    figures: dict[str, list[dict[str, float]]] = {client: [] for client in clients}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        Authority().write(folder)
        with sink(folder, tls=tls) as (kind, url):
            print(
                f"sink: {kind}, {'TLS' if tls else 'plain'}, {slots} slots, median of {rounds} rounds"
            )
            for _ in range(rounds):
                for client in clients:
                    count = max(slots * 10, sends // 20 if client == "httpx" else sends)
                    command = [
                        sys.executable,
                        "-m",
                        __spec__.name,
                        "--client",
                        client,
                        "--url",
                        url,
                    ]
                    command += ["--folder", name, "--slots", str(slots), "--sends", str(count)]
                    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                    figures[client].append(json.loads(out))
    base = statistics.median(round_["cpu_us"] for round_ in figures[clients[0]])
    print(f"{'sender':<12}{'CPU-µs a send':>14}{'sends/s':>10}{'ratio':>8}   rounds")
    for client, taken in figures.items():
        cpu_us = statistics.median(round_["cpu_us"] for round_ in taken)
        per_s = statistics.median(round_["per_s"] for round_ in taken)
        spread = " ".join(f"{round_['cpu_us']:.1f}" for round_ in taken)
        print(f"{client:<12}{cpu_us:>14.1f}{per_s:>10.0f}{cpu_us / base:>8.2f}   {spread}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sends", type=int, default=40_000)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--only", action="append", choices=list(CLIENTS))
    parser.add_argument("--client", choices=list(CLIENTS), help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve is not None:
        uvloop.run(_serve(given.serve, given.folder, tls=given.tls))
    elif given.client is not None:
        authority = os.fspath(given.folder / "authority.pem")
        print(
            json.dumps(
                uvloop.run(measure(given.client, given.url, authority, given.slots, given.sends))
            )
        )
    else:
        clients = given.only or list(CLIENTS)
        compare(
            sends=given.sends,
            slots=given.slots,
            rounds=given.rounds,
            tls=given.tls,
            clients=clients,
        )


if __name__ == "__main__":
    main()
