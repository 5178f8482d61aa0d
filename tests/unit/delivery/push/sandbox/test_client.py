"""Test the sandbox client: what is sent again after a crash, how often, and when it gives up."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from delivery.push.errors import (
    AttemptCrashedError,
    ClaimExpiredError,
    ResourceShortageError,
    SandboxDiedError,
    SandboxUnavailableError,
)
from delivery.push.sandbox.client import MAX_CRASHES, SandboxClient
from rooms.domain.attempt import AttemptResult
from rooms.domain.ids import DeliveryId, OrganisationId
from rooms.domain.push_url import PushUrl
from tests.support.push_worker import OK, StoppedClock

LATER = 2000.0
ORGANISATION = OrganisationId("01900000-0000-7000-8000-000000000001")
POISON = b"poison"
VERSION = DeliveryId("01900000-0000-7000-8000-000000000009"), 1, 0


@dataclass
class FakeSandbox:
    """Crash on a poisonous task, with everything else in progress."""

    sent: list[bytes] = field(default_factory=list)
    most: int = 0
    missing: bool = False
    closed: bool = False
    until: float = LATER
    """Expected as that before which an attempt must begin."""
    _in_progress: dict[int, asyncio.Future[AttemptResult]] = field(default_factory=dict)

    async def send(
        self,
        _target: PushUrl,
        _headers: bytes,
        body: bytes,
        *,
        organisation: OrganisationId,
        timeout_s: float,
        start_before: float = LATER,
    ) -> AttemptResult:
        assert (organisation, timeout_s, start_before) == (ORGANISATION, 5, self.until)
        if self.missing:
            raise SandboxUnavailableError("no")
        self.sent.append(body)
        pending: asyncio.Future[AttemptResult] = asyncio.get_running_loop().create_future()
        self._in_progress[len(self.sent)] = pending
        self.most = max(self.most, len(self._in_progress))
        asyncio.get_running_loop().call_soon(self._end, len(self.sent), body)
        return await pending

    def _end(self, number: int, body: bytes) -> None:
        if body == POISON:
            for pending in self._in_progress.values():
                pending.set_exception(AttemptCrashedError("SIGSEGV"))
            self._in_progress.clear()
        elif number in self._in_progress:
            self._in_progress.pop(number).set_result(OK)

    async def close(self) -> None:
        self.closed = True


@dataclass
class HangingSandbox:
    """Attempt for ever."""

    organisations: list[OrganisationId] = field(default_factory=list)

    async def send(
        self,
        _target: PushUrl,
        _headers: bytes,
        _body: bytes,
        *,
        organisation: OrganisationId,
        timeout_s: float,
        start_before: float,
    ) -> AttemptResult:
        self.organisations.append(organisation)
        await asyncio.sleep(3_600 + timeout_s)
        return OK

    async def close(self) -> None:
        """Do nothing."""


@dataclass
class StuckSandbox:
    """Hang for the time-out and the grace in every attempt, and be killed."""

    clock: StoppedClock
    began: list[tuple[float, float]] = field(default_factory=list)
    """Of each attempt its time, and that before which it had to begin."""

    async def send(
        self,
        _target: PushUrl,
        _headers: bytes,
        _body: bytes,
        *,
        organisation: OrganisationId,
        timeout_s: float,
        start_before: float,
    ) -> AttemptResult:
        self.began.append((self.clock.monotonic(), start_before))
        self.clock.ahead_s += timeout_s + 15
        raise AttemptCrashedError("its process hung")

    async def close(self) -> None:
        """Do nothing."""


@dataclass
class SlowlyMissingSandbox:
    """Find out after a minute that no process can be started."""

    clock: StoppedClock
    tried: int = 0

    async def send(
        self,
        _target: PushUrl,
        _headers: bytes,
        _body: bytes,
        *,
        organisation: OrganisationId,
        timeout_s: float,
        start_before: float,
    ) -> AttemptResult:
        self.tried += 1
        self.clock.ahead_s += 60
        raise SandboxUnavailableError("the process did not become ready")

    async def close(self) -> None:
        """Do nothing."""


@dataclass
class Place:
    """Create a client with fake sandboxes, the first of which is the shared one."""

    clock: StoppedClock = field(default_factory=StoppedClock)
    sandboxes: list[FakeSandbox] = field(default_factory=list)
    fallback: FakeSandbox = field(default_factory=FakeSandbox)

    def __post_init__(self) -> None:
        self.sender = SandboxClient(
            create_sandbox=self._start, fallback=self.fallback, clock=self.clock
        )

    def _start(self) -> FakeSandbox:
        self.sandboxes.append(FakeSandbox())
        return self.sandboxes[-1]

    async def send(self, body: bytes, until: float = LATER) -> AttemptResult:
        target = PushUrl.parse("http://h.test/")
        for sandbox in self.sandboxes:
            sandbox.until = until
        return await self.sender.send(
            target,
            b"",
            body,
            version=(DeliveryId(body.hex()), 0, 0),
            organisation=ORGANISATION,
            timeout_s=5,
            start_before=until,
        )

    @property
    def sent_singly(self) -> list[bytes]:
        return [body for sandbox in self.sandboxes[1:] for body in sandbox.sent]


async def test_a_harmless_task_is_attempted_once() -> None:
    place = Place()
    assert await place.send(b"well") == OK
    assert (place.sandboxes[0].sent, place.sent_singly) == ([b"well"], [])


async def test_a_crashing_task_is_tried_in_single_sandboxes_up_to_the_limit() -> None:
    place = Place()
    with pytest.raises(AttemptCrashedError, match="SIGSEGV"):
        await place.send(POISON)
    assert place.sandboxes[0].sent == [POISON]
    assert place.sent_singly == [POISON] * MAX_CRASHES


async def test_tasks_beside_a_crashing_one_get_their_results() -> None:
    place = Place()
    harmless = [b"%d" % number for number in range(100)]
    found = await asyncio.gather(
        *map(place.send, [*harmless[:10], POISON, *harmless[10:]]), return_exceptions=True
    )
    assert isinstance(found.pop(10), AttemptCrashedError)
    assert found == [OK] * 100
    assert place.sandboxes[0].most > 1
    assert {sandbox.most for sandbox in place.sandboxes[1:] if sandbox.sent} == {1}
    assert place.sent_singly.count(POISON) == MAX_CRASHES


async def test_one_organisation_takes_at_most_half_of_the_places() -> None:
    """Its endpoints may all hang, and those of others need an attempt before their claims end."""
    place, other = Place(), OrganisationId("01900000-0000-7000-8000-000000000002")
    shared, target = HangingSandbox(), PushUrl.parse("http://h.test/")
    place.sender._shared_sandbox.process = shared

    def send(organisation: OrganisationId) -> asyncio.Task[AttemptResult]:
        return asyncio.create_task(
            place.sender.send(
                target,
                b"",
                b"",
                version=VERSION,
                organisation=organisation,
                timeout_s=5,
                start_before=LATER,
            )
        )

    sending = [send(ORGANISATION) for _ in range(100)]
    await asyncio.sleep(0)
    sending.append(send(other))
    await asyncio.sleep(0)
    assert shared.organisations == [ORGANISATION] * 16 + [other]
    for one in sending:
        one.cancel()
    await asyncio.gather(*sending, return_exceptions=True)


@pytest.mark.parametrize("late", [lambda: LATER, lambda: LATER + 1])
async def test_a_task_whose_claim_runs_out_is_not_attempted(late: Callable[[], float]) -> None:
    place = Place()
    place.clock.ahead_s = late() - place.clock.monotonic()
    with pytest.raises(ClaimExpiredError):
        await place.send(b"well")
    assert place.sandboxes[0].sent == []


@pytest.mark.parametrize(
    ("timeout_s", "claim_s"), [(30, 60), (23, 60), (15, 35), (30, 35), (15, 60)]
)
async def test_a_task_that_hangs_its_sandbox_is_given_up_after_some_claims(
    timeout_s: float, claim_s: float
) -> None:
    """A hang takes most of a claim or more, so that no claim has time for all attempts."""
    clock, sandboxes = StoppedClock(), list[StuckSandbox]()

    def create_sandbox() -> StuckSandbox:
        sandboxes.append(StuckSandbox(clock))
        return sandboxes[-1]

    client = SandboxClient(create_sandbox=create_sandbox, fallback=FakeSandbox(), clock=clock)
    ends = list[type[Exception]]()
    while AttemptCrashedError not in ends and len(ends) < 5:
        with pytest.raises((AttemptCrashedError, ClaimExpiredError)) as ended:
            await client.send(
                PushUrl.parse("http://h.test/"),
                b"",
                POISON,
                version=VERSION,
                organisation=ORGANISATION,
                timeout_s=timeout_s,
                start_before=clock.monotonic() + claim_s - timeout_s,
            )
        ends.append(ended.type)
    assert ends == [SandboxDiedError] * (len(ends) - 1) + [AttemptCrashedError]
    attempts = [attempt for sandbox in sandboxes for attempt in sandbox.began]
    assert len(attempts) == 1 + MAX_CRASHES
    assert len(sandboxes[0].began) == 1, "only once with others"
    assert all(began < start_before for began, start_before in attempts)


async def test_an_attempt_with_a_result_ends_the_count_of_deaths() -> None:
    place = Place()
    place.sender._record_deaths((DeliveryId(b"well".hex()), 0, 0), MAX_CRASHES - 1)
    assert await place.send(b"well") == OK
    assert place.sent_singly == [b"well"]
    assert await place.send(b"well") == OK
    assert place.sandboxes[0].sent == [b"well"]


async def test_deaths_of_the_latest_deliveries_are_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("delivery.push.sandbox.client._MAX_REMEMBERED", 2)
    place = Place()
    for body in (b"poison1", b"poison2", b"poison1", b"poison3"):
        place.sender._record_deaths((DeliveryId(body.hex()), 0, 0), 0)
    assert [key[0] for key in place.sender._deaths] == [b"poison1".hex(), b"poison3".hex()]


async def test_a_sandbox_that_cannot_start_in_time_is_not_waited_for_again() -> None:
    """Else each claim would be spent on the wait, and nothing would ever be attempted."""
    place = Place()
    shared = place.sender._shared_sandbox.process = SlowlyMissingSandbox(place.clock)
    with pytest.raises(ClaimExpiredError):
        await place.send(b"well", until=place.clock.monotonic() + 30)
    assert place.fallback.sent == [], "another worker may have the claim"
    assert await place.send(b"well") == OK
    assert (shared.tried, place.fallback.sent) == (1, [b"well"])
    place.clock.ahead_s += 60
    assert await place.send(b"well") == OK
    assert shared.tried == 2


def make_singles_slow(place: Place, count: int = 4) -> list[SlowlyMissingSandbox]:
    """Let these single sandboxes need a minute for a start that fails."""
    slow = [SlowlyMissingSandbox(place.clock) for _ in range(count)]
    for single, process in zip(place.sender._single_sandboxes[-count:], slow, strict=True):
        single.process = process
    return slow


async def test_a_slow_start_of_a_single_sandbox_leaves_the_shared_one_in_use() -> None:
    place = Place()
    make_singles_slow(place)
    with pytest.raises(ClaimExpiredError):
        await place.send(POISON, until=place.clock.monotonic() + 30)
    assert await place.send(b"well") == OK
    assert (place.sandboxes[0].sent, place.fallback.sent) == ([POISON, b"well"], [])


async def test_a_claim_counts_as_lost_if_a_sandbox_died_before_one_could_not_start() -> None:
    """The shared sandbox died with it, so the attempt may have reached the endpoint."""
    place = Place()
    make_singles_slow(place)
    with pytest.raises(SandboxDiedError):
        await place.send(POISON, until=place.clock.monotonic() + 30)


async def test_a_delivery_that_killed_a_sandbox_is_never_sent_by_the_worker() -> None:
    place = Place()
    slow = make_singles_slow(place)
    with pytest.raises(SandboxDiedError):
        await place.send(POISON, until=place.clock.monotonic() + 30)
    for sandbox in place.sender._single_sandboxes:
        sandbox.unavailable_until = place.clock.monotonic() + 60
    with pytest.raises(ResourceShortageError):
        await place.send(POISON, until=place.clock.monotonic() + 30)
    assert sum(sandbox.tried for sandbox in slow) == 1, "a start is not waited for again"
    assert place.fallback.sent == []


async def test_a_single_sandbox_that_can_start_is_taken_before_those_that_could_not() -> None:
    place = Place()
    (slow,) = make_singles_slow(place, count=1)
    with pytest.raises(SandboxDiedError):
        await place.send(POISON, until=place.clock.monotonic() + 30)
    with pytest.raises(AttemptCrashedError, match="SIGSEGV"):
        await place.send(POISON)
    assert (slow.tried, place.sent_singly) == (1, [POISON] * MAX_CRASHES)


async def test_without_a_sandbox_the_worker_sends() -> None:
    place = Place()
    for sandbox in place.sandboxes:
        sandbox.missing = True
    assert await place.send(b"well") == OK
    assert place.fallback.sent == [b"well"]


async def test_every_sandbox_is_closed_at_the_end() -> None:
    place = Place()
    async with place.sender:
        pass
    assert [sandbox.closed for sandbox in place.sandboxes] == [True] * len(place.sandboxes)
