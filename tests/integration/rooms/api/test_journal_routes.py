"""Test that every route that changes something is in the journal, once, in its transaction.

A new route needs a step in `everything`: the routes are those of the application.
"""

import json
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Final

import pytest

from rooms.api.app import route_handlers
from rooms.api.auth import DATA_PLANE
from rooms.domain.state_machine import Scope
from rooms.evidence.jose import generate_key
from tests.integration.rooms.api.conftest import Api, make_key, open_api, room_body
from tests.integration.rooms.api.members import Member, accepted, grant, member, subscribe
from tests.integration.rooms.api.sign_in import make_session
from tests.integration.rooms.api.test_auth import BODIES, named
from tests.integration.rooms.api.test_subscriptions_native import Doorman
from tests.support.installation import until

CHANGES_NOTHING: Final = {"check_message", "try_filter"}
WRITTEN_AFTER: Final = {
    "move_message",
    "move_named_message",
    "purge_queue_sideline",
    "redeliver",
    "skip_head",
    "withdraw_message",
    "withdraw_named_message",
}
"""Handlers whose change is a transaction of the writer: the entry follows it."""
WITHOUT_BEFORE: Final = {"delete_event_type", "delete_version", "end_schedule"}
SECRETS: Final = ("secret-path", "secret-query", "secret-header", "secret-operational")
PUSH: Final = {
    "type": "PUSH",
    "push_url": "https://hooks.example.com/secret-path?x=secret-query",
    "headers": {"X-Token": "secret-header"},
}
SNAPSHOT: Final = " UNION ALL ".join(
    f"SELECT '{table}', md5(coalesce(string_agg(to_jsonb(t)::text, '' ORDER BY to_jsonb(t)::text), ''))"
    f" FROM {table} t"
    for table in (
        "api_keys",
        "due_buckets",
        "event_types",
        "event_type_versions",
        "grants",
        "jobs",
        "organisations",
        "queues",
        "rooms",
        "shovel_schedules",
        "sign_in_links",
        "signing_keys",
        "subscription_history",
        "subscriptions",
    )
)
FAILING: Final = """
CREATE OR REPLACE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.outcome = 'succeeded' THEN RAISE disk_full; END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER fail BEFORE INSERT ON journal FOR EACH ROW EXECUTE FUNCTION fail()
"""


@dataclass
class Recorder:
    """Make changes, and check what each writes."""

    api: Api
    key: str = ""
    """The key of the next steps."""
    actions: dict[str, str] = field(default_factory=dict)
    """The handler's name of each route, as "METHOD /path"."""
    done: set[str] = field(default_factory=set)
    shown: list[str] = field(default_factory=list)
    """Secrets that an answer showed once."""

    async def entries(self, where: str, *values: object) -> list[tuple[Any, ...]]:
        """Return action, outcome, organisation, object, before and after of entries."""
        statement = (
            "SELECT action, outcome, organisation_id::text, object, before, after FROM journal"
        )
        return await self.api.sql(
            f"{statement} WHERE {where} ORDER BY organisation_id, seq", *values
        )

    async def step(
        self, method: str, route: str, body: Any = None, *, query: str = "", **ids: object
    ) -> Any:
        """Take a step twice: with a journal that fails, and as it is; return the answer."""
        action = self.actions[f"{method} /v1{route}"]
        path = route.format(**ids) + query
        request = str(uuid.uuid4())
        headers = {"X-Request-ID": request}
        if action not in WRITTEN_AFTER:
            before = await self.api.sql(SNAPSHOT)
            await self.api.sql(FAILING)
            failed = await self.api.call(method, path, self.key, json=body)
            await self.api.sql("DROP TRIGGER fail ON journal")
            assert failed.status_code >= 500, (action, failed.text)
            assert await self.api.sql(SNAPSHOT) == before, action
        total = await self.entries("outcome = 'succeeded'")
        answer = await self.api.call(method, path, self.key, json=body, headers=headers)
        assert answer.is_success, (action, answer.text)
        (written,) = await self.entries("request_id = %s", request)
        assert len(await self.entries("outcome = 'succeeded'")) == len(total) + 1, action
        assert written[:2] == (action, "succeeded")
        assert written[3].startswith("/v1/")
        if method in {"PATCH", "DELETE"} and action not in WITHOUT_BEFORE | WRITTEN_AFTER:
            assert written[4], action
        if body is not None and method != "DELETE":
            assert written[5], action
        self.done.add(action)
        if not answer.content:
            return None
        found = answer.json()
        login = found.get("login") or {}
        for name in ("secret", "key", "password"):
            self.shown += [one[name] for one in (found, login) if one.get(name)]
        if "path" in found:
            self.shown.append(found["path"].partition("token=")[2])
        return found


