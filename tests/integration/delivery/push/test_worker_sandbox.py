"""Test that a claim whose sandbox died counts as lost, and one without an attempt does not."""

import pytest

from delivery.push.errors import ClaimExpiredError, SandboxDiedError
from rooms.db.notify import Channel
from rooms.domain.state_machine import State
from rooms.domain.work_location import BrokerMode
from tests.support.installation import Installation, until
from tests.support.push_worker import SHAPES, ScriptedSender, deliver, working

ABANDONED = "SELECT abandoned FROM outbox"
CLAIM_S = 3.2
"""Little more than the margin of an attempt and its time-out."""


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest) -> BrokerMode:
    found: BrokerMode = SHAPES[request.param]
    return found


@pytest.mark.parametrize(
    ("error", "counted"), [(SandboxDiedError("it hung"), 1), (ClaimExpiredError("late"), None)]
)
async def test_a_claim_ends_by_itself_only_after_a_sandbox_died(
    installation: Installation, error: Exception, counted: int | None
) -> None:
    """So deliveries that hang every sandbox are counted, and `rooms doctor` finds them."""
    sender = ScriptedSender()
    subscription = await installation.subscribe(timeout_ms=1000)
    sender.plan(subscription, error)
    async with working(installation, sender, claim_s=CLAIM_S) as work:
        sender.hang(subscription)
        (copy,) = await deliver(installation, subscription)
        work.signals.notify(Channel.PUSH)
        sender.recover(subscription)
        await sender.called(lambda: len(sender.calls) == 1, "the first attempt")
        sender.hang(subscription)
        await sender.called(lambda: len(sender.calls) == 2, "the second attempt")
        assert await installation.value(ABANDONED) == counted
        sender.recover(subscription)

        async def is_delivered() -> bool:
            return await installation.state(copy) is State.DELIVERED

        await until(is_delivered, "the delivery")
    first, second = sender.calls
    assert (second.at - first.at > CLAIM_S / 2) is (counted is not None)
    assert (await installation.delivery(copy))["attempts"] == 1
