"""Keys and ids of all kinds against every route, in process, over two organisations whose data is marked.

What must hold after each case: no answer is a 5xx (readiness apart); without a valid key nothing but a 401 (or a 429) comes back from `/v1`; no
answer has a mark of an organisation that the key is not of. In the end neither organisation has changed what is the other's.
"""

import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from random import Random
from typing import Any, Final, cast
from urllib.parse import quote
from uuid import UUID

import httpx

from rooms.api.auth import authenticate
from rooms.api.fast_routes import FastRoutes
from rooms.db.catalog.api_keys import new_key
from rooms.domain.state_machine import Scope
from tests.faults.hostile.suite import Suite
from tests.integration.rooms.api.conftest import Api, make_key, open_api
from tests.integration.rooms.api.sign_in import begin
from tests.integration.rooms.api.test_auth import ALLOWED, BODIES, WITHOUT_KEY

MARKS: Final = {"default": "mark-of-A-7f3c", "other": "mark-of-B-91d2"}
ROUTES: Final = sorted(ALLOWED.keys() | WITHOUT_KEY)
_PARAMETERS: Final = (
    "room_id", "name", "version", "subscription_id", "message_id", "delivery_id", "job_id", "key_id", "session_id", "queue", "magazine",
    "grant_id", "organisation_id", "caller_id", "path",
)  # fmt: skip
_IDS: Final = ("own", "others", "others", "others", "random", "malformed")
_KEYS: Final = (
    *("own",) * 10,
    *("other",) * 5,
    "missing",
    "malformed",
    "invented",
    "unchecked",
    "revoked",
)
_MALFORMED: Final = (
    "nothing", "0", "-1", "99999999999999999999", "\x00", "%", "..", "../keys", "' OR 1=1 --", "a" * 3000, "\u202e", "🐟",
    "{room_id}", "null", "1e3", "0x10", "subscription-", "_SIDELINE", "queue-", "true", " ", "\n",
)  # fmt: skip
_HEADERS: Final = (
    "",
    "Bearer",
    "Bearer ",
    "Basic eA==",
    "bearer rooms_",
    "Bearer rooms_" + "a" * 49,
    "Bearer \x80",
    "rooms_x",
)
_BODIES: Final[tuple[Any, ...]] = (
    None,
    {},
    [],
    1,
    "x",
    {"confirm": True},
    {"organisation_id": "x"},
    {"scopes": ["platform"], "name": "x"},
)
_QUERIES: Final = (
    "",
    "",
    "",
    "?limit=200",
    "?limit=0",
    "?cursor=x",
    "?confirm=x",
    "?organisation_id=x",
    "?subscription={sub}",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One request. `ids`: the kind of each id; `seed` chooses among the ids and keys of a kind."""

    method: str
    path: str
    key: str
    scope: Scope
    ids: str
    body: Any
    query: str
    front: bool
    seed: int


def generate(rng: Random) -> Case:
    """Draw a request. Most have a body that is right and a scope that is enough: what is refused early shows nothing."""
    method, path = rng.choice(ROUTES)
    body = BODIES.get((method, path)) if rng.random() < 0.7 else rng.choice(_BODIES)
    enough = sorted(ALLOWED.get((method, path), set())) or [Scope.ADMIN]
    return Case(
        method=method,
        path=path,
        key=rng.choice(_KEYS),
        scope=rng.choice(enough if rng.random() < 0.7 else list(Scope)),
        ids=rng.choice(_IDS),
        body=body,
        query=rng.choice(_QUERIES),
        front=rng.random() < 0.5,
        seed=rng.getrandbits(32),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The API over both organisations: what each has, by the names of parameters, and a key that was revoked."""

    api: Api
    front: httpx.AsyncClient
    things: dict[str, dict[str, str]]
    revoked: str

    async def run(self, case: Case) -> str:
        """Send the request and judge its answer."""
        rng = Random(case.seed)
        owner = {"own": "default", "other": "other"}.get(case.key)
        if owner == "other" and case.method != "GET" and "{" not in case.path:
            owner = "default"  # what is made without naming anything is its own
        prefix = "other-" if owner == "other" else ""
        header = {
            "missing": None,
            "malformed": rng.choice(_HEADERS),
            "invented": f"Bearer {new_key(rng.randbytes)}",
            "unchecked": f"Bearer {new_key(rng.randbytes)[:-6]}",
            "revoked": f"Bearer {self.revoked}",
        }.get(case.key, f"Bearer {self.api.keys.get(f'{prefix}{case.scope}', '')}")
        ids = "others" if case.ids == "own" and not _may_have(case, owner) else case.ids
        asked = self._filled(case.path, ids, owner or "default", rng)
        query = case.query.format(
            sub=quote(self._filled("{subscription_id}", ids, owner or "default", rng))
        )
        client = self.front if case.front else self.api.http
        headers = {} if header is None else {b"authorization": header.encode("latin-1", "replace")}
        answer = await client.request(
            case.method,
            f"{asked}{query}",
            headers=cast(Any, headers),
            json=case.body if case.body is not None else None,
        )
        self._judge(case, owner, answer)
        return f"{case.key} {answer.status_code}"

    def _filled(self, path: str, kind: str, owner: str, rng: Random) -> str:
        whose = {"own": owner, "others": next(name for name in MARKS if name != owner)}.get(kind)
        for name in _PARAMETERS:
            if f"{{{name}}}" in path:
                match kind:
                    case "own" | "others":
                        value = self.things[cast(str, whose)].get(name, "x")
                    case "random":
                        value = rng.choice(
                            (
                                str(UUID(int=rng.getrandbits(128))),
                                str(rng.getrandbits(31)),
                                f"q{rng.random()}",
                            )
                        )
                    case _:
                        value = rng.choice(_MALFORMED)
                path = path.replace(f"{{{name}}}", quote(value, safe=""))
        return path

    def _judge(self, case: Case, owner: str | None, answer: httpx.Response) -> None:
        # Its readiness is that of an API whose workers do not run.
        assert (
            answer.status_code < HTTPStatus.INTERNAL_SERVER_ERROR or case.path == "/health/ready"
        ), answer.text
        # A path names what was asked for, and a problem repeats it.
        said = answer.text.replace(json.dumps(answer.request.url.path)[1:-1], "").replace(
            answer.request.url.path, ""
        )
        if case.path.startswith("/v1/journal"):
            said = re.sub(r'"object":"[^"]*"', "", said)  # which paths its own keys were refused
        said = said + repr(sorted((name, value) for name, value in answer.headers.items()))
        for name, mark in MARKS.items():
            assert name == owner or mark not in said, (case.path, name, said[:2000])
        if (case.method, case.path) in WITHOUT_KEY or not answer.request.url.path.startswith("/v1"):
            return
        if owner is None:
            allowed = {
                HTTPStatus.UNAUTHORIZED,
                HTTPStatus.TOO_MANY_REQUESTS,
                HTTPStatus.NOT_FOUND,
                HTTPStatus.METHOD_NOT_ALLOWED,
            }
            assert answer.status_code in allowed, answer.text
            assert (
                answer.status_code != HTTPStatus.TOO_MANY_REQUESTS
                or "retry-after" in answer.headers
            )
        elif case.ids == "others" and any(
            f"{{{name}}}" in case.path for name in _PARAMETERS if name not in {"name", "version"}
        ):
            assert answer.status_code >= HTTPStatus.BAD_REQUEST, answer.text


def _may_have(case: Case, owner: str | None) -> bool:
    """Return whether to try a key on its own objects.

    Streams have no end, and deleted objects would be missing afterwards. The other organisation only
    reads, so that the end of the suite can check that its objects have not changed.
    """
    if owner is None:
        return True
    reads = case.method == "GET" and not case.path.endswith("/stream")
    return reads or (owner == "default" and case.method not in {"GET", "DELETE"})


async def planted(api: Api, organisation: str) -> dict[str, str]:
    """One of everything, its organisation's mark in all text that there is."""
    mark, admin = MARKS[organisation], "admin" if organisation == "default" else "other-admin"
    call = partial(api.call, key=admin)
    room = await api.room(
        f"room-{mark}",
        admin,
        description=f"about {mark}",
        operational_url=f"https://{mark}.example.com/ops",
    )
    await api.made(
        f"/rooms/{room['id']}/event-types",
        {"name": f"type-{mark}", "schema": {"description": mark}},
        admin,
    )
    push = {
        "name": f"push-{mark}",
        "type": "PUSH",
        "push_url": f"https://{mark}.example.com/in",
        "headers": {"x-mark": mark},
    }
    subscription = await api.made(f"/rooms/{room['id']}/subscriptions", push, admin)
    pull = await api.made(
        f"/rooms/{room['id']}/subscriptions", {"name": f"pull-{mark}", "type": "PULL"}, admin
    )
    principal = await api.services.keys.authenticate(f"Bearer {api.keys[admin]}".encode())
    body = {
        "event_type": f"type-{mark}",
        "payload": {"said": mark},
        "correlation_id": mark,
        "business_key": mark,
    }
    answers = [
        json.loads(
            (
                await api.services.publisher.publish(
                    principal, room["id"], json.dumps(body | {"id": f"{mark}{turn}"}).encode(), None
                )
            ).body
        )
        for turn in ("", "-1", "-2")
    ]
    message = answers[0]["message_id"]
    deliveries = (await call("GET", f"/messages/{message}/deliveries")).json()["items"]
    delivery = next(one["id"] for one in deliveries if one["subscription_id"] == subscription["id"])
    await api.sql(
        "UPDATE deliveries SET state = 'sidelined', reason = 'terminal_status', last_error = %s WHERE id = %s",
        mark,
        delivery,
    )
    await api.sql(
        "INSERT INTO sidelined (room_id, id, subscription_id, generation, reason, since) VALUES (%s, %s, %s, 0, 'nacked', now())",
        room["id"], delivery, subscription["id"],
    )  # fmt: skip
    await api.sql("DELETE FROM outbox WHERE id = %s RETURNING 1", delivery)
    await api.sql(
        "UPDATE subscriptions SET status = 'disabled', status_reason = %s WHERE id = %s",
        mark,
        subscription["id"],
    )
    queue = await api.made("/queues", {"name": f"queue-{mark}", "shards": 1}, admin)
    await call("POST", f"/queues/queue-{mark}/messages", json={"id": mark, "payload": mark})
    key = await api.made("/keys", {"name": f"key-{mark}", "scopes": ["publish"]}, admin)
    grant = await api.made(
        f"/rooms/{room['id']}/grants",
        {"organisation_id": "*", "kind": "publish", "event_types": [f"granted-{mark}"]},
        admin,
    )
    await call("DELETE", f"/rooms/{room['id']}/grants/{grant['id']}")
    job = (await call("POST", f"/rooms/{room['id']}/restore", json={})).json()["job_id"]
    await api.sql("UPDATE jobs SET error = %s WHERE id = %s", mark, job)
    whose = (await call("GET", "/whoami")).json()["organisation"]["id"]
    session, _ = await begin(api, whose, name=mark)
    return {
        "session_id": session.id,
        "room_id": str(room["id"]), "name": f"type-{mark}", "version": "1", "subscription_id": pull["id"],
        "message_id": message, "delivery_id": delivery, "job_id": job, "key_id": key["id"], "queue": queue["name"],
        "magazine": queue["name"], "grant_id": grant["id"], "caller_id": mark, "path": "openapi.json",
    }  # fmt: skip


async def kept(api: Api, organisation: str) -> list[tuple[Any, ...]]:
    """Everything of an organisation that another could have changed."""
    return await api.sql(
        "SELECT to_jsonb(r) FROM rooms r WHERE organisation_id = o UNION ALL SELECT to_jsonb(q) FROM queues q WHERE organisation_id = o".replace(
            "= o", "= (SELECT id FROM organisations WHERE name = %s)"
        )
        + " UNION ALL SELECT to_jsonb(k) FROM api_keys k WHERE organisation_id = (SELECT id FROM organisations WHERE name = %s)"
        " UNION ALL SELECT to_jsonb(t) FROM (SELECT s.* FROM subscriptions s JOIN rooms r ON r.id = s.room_id JOIN organisations o"
        " ON o.id = r.organisation_id WHERE o.name = %s) t UNION ALL SELECT to_jsonb(t) FROM (SELECT d.* FROM deliveries d JOIN rooms r"
        " ON r.id = d.room_id JOIN organisations o ON o.id = r.organisation_id WHERE o.name = %s) t",
        *(organisation,) * 5,
    )


@asynccontextmanager
async def target(database_url: str) -> AsyncIterator[Callable[[Case], Awaitable[str]]]:
    """Open the API; in the end the organisation whose keys only read is what it was."""
    async with open_api(database_url) as api:
        things = {organisation: await planted(api, organisation) for organisation in MARKS}
        revoked = await make_key(api.services, "other", Scope.ADMIN)
        await api.sql(
            "UPDATE api_keys SET revoked_at = now() WHERE key_hash = sha256(%s)", revoked.encode()
        )
        front = FastRoutes(
            cast(Any, api.app),
            authenticate=partial(authenticate, api.services),
            publisher=api.services.publisher,
            pull_api=api.services.pull_service,
            max_body_bytes=api.services.settings.max_body_bytes,
        )
        transport = httpx.ASGITransport(cast(Any, front), raise_app_exceptions=False)
        before = sorted(map(repr, await kept(api, "other")))
        assert any(MARKS["other"] in row for row in before)
        async with httpx.AsyncClient(transport=transport, base_url="http://rooms.test") as client:
            yield Target(api=api, front=client, things=things, revoked=revoked).run
        after = sorted(map(repr, await kept(api, "other")))
        assert after == before, f"changed: {sorted(set(before) ^ set(after))}"


SUITE: Final = Suite(name="authorisation", cases=600, generate=generate, target=target)
