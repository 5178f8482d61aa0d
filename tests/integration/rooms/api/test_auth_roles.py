"""Test every route with every kind of key against the things of each organisation.

`access_rules` gives the exact status; a route that it does not know fails. What a caller may not see
reads like what is not there.
"""

import asyncio
import itertools
import json
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Final
from uuid import uuid4

import httpx
import pytest

from rooms.db.connection import open_connection
from tests.integration.rooms.api.access_rules import (
    NOT_FOUND,
    distinct_targets,
    expected,
    is_hidden,
    rules,
    sees_room,
)
from tests.integration.rooms.api.access_world import (
    CALLERS,
    LISTED,
    PENDING,
    SHARED,
    AccessWorld,
    Caller,
    build_access_world,
)
from tests.integration.rooms.api.conftest import Api
from tests.integration.rooms.api.sharing_world import OWNER, STRANGER, SUBSCRIBER
from tests.integration.rooms.api.test_auth import BODIES, WITHOUT_KEY, named, routes

_BODIES: Final[Mapping[str, Any]] = {
    "PATCH /subscriptions/{subscription_id}": {"name": "renamed"},
}
_CONFIRMED: Final = re.compile(
    r"DELETE /(rooms/{room_id}|queues/{queue}|organisations/{organisation_id})"
    r"|POST /\S*/(clear|skip-to-now|purge)"
)
"""Routes that want the name of the thing once more."""
_AT: Final = "/subscriptions/{subscription_id}"
_UUID: Final = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_UNKNOWN: Final = {
    "room_id": "1000000001",
    "name": "unknown",
    "caller_id": "unknown",
    "version": "77",
    "queue": "unknown",
    "magazine": f"subscription-{uuid4()}_SIDELINE",
}
Answer = tuple[int, str, frozenset[str]]


class Walk:
    """Send the requests of one route, each to the same world."""

    def __init__(self, world: AccessWorld, line: str) -> None:
        self.world = world
        self.line = line
        self.method, _, self.path = line.partition(" ")
        self.names = re.findall(r"{(\w+)}", named(f"/v1{self.path}"))
        body = BODIES.get((self.method, f"/v1{self.path}"))
        self.body = world.bodies.get(line, _BODIES.get(line, body))
        self._changed = False

    def targets(self) -> Iterator[dict[str, str]]:
        """Yield the targets of each parameter of the path."""
        for whose in itertools.product(*(self.world.paths[name] for name in self.names)):
            yield dict(zip(self.names, whose, strict=True))

    def ids(self, target: Mapping[str, str]) -> dict[str, str]:
        return {name: self.world.paths[name][whose] for name, whose in target.items()}

    async def send(
        self, caller: Caller, ids: Mapping[str, str], target: Mapping[str, str]
    ) -> httpx.Response:
        """Send a request; what it changes is put back."""
        await self._prepare()
        place = named(f"/v1{self.path}").format(**ids)
        if _CONFIRMED.fullmatch(self.line):
            place += f"?confirm={self._name_of(target)}"
        key = self.world.keys[caller.name]
        answer = await ask(self.world.api, self.method, place, key, self.body)
        if answer.is_success and self.method != "GET":
            self._changed = True
            await self.leave()
        return answer

    async def leave(self) -> None:
        """Put the world back, if it was changed."""
        if self._changed:
            await self.world.restore()
        self._changed = False

    async def _prepare(self) -> None:
        """Bring the world into the state that the route is for."""
        steps = self._steps()
        if self._changed or not steps:
            return
        self._changed = True
        for who, method, path, body in steps:
            key, ids = self.world.keys[who], self.world.paths["subscription_id"]
            answer = await self.world.api.call(method, path.format(**ids), key, json=body)
            assert answer.is_success, (self.line, path, answer.text)

    def _steps(self) -> list[tuple[str, str, str, Any]]:
        pending = f"/subscriptions/{{{PENDING}}}"
        if self.line == f"POST {_AT}/reinstate":
            return [(OWNER, "POST", f"/subscriptions/{{{SUBSCRIBER}}}/suspend", None)]
        if self.line == f"DELETE {_AT}/proposal":
            interests = [{"name": "made"}]
            return [
                (OWNER, "POST", f"{pending}/approve", {"version": 1}),
                (SUBSCRIBER, "PATCH", pending, {"event_types": interests}),
            ]
        return []

    async def ask_for_unknown(self, caller: Caller, target: Mapping[str, str], room: str) -> Answer:
        """Return the answer about ids that do not exist, in the room that the caller sees."""
        ids = {name: _UNKNOWN.get(name, str(uuid4())) for name in target}
        if room:
            ids["room_id"] = room
        return without_ids(await self.send(caller, ids, target), ids)

    def _name_of(self, target: Mapping[str, str]) -> str:
        (name,) = target
        match name:
            case "room_id":
                return {SHARED: "shared", LISTED: LISTED}[target[name]]
            case "queue":
                return self.world.paths[name][OWNER]
            case "organisation_id":
                return self.world.names[STRANGER]
            case _:
                return target[name]


