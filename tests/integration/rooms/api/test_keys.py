"""Test API keys: created, shown once, revoked, cached for a second."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from ipaddress import ip_network
from typing import Any, cast

import httpx
import pytest

from rooms.api.auth import authenticate
from rooms.api.fast_routes import FastRoutes
from rooms.db.authentication import (
    UNKNOWN_CACHE_S,
    ApiKeyAuthenticator,
    AuthFailure,
    client_block,
)
from rooms.db.catalog.api_keys import hash_key, new_key
from rooms.db.known_keys import CACHE_S
from rooms.db.principals import KnownKey
from rooms.domain.state_machine import Scope
from rooms.errors import RateLimitedError, UnauthenticatedError
from rooms.settings import IpNetwork
from tests.integration.rooms.api.conftest import Api
from tests.support.installation import until


class Seconds:
    """Hold a clock that only moves when the test moves it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_the_text_of_a_key_is_shown_once_and_not_stored(api: Api) -> None:
    made = await api.made("/keys", {"name": "ci", "scopes": ["publish", "manage", "publish"]})
    assert made["scopes"] == ["manage", "publish"]
    assert made["key"].startswith("rooms_")
    assert len(made["key"]) == 55
    for path in ("/keys", f"/keys/{made['id']}"):
        assert made["key"] not in (await api.call("GET", path)).text
    rows = await api.sql(
        "SELECT key_hash, to_jsonb(k)::text FROM api_keys k WHERE id = %s", made["id"]
    )
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


async def test_a_known_key_is_looked_up_again_after_a_second(api: Api) -> None:
    clock = Seconds()
    keys = ApiKeyAuthenticator(api.services.engine, clock)
    made = await api.made("/keys", {"name": "ci", "scopes": ["publish"]})
    header = f"bEaReR {made['key']}".encode()
    principal = await keys.authenticate(header)
    assert (str(principal.key_id), principal.scopes) == (made["id"], frozenset({Scope.PUBLISH}))
    await api.call("DELETE", f"/keys/{made['id']}")
    clock.now += CACHE_S * 0.9
    assert await keys.authenticate(header) is principal
    clock.now += CACHE_S * 0.2
    for _ in range(2):
        try:
            await keys.authenticate(header)
        except UnauthenticatedError:
            continue
        raise AssertionError("a revoked key came in")


async def test_a_change_of_a_key_counts_at_once_and_others_forget_no_key(api: Api) -> None:
    """A subscriber or room that is created must not make all publishers look up their keys."""
    made = await api.made("/keys", {"name": "ci", "scopes": ["manage"]})
    header, path = f"Bearer {made['key']}".encode(), f"/keys/{made['id']}"
    for method, body in (("PATCH", {"scopes": ["operate"]}), ("DELETE", None)):
        principal = await api.services.keys.authenticate(header)
        assert (await api.call("PATCH", path, json={"name": ""})).status_code == 422
        await api.room(f"beside-{method.lower()}")
        assert api.services.keys.find_cached(header, None) is principal
        assert (await api.call(method, path, json=body)).is_success
        assert api.services.keys.find_cached(header, None) is None


async def test_concurrent_requests_share_one_look_up(api: Api) -> None:
    keys = ApiKeyAuthenticator(api.services.engine, Seconds())
    header = f"Bearer {api.keys['publish']}".encode()
    found = await asyncio.gather(*(keys.authenticate(header) for _ in range(50)))
    assert len({id(principal) for principal in found}) == 1


class Counted(ApiKeyAuthenticator):
    """Count key look-ups, and block their answers on request."""

    def __init__(
        self, api: Api, clock: Seconds, *, unknown_per_s: int = 0, trusted: Sequence[IpNetwork] = ()
    ) -> None:
        self.lookups = 0
        self.refused: list[AuthFailure] = []
        self.open = asyncio.Event()
        self.open.set()
        super().__init__(
            api.services.engine,
            clock,
            unknown_per_s=unknown_per_s,
            trusted=trusted,
            on_failure=self.refused.append,
        )

    async def _look_up(self, digest: bytes) -> KnownKey | None:
        self.lookups += 1
        await self.open.wait()
        return await super()._look_up(digest)

    async def outcome(self, text: str, client: tuple[str, int] | None = None) -> str:
        """Return the outcome of a request with that key."""
        try:
            await self.authenticate(f"Bearer {text}".encode(), client)
        except (UnauthenticatedError, RateLimitedError) as exc:
            return type(exc).__name__.removesuffix("Error")
        return "in"