@pytest.fixture
async def api(database: str) -> AsyncIterator[Api]:
    async with open_api(database, gate=Doorman()) as opened:
        yield opened


def changing(api: Api) -> dict[str, str]:
    """Return the handler's name of each route that may change something."""
    return {
        f"{method} {path}": handler.handler_name
        for handler, path in route_handlers(api.app)
        for method in handler.http_methods
        if method not in {"GET", "HEAD"} and not handler.opt.get(DATA_PLANE)
    }


async def test_every_change_is_written_once_with_its_change(api: Api) -> None:
    recorder = Recorder(api, actions=changing(api))
    owner, other = await member(api, "owner"), await member(api, "other")
    await as_platform(recorder)
    recorder.key = owner.key
    room = await rooms_and_types(recorder, other)
    await own_subscriptions(recorder, room)
    await foreign_subscriptions(recorder, owner, other, room)
    await messages(recorder, owner, room)
    await queues_and_keys(recorder)
    await recorder.step("DELETE", "/rooms/{room_id}", query="?confirm=changed", room_id=room)
    assert set(recorder.actions.values()) - recorder.done == CHANGES_NOTHING
    everything = json.dumps(await recorder.entries("true"))
    assert len(recorder.shown) >= 7
    for secret in (*SECRETS, *recorder.shown, owner.key, other.key):
        assert secret not in everything


async def as_platform(recorder: Recorder) -> None:
    recorder.key = "platform"
    made = await recorder.step("POST", "/organisations", {"name": "third"})
    one = {"organisation_id": made["id"]}
    await recorder.step("PATCH", "/organisations/{organisation_id}", {"contact": "desk"}, **one)
    body = {"name": "x", "scopes": ["admin"]}
    await recorder.step("POST", "/organisations/{organisation_id}/keys", body, **one)
    limits = {"messages_per_s": 5}
    await recorder.step("PATCH", "/organisations/{organisation_id}/quotas", limits, **one)
    await recorder.step("POST", "/organisations/{organisation_id}/suspend", {"reason": "x"}, **one)
    await recorder.step("POST", "/organisations/{organisation_id}/resume", **one)
    await recorder.step("DELETE", "/organisations/{organisation_id}", query="?confirm=third", **one)
    await recorder.step("PUT", "/cluster/buckets", {"count": 9})
    await recorder.step("POST", "/recover")
    await recorder.step("POST", "/doctor", {"repair": True})
    await recorder.step("POST", "/analysis/runs", {"full": True})
    await recorder.step("POST", "/retention-preview", {"days": 7})


async def rooms_and_types(recorder: Recorder, other: Member) -> int:
    body = room_body("made") | {"operational_url": "https://ops.example.com/secret-operational"}
    room = await recorder.step("POST", "/rooms", body)
    of = {"room_id": room["id"]}
    change = {"name": "changed", "operational_url": "https://b.example.com/secret-operational"}
    await recorder.step("PATCH", "/rooms/{room_id}", change, **of)
    await recorder.step("PATCH", "/rooms/{room_id}/quotas", {"subscriptions": 50}, **of)
    types = "/rooms/{room_id}/event-types"
    await recorder.step("POST", types, {"name": "order.paid"}, **of)
    await recorder.step("POST", types, {"name": "spare"}, **of)
    spare = {"name": "spare", **of}
    await recorder.step("POST", types + "/{name}/versions", {"schema": True}, **spare)
    version = types + "/{name}/versions/{version}"
    await recorder.step("PUT", version, {"schema": None}, version=2, **spare)
    await recorder.step("DELETE", version, version=2, **spare)
    await recorder.step("DELETE", types + "/{name}", **spare)
    body = {"organisation_id": other.id, "kind": "publish"}
    made = await recorder.step("POST", "/rooms/{room_id}/grants", body, **of)
    await recorder.step("DELETE", "/rooms/{room_id}/grants/{grant_id}", grant_id=made["id"], **of)
    return int(room["id"])


