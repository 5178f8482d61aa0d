"""Measure the bare sender loop: sign and POST with `delivery.push.http.client.HttpSender`, in its own process.

    python -m tests.bench.ratio URL SENDS SLOTS

Its sends per CPU-second are the yardstick of machine, sink and moment: every figure is also given as a ratio of it.
"""

import asyncio
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from ipaddress import IPv4Network
from typing import Final

import uvloop

from delivery.push.http.client import HttpSender
from delivery.push.http.connection import HttpLimits
from delivery.push.http.signing import Signer
from delivery.push.http.ssrf import SsrfGuard
from rooms.domain.ids import OrganisationId
from rooms.domain.push_url import PushUrl
from tests.bench.service import ROOT

_TIMEOUT_S: Final = 10.0
_WARM_UP: Final = 20
_ORGANISATION: Final = OrganisationId("0192e4a0-5d1c-7e3a-8000-bbbbbbbbbbbb")
_ID: Final = "0192e4a0-5d1c-7e3a-8000-0123456789ab"
_BODY: Final = json.dumps({"sent": 0, "order": 4711, "note": "x" * 980}).encode()
_FIXED: Final = (
    f"webhook-id: {_ID}\r\n"
    "Rooms-Delivery-Attempt: 0\r\n"
    "Rooms-Delivery-Delay: 0\r\n"
    f"Rooms-Correlation-Id: {_ID}\r\n"
    f"Rooms-Message-Id: {_ID}\r\n"
    "Rooms-Event-Type: order.created\r\n"
    "Rooms-Event-Version: 1\r\n"
    "Content-Type: application/json\r\n"
    "User-Agent: Rooms/1\r\n"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bare:
    """Hold the results of the loop."""

    per_s: float
    per_cpu_s: float


async def _measure(url: str, sends: int, slots: int) -> Bare:
    target = PushUrl.parse(url)
    signer = Signer((b"k" * 32,))
    guard = SsrfGuard((IPv4Network("127.0.0.0/8"),))
    async with HttpSender(guard, limits=HttpLimits(max_connections=slots)) as sender:

        async def slot(count: int) -> None:
            for _ in range(count):
                now = int(time.time())
                signature = signer.sign(_ID, now, _BODY)
                lines = f"{_FIXED}webhook-timestamp: {now}\r\nwebhook-signature: {signature}\r\n".encode(
                    "ascii"
                )
                answer = await sender.send(
                    target, lines, _BODY, organisation=_ORGANISATION, timeout_s=_TIMEOUT_S
                )
                if answer.error is not None:
                    raise RuntimeError(f"the sink answered {answer}")

        await asyncio.gather(*(slot(_WARM_UP) for _ in range(slots)))
        used, began = time.process_time(), time.perf_counter()
        await asyncio.gather(*(slot(sends // slots) for _ in range(slots)))
        used, took = time.process_time() - used, time.perf_counter() - began
    done = sends // slots * slots
    return Bare(per_s=done / took, per_cpu_s=done / used)


def measured(url: str, *, sends: int, slots: int = 32) -> Bare:
    """Run the loop against `url`, now."""
    command = [sys.executable, "-m", "tests.bench.ratio", url, str(sends), str(slots)]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=ROOT).stdout
    return Bare(**json.loads(out))


def main() -> None:
    url, sends, slots = sys.argv[1:]
    sys.stdout.write(json.dumps(asdict(uvloop.run(_measure(url, int(sends), int(slots))))))


if __name__ == "__main__":
    main()
