"""Check that values of headers are sealed, never shown, and kept where a change says so."""

import logging
from typing import Any

import pytest

from rooms.db.encrypted_headers import decrypt_headers
from rooms.db.secrets import Cipher
from rooms.domain.ids import SubscriptionId
from tests.integration.rooms.api.conftest import SEAL_KEY, Api

VALUE = "Bearer s3cret-value-of-a-header"
OTHER = "another-s3cret-value"


@pytest.fixture
async def room(api: Api) -> int:
    return int((await api.room())["id"])


async def stored(api: Api, made: dict[str, Any]) -> dict[str, str]:
    """Return the headers that a worker sends."""
    ((plain, sealed, names),) = await api.sql(
        "SELECT headers, sealed_headers, header_names FROM subscriptions WHERE id = %s", made["id"]
    )
    assert plain == {}
    found = (
        {}
        if sealed is None
        else decrypt_headers(Cipher(SEAL_KEY), SubscriptionId(made["id"]), sealed)
    )
    assert names == list(found)
    return dict(found)


async def everything(api: Api) -> str:
    """Return all columns of all tables as text."""
    tables = await api.sql(
        "SELECT quote_ident(relname) FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace"
        " WHERE nspname = 'public' AND relkind IN ('r', 'p') AND NOT relispartition"
    )
    found = ""
    for (table,) in tables:
        found += str(await api.sql(f"SELECT coalesce(string_agg(t::text, ' '), '') FROM {table} t"))
    return found


async def test_values_are_never_shown(api: Api, room: int) -> None:
    made = await api.subscription(room, headers={"Authorization": VALUE})
    assert made["headers"] == {"Authorization": "***"}
    path = f"/subscriptions/{made['id']}"
    for key in ("admin", "manage", "operate", "subscribe"):
        found = (await api.call("GET", path, key)).json()
        assert found["headers"] == {"Authorization": "***"}
    changed = (await api.call("PATCH", path, json={"headers": {"X-Other": OTHER}})).json()
    assert changed["headers"] == {"X-Other": "***"}
    assert await stored(api, made) == {"X-Other": OTHER}


async def test_stars_keep_the_present_value(api: Api, room: int) -> None:
    made = await api.subscription(room, headers={"Authorization": VALUE, "X-Other": OTHER})
    path = f"/subscriptions/{made['id']}"
    read = (await api.call("GET", path)).json()["headers"]
    again = await api.call("PATCH", path, json={"headers": read})
    assert again.status_code == 200
    assert await stored(api, made) == {"Authorization": VALUE, "X-Other": OTHER}
    new = {"authorization": "***", "X-New": "1"}
    assert (await api.call("PATCH", path, json={"headers": new})).status_code == 200
    assert await stored(api, made) == {"authorization": VALUE, "X-New": "1"}


async def test_stars_for_a_name_without_a_value_are_refused(api: Api, room: int) -> None:
    body = {"name": "new", "type": "PUSH", "push_url": "https://e.test/", "headers": {"A": "***"}}
    refused = await api.call("POST", f"/rooms/{room}/subscriptions", json=body)
    made = await api.subscription(room, headers={"Authorization": VALUE})
    path = f"/subscriptions/{made['id']}"
    change = {"headers": {"Authorization": "***", "A": "***"}}
    for answer in (refused, await api.call("PATCH", path, json=change)):
        assert answer.status_code == 422
        (problem,) = answer.json()["errors"]
        assert problem["field"] == "headers.A"
        assert "give the value" in problem["message"]
    assert await stored(api, made) == {"Authorization": VALUE}


async def test_kept_values_count_for_the_limit(api: Api, room: int) -> None:
    made = await api.subscription(room, headers={"A": "x" * 8000})
    path = f"/subscriptions/{made['id']}"
    answer = await api.call("PATCH", path, json={"headers": {"A": "***", "B": "y" * 500}})
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == "headers"
    assert "xxx" not in answer.text
    assert "yyy" not in answer.text


async def test_values_of_a_lost_key_must_be_given_again(api: Api, room: int) -> None:
    made = await api.subscription(room, headers={"Authorization": VALUE})
    await api.sql(
        "UPDATE subscriptions SET sealed_headers = %s WHERE id = %s RETURNING 1",
        Cipher(b"x" * 32).encrypt(b"{}", f"headers {made['id']}".encode()),
        made["id"],
    )
    path = f"/subscriptions/{made['id']}"
    answer = await api.call("PATCH", path, json={"headers": {"Authorization": "***"}})
    assert answer.status_code == 409
    assert "give them all" in answer.json()["detail"]
    answer = await api.call("PATCH", path, json={"headers": {"Authorization": OTHER}})
    assert answer.status_code == 200
    assert await stored(api, made) == {"Authorization": OTHER}


async def test_no_value_is_stored_or_logged_anywhere(
    api: Api, room: int, caplog: pytest.LogCaptureFixture
) -> None:
    """In no table, so also not in the journal and the history, and in no log line or problem."""
    caplog.set_level(logging.DEBUG)
    made = await api.subscription(room, headers={"Authorization": VALUE})
    path = f"/subscriptions/{made['id']}"
    answers = [
        await api.call("PATCH", path, json={"headers": {"Authorization": OTHER}}),
        await api.call("PATCH", path, json={"headers": {"bad name": OTHER}}),
        await api.call("PATCH", path, json={"headers": {"Authorization": OTHER + "\n"}}),
        await api.call("PATCH", path, json={"headers": {"Authorization": [OTHER]}}),
        await api.call("PATCH", path, "operate", json={"headers": {"Authorization": OTHER}}),
        await api.call("GET", f"{path}/history"),
        await api.call("GET", "/journal"),
    ]
    rotated = (await api.call("POST", f"{path}/rotate-secret")).json()["secret"]
    assert [answer.status_code for answer in answers] == [200, 422, 422, 422, 403, 200, 200]
    tables = await everything(api)
    assert made["id"] in tables
    for secret in (VALUE, OTHER, made["secret"], rotated):
        bare = secret.removeprefix("whsec_")
        for text in (bare, bare.encode().hex()):
            assert text not in tables
            assert text not in caplog.text
            assert not any(text in answer.text for answer in answers)