async def own_subscriptions(recorder: Recorder, room: int) -> None:
    create, one = "/rooms/{room_id}/subscriptions", "/subscriptions/{subscription_id}"
    made = await recorder.step("POST", create, {"name": "own", **PUSH}, room_id=room)
    own = {"subscription_id": made["id"]}
    change = {name: PUSH[name] for name in ("push_url", "headers")} | {"timeout_ms": 900}
    await recorder.step("PATCH", one, change, **own)
    link = {"name": "a person", "subscription_ids": [made["id"]]}
    await recorder.step("POST", "/portal-links", link)
    for action in ("pause", "resume", "test"):
        await recorder.step("POST", f"{one}/{action}", **own)
    await recorder.step("POST", one + "/rotate-secret", {"overlap_s": 0}, **own)
    body = {"name": "native", "type": "PULL", "native": True}
    native = await recorder.step("POST", create, body, room_id=room)
    await recorder.step("POST", one + "/rotate-password", subscription_id=native["id"])
    await recorder.step("PUT", one + "/sideline/schedule", {"interval_s": 60}, **own)
    await recorder.step("DELETE", one + "/sideline/schedule", **own)
    await recorder.step("POST", one + "/sideline/shovel", **own)
    await recorder.step("POST", one + "/sideline/purge", query="?confirm=own", **own)
    for action in ("clear", "skip-to-now"):
        await recorder.step("POST", f"{one}/{action}", query="?confirm=own", **own)
    await recorder.step("POST", f"{one}/retry", **own)
    body = {"since": "2026-01-01T00:00:00Z"}
    job = await recorder.step("POST", one + "/replay", body, **own)
    await recorder.step("POST", "/jobs/{job_id}/cancel", job_id=job["job_id"])
    magazine = f"subscription-{made['id']}_SIDELINE"
    await recorder.step("POST", "/magazines/{magazine}/sweep", magazine=magazine)
    await recorder.step("DELETE", one, **own)


async def foreign_subscriptions(
    recorder: Recorder, owner: Member, other: Member, room: int
) -> None:
    policy = {"subscription_policy": "approval", "visibility": "listed"}
    await recorder.step("PATCH", "/rooms/{room_id}", policy, room_id=room)
    one = "/subscriptions/{subscription_id}"
    first = await subscribe(recorder.api, other, room, "first", push_url=PUSH["push_url"])
    second = await subscribe(recorder.api, other, room, "second")
    of = {"subscription_id": first["id"]}
    await recorder.step("POST", one + "/approve", {"version": first["version"]}, **of)
    recorder.key = other.key
    change = {"push_url": "https://other.example.com/secret-path"}
    await recorder.step("PATCH", one, change, **of)
    await recorder.step("DELETE", one + "/proposal", **of)
    recorder.key = owner.key
    for action in ("suspend", "reinstate", "terminate"):
        await recorder.step("POST", f"{one}/{action}", {"reason": "x"}, **of)
    body = {"reason": "x"}
    await recorder.step("POST", one + "/reject", body, subscription_id=second["id"])


