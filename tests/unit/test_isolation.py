"""Who is guilty: what is sent again after a ward died, how often, and when it is left."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from delivery.errors import AttemptCrashedError, AttemptLateError, WardUnavailableError
from delivery.isolation.sender import TRIES, IsolatedSender
from rooms.domain.attempt import Answer
from rooms.domain.ids import OrganisationId
from rooms.domain.target import Target
from tests.pushing import OK, StoppedClock

LATER = 2000.0
ORGANISATION = OrganisationId("01900000-0000-7000-8000-000000000001")
GUILTY = b"guilty"


@dataclass
class FakeWard:
    """Dies of what is guilty, with everything that it has under way then."""

    sent: list[bytes] = field(default_factory=list)
    most: int = 0
    missing: bool = False
    closed: bool = False
    _under_way: dict[int, asyncio.Future[Answer]] = field(default_factory=dict)

    async def send(
        self, _target: Target, _headers: bytes, body: bytes, *, organisation: OrganisationId, timeout_s: float
    ) -> Answer:
        assert (organisation, timeout_s) == (ORGANISATION, 5)
        if self.missing:
            raise WardUnavailableError("no")
        self.sent.append(body)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._under_way[len(self.sent)] = answer
        self.most = max(self.most, len(self._under_way))
        asyncio.get_running_loop().call_soon(self._end, len(self.sent), body)
        return await answer

    def _end(self, number: int, body: bytes) -> None:
        if body == GUILTY:
            for answer in self._under_way.values():
                answer.set_exception(AttemptCrashedError("SIGSEGV"))
            self._under_way.clear()
        elif number in self._under_way:
            self._under_way.pop(number).set_result(OK)

    async def close(self) -> None:
        self.closed = True


@dataclass
class Place:
    """An isolated sender over fake wards, the first of which is the one that many share."""

    clock: StoppedClock = field(default_factory=StoppedClock)
    wards: list[FakeWard] = field(default_factory=list)
    otherwise: FakeWard = field(default_factory=FakeWard)

    def __post_init__(self) -> None:
        self.sender = IsolatedSender(start=self._start, otherwise=self.otherwise, clock=self.clock)

    def _start(self) -> FakeWard:
        self.wards.append(FakeWard())
        return self.wards[-1]

    async def send(self, body: bytes, until: float = LATER) -> Answer:
        target = Target.parse("http://h.test/")
        return await self.sender.send(target, b"", body, organisation=ORGANISATION, timeout_s=5, until=until)

    @property
    def alone(self) -> list[bytes]:
        return [body for cell in self.wards[1:] for body in cell.sent]


async def test_what_kills_nobody_is_attempted_once() -> None:
    place = Place()
    assert await place.send(b"well") == OK
    assert (place.wards[0].sent, place.alone) == ([b"well"], [])


async def test_the_guilty_is_tried_alone_so_often_and_no_more() -> None:
    place = Place()
    with pytest.raises(AttemptCrashedError, match="SIGSEGV"):
        await place.send(GUILTY)
    assert place.wards[0].sent == [GUILTY]
    assert place.alone == [GUILTY] * TRIES


async def test_whoever_was_with_the_guilty_is_answered() -> None:
    place = Place()
    innocent = [b"%d" % number for number in range(100)]
    found = await asyncio.gather(*map(place.send, [*innocent[:10], GUILTY, *innocent[10:]]), return_exceptions=True)
    assert isinstance(found.pop(10), AttemptCrashedError)
    assert found == [OK] * 100
    assert place.wards[0].most > 1
    assert {cell.most for cell in place.wards[1:] if cell.sent} == {1}
    assert place.alone.count(GUILTY) == TRIES


@pytest.mark.parametrize("late", [lambda: LATER, lambda: LATER + 1])
async def test_what_has_no_time_left_is_not_begun(late: Callable[[], float]) -> None:
    place = Place()
    place.clock.ahead_s = late() - place.clock.monotonic()
    with pytest.raises(AttemptLateError):
        await place.send(b"well")
    assert place.wards[0].sent == []


async def test_where_no_process_can_be_had_the_worker_sends() -> None:
    place = Place()
    for ward in place.wards:
        ward.missing = True
    assert await place.send(b"well") == OK
    assert place.otherwise.sent == [b"well"]


async def test_at_the_end_every_ward_is_closed() -> None:
    place = Place()
    async with place.sender:
        pass
    assert [ward.closed for ward in place.wards] == [True] * len(place.wards)
