"""Test that every change by GovStack's interfaces is in the journal once, in its transaction."""

import uuid
from typing import Any, Final

import pytest

from rooms.api.app import govstack_handlers
from rooms.api.auth import DATA_PLANE
from rooms.domain.state_machine import Scope
from tests.integration.rooms.api.conftest import Api, make_key
from tests.integration.rooms.api.govstack.conftest import (
    MADE,
    OWNER,
    PAID,
    PUBLISHER,
    ROOM,
    STRANGER,
    SUBSCRIBER,
    GovStack,
    member_id,
)
from tests.integration.rooms.api.test_journal_routes import FAILING, SNAPSHOT

WRITTEN_AFTER: Final = {"stop_event"}
"""The change is a transaction of the writer, as in `/v1`: the entry follows it."""
R1: Final = f"/r1/{member_id(OWNER)}/{ROOM}"
AT: Final = f"/rooms/{member_id(OWNER)}/{ROOM}"
NEW_ROOM: Final = {
    "name": "new",
    "delivery_delay_ms": 1000,
    "delivery_delay_multiplier": 2,
    "delivery_attempts": 3,
}


def changing(api: Api) -> set[str]:
    """Return the names of the handlers that change something."""
    return {
        handler.handler_name
        for handler, _ in govstack_handlers(api.app)
        if not handler.http_methods & {"GET", "HEAD"} and not handler.opt.get(DATA_PLANE)
    }


class Recorder:
    """Make changes, and check what each writes."""

    def __init__(self, gov: GovStack) -> None:
        self.gov = gov
        self.done: set[str] = set()

    async def step(
        self, method: str, path: str, role: str = OWNER, body: Any = None, *, entries: int = 1
    ) -> Any:
        """Take a step twice: with a journal that fails, and as it is; return the answer's body."""
        sql, request = self.gov.api.sql, str(uuid.uuid4())
        if not path.startswith(f"{R1}/pub"):
            before = await sql(SNAPSHOT)
            await sql(FAILING)
            failed = await self.gov.send(method, path, role, json=body)
            await sql("DROP TRIGGER fail ON journal")
            assert failed.status_code >= 500, (method, path, failed.text)
            assert await sql(SNAPSHOT) == before, (method, path)
        headers = {"X-Request-ID": request}
        answer = await self.gov.send(method, path, role, json=body, headers=headers)
        assert answer.is_success, (method, path, answer.text)
        rows = await sql(
            "SELECT action, outcome, organisation_id::text, application FROM journal"
            " WHERE request_id = %s",
            request,
        )
        assert len(rows) == entries, (method, path, rows)
        for action, outcome, organisation, application in rows:
            self.done.add(action)
            assert outcome == "succeeded"
            assert organisation == self.gov.organisations[role]
            assert application == "app"
        return answer.json() if answer.content else None


async def test_every_change_is_written_once_with_its_change(gov: GovStack) -> None:
    recorder = Recorder(gov)
    step = recorder.step
    await step("POST", f"{R1}/api/v1/eventType", body={"eventType": "x"})
    await step("DELETE", f"{R1}/api/v1/eventType/x")
    item = {"eventType": MADE, "delivery": "PULL"}
    await step("POST", f"{R1}/api/v1/subs/{MADE}", SUBSCRIBER, item)
    event = await gov.publish()
    await step("DELETE", f"{R1}/pub/v1/{MADE}/{event}", PUBLISHER)
    change = {"eventType": MADE, "options": {"TTL": 5}}
    await step("PATCH", f"{R1}/api/v1/subs/{MADE}", SUBSCRIBER, change)
    await step("DELETE", f"{R1}/api/v1/subs/{MADE}", SUBSCRIBER)
    await step("POST", f"/rooms/{member_id(STRANGER)}", STRANGER, NEW_ROOM)
    await step("POST", f"{AT}/event-types", body={"name": "y"})
    await step("POST", f"{AT}/event-types/y/versions", body={"schema": True})
    await step("PUT", f"{AT}/event-types/y/versions", body={"version": 2, "schema": False})
    await step("DELETE", f"{AT}/event-types/y/versions/2")
    await step("DELETE", f"{AT}/event-types/y")
    own = f"/rooms/{member_id(STRANGER)}/new"
    await step("PUT", own, STRANGER, {"description": "changed"})
    await step("DELETE", f"{own}?confirm=new", STRANGER)
    publisher = {"organisation_id": STRANGER}
    made = await step("POST", f"{AT}/publishers", body=publisher)
    types = {"event_types": [PAID]}
    path = f"{AT}/publishers/{made['id']}"
    changed = await step("PUT", path, body=types)
    await step("DELETE", f"{AT}/publishers/{changed['id']}")
    policy = {"subscription_policy": "approval", "visibility": "listed"}
    await gov.api.call("PATCH", f"/rooms/{gov.room}", OWNER, json=policy)
    body = {"name": "pulling", "type": "PULL"}
    pending = await step("POST", f"{AT}/subscriptions", STRANGER, body)
    decision = {"approved": True, "version": pending["version"]}
    await step("POST", f"{AT}/subscriptions/{pending['id']}", OWNER, decision)
    await step("DELETE", f"{AT}/subscriptions/{pending['id']}", STRANGER)
    gov.api.keys[OWNER] = await make_key(gov.api.services, OWNER, Scope.PLATFORM)
    manager = {"name": "new", "member_id": "EE/GOV/new"}
    made = await step("POST", "/api/admin/managers", body=manager)
    refused = await gov.send("DELETE", f"/api/admin/managers/{made['id']}")
    assert refused.status_code == 409
    recorder.done.add("remove_manager")  # it changes nothing, and is refused
    assert recorder.done == changing(gov.api)


@pytest.mark.parametrize("path", [f"{R1}/pub/v1/{MADE}", f"{AT}/publish"])
async def test_messages_are_in_the_delivery_log_with_their_sender(gov: GovStack, path: str) -> None:
    await gov.subscribe()
    before = await gov.api.sql("SELECT count(*) FROM journal")
    content = {"event": 1} if "/r1/" in path else {"content": 1}
    answer = await gov.send("POST", path, PUBLISHER, json={"eventType": MADE, **content})
    (event,) = answer.json().values()
    await gov.pull()
    assert await gov.api.sql("SELECT count(*) FROM journal") == before
    steps = (await gov.api.call("GET", f"/messages/{event}/journey", OWNER)).json()["items"]
    assert [step["kind"] for step in steps] == ["published", "enqueued", "leased"]
    assert (steps[0]["publisher_organisation"], steps[0]["application"]) == (PUBLISHER, "app")