def invented(number: int, *, checked: bool = True) -> str:
    """Return a key that was never created."""
    text = new_key(lambda size: number.to_bytes(size, "big"))
    return text if checked else text[:-6]


async def test_what_cannot_be_a_key_costs_no_lookup(api: Api) -> None:
    keys = Counted(api, Seconds())
    genuine = api.keys["publish"]
    wrong = [
        genuine[:-1],
        genuine + "x",
        "",
        "x" * 100_000,
        genuine[:-1] + ("A" if genuine[-1] != "A" else "B"),
    ]
    wrong += [
        genuine[:at] + ("A" if genuine[at] != "A" else "B") + genuine[at + 1 :]
        for at in range(0, len(genuine), 5)
    ]
    assert {await keys.outcome(text) for text in wrong} == {"Unauthenticated"}
    assert keys.lookups == 0
    assert set(keys.refused) == {AuthFailure.MALFORMED, AuthFailure.CHECKSUM}
    assert await keys.outcome(genuine) == "in"


async def test_a_key_from_before_checksums_stays_valid(api: Api) -> None:
    made = await api.made("/keys", {"name": "old", "scopes": ["manage"]})
    old = made["key"][:-6]
    await api.sql(
        "UPDATE api_keys SET key_hash = %s WHERE id = %s RETURNING 1",
        hash_key(old.encode()),
        made["id"],
    )
    assert (await api.call("GET", "/rooms", old)).status_code == 200
    assert (await api.call("GET", "/rooms", made["key"])).status_code == 401


async def test_an_unknown_key_is_looked_up_once_a_minute(api: Api) -> None:
    clock = Seconds()
    keys = Counted(api, clock)
    for checked in (True, False):
        for _ in range(3):
            assert await keys.outcome(invented(1, checked=checked)) == "Unauthenticated"
    assert keys.lookups == 2
    clock.now += UNKNOWN_CACHE_S
    assert await keys.outcome(invented(1)) == "Unauthenticated"
    assert keys.lookups == 3


async def test_a_key_that_is_extended_after_its_end_is_valid_again(api: Api) -> None:
    clock = Seconds()
    keys = Counted(api, clock)
    made = await api.made("/keys", {"name": "ci", "scopes": ["publish"]})
    text = made["key"]
    await api.sql(
        "UPDATE api_keys SET expires_at = now() - interval '1 min' WHERE id = %s", made["id"]
    )
    assert await keys.outcome(text) == "Unauthenticated"
    extended = await api.call(
        "PATCH", f"/keys/{made['id']}", json={"expires_at": "2100-01-01T00:00:00Z"}
    )
    assert extended.status_code == 200, extended.text
    assert await keys.outcome(text) == "Unauthenticated"
    assert keys.lookups == 1
    clock.now += CACHE_S
    assert await keys.outcome(text) == "in"
    await api.call("DELETE", f"/keys/{made['id']}")
    clock.now += CACHE_S
    for _ in range(2):
        assert await keys.outcome(text) == "Unauthenticated"
        clock.now += CACHE_S
    assert keys.lookups == 3, "a revoked key stays unknown for longer"


