"""Users of the broker for native subscriptions, made by its management.

A user has a role of its own name, which a security setting of its queue's full name allows to consume and to browse; on
every other address the setting of `#` holds, which does not know the role. A second role says which password it is, so
that whoever compares can tell an old one. A broker whose users are kept elsewhere (LDAP) refuses to make any.
"""

import hashlib
import json
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from rooms.brokers.layout import PULL_PREFIX, Queues
from rooms.brokers.management import Management, ManagementError
from rooms.brokers.stomp_consumer import StompConsumer
from rooms.domain.ids import SubscriptionId
from rooms.domain.native_address import NativeAddress

_T = TypeVar("_T")
Managed = Callable[[Callable[[Management], Awaitable[_T]]], Awaitable[_T]]

_OURS: Final = "amq"
"""The role of Rooms' own user in `rooms/embedded/broker.xml`."""
_ROUNDS: Final = 1024
_SALT_BYTES: Final = 32
_KEY_BYTES: Final = 64
_EXISTS: Final = "AMQ229223"
_FORGET: Final = ("broker", "clearAuthenticationCache", list[Any]())
"""It remembers for ten seconds whom it let in, and whom it did not."""


class StompGate:
    """`rooms.ports.Gate` on Artemis."""

    def __init__(
        self,
        managed: Managed[Any],
        queues: Queues,
        *,
        read_dead_letters: Callable[[int], StompConsumer],
        addresses: Sequence[NativeAddress],
    ) -> None:
        """`read_dead_letters` opens a consumer of the dead letters with so much credit."""
        self._managed = managed
        self._queues = queues
        self._read_dead_letters = read_dead_letters
        self.addresses: Final = addresses

    def dead_letters(self, *, credit: int) -> StompConsumer:
        """Take what readers of native queues rejected."""
        return self._read_dead_letters(credit)

    async def dead_letter_depth(self) -> int:
        """Ask for this one queue, however many others there are."""
        found: int = await self._managed(lambda management: management.depth(self._queues.dead_letters))
        return found

    async def depths(self) -> Mapping[SubscriptionId, int]:
        """Ask one question for every five hundred queues."""
        found: Mapping[str, int] = await self._managed(lambda management: management.depths(self._queues.owner))
        return {
            SubscriptionId(name.removeprefix(PULL_PREFIX)): depth
            for name, depth in found.items()
            if name.startswith(PULL_PREFIX)
        }

    def user(self, subscription: SubscriptionId) -> str:
        """The name of the user."""
        return self._queues.user(subscription)

    def hashed(self, password: str) -> str:
        """As the broker's own codec makes it, so that no password leaves this process."""
        salt = secrets.token_bytes(_SALT_BYTES)
        key = hashlib.pbkdf2_hmac("sha1", password.encode(), salt, _ROUNDS, _KEY_BYTES)
        return f"ENC({_ROUNDS}:{salt.hex().upper()}:{key.hex().upper()})"

    async def open(self, subscription: SubscriptionId, hashed: str) -> None:
        """The user comes last: where it is, the rest is."""
        queue, user = self._queues.pull(subscription), self.user(subscription)
        readers = f"{_OURS},{user}"
        # Who may send, consume, make and delete durable queues and others, manage, browse, make and delete addresses.
        setting = [queue.destination, _OURS, readers, *[_OURS] * 4, "", readers, _OURS, _OURS]
        login = [user, hashed, f"{user},{fingerprint(hashed)}", True]

        async def work(management: Management) -> None:
            await management.make([queue], owner=self._queues.owner)
            await management.ask([("broker", "addSecuritySettings", setting)])
            try:
                await management.ask([("broker", "addUser", login)])
            except ManagementError as exc:
                if not exc.has(_EXISTS):
                    raise
                if fingerprint(hashed) not in (await _users(management))[user]:
                    await management.ask(
                        [("broker", "resetUser", login), _FORGET, ("broker", "closeConnectionsForUser", [user])]
                    )
            await management.ask([_FORGET])

        await self._managed(work)

    async def close(self, subscription: SubscriptionId) -> None:
        """Nobody comes in by the time that connections are ended."""
        user = self.user(subscription)

        async def work(management: Management) -> None:
            try:
                await management.ask([("broker", "removeUser", [user])])
            except ManagementError:
                if user in await _users(management):
                    raise
            await management.ask(
                [
                    ("broker", "removeSecuritySettings", [self._queues.pull(subscription).destination]),
                    _FORGET,
                    ("broker", "closeConnectionsForUser", [user]),
                ]
            )

        await self._managed(work)

    async def opened(self, hashed: Mapping[SubscriptionId, str]) -> Mapping[SubscriptionId, bool]:
        """One question for all users, and one for all queues."""
        users: Mapping[str, frozenset[str]] = await self._managed(_users)
        prefix = self._queues.user_prefix
        found = {
            SubscriptionId(name.removeprefix(prefix)): roles for name, roles in users.items() if name.startswith(prefix)
        }
        if not found:
            return {}
        queues: frozenset[str] = frozenset(await self._managed(lambda management: management.owned(self._queues.owner)))
        return {
            subscription: subscription in hashed
            and fingerprint(hashed[subscription]) in roles
            and self._queues.pull(subscription).name in queues
            for subscription, roles in found.items()
        }


def fingerprint(hashed: str) -> str:
    """A role that names a password and says nothing of it."""
    return f"password-{hashlib.sha256(hashed.encode()).hexdigest()[:16]}"


async def _users(management: Management) -> Mapping[str, frozenset[str]]:
    """All users by name, with their roles; none where the broker's users are not its own."""
    try:
        ((found,),) = await management.ask([("broker", "listUser", [""])])
    except ManagementError:
        return {}
    return {user["username"]: frozenset(user["roles"]) for user in json.loads(found)}
