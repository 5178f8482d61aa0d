"""Keep the broker's users equal to the native subscriptions.

The API creates and removes users as it answers. This repairs what it could not do because it died
or the broker was unavailable, and what a broker lost that was emptied.
"""

import logging
from typing import Final

from delivery.maintenance.task import ShouldContinue
from rooms.db.catalog.native_subscriptions import NativeState, native_passwords, native_state
from rooms.db.writer import LogWriter
from rooms.domain.ids import SubscriptionId
from rooms.ports import BrokerUsers, Clock

_log = logging.getLogger(__name__)

FULL_EVERY_S: Final = 60.0
"""Time between two comparisons of all users where nothing seems to have changed."""
UNSETTLED_S: Final = 30.0
"""Time after a change for which each run compares: the API changes users after its commit."""


async def sync_broker_users(
    writer: LogWriter, users: BrokerUsers, should_continue: ShouldContinue
) -> bool:
    """Create missing broker users of native subscriptions, and remove users without one.

    Return whether all were compared, and none differed.
    """
    wanted = await native_passwords(writer) if should_continue() else {}
    present = await users.list_users(wanted) if should_continue() else {}
    is_equal = True
    for subscription, hashed in wanted.items():
        if not should_continue():
            return False
        if not present.get(subscription):
            is_equal = False
            await users.create(subscription, hashed)
            _log.info("created the broker user of subscription %s", subscription)
    if not should_continue():
        return False
    # Read again: the API may have created a subscription and its user since the first query.
    existing = await native_passwords(writer) if present.keys() - wanted.keys() else wanted
    for subscription in present.keys() - existing.keys():
        if not should_continue():
            return False
        is_equal = False
        await users.remove(subscription)
        _log.info("removed the broker user of subscription %s, which does not exist", subscription)
    return is_equal


class BrokerUserSync:
    """Compare all users where there may be a difference; otherwise ask for one digest and one user.

    PostgreSQL computes the digest of every native subscription in each run. A notification could be
    lost, and then a suspended reader would go on reading. One user shows whether the broker was
    emptied: it loses all of them together.
    """

    name = "synchronisation of broker users"

    def __init__(self, writer: LogWriter, users: BrokerUsers, clock: Clock) -> None:
        self._writer = writer
        self._users = users
        self._clock = clock
        self._compared: NativeState | None = None
        """The subscriptions at the last comparison; None: it failed, or there was none."""
        self._full_at = 0.0
        self._unsettled_until = 0.0
        self._asked: SubscriptionId | None = None

    async def run(self, should_continue: ShouldContinue) -> None:
        """Compare what may differ. Errors are those of PostgreSQL and of the broker."""
        if not should_continue():
            return
        compared, self._compared = self._compared, None
        state = await native_state(self._writer, self._asked)
        now = self._clock.monotonic()
        if compared is None or state.digest != compared.digest:
            self._unsettled_until = now + UNSETTLED_S
        is_due = now < self._unsettled_until or now >= self._full_at
        if not is_due and should_continue():
            is_due = not await self._has_one_user(state)
        if is_due:
            if not await sync_broker_users(self._writer, self._users, should_continue):
                self._unsettled_until = now + UNSETTLED_S
            self._full_at = now + FULL_EVERY_S
        self._compared = state

    async def _has_one_user(self, state: NativeState) -> bool:
        """Ask for the user of another subscription each time."""
        self._asked = state.next_readable
        return self._asked is None or await self._users.has_user(self._asked)