@pytest.fixture
async def world(api: Api) -> AsyncIterator[AccessWorld]:
    async with open_connection(api.url, name="test") as connection:
        yield await build_access_world(api, connection)


async def test_every_route_is_in_the_rules(api: Api) -> None:
    known = [line for line, _ in rules()]
    served = {f"{m} {path.removeprefix('/v1')}" for m, path in set(routes(api)) - WITHOUT_KEY}
    assert sorted(known) == sorted(served)
    document = (await api.http.get("/schema/openapi.json")).json()
    described = {
        f"{method.upper()} {path.removeprefix('/v1')}"
        for path, operations in document["paths"].items()
        for method in operations
        if path.startswith("/v1/")
    }
    assert described <= served


async def test_every_route_answers_each_caller_as_it_should(world: AccessWorld) -> None:
    wrong: list[tuple[object, ...]] = []
    for line, group in rules():
        walk = Walk(world, line)
        targets = list(walk.targets())
        unknown: dict[str, Answer] = {}
        for caller in CALLERS:
            for target in distinct_targets(line, group, targets, caller):
                ids = walk.ids(target)
                answer = await walk.send(caller, ids, target)
                status = expected(line, group, target, caller)
                if answer.status_code != status:
                    wrong.append((line, target, caller.name, status, answer.status_code))
                elif status == NOT_FOUND and is_hidden(line, target):
                    room = ids["room_id"] if sees_room(target, caller) else ""
                    if room not in unknown:
                        unknown[room] = await walk.ask_for_unknown(caller, target, room)
                    if without_ids(answer, ids) != unknown[room]:
                        wrong.append((line, target, caller.name, answer.text, unknown[room]))
        await walk.leave()
    assert not wrong, "\n".join(map(str, wrong))


async def ask(api: Api, method: str, place: str, key: str | None, body: Any) -> httpx.Response:
    """Send a request without a client, which would take longer than most answers.

    A stream has no end: its client leaves at the first message.
    """
    path, _, query = place.partition("?")
    headers = [(b"host", b"rooms.test")]
    sent = b"" if body is None else json.dumps(body).encode()
    if key is not None:
        headers.append((b"authorization", f"Bearer {key}".encode()))
    if body is not None:
        headers += [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(sent)).encode()),
        ]
    scope: dict[str, Any] = {
        "type": "http", "http_version": "1.1", "method": method, "scheme": "http", "root_path": "",
        "path": f"/v1{path}", "raw_path": f"/v1{path}".encode(), "query_string": query.encode(),
        "headers": headers, "server": ("rooms.test", 80), "client": ("127.0.0.1", 123),
    }  # fmt: skip
    over = asyncio.Event()
    requests: list[Any] = [{"type": "http.request", "body": sent, "more_body": False}]
    messages: list[Any] = []

    async def receive() -> Any:
        if requests:
            return requests.pop()
        await over.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        messages.append(message)
        is_last = message["type"] == "http.response.body" and not message.get("more_body")
        if is_last or path.endswith("/stream"):
            over.set()

    # As over a network: answers in a row would keep the loop for as long as all of them take.
    await asyncio.sleep(0)
    app: Any = api.app
    await app(scope, receive, send)
    start, *rest = messages
    content = b"".join(one.get("body", b"") for one in rest)
    return httpx.Response(start["status"], headers=start["headers"], content=content)


def without_ids(answer: httpx.Response, ids: Mapping[str, str]) -> Answer:
    text = _UUID.sub("…", answer.text)
    for identity in ids.values():
        # Not by `\b`: a `kid` may begin or end with a hyphen.
        text = re.sub(rf"(?<!\w){re.escape(identity)}(?!\w)", "…", text)
    headers = frozenset(name for name in answer.headers if name != "x-request-id")
    return answer.status_code, text, headers
