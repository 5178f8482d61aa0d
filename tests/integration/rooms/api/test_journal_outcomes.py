"""Test how the outcome of a change is noted in the journal, where something fails on the way."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from rooms.api import changes, message_changes
from rooms.db.connection import ConnectionShares, hold_share, transaction
from rooms.db.queue import withdraw
from rooms.domain.ids import OrganisationId
from rooms.errors import ConflictError, RateLimitedError, StorageUnavailableError
from tests.integration.rooms.api.conftest import Api
from tests.support.installation import until


async def waiting_message(api: Api) -> str:
    """Return a message with a delivery that can be cancelled."""
    room = (await api.room())["id"]
    await api.made(f"/rooms/{room}/event-types", {"name": "made"})
    await api.subscription(room)
    published = await api.publish(room, "made", {})
    return str(published["message_id"])


async def call_and_leave(api: Api, method: str, path: str, *headers: tuple[bytes, bytes]) -> int:
    """Send a request without its body, and be gone when it is read; return the answer's status."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    async def send(event: Any) -> None:
        sent.append(event)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": f"/v1{path}",
        "raw_path": f"/v1{path}".encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"authorization", f"Bearer {api.keys['admin']}".encode()), *headers],
        "client": ("127.0.0.1", 1),
        "server": ("rooms.test", 80),
    }
    await api.app(cast(Any, scope), cast(Any, receive), cast(Any, send))
    return int(sent[0]["status"])


async def noted(api: Api, action: str) -> list[str]:
    """Return the outcomes of the entries about an action, when there is one."""

    async def look() -> list[str]:
        found = await api.sql("SELECT outcome FROM journal WHERE action = %s ORDER BY seq", action)
        return [outcome for (outcome,) in found]

    return await until(look, f"an entry about {action}")


async def test_a_change_is_noted_though_the_client_is_gone(api: Api) -> None:
    message = await waiting_message(api)
    await call_and_leave(api, "DELETE", f"/messages/{message}")
    assert await noted(api, "withdraw_message") == ["succeeded"]
    assert await api.sql("SELECT state::text FROM deliveries") == [("cancelled",)]


