"""Test PULL by streams over HTTP: events and WebSockets."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from rooms.db.notify import Channel, Notifier
from tests.integration.rooms.api.conftest import Api
from tests.support.pull_service import until
from tests.support.stream_clients import Server, payloads, serving

NOWHERE = "00000000-0000-7000-8000-000000000001"


@pytest.fixture
async def server(api: Api) -> AsyncIterator[Server]:
    puller = api.services.pull_service
    async with (
        Notifier(
            api.url,
            listeners={Channel.PULL: puller.on_notify, Channel.CONFIG: puller.on_config_change},
        ),
        serving(api) as opened,
    ):
        yield opened


async def place(api: Api, *names: str) -> tuple[int, list[str]]:
    """Create a room with PULL subscriptions of these names, and return their ids."""
    room = await api.room()
    await api.made(f"/rooms/{room['id']}/event-types", {"name": "made"})
    return room["id"], [
        (await api.subscription(room["id"], name, type="PULL"))["id"] for name in names or ("one",)
    ]


async def test_present_and_new_messages_are_sent_and_acked(server: Server) -> None:
    room, (queue,) = await place(server.api)
    await server.publish(room, 1, 2)
    async with server.events(f"/subscriptions/{queue}/stream") as events:
        first = await events.messages(2)
        await server.publish(room, 3)
        last = await events.messages(1)
        assert payloads(first + last) == [1, 2, 3]
        assert {message["subscription_id"] for message in first} == {queue}
        body = {"ack_ids": [message["ack_id"] for message in first + last]}
        answer = await server.http.post(
            f"/v1/subscriptions/{queue}/ack",
            json=body,
            headers={"Authorization": f"Bearer {server.api.keys['admin']}"},
        )
        assert [result["status"] for result in answer.json()["results"]] == ["acked"] * 3
    assert await server.api.sql("SELECT count(*) FROM leases") == [(0,)]


async def test_events_stop_at_the_credit_and_an_ack_makes_room(server: Server) -> None:
    room, (queue,) = await place(server.api)
    await server.publish(room, *range(5))
    async with server.events(
        f"/subscriptions/{queue}/stream", credit=2, heartbeat_ms=100
    ) as events:
        first = await events.messages(2)
        await events.beat()
        await events.beat()
        assert await server.api.sql("SELECT count(*) FROM leases") == [(2,)]
        answer = await server.api.call(
            "POST", f"/subscriptions/{queue}/ack", json={"ack_ids": [first[0]["ack_id"]]}
        )
        assert answer.status_code == 200
        assert payloads(await events.messages(1)) == [2]


async def test_a_message_settled_elsewhere_makes_room_too(server: Server) -> None:
    room, (queue,) = await place(server.api)
    await server.publish(room, "a", "b")
    async with server.events(f"/subscriptions/{queue}/stream", credit=1) as events:
        assert payloads(await events.messages(1)) == ["a"]
        # As in another process: the row is changed, and this process is not notified.
        await server.api.sql("UPDATE deliveries SET state = 'delivered' WHERE state = 'leased'")
        await server.api.sql("DELETE FROM leases")
        assert payloads(await events.messages(1)) == ["b"]


async def test_a_socket_gets_what_it_grants_credit_for_and_settles_over_itself(
    server: Server,
) -> None:
    room, (queue,) = await place(server.api)
    await server.publish(room, *range(4))
    async with server.socket(f"/subscriptions/{queue}/stream") as socket:
        await socket.send(credit=3)
        assert (await socket.next("credit"))["credit"] == 3
        one, two, three = await socket.messages(3)
        assert payloads([one, two, three]) == [0, 1, 2]
        assert await socket.settle(ack=[one["ack_id"], "AQ" + "A" * 26]) == ["acked", "unknown"]
        assert await socket.settle(extend=[two["ack_id"]], lease_ms=60_000) == ["extended"]
        assert await socket.settle(nack=[two["ack_id"]], delay_ms=3_600_000) == ["nacked"]
        assert await socket.settle(ack=[two["ack_id"]]) == ["late"]
        assert await server.api.sql("SELECT count(*) FROM leases") == [(1,)]
        await socket.send(credit=1)
        assert (await socket.next())["payload"] == 3


async def test_frames_that_are_wrong_are_answered_and_the_socket_stays(server: Server) -> None:
    _, (queue,) = await place(server.api)
    async with server.socket(f"/subscriptions/{queue}/stream") as socket:
        for text, status in {
            "{": 400,
            "[]": 422,
            "{}": 422,
            '{"credit": 0}': 422,
            '{"credit": 1, "ack": []}': 422,
            '{"ack": ["x"]}': 422,
            '{"ack": []}': 422,
            '{"nack": ["AQ"], "delay": 1}': 422,
        }.items():
            await socket.connection.send(text)
            assert (await socket.next("problem"))["problem"]["status"] == status, text
        await socket.connection.send(b'{"credit": 1}')
        assert await socket.next("credit")


async def test_several_subscriptions_are_served_in_turn_under_one_credit(server: Server) -> None:
    room, queues = await place(server.api, "one", "two", "three")
    messages = [{"event_type": "made", "payload": number} for number in range(150)]
    answer = await server.api.call(
        "POST", f"/rooms/{room}/messages/batch", json={"messages": messages}
    )
    assert answer.status_code == 202
    async with server.socket("/stream", subscription=queues) as socket:
        await socket.send(credit=300)
        found = await socket.messages(300)
        order = [message["subscription_id"] for message in found]
        assert {queue: order[:300].count(queue) for queue in queues} == {
            queues[0]: 100,
            queues[1]: 100,
            queues[2]: 100,
        }
        assert await socket.settle(ack=[found[0]["ack_id"], found[150]["ack_id"]]) == [
            "acked",
            "acked",
        ]
        await socket.send(credit=150)
        assert len(await socket.messages(150)) == 150
    assert await server.api.sql("SELECT count(*) FROM outbox") == [(0,)]


async def test_a_peek_shows_every_message_and_leases_none(server: Server) -> None:
    room, (queue,) = await place(server.api)
    await server.publish(room, 1, 2)
    async with server.events(f"/subscriptions/{queue}/stream", browse="true") as events:
        seen = await events.messages(2)
        await server.publish(room, 3)
        seen += await events.messages(1)
        assert payloads(seen) == [1, 2, 3]
        assert not any("ack_id" in message for message in seen)
        pulled = (await server.api.call("POST", f"/subscriptions/{queue}/pull", json={})).json()[
            "messages"
        ]
        assert payloads(pulled) == [1, 2, 3]
        assert [message["attempt"] for message in pulled] == [0, 0, 0]


async def test_a_selector_only_leases_matching_messages(server: Server) -> None:
    room, (queue,) = await place(server.api)
    await server.publish(room, {"country": "FI"}, {"country": "SE"}, {"country": "FI"}, [1])
    async with server.events(f"/subscriptions/{queue}/stream", payload="country:FI") as events:
        assert payloads(await events.messages(2)) == [{"country": "FI"}] * 2
        await server.publish(room, {"country": "FI", "n": 3})
        assert payloads(await events.messages(1)) == [{"country": "FI", "n": 3}]
        rest = (await server.api.call("POST", f"/subscriptions/{queue}/pull", json={})).json()[
            "messages"
        ]
        assert payloads(rest) == [{"country": "SE"}, [1]]


@pytest.mark.parametrize("kind", ["events", "socket"])
async def test_a_stream_ends_with_its_subscription(server: Server, kind: str) -> None:
    _, (queue,) = await place(server.api)
    async with getattr(server, kind)(f"/subscriptions/{queue}/stream") as stream:
        assert (await server.api.call("DELETE", f"/subscriptions/{queue}")).status_code == 202
        if kind == "events":
            assert await stream.next() == ("end", {"reason": "deleted"})
        else:
            assert (await stream.next("end"))["reason"] == "deleted"
            assert await _close_code(stream) == 4404


@pytest.mark.parametrize("kind", ["events", "socket"])
async def test_a_stream_ends_with_its_key(server: Server, kind: str) -> None:
    _, (queue,) = await place(server.api)
    made = await server.api.made("/keys", {"name": "short", "scopes": ["subscribe"]})
    server.api.keys["short"] = made["key"]
    async with getattr(server, kind)(f"/subscriptions/{queue}/stream", "short") as stream:
        assert (await server.api.call("DELETE", f"/keys/{made['id']}")).status_code in (200, 204)
        if kind == "events":
            assert await stream.next() == ("end", {"reason": "revoked"})
        else:
            assert (await stream.next("end"))["reason"] == "revoked"
            assert await _close_code(stream) == 4401


async def test_streams_end_when_the_process_stops(server: Server) -> None:
    _, (queue,) = await place(server.api)
    async with (
        server.events(f"/subscriptions/{queue}/stream") as events,
        server.socket(f"/subscriptions/{queue}/stream") as socket,
    ):
        await server.api.services.pull_service.end_polls()
        assert await events.next() == ("end", {"reason": "shutdown"})
        assert (await socket.next("end"))["reason"] == "shutdown"
        assert await _close_code(socket) == 1001
    assert not server.api.services.pull_service.streams._open


async def test_a_stream_ends_after_its_maximum_duration(server: Server) -> None:
    _, (queue,) = await place(server.api)
    async with server.events(f"/subscriptions/{queue}/stream", for_ms=1) as events:
        assert await events.next() == ("end", {"reason": "over"})


async def test_a_stream_ends_when_its_client_closes_its_half(server: Server) -> None:
    _, (queue,) = await place(server.api)
    streams = server.api.services.metrics.pull_streams.labels("events")
    url = server.http.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(
        f"GET /v1/subscriptions/{queue}/stream HTTP/1.1\r\nHost: rooms\r\n"
        f"Authorization: Bearer {server.api.keys['admin']}\r\n\r\n".encode()
    )
    await reader.readuntil(b"retry: ")
    assert streams._value.get() == 1
    writer.write_eof()
    await until(lambda: streams._value.get() == 0)
    writer.close()


async def test_a_disconnected_client_only_keeps_what_was_sent(server: Server) -> None:
    room, (queue,) = await place(server.api)
    async with server.socket(f"/subscriptions/{queue}/stream", credit=10) as socket:
        await server.waiting()
        await server.publish(room, 1)
        assert payloads(await socket.messages(1)) == [1]
    puller = server.api.services.pull_service
    await until(lambda: not puller.streams._open and not puller._waiters._queues)
    await server.publish(room, 2)
    pulled = (await server.api.call("POST", f"/subscriptions/{queue}/pull", json={})).json()[
        "messages"
    ]
    assert [(message["payload"], message["attempt"]) for message in pulled] == [(2, 0)]
    assert await server.api.sql("SELECT count(*) FROM leases") == [(2,)]


async def test_the_higher_priority_goes_first(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "delivery.pull.stream.STALL_TIMEOUT_S", 60.0
    )  # so that no client counts as slow on a slow machine
    room, (queue,) = await place(server.api)
    path = f"/subscriptions/{queue}/stream"
    async with (
        server.socket(path, priority=1, credit=10) as low,
        server.socket(path, priority=8, credit=2) as high,
    ):
        await server.waiting(2)
        for number in range(3):
            await server.publish(room, number)
            assert (await (high if number < 2 else low).next())["payload"] == number
        assert await server.api.sql("SELECT count(*) FROM leases") == [(3,)]


@pytest.mark.parametrize(
    ("path", "key", "status"),
    [
        ("/subscriptions/{queue}/stream", None, 401),
        ("/subscriptions/{queue}/stream", "nonsense", 401),
        ("/subscriptions/{queue}/stream", "publish", 403),
        ("/subscriptions/{queue}/stream", "stranger", 404),
        ("/subscriptions/{queue}/stream?credit=x", "admin", 422),
        ("/subscriptions/{queue}/stream?subscription={queue}", "admin", 422),
        (f"/subscriptions/{NOWHERE}/stream", "admin", 404),
        ("/subscriptions/nothing/stream", "admin", 404),
        ("/stream", "admin", 422),
        ("/stream?subscription={queue}&subscription=nothing", "admin", 404),
        ("/elsewhere", "admin", 404),
    ],
)
async def test_a_refused_stream_never_starts(
    server: Server, path: str, key: str | None, status: int
) -> None:
    _, (queue,) = await place(server.api)
    path = path.format(queue=queue)
    text = None if key is None else server.api.keys.get(key, key)
    headers = {} if text is None else {"Authorization": f"Bearer {text}"}
    answer = await server.http.get(f"/v1{path}", headers=headers)
    assert answer.status_code == status
    with pytest.raises(InvalidStatus) as refused:
        async with server.connecting(path, text):
            pass
    assert refused.value.response.status_code == status
    problem = httpx.Response(200, content=bytes(refused.value.response.body)).json()
    assert (
        problem["type"] == answer.json()["type"]
        if path != "/elsewhere"
        else problem["status"] == status
    )


async def _close_code(socket: Any) -> int:
    with pytest.raises(ConnectionClosed) as closed:
        await socket.connection.recv()
    assert closed.value.rcvd is not None
    return int(closed.value.rcvd.code)
