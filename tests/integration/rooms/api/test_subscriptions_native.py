"""Test native subscriptions over REST: creation, credentials, and what is refused."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from rooms.domain.ids import SubscriptionId
from rooms.domain.native_address import NativeAddress
from rooms.errors import BrokerUnavailableError
from rooms.ports import Consumer
from tests.integration.rooms.api.conftest import Api, open_api
from tests.integration.rooms.api.members import act, approve, member, shared_room, subscribe


@dataclass
class Doorman:
    """Implement `rooms.ports.BrokerUsers` in memory; `away`: the broker does not answer."""

    inside: dict[SubscriptionId, str] = field(default_factory=dict)
    away: bool = False
    addresses: Sequence[NativeAddress] = (
        NativeAddress(protocol="amqp", host="broker", port=5672, tls=True),
    )

    def user_name(self, subscription: SubscriptionId) -> str:
        return f"user-{subscription}"

    def hash_password(self, password: str) -> str:
        return f"<{password}>"

    async def create(self, subscription: SubscriptionId, password_hash: str) -> None:
        if self.away:
            raise BrokerUnavailableError("it is away")
        self.inside[subscription] = password_hash

    async def remove(self, subscription: SubscriptionId) -> None:
        self.inside.pop(subscription, None)

    def consume_dead_letters(self, *, credit: int) -> Consumer:
        raise AssertionError("the API reads no dead letters")

    async def dead_letter_depth(self) -> int:
        raise AssertionError("the API asks for no depths")

    async def keeps_rejected(self) -> bool:
        raise AssertionError("the API asks for no interceptor")

    async def pull_queue_depths(self) -> Mapping[SubscriptionId, int]:
        raise AssertionError("the API asks for no depths")

    async def has_user(self, subscription: SubscriptionId) -> bool:
        raise AssertionError("the API asks for no users")

    async def list_users(
        self, password_hashes: Mapping[SubscriptionId, str]
    ) -> Mapping[SubscriptionId, bool]:
        return {one: password_hashes.get(one) == known for one, known in self.inside.items()}


@pytest.fixture
def doorman() -> Doorman:
    return Doorman()


@pytest.fixture
async def full(database: str, doorman: Doorman) -> AsyncIterator[Api]:
    """Open the API with a broker other than PostgreSQL."""
    async with open_api(database, gate=doorman) as opened:
        yield opened


async def test_user_and_password_are_shown_once(full: Api, doorman: Doorman) -> None:
    room = (await full.room())["id"]
    made = await full.subscription(room, type="PULL", native=True)
    login = made["login"]
    assert login == {
        "user": f"user-{made['id']}", "password": login["password"], "queue": made["destination"], "ready": True,
        "addresses": [{"protocol": "amqp", "host": "broker", "port": 5672, "tls": True}],
    }  # fmt: skip
    assert len(login["password"]) == 32
    assert doorman.inside == {made["id"]: f"<{login['password']}>"}
    assert made["native"] is True
    again = (await full.call("GET", f"/subscriptions/{made['id']}")).json()
    assert again["native"] is True
    assert "login" not in again
    assert login["password"] not in str(again)
    other = await full.subscription(room, "other", type="PULL")
    assert (other["native"], other["login"]) == (False, None)


async def test_an_unreachable_broker_is_not_awaited(full: Api, doorman: Doorman) -> None:
    doorman.away = True
    made = await full.subscription((await full.room())["id"], type="PULL", native=True)
    assert made["login"]["ready"] is False
    ((kept,),) = await full.sql("SELECT native_password FROM subscriptions")
    assert kept == f"<{made['login']['password']}>", "upkeep makes the user from it"


async def test_a_password_is_rotated(full: Api, doorman: Doorman) -> None:
    made = await full.subscription((await full.room())["id"], type="PULL", native=True)
    answer = await full.call("POST", f"/subscriptions/{made['id']}/rotate-password")
    assert answer.status_code == 200, answer.text
    login = answer.json()
    assert login["password"] != made["login"]["password"]
    assert login["user"] == made["login"]["user"]
    assert doorman.inside == {made["id"]: f"<{login['password']}>"}
    other = await full.subscription(made["room_id"], "other", type="PULL")
    answer = await full.call("POST", f"/subscriptions/{other['id']}/rotate-password")
    assert answer.status_code == 409


async def test_only_a_subscription_that_is_served_has_a_user(full: Api, doorman: Doorman) -> None:
    """A new password does not open a queue that the room's owner closed."""
    owner, subscriber = await member(full, "owner"), await member(full, "subscriber")
    room = await shared_room(full, owner, subscription_policy="approval", visibility="listed")
    made = await subscribe(full, subscriber, room, native=True)
    assert (made["status"], made["login"]["ready"]) == ("pending", False)
    await approve(full, owner, made["id"])
    path = f"/subscriptions/{made['id']}/rotate-password"
    for action, is_served in (("suspend", False), ("reinstate", True), ("terminate", False)):
        doorman.inside.clear()  # as the maintenance does for one that is not served
        assert (await act(full, owner, made["id"], action)).status_code == 200
        answer = await full.call("POST", path, subscriber.key)
        assert answer.status_code == 200, answer.text
        login = answer.json()
        assert login["ready"] is is_served, action
        expected = {made["id"]: f"<{login['password']}>"} if is_served else {}
        assert doorman.inside == expected, action


async def test_settings_of_other_types_are_refused(full: Api) -> None:
    made = await full.subscription((await full.room())["id"], type="PULL", native=True)
    leases = {"ack_ids": ["AQ" + "A" * 26]}
    bodies: dict[str, dict[str, object] | None] = {
        "pull": {}, "ack": {**leases}, "nack": {**leases}, "extend": {**leases, "lease_ms": 1000}, "pause": None,
    }  # fmt: skip
    for action, body in bodies.items():
        answer = await full.call("POST", f"/subscriptions/{made['id']}/{action}", json=body)
        assert answer.status_code == 409, answer.text
        assert "native" in answer.json()["detail"], action


async def test_settings_that_native_excludes_are_refused(full: Api) -> None:
    room = (await full.room())["id"]
    hook = "https://hooks.example.com/in"
    for fields, name, said in (
        ({"type": "PUSH", "push_url": hook}, "native", "PULL"),
        ({"type": "PULL", "max_receives": 3}, "max_receives", "leased"),
    ):
        body = {"name": "mine", "native": True, **fields}
        answer = await full.call("POST", f"/rooms/{room}/subscriptions", json=body)
        assert answer.status_code == 422
        (problem,) = answer.json()["errors"]
        assert problem["field"] == name
        assert said in problem["message"]
    made = await full.subscription(room, type="PULL", native=True)
    answer = await full.call("PATCH", f"/subscriptions/{made['id']}", json={"max_receives": 2})
    assert answer.status_code == 422


async def test_postgresql_as_broker_has_no_native_subscriptions(api: Api) -> None:
    room = (await api.room())["id"]
    body = {"name": "mine", "type": "PULL", "native": True}
    answer = await api.call("POST", f"/rooms/{room}/subscriptions", json=body)
    assert answer.status_code == 422
    (problem,) = answer.json()["errors"]
    assert problem["field"] == "native"
    assert "BROKER_URL=stomp" in problem["message"]