@pytest.mark.parametrize("method", ["DELETE", "PATCH"])
async def test_a_part_of_a_change_is_noted_where_the_rest_fails(
    api: Api, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """A message may have many pages of deliveries, and each is changed for itself."""
    message = await waiting_message(api)
    monkeypatch.setattr(message_changes, "PAGE", 1)
    name = "cancel_message" if method == "DELETE" else "reschedule_message"
    change_page, pages = getattr(withdraw, name), 0

    async def change_one_page(*args: Any, **more: Any) -> Any:
        nonlocal pages
        pages += 1
        if pages > 1:
            raise RateLimitedError("too many changes wait")
        return await change_page(*args, **more)

    monkeypatch.setattr(withdraw, name, change_one_page)
    answer = await api.call(
        method, f"/messages/{message}", json={"delay_ms": 60_000} if method == "PATCH" else None
    )
    assert answer.status_code == 429
    action, result = (
        ("withdraw_message", "withdrawn") if method == "DELETE" else ("move_message", "moved")
    )
    assert await noted(api, action) == ["failed"]
    assert await api.sql("SELECT after, reason FROM journal WHERE action = %s", action) == [
        ({"results": {result: 1}}, "too many changes wait")
    ]


@pytest.mark.parametrize("header", [(b"content-length", b"20"), (b"transfer-encoding", b"chunked")])
async def test_a_body_that_does_not_come_changes_nothing(
    api: Api, header: tuple[bytes, bytes]
) -> None:
    message = await waiting_message(api)
    await call_and_leave(api, "DELETE", f"/messages/{message}", header)
    assert await noted(api, "withdraw_message") == ["failed"]
    assert await api.sql("SELECT state::text FROM deliveries") == [("queued",)]


@pytest.mark.parametrize("commits", [False, True])
async def test_a_change_whose_entry_fails_is_noted_once_as_a_success(
    api: Api, monkeypatch: pytest.MonkeyPatch, *, commits: bool
) -> None:
    message = await waiting_message(api)
    fails, written_later = True, asyncio.Event()

    @asynccontextmanager
    async def failing(engine: AsyncEngine) -> AsyncIterator[AsyncConnection]:
        nonlocal fails
        async with transaction(engine) as connection:
            yield connection
            if fails and not commits:
                fails = False
                raise StorageUnavailableError("the connection broke")
        if fails:
            fails = False
            raise StorageUnavailableError("the connection broke at the commit")
        written_later.set()

    monkeypatch.setattr(changes, "transaction", failing)
    refused = await api.call("DELETE", f"/messages/{message}")
    assert refused.status_code == 503
    await written_later.wait()
    assert await api.sql("SELECT state::text FROM deliveries") == [("cancelled",)]
    assert await noted(api, "withdraw_message") == ["succeeded"]


async def test_the_entry_of_a_change_waits_for_no_share_of_connections(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = await waiting_message(api)
    shares = ConnectionShares(1, on_refusal=lambda: None, wait_s=0.01)
    cancelled = withdraw.cancel_message

    async def cancel_beside_others(*args: Any, **page: Any) -> Any:
        """Let others use up the share once the message is cancelled."""
        found = await cancelled(*args, **page)
        shares.enter(OrganisationId("busy"))
        busy.set()
        await held.wait()
        return found

    async def hold() -> None:
        await busy.wait()
        shares.enter(OrganisationId("busy"))
        async with hold_share():
            held.set()
            await done.wait()

    busy, held, done = asyncio.Event(), asyncio.Event(), asyncio.Event()
    monkeypatch.setattr(withdraw, "cancel_message", cancel_beside_others)
    other = asyncio.create_task(hold())
    answer = await api.call("DELETE", f"/messages/{message}")
    assert answer.status_code == 429, "what it names is read within the share"
    done.set()
    await other
    await api.made("/keys", {"name": "later", "scopes": ["publish"]})
    assert await noted(api, "withdraw_message") == ["succeeded"]


async def failures_written(api: Api) -> None:
    """Wait for the entries of attempts that have failed."""
    for close in api.app.on_shutdown:
        await cast(Any, close)()


@pytest.mark.parametrize(("commits", "outcome"), [(False, "failed"), (True, "succeeded")])
async def test_a_change_whose_commit_is_in_doubt_is_noted_once(
    api: Api, monkeypatch: pytest.MonkeyPatch, *, commits: bool, outcome: str
) -> None:
    """The connection breaks at the commit of the change and its entry: before it, or after it."""
    fails = True

    @asynccontextmanager
    async def failing(engine: AsyncEngine) -> AsyncIterator[AsyncConnection]:
        nonlocal fails
        fails_now, fails = fails, False  # the entry about the failure is written
        async with transaction(engine) as connection:
            yield connection
            if fails_now and not commits:
                raise StorageUnavailableError("the connection broke")
        if fails_now:
            raise StorageUnavailableError("the connection broke at the commit")

    monkeypatch.setattr(changes, "transaction", failing)
    body = {"name": "k", "scopes": ["publish"]}
    refused = await api.call("POST", "/keys", json=body)
    assert refused.status_code == 503
    await failures_written(api)
    assert await noted(api, "create_key") == [outcome]


async def test_a_change_is_noted_as_a_success_though_its_answer_fails(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fail at what shows the subscription, which is read in a transaction of its own."""
    room = (await api.room())["id"]
    identity = (await api.subscription(room))["id"]

    def refuse(*_: Any, **__: Any) -> Any:
        raise RateLimitedError("the share of connections is used up")

    monkeypatch.setattr("rooms.api.subscription_actions.describe_subscription", refuse)
    monkeypatch.setattr("rooms.api.subscription_creation.to_response_fields", refuse)
    paused = await api.call("POST", f"/subscriptions/{identity}/pause")
    body = {"name": "other", "type": "PULL"}
    created = await api.call("POST", f"/rooms/{room}/subscriptions", json=body)
    assert (paused.status_code, created.status_code) == (429, 429)
    await failures_written(api)
    states = await api.sql("SELECT status FROM subscriptions ORDER BY id")
    assert states == [("paused",), ("active",)]
    assert await noted(api, "pause") == ["succeeded"]
    assert await noted(api, "create_subscription") == ["succeeded", "succeeded"]


async def test_the_failure_of_a_webhook_test_is_noted_after_its_beginning(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fail at the call, which follows the commit."""
    room = (await api.room())["id"]
    identity = (await api.subscription(room))["id"]

    async def refuse(*_: Any) -> Any:
        raise ConflictError("its secrets cannot be decrypted")

    monkeypatch.setattr(type(api.pings), "__call__", refuse)
    assert (await api.call("POST", f"/subscriptions/{identity}/test")).status_code == 409
    await failures_written(api)
    assert await noted(api, "ping") == ["succeeded", "refused"]


async def test_a_delivery_that_a_redelivery_ended_is_noted(api: Api) -> None:
    message = await waiting_message(api)
    await api.sql("DELETE FROM outbox RETURNING 1")
    await api.sql(
        "UPDATE deliveries SET state = 'sidelined', expires_at = now() WHERE message_id = %s"
        " RETURNING 1",
        message,
    )
    ((delivery,),) = await api.sql("SELECT id::text FROM deliveries")
    assert (await api.call("POST", f"/deliveries/{delivery}/redeliver")).status_code == 409
    await failures_written(api)
    found = await api.sql("SELECT outcome, before, after FROM journal WHERE action = 'redeliver'")
    assert found == [("succeeded", {"state": "sidelined"}, {"state": "expired"})]
