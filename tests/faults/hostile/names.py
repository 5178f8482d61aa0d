"""Attack the resolver: silence, errors, refused addresses, and names that flip to private."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from random import Random
from typing import Final

from delivery.push.http.client import HttpSender
from delivery.push.http.connection import HttpLimits
from delivery.push.http.dns import LookupLimits
from delivery.push.http.ssrf import SsrfGuard
from rooms.domain.attempt import AttemptResult, ErrorClass
from rooms.domain.ids import OrganisationId
from rooms.domain.push_url import PushUrl
from tests.faults.hostile.suite import Suite
from tests.support.scripted_endpoints import OK, answering, serving

_HOSTILE: Final = OrganisationId("01900000-0000-7000-8000-000000000001")
_HEALTHY: Final = OrganisationId("01900000-0000-7000-8000-000000000002")
_ALLOWED: Final = ip_network("127.0.0.0/24")
_PARTS: Final = (
    "127.0.0.1", "127.0.0.1", "127.0.0.1", "127.0.0.2", "127.1.0.1", "10.0.0.1", "169.254.169.254", "0.0.0.0", "::1", "::",
    "fe80::1%lo", "::ffff:127.0.0.1", "64:ff9b::127.0.0.1", "2002:7f00:1::1", "fd00::1", "no address", "", "127.1", "2130706433",
)  # fmt: skip
_STEP_S: Final = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NamesCase:
    """List the answers for each name, look-up by look-up. None: silence; text: a failure."""

    names: dict[str, tuple[tuple[str, ...] | str | None, ...]]
    rounds: int


def _said(rng: Random) -> tuple[str, ...] | str | None:
    match rng.randrange(6):
        case 0:
            return None
        case 1:
            return rng.choice(("SERVFAIL", "REFUSED", ""))
        case 2:
            return ()
        case 3:
            return tuple(rng.choice(_PARTS) for _ in range(rng.choice((30, 400))))
        case _:
            return tuple(rng.choice(_PARTS) for _ in range(rng.choice((1, 1, 2, 4))))


def generate(rng: Random) -> NamesCase:
    """Make some names, each with a history of answers."""
    names = {
        f"{number}.{rng.randrange(1000)}.test": tuple(
            _said(rng) for _ in range(rng.choice((1, 2, 4)))
        )
        for number in range(rng.choice((1, 3, 30)))
    }
    return NamesCase(names=names, rounds=rng.choice((1, 3, 5)))


class _Resolver:
    """Say what the case has for a name, the last of it again and again.

    `last` is the last answer for it, `reachable` what any answer allowed.
    """

    def __init__(self) -> None:
        self.case = NamesCase(names={}, rounds=0)
        self.asked: dict[str, int] = {}
        self.last: dict[str, Sequence[str]] = {}
        self.reachable: dict[str, set[str]] = {}

    async def __call__(self, host: str) -> Sequence[str]:
        said = self.case.names.get(host, (("127.0.0.1",),))
        number = self.asked.get(host, 0)
        self.asked[host] = number + 1
        now = said[min(number, len(said) - 1)]
        if now is None:
            await asyncio.Event().wait()
            return ()
        if isinstance(now, str):
            raise OSError(now)
        self.last[host] = now
        self.reachable.setdefault(host, set()).update(filter(_reachable, now))
        return now


@asynccontextmanager
async def target(_database_url: str) -> AsyncIterator[Callable[[NamesCase], Awaitable[str]]]:
    """Attack a sender's guard. What it knows when all is quiet are vetted addresses, and the last answer had some."""
    resolver, now = _Resolver(), [0.0]
    lookups = LookupLimits(total=8, per_organisation=4, deadline_s=0.05, wait_s=0.5)
    guard = SsrfGuard(
        (_ALLOWED,),
        resolver=resolver,
        limits=lookups,
        clock=lambda: now[0],
        refresh_wait_s=0.01,
        max_names=40,
        max_names_per_organisation=20,
    )
    limits = HttpLimits(max_connections=6, max_per_organisation=4, sweep_s=0.02)
    async with serving(answering(OK)) as endpoint, HttpSender(guard, limits=limits) as sender:

        async def post(host: str, organisation: OrganisationId) -> AttemptResult:
            to = PushUrl.parse(f"http://{host}:{endpoint.port}/")
            return await sender.send(
                to, b"webhook-id: 1\r\n", b"{}", organisation=organisation, timeout_s=10
            )

        async def run(case: NamesCase) -> str:
            resolver.case = case
            outcomes = set[str]()
            for _ in range(case.rounds):
                calls = {host: asyncio.create_task(post(host, _HOSTILE)) for host in case.names}
                # While they are under way, another organisation's names are found.
                assert (await post(f"{len(resolver.asked)}.well.test", _HEALTHY)).error is None
                for host, call in calls.items():
                    answer = await call
                    outcomes.add(str(answer.error or "delivered"))
                    _check(answer, resolver.reachable.get(host, set()))
                await asyncio.gather(*guard._pending.values())
                for host in case.names:
                    known, last = guard.cached(host, _HOSTILE), resolver.last.get(host, ())
                    assert all(map(_reachable, known or ())), known
                    assert known is None or any(map(_reachable, last)), (known, last)
                now[0] += _STEP_S
            assert guard.active_organisations == 0
            assert guard._cache.size <= 40
            idle = sum(len(idle) for idle in sender._pool._idle.values())
            assert sender.connections == idle
            return "+".join(sorted(outcomes))

        yield run


def _check(answer: AttemptResult, reachable: set[str]) -> None:
    if answer.error is None:
        assert reachable
    else:
        assert answer.error in {
            ErrorClass.BLOCKED,
            ErrorClass.DNS,
            ErrorClass.CONNECT,
            ErrorClass.TIMEOUT,
        }, answer
    assert "169.254" not in answer.detail
    assert "10.0.0.1" not in answer.detail


def _reachable(text: str) -> bool:
    try:
        return ip_address(text) in _ALLOWED
    except ValueError:
        return False


SUITE: Final = Suite(name="names", cases=50, generate=generate, target=target)
