"""Test that exports end with the right of their key to read them."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import pytest

from rooms.api.exports import CHECK_INTERVAL_S, while_key_lasts
from rooms.errors import UnauthenticatedError
from tests.integration.rooms.api.conftest import Api
from tests.support.push_worker import ShiftedClock

End = Callable[[Api, str], Awaitable[object]]


async def chunks() -> AsyncIterator[bytes]:
    for number in range(10):
        yield b"%d" % number


async def revoke(api: Api, key: str) -> object:
    return await api.call("DELETE", f"/keys/{key}")


async def narrow(api: Api, key: str) -> object:
    return await api.call("PATCH", f"/keys/{key}", json={"scopes": ["view"]})


async def end(api: Api, key: str) -> object:
    return await api.sql("UPDATE api_keys SET expires_at = now() WHERE id = %s RETURNING 1", key)


@pytest.mark.parametrize("loses", [revoke, narrow, end])
async def test_an_export_breaks_off_once_its_key_is_over(api: Api, loses: End) -> None:
    made = await api.made("/keys", {"name": "export", "scopes": ["audit"]})
    principal = await api.services.keys.authenticate(f"Bearer {made['key']}".encode())
    clock = ShiftedClock()
    rows = while_key_lasts(replace(api.services, clock=clock), principal, chunks())
    assert await anext(rows) == b"0"
    clock.ahead_s += CHECK_INTERVAL_S
    assert await anext(rows) == b"1"
    await loses(api, made["id"])
    clock.ahead_s += CHECK_INTERVAL_S
    with pytest.raises(UnauthenticatedError):
        await anext(rows)


async def test_an_export_of_a_suspended_organisation_goes_on(api: Api) -> None:
    principal = await api.services.keys.authenticate(f"Bearer {api.keys['stranger']}".encode())
    clock = ShiftedClock()
    rows = while_key_lasts(replace(api.services, clock=clock), principal, chunks())
    assert await anext(rows) == b"0"
    body = {"reason": "x"}
    path = f"/organisations/{principal.organisation_id}/suspend"
    assert (await api.call("POST", path, "platform", json=body)).status_code == 200
    clock.ahead_s += CHECK_INTERVAL_S
    assert await anext(rows) == b"1"


@pytest.mark.parametrize("path", ["/journal/export", "/journal/export?format=csv", "/usage/export"])
async def test_each_export_is_watched(api: Api, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    await api.made("/keys", {"name": "noted", "scopes": ["publish"]})
    monkeypatch.setattr("rooms.api.exports.CHECK_INTERVAL_S", 0.0)
    checked = 0
    check = api.services.keys.check_keys

    async def count(principals: object) -> object:
        nonlocal checked
        checked += 1
        return await check(principals)  # type: ignore[arg-type]

    monkeypatch.setattr(api.services.keys, "check_keys", count)
    assert (await api.call("GET", path)).status_code == 200
    assert checked