async def test_the_cache_of_unknown_keys_is_bounded(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rooms.db.authentication.MAX_CACHED", 5)
    keys = Counted(api, Seconds())
    for number in range(20):
        await keys.outcome(invented(number))
    assert len(keys._unknown_cache) == 5
    assert not keys._pending_lookups


async def test_unknown_keys_cost_their_address_and_valid_ones_nothing(api: Api) -> None:
    """Check that an attack behind one address is stopped, and that known keys go on."""
    clock = Seconds()
    keys = Counted(api, clock, unknown_per_s=3)
    proxy, other = ("10.0.0.1", 1), ("10.0.0.2", 1)
    for name in ("publish", "manage", "operate", "subscribe", "admin"):
        assert await keys.outcome(api.keys[name], proxy) == "in"
    assert [await keys.outcome(invented(number), proxy) for number in range(4)] == [
        "Unauthenticated"
    ] * 3 + ["RateLimited"]
    assert keys.refused == [AuthFailure.UNKNOWN] * 3 + [AuthFailure.LIMITED]
    lookups = keys.lookups
    assert await keys.outcome(invented(5), ("10.0.0.1", 2)) == "RateLimited"
    assert await keys.outcome(invented(0), proxy) == "Unauthenticated", "known to be unknown"
    assert keys.lookups == lookups
    clock.now += CACHE_S / 4
    assert await keys.outcome(api.keys["publish"], proxy) == "in"
    assert await keys.outcome(invented(5), other) == "Unauthenticated"
    clock.now += CACHE_S
    keys._lookup_limiter._buckets[client_block(proxy)] = (0.0, clock.now)
    assert await keys.outcome(api.keys["publish"], proxy) == "in", "seen before"
    clock.now += 1
    assert await keys.outcome(invented(6), proxy) == "Unauthenticated"


async def test_unknown_keys_behind_a_trusted_proxy_do_not_block_valid_ones(api: Api) -> None:
    keys = Counted(
        api,
        Seconds(),
        unknown_per_s=3,
        trusted=[ip_network("10.0.0.0/24"), ip_network("2001:db8::/64")],
    )
    for number, host in enumerate(("10.0.0.1", "::ffff:10.0.0.1", "2001:db8::1")):
        found = [await keys.outcome(invented(10 * number + one), (host, 1)) for one in range(8)]
        assert found == ["Unauthenticated"] * 8
    assert await keys.outcome(api.keys["publish"], ("10.0.0.1", 1)) == "in"
    stranger = [await keys.outcome(invented(100 + number), ("10.0.1.1", 1)) for number in range(4)]
    assert stranger == ["Unauthenticated"] * 3 + ["RateLimited"]


async def test_lookups_of_keys_never_seen_leave_connections_to_others(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rooms.db.authentication.MAX_PENDING_LOOKUPS", 10)
    keys = Counted(api, Seconds())
    assert await keys.outcome(api.keys["publish"]) == "in"
    keys.open.clear()
    asked = [
        asyncio.create_task(keys.outcome(invented(number), (f"10.0.1.{number}", 1)))
        for number in range(20)
    ]

    async def refused() -> bool:
        return len(keys.refused) == 10

    await until(refused, "those beyond the bound to be refused")
    assert keys.refused == [AuthFailure.LIMITED] * 10
    assert keys.lookups == 1 + 2
    assert await keys.outcome(api.keys["publish"]) == "in"
    keys.open.set()
    assert sorted(await asyncio.gather(*asked)) == ["RateLimited"] * 10 + ["Unauthenticated"] * 10


class Ordered(ApiKeyAuthenticator):
    """Record the order of look-ups, and let each wait for its permit."""

    def __init__(self, api: Api, clock: Seconds) -> None:
        self.begun: list[bytes] = []
        self.permits = asyncio.Semaphore(1000)
        super().__init__(api.services.engine, clock)

    async def _look_up(self, digest: bytes) -> KnownKey | None:
        self.begun.append(digest)
        await self.permits.acquire()
        return await super()._look_up(digest)

    async def ask(self, texts: Sequence[str], client: tuple[str, int]) -> list[asyncio.Task[Any]]:
        """Return the requests with these keys, once each waits for its look-up."""
        asked = [
            asyncio.create_task(self.authenticate(f"Bearer {text}".encode(), client))
            for text in texts
        ]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return asked


async def test_organisations_take_turns_when_their_keys_are_looked_up_again(api: Api) -> None:
    """One that holds very many keys would else fill the connections at each second."""
    clock = Seconds()
    keys = Ordered(api, clock)
    many = [
        (await api.made("/keys", {"name": f"key-{n}", "scopes": ["publish"]}))["key"]
        for n in range(30)
    ]
    other, here = [api.keys["stranger"]], ("10.0.0.1", 1)
    await asyncio.gather(*await keys.ask([*many, *other], here))
    clock.now += CACHE_S
    keys.begun.clear()
    keys.permits = asyncio.Semaphore(0)
    asked = await keys.ask(many, here) + await keys.ask(other, here)
    before = len(keys.begun)
    assert before < 10, "others keep their connections"
    for _ in range(1000):
        keys.permits.release()
    await asyncio.gather(*asked)
    assert hash_key(other[0].encode()) in keys.begun[: before + 2]
    assert len(keys.begun) == 31


async def test_addresses_take_turns_with_keys_never_seen_before(api: Api) -> None:
    keys = Ordered(api, Seconds())
    keys.permits = asyncio.Semaphore(0)
    asked = await keys.ask([invented(n) for n in range(30)], ("10.0.0.1", 1))
    asked += await keys.ask([api.keys["publish"]], ("10.0.0.2", 1))
    for _ in range(1000):
        keys.permits.release()
    await asyncio.gather(*asked, return_exceptions=True)
    assert hash_key(api.keys["publish"].encode()) in keys.begun[:4]


async def test_repeated_lookups_do_not_count_as_those_of_unknown_keys(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rooms.db.authentication.MAX_PENDING_LOOKUPS", 2)
    clock, here = Seconds(), ("10.0.0.1", 1)
    keys = Ordered(api, clock)
    known = [api.keys[name] for name in ("publish", "manage", "operate")]
    for text in known:
        await asyncio.gather(*await keys.ask([text], here))
    clock.now += CACHE_S
    keys.permits = asyncio.Semaphore(0)
    asked = await keys.ask([*known, api.keys["admin"]], here)
    for _ in asked:
        keys.permits.release()
    assert len({one.key_id for one in await asyncio.gather(*asked)}) == 4


async def test_an_organisation_with_many_keys_displaces_only_its_own(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rooms.db.known_keys.MAX_CACHED", 3)
    keys = Counted(api, Seconds())
    for name in ("stranger", "publish", "manage", "operate", "subscribe", "admin"):
        assert await keys.outcome(api.keys[name]) == "in"
    lookups = keys.lookups
    assert await keys.outcome(api.keys["stranger"]) == "in"
    assert keys.lookups == lookups
    assert len(keys._known) == 3


async def test_an_address_is_that_of_ipv4_or_a_network_of_ipv6() -> None:
    same = {"2001:db8:1:2::1", "2001:db8:1:2:ffff::9", "2001:db8:1:2::3%eth0"}
    assert {client_block((host, 1)) for host in same} == {"2001:db8:1:2::"}
    assert client_block(("::ffff:10.0.0.1", 1)) == client_block(("10.0.0.1", 9)) == "10.0.0.1"
    assert (client_block(None), client_block(("testclient", 1))) == ("", "testclient")


async def test_an_address_that_tries_keys_gets_429_and_is_counted(api: Api) -> None:
    keys = ApiKeyAuthenticator(
        api.services.engine,
        Seconds(),
        unknown_per_s=1,
        on_failure=api.services.metrics.count_authentication_failure,
    )
    api.app.state.services = replace(api.services, keys=keys)
    front = FastRoutes(
        cast(Any, api.app),
        authenticate=partial(authenticate, api.app.state.services),
        publisher=api.services.publisher,
        pull_api=api.services.pull_service,
        max_body_bytes=1000,
    )
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(cast(Any, front)), base_url="http://rooms.test"
    ) as http:
        for number, (method, path) in enumerate(
            [("GET", "/v1/rooms"), ("POST", "/v1/rooms/1/messages")]
        ):
            headers = {"Authorization": f"Bearer {invented(2 * number)}"}
            answer = await http.request(method, path, headers=headers, content=b"{}")
            assert answer.status_code == (429 if number else 401), answer.text
            answer = await http.request(
                method, path, headers={"Authorization": f"Bearer {invented(2 * number + 1)}"}
            )
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert (await http.get("/v1/rooms")).status_code == 401
        assert (
            await http.get("/v1/rooms", headers={"Authorization": f"Bearer {api.keys['manage']}"})
        ).status_code == 429
    reported = api.services.metrics.render().decode()
    for reason, count in {"unknown": 1, "limited": 4, "missing": 1}.items():
        assert f'rooms_authentication_failures_total{{reason="{reason}"}} {count}.0' in reported