async def messages(recorder: Recorder, owner: Member, room: int) -> None:
    api = recorder.api
    fields = {"ordered": True, "max_receives": 1}
    pulling = await subscribe(api, owner, room, "pulling", **fields)
    later = {"message_id": await accepted(api, owner.key, room, delay_ms=60_000)}
    await recorder.step("PATCH", "/messages/{message_id}", {"delay_ms": 50_000}, **later)
    await recorder.step("DELETE", "/messages/{message_id}", **later)
    named = "/rooms/{room_id}/messages/by-id/{caller_id}"
    await accepted(api, owner.key, room, delay_ms=60_000, id="mine/1")
    by_id: dict[str, Any] = {"room_id": room, "caller_id": "mine%2F1"}
    await recorder.step("PATCH", named, {"delay_ms": 50_000}, **by_id)
    await recorder.step("DELETE", named, **by_id)
    path = f"/messages/{later['message_id']}/deliveries"
    found = (await api.call("GET", path, owner.key)).json()["items"]
    (delivery,) = (one for one in found if one["subscription_id"] == pulling["id"])
    again = "/deliveries/{delivery_id}/redeliver"
    await recorder.step("POST", again, delivery_id=delivery["id"])
    await recorder.step("POST", "/messages/{message_id}/restore", **later)
    await recorder.step("POST", "/rooms/{room_id}/restore", room_id=room)
    await accepted(api, owner.key, room, ordering_key="k")
    path = f"/subscriptions/{pulling['id']}"
    pull = {"max_messages": 10, "wait_ms": 0}
    leased = (await api.call("POST", f"{path}/pull", owner.key, json=pull)).json()["messages"]
    nack = {"ack_ids": [one["ack_id"] for one in leased]}
    assert (await api.call("POST", f"{path}/nack", owner.key, json=nack)).is_success
    skip = "/subscriptions/{subscription_id}/ordering-keys/skip"
    await recorder.step("POST", skip, {"ordering_key": "k"}, subscription_id=pulling["id"])
    await recorder.step("POST", "/rooms/{room_id}/clear", query="?confirm=changed", room_id=room)


async def queues_and_keys(recorder: Recorder) -> None:
    await recorder.step("POST", "/queues", {"name": "q", "shards": 1})
    await recorder.step("PATCH", "/queues/{queue}", {"concurrency": 2}, queue="q")
    await recorder.step("POST", "/queues/{queue}/sideline/purge", query="?confirm=q", queue="q")
    await recorder.step("DELETE", "/queues/{queue}", query="?confirm=q", queue="q")
    made = await recorder.step("POST", "/keys", {"name": "made", "scopes": ["publish"]})
    one = {"key_id": made["id"]}
    await recorder.step("PATCH", "/keys/{key_id}", {"name": "renamed"}, **one)
    await recorder.step("POST", "/keys/{key_id}/rotate", {"overlap_s": 0}, **one)
    await recorder.step("DELETE", "/keys/{key_id}", **one)
    await recorder.step("POST", "/sign-in-links", {"name": "a person", "roles": ["viewer"]})
    whoami = (await recorder.api.call("GET", "/whoami", recorder.key)).json()
    session = await make_session(recorder.api, whoami["organisation"]["id"])
    await recorder.step("DELETE", "/sessions/{session_id}", session_id=session)
    await make_session(recorder.api, whoami["organisation"]["id"])
    await recorder.step("POST", "/people/end-sessions", {"name": "a person"})
    body = {"name": "signs", "jwk": generate_key("EdDSA").public.to_jwk()}
    template = {"template": "https://ss.example.com/secret-path/{eventType}"}
    await recorder.step("PUT", "/push-template", template)
    await recorder.step("DELETE", "/push-template")
    signing = await recorder.step("POST", "/signing-keys", body)
    await recorder.step("DELETE", "/signing-keys/{kid}", kid=signing["kid"])


