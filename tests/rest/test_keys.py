"""API keys: made, shown once, revoked, remembered for a second."""

import asyncio

from rooms.domain.states import Scope
from rooms.errors import UnauthenticatedError
from rooms.storage.keys import FRESH_S, Keys, hash_key
from tests.rest.conftest import Api


class Seconds:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_the_text_of_a_key_is_shown_once_and_kept_nowhere(api: Api) -> None:
    made = await api.made("/keys", {"name": "ci", "scopes": ["publish", "manage", "publish"]})
    assert made["scopes"] == ["manage", "publish"]
    assert made["key"].startswith("rooms_")
    assert len(made["key"]) == 49
    for path in ("/keys", f"/keys/{made['id']}"):
        assert made["key"] not in (await api.call("GET", path)).text
    rows = await api.sql("SELECT key_hash, to_jsonb(k)::text FROM api_keys k WHERE id = %s", made["id"])
    assert rows[0][0] == hash_key(made["key"].encode())
    assert made["key"] not in rows[0][1]
    assert (await api.call("GET", "/rooms", made["key"])).status_code == 200


async def test_wrong_keys_are_refused_by_field(api: Api) -> None:
    for body, field in (
        ({"name": "x", "scopes": []}, "scopes"),
        ({"name": "x", "scopes": ["root"]}, "scopes[0]"),
        ({"name": "x"}, "scopes"),
        ({"name": "", "scopes": ["publish"]}, "name"),
        ({"name": "x", "scopes": ["publish"], "key": "rooms_mine"}, "key"),
    ):
        answer = await api.call("POST", "/keys", json=body)
        assert answer.status_code == 422
        assert answer.json()["errors"][0]["field"] == field


async def test_a_revoked_key_stays_in_the_list_and_opens_nothing(api: Api) -> None:
    made = await api.made("/keys", {"name": "ci", "scopes": ["manage"]})
    assert (await api.call("DELETE", f"/keys/{made['id']}")).status_code == 204
    assert (await api.call("GET", "/rooms", made["key"])).status_code == 401
    revoked = (await api.call("GET", f"/keys/{made['id']}")).json()["revoked_at"]
    assert revoked is not None
    assert (await api.call("DELETE", f"/keys/{made['id']}")).status_code == 204
    assert (await api.call("GET", f"/keys/{made['id']}")).json()["revoked_at"] == revoked


async def test_a_known_key_is_asked_for_again_after_a_second(api: Api) -> None:
    clock = Seconds()
    keys = Keys(api.services.engine, clock)
    made = await api.made("/keys", {"name": "ci", "scopes": ["publish"]})
    header = f"bEaReR {made['key']}".encode()
    principal = await keys.authenticate(header)
    assert (str(principal.key_id), principal.scopes) == (made["id"], frozenset({Scope.PUBLISH}))
    await api.call("DELETE", f"/keys/{made['id']}")
    clock.now += FRESH_S * 0.9
    assert await keys.authenticate(header) is principal
    clock.now += FRESH_S * 0.2
    for _ in range(2):
        try:
            await keys.authenticate(header)
        except UnauthenticatedError:
            continue
        raise AssertionError("a revoked key came in")


async def test_many_requests_at_once_ask_once(api: Api) -> None:
    keys = Keys(api.services.engine, Seconds())
    header = f"Bearer {api.keys['publish']}".encode()
    found = await asyncio.gather(*(keys.authenticate(header) for _ in range(50)))
    assert len({id(principal) for principal in found}) == 1
