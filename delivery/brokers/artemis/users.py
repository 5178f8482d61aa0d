"""Manage the broker's users for native subscriptions.

A user has a role of its own name. A security setting of its queue's full name allows that role to
consume and to browse. On every other address the setting of `#` holds, which does not know the
role. A second role identifies the password, so that an old one is found by comparison. A broker
whose users are kept elsewhere (LDAP) refuses to create any.
"""

import hashlib
import json
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from delivery.brokers.artemis.consumer import ArtemisConsumer
from delivery.brokers.artemis.management import ManagementClient, ManagementError
from delivery.brokers.artemis.queue_names import PULL_PREFIX, QueueNames
from rooms.domain.ids import SubscriptionId
from rooms.domain.native_address import NativeAddress

_T = TypeVar("_T")
WithManagement = Callable[[Callable[[ManagementClient], Awaitable[_T]]], Awaitable[_T]]

_ROOMS_ROLE: Final = "amq"
"""The role of Rooms' own user in `rooms/local/broker.xml`."""
_NACK_INTERCEPTOR: Final = "rooms.NackInterceptor"
_PBKDF2_ROUNDS: Final = 1024
_SALT_BYTES: Final = 32
_KEY_BYTES: Final = 64
_USER_EXISTS: Final = "AMQ229223"
_CLEAR_AUTHENTICATION_CACHE: Final = ("broker", "clearAuthenticationCache", list[Any]())
"""The broker remembers for ten seconds which logins it accepted and rejected."""


class ArtemisUsers:
    """Serve as `BrokerUsers` on Artemis."""

    def __init__(
        self,
        with_management: WithManagement[Any],
        queue_names: QueueNames,
        *,
        open_dead_letter_consumer: Callable[[int], ArtemisConsumer],
        addresses: Sequence[NativeAddress],
    ) -> None:
        """Open consumers of the dead letters, with a credit, by `open_dead_letter_consumer`."""
        self._with_management = with_management
        self._queue_names = queue_names
        self._open_dead_letter_consumer = open_dead_letter_consumer
        self.addresses: Final = addresses

    def consume_dead_letters(self, *, credit: int) -> ArtemisConsumer:
        """Consume what readers of native queues rejected."""
        return self._open_dead_letter_consumer(credit)

    async def dead_letter_depth(self) -> int:
        """Return the depth of the dead-letter queue, with one request."""
        found: int = await self._with_management(
            lambda management: management.depth(self._queue_names.dead_letters)
        )
        return found

    async def keeps_rejected(self) -> bool:
        """Return whether the broker has the interceptor that keeps what STOMP clients reject."""
        found: Sequence[str] = await self._with_management(
            lambda management: management.interceptors()
        )
        return _NACK_INTERCEPTOR in found

    async def pull_queue_depths(self) -> Mapping[SubscriptionId, int]:
        """Return the depths of all PULL queues, with one request for every five hundred."""
        found: Mapping[str, int] = await self._with_management(
            lambda management: management.depths(self._queue_names.owner)
        )
        return {
            SubscriptionId(name.removeprefix(PULL_PREFIX)): depth
            for name, depth in found.items()
            if name.startswith(PULL_PREFIX)
        }

    def user_name(self, subscription: SubscriptionId) -> str:
        """Return the name of the subscription's user."""
        return self._queue_names.user_name(subscription)

    def hash_password(self, password: str) -> str:
        """Hash as the broker's own codec does, so that no password leaves this process."""
        salt = secrets.token_bytes(_SALT_BYTES)
        key = hashlib.pbkdf2_hmac("sha1", password.encode(), salt, _PBKDF2_ROUNDS, _KEY_BYTES)
        return f"ENC({_PBKDF2_ROUNDS}:{salt.hex().upper()}:{key.hex().upper()})"

    async def create(self, subscription: SubscriptionId, password_hash: str) -> None:
        """Create the queue, its permissions and then the user, whose existence proves the rest."""
        queue, user = self._queue_names.pull(subscription), self.user_name(subscription)
        readers = f"{_ROOMS_ROLE},{user}"
        # Roles that may send, consume, create and delete queues of both kinds, manage, browse, and
        # create and delete addresses.
        # delete addresses.
        setting = [
            queue.destination,
            _ROOMS_ROLE,
            readers,
            *[_ROOMS_ROLE] * 4,
            "",
            readers,
            _ROOMS_ROLE,
            _ROOMS_ROLE,
        ]
        login = [user, password_hash, f"{user},{password_role(password_hash)}", True]

        async def work(management: ManagementClient) -> None:
            await management.create_queues([queue], owner=self._queue_names.owner)
            await management.call([("broker", "addSecuritySettings", setting)])
            try:
                await management.call([("broker", "addUser", login)])
            except ManagementError as exc:
                if not exc.has_code(_USER_EXISTS):
                    raise
                if password_role(password_hash) not in (await _list_users(management, user))[user]:
                    await management.call(
                        [
                            ("broker", "resetUser", login),
                            _CLEAR_AUTHENTICATION_CACHE,
                            ("broker", "closeConnectionsForUser", [user]),
                        ]
                    )
            await management.call([_CLEAR_AUTHENTICATION_CACHE])

        await self._with_management(work)

    async def remove(self, subscription: SubscriptionId) -> None:
        """Remove the user, then its permissions, then end its connections: it cannot come back."""
        user = self.user_name(subscription)

        async def work(management: ManagementClient) -> None:
            try:
                await management.call([("broker", "removeUser", [user])])
            except ManagementError:
                if user in await _list_users(management):
                    raise
            await management.call(
                [
                    (
                        "broker",
                        "removeSecuritySettings",
                        [self._queue_names.pull(subscription).destination],
                    ),
                    _CLEAR_AUTHENTICATION_CACHE,
                    ("broker", "closeConnectionsForUser", [user]),
                ]
            )

        await self._with_management(work)

    async def has_user(self, subscription: SubscriptionId) -> bool:
        """Return whether the subscription has a user, with one request."""
        user = self.user_name(subscription)
        found: Mapping[str, frozenset[str]] = await self._with_management(
            lambda management: _list_users(management, user)
        )
        return bool(found.get(user))

    async def list_users(
        self, password_hashes: Mapping[SubscriptionId, str]
    ) -> Mapping[SubscriptionId, bool]:
        """Return the users, and whether each is current, with two requests in all."""
        users: Mapping[str, frozenset[str]] = await self._with_management(_list_users)
        prefix = self._queue_names.user_prefix
        found = {
            SubscriptionId(name.removeprefix(prefix)): roles
            for name, roles in users.items()
            if name.startswith(prefix)
        }
        if not found:
            return {}
        queues: frozenset[str] = frozenset(
            await self._with_management(
                lambda management: management.queue_names(self._queue_names.owner)
            )
        )
        return {
            subscription: subscription in password_hashes
            and password_role(password_hashes[subscription]) in roles
            and self._queue_names.pull(subscription).name in queues
            for subscription, roles in found.items()
        }


def password_role(password_hash: str) -> str:
    """Return a role that identifies a password without revealing it."""
    return f"password-{hashlib.sha256(password_hash.encode()).hexdigest()[:16]}"


async def _list_users(management: ManagementClient, name: str = "") -> Mapping[str, frozenset[str]]:
    """Return the users of this name with their roles, or all users.

    It returns none if the broker's users are kept elsewhere.
    """
    try:
        ((found,),) = await management.call([("broker", "listUser", [name])])
    except ManagementError:
        return {}
    return {user["username"]: frozenset(user["roles"]) for user in json.loads(found)}