async def test_every_refusal_of_a_known_key_is_written_once(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    # There are more of them at once than a second may write.
    monkeypatch.setattr("rooms.token_buckets.TokenBuckets.take", lambda *_: True)
    refusing = await make_key(api.services, "refusing", Scope.AUDIT)
    asked = changing(api)
    for route in sorted(asked):
        method, path = route.split(" ")
        parts = {"room_id": "1", "version": "1"}
        place = named(path)
        for name in ("name", "queue", "magazine", "kid", "caller_id"):
            parts[name] = "x"
        for name in (
            *("subscription", "message", "delivery", "job", "key", "session", "grant"),
            "organisation",
        ):
            parts[f"{name}_id"] = str(uuid.uuid4())
        body = BODIES.get((method, path))
        answer = await api.call(method, place.format(**parts), refusing, json=body)
        assert answer.status_code == 403, (route, answer.text)
        for unknown in (None, "rooms_" + "a" * 43):
            answer = await api.call(method, place.format(**parts), unknown, json=body)
            assert answer.status_code == 401

    async def written() -> list[str]:
        rows = await api.sql(
            "SELECT action FROM journal WHERE outcome = 'refused' AND actor_name = 'audit'"
        )
        found = sorted(row[0] for row in rows)
        return found if len(found) >= len(asked) - len(CHANGES_NOTHING) else []

    expected = sorted(action for action in asked.values() if action not in CHANGES_NOTHING)
    assert await until(written, "refused attempts") == expected
    assert await api.sql("SELECT DISTINCT actor_name FROM journal") == [("audit",)]
    metrics = (await api.http.get("/metrics")).text
    counted = [
        float(line.split()[-1])
        for line in metrics.splitlines()
        if "authentication" in line and "_total{" in line and '"missing"' in line
    ]
    assert counted == [len(asked)]


async def test_a_refusal_shows_no_secret(api: Api) -> None:
    """Check what problems quote: values that were refused are not written."""
    owner = await member(api)
    room = await api.room("r", owner.key)
    path = f"/rooms/{room['id']}/subscriptions"
    refused = [
        {
            "name": "a",
            **PUSH,
            "push_url": "https://user:secret-path@hooks.example.com/secret-query",
        },
        {"name": "a", **PUSH, "push_url": "ftp://hooks.example.com/secret-path"},
        {"name": "a", **PUSH, "headers": {"X-Token": "secret-header\n"}},
        {"name": "a", **PUSH, "filter": "1 +"},
        {"name": "a", **PUSH, "headers": "secret-header"},
        {"name": "a", **PUSH, "secret": "secret-path"},
        {"name": "a", **PUSH, "push_url": "https://blocked.example.com/secret-path"},
    ]
    for body in refused:
        answer = await api.call("POST", path, owner.key, json=body)
        assert answer.status_code == 422, answer.text

    async def written() -> list[tuple[Any, ...]]:
        rows = await api.sql("SELECT to_jsonb(j)::text FROM journal j WHERE outcome = 'refused'")
        return rows if len(rows) == len(refused) else []

    everything = str(await until(written, "refused attempts"))
    for secret in SECRETS:
        assert secret not in everything


async def test_a_refusal_in_the_handler_leaves_one_entry(api: Api) -> None:
    owner, other = await member(api), await member(api)
    room = await api.room("r", owner.key)
    await grant(api, owner, room["id"], other.id, "subscribe")
    pulling = await subscribe(api, other, room["id"])
    calls = (
        ("POST", f"/subscriptions/{pulling['id']}/test", None, 409),
        ("POST", f"/subscriptions/{pulling['id']}/rotate-secret", None, 409),
        ("POST", f"/subscriptions/{pulling['id']}/approve", {"version": 1}, 404),
        ("DELETE", f"/rooms/{room['id']}?confirm=r", None, 404),
        ("PATCH", f"/rooms/{room['id']}", {"name": "x"}, 404),
    )
    before = len(await api.sql("SELECT action FROM journal WHERE outcome = 'succeeded'"))
    for method, path, body, status in calls:
        answer = await api.call(method, path, other.key, json=body)
        assert answer.status_code == status, (path, answer.text)

    async def written() -> bool:
        rows = await api.sql("SELECT action FROM journal WHERE outcome = 'refused'")
        return len(rows) == len(calls)

    await until(written, "refused attempts")
    rows = await api.sql("SELECT action FROM journal WHERE outcome = 'succeeded'")
    assert len(rows) == before
