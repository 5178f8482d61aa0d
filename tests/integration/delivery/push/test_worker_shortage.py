"""Test that a worker that can open no connection books no failure of a healthy endpoint."""

import pytest

from delivery.push.errors import ResourceShortageError
from rooms.db.notify import Channel
from rooms.domain.state_machine import State
from rooms.domain.work_location import BrokerMode
from tests.support.installation import Installation, until
from tests.support.push_worker import SHAPES, ScriptedSender, deliver, working

SHORTAGE = ResourceShortageError("Too many open files: raise the limit")


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest) -> BrokerMode:
    found: BrokerMode = SHAPES[request.param]
    return found


@pytest.fixture
def sender() -> ScriptedSender:
    return ScriptedSender()


async def test_a_delivery_that_lacked_a_file_is_put_off_without_an_attempt(
    installation: Installation, sender: ScriptedSender
) -> None:
    subscription = await installation.subscribe(delivery_attempts=0)
    sender.plan(subscription, SHORTAGE, SHORTAGE)
    async with working(installation, sender) as work:
        (copy,) = await deliver(installation, subscription)
        work.signals.notify(Channel.PUSH)

        async def is_delivered() -> bool:
            return await installation.state(copy) is State.DELIVERED

        await until(is_delivered, "the delivery")
    assert await installation.kinds(copy) == ["attempted", "delivered"]
    assert (await installation.delivery(copy))["attempts"] == 1
    assert [call.attempt for call in sender.calls] == [0, 0, 0]
    pauses = [
        later.at - call.at for call, later in zip(sender.calls, sender.calls[1:], strict=False)
    ]
    assert min(pauses) >= 0.5, "it is not claimed again at once"
