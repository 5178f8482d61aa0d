"""Test the pages of API keys and signing keys."""

import json

from rooms.evidence.jose import generate_key
from tests.integration.rooms.console.browser import Browser, Document
from tests.integration.rooms.console.platform_key import HOSTILE, SHOWN

PATH = "/console/administration/keys"
SIGNING = "/console/administration/signing-keys"


def shown_key(page: Document) -> str:
    """Return the text of the key on a page."""
    return next(word for word in page.text.split() if word.startswith("rooms_") and len(word) > 40)


async def test_a_key_is_created_and_shown_once(browser: Browser) -> None:
    await browser.sign_in("owner")
    form = await browser.get(f"{PATH}/new")
    assert "platform" not in [value for _, value in form.form(PATH).fields]
    refused = await browser.submit(
        form, PATH, name="shop", scopes="publish", rooms="1000\nx", networks="10.0.0.0/8, none"
    )
    assert refused.status == 422
    assert ("networks", "10.0.0.0/8, none") in refused.form(PATH).fields
    assert ("scopes", "publish") in refused.form(PATH).fields
    made = await browser.submit(
        refused, PATH, rooms="1000", networks="10.0.0.0/8", expires_at="2099-01-01T00:00:00Z"
    )
    assert made.status == 201
    key = shown_key(made)
    caller = (await browser.api.call("GET", "/keys?name=shop")).json()["items"][0]
    assert caller["rooms"] == [1000]
    assert caller["networks"] == ["10.0.0.0/8"]
    page = await browser.get(PATH)
    assert "1 room, 1 network" in page.text
    assert key not in page.html


async def test_a_key_is_changed_rotated_and_revoked(browser: Browser) -> None:
    await browser.sign_in("owner")
    made = await browser.api.made("/keys", {"name": "shop", "scopes": ["publish"]})
    path = f"{PATH}/{made['id']}"
    page = await browser.get(path)
    refused = await browser.submit(page, path, event_types="not a pattern")
    assert refused.status == 422
    assert ("event_types", "not a pattern") in refused.form(path).fields
    page = await browser.submit(refused, path, event_types="order.*", name="checkout")
    assert "The key is changed" in page.text
    assert (await browser.api.call("GET", f"/keys/{made['id']}")).json()["event_types"] == [
        "order.*"
    ]
    rotated = await browser.submit(page, f"{path}/rotate", overlap_h="0")
    assert (await browser.api.call("GET", "/whoami", shown_key(rotated))).status_code == 200
    assert (await browser.api.call("GET", "/whoami", made["key"])).status_code == 401
    page = await browser.submit(await browser.get(path), f"{path}/revoke")
    assert "The key is revoked for good." in page.text
    assert not [one for one in page.forms if one.action == f"{path}/revoke"]


async def test_a_change_sends_only_what_differs(browser: Browser) -> None:
    await browser.sign_in("owner")
    made = await browser.api.made("/keys", {"name": "old", "scopes": ["publish"]})
    await browser.api.sql(
        "UPDATE api_keys SET expires_at = now() - interval '1 day' WHERE id = %s", made["id"]
    )
    path = f"{PATH}/{made['id']}"
    page = await browser.submit(await browser.get(path), path, name="new")
    assert page.status == 200, page.text


async def test_an_old_form_takes_back_no_other_change(browser: Browser) -> None:
    await browser.sign_in("owner")
    body = {"name": "old", "scopes": ["publish", "subscribe"], "rooms": [1001, 1000]}
    made = await browser.api.made("/keys", body)
    path = f"{PATH}/{made['id']}"
    page = await browser.get(path)
    assert ("rooms", "1001\n1000") in page.form(path).fields
    narrowed = {"scopes": ["publish"], "networks": ["10.0.0.0/8"], "rooms": None}
    answer = await browser.api.call("PATCH", f"/keys/{made['id']}", json=narrowed)
    assert answer.is_success
    refused = await browser.submit(page, path, name="new", event_types="not a pattern")
    assert refused.status == 422
    changed = await browser.submit(refused, path, event_types="order.*")
    assert "The key is changed" in changed.text
    now = (await browser.api.call("GET", f"/keys/{made['id']}")).json()
    assert (now["name"], now["event_types"]) == ("new", ["order.*"])
    assert {name: now[name] for name in narrowed} == narrowed


async def test_a_key_without_a_scope_is_refused_and_shown_so(browser: Browser) -> None:
    await browser.sign_in("owner")
    made = await browser.api.made("/keys", {"name": "shop", "scopes": ["publish"]})
    path = f"{PATH}/{made['id']}"
    fields = [one for one in (await browser.get(path)).form(path).fields if one[0] != "scopes"]
    refused = await browser.post(path, dict(fields))
    assert refused.status == 422
    assert "scopes" not in dict(refused.form(path).fields)


async def test_only_who_may_everything_sees_keys(browser: Browser) -> None:
    made = await browser.api.made("/keys", {"name": "shop", "scopes": ["publish"]})
    other = await browser.api.made("/keys", {"name": "shop", "scopes": ["publish"]}, "stranger")
    await browser.sign_in("viewer", "operator", "developer")
    token = dict((await browser.get("/console")).forms[-1].fields)["form_token"]
    for path in (PATH, f"{PATH}/{made['id']}", SIGNING):
        assert (await browser.get(path)).status == 403
    for path in (PATH, f"{PATH}/{made['id']}", f"{PATH}/{made['id']}/rotate", SIGNING):
        fields = {"form_token": token, "name": "x", "scopes": "publish", "jwk": "{}"}
        assert (await browser.post(path, fields)).status == 403, path
    await browser.sign_in("owner")
    token = dict((await browser.get("/console")).forms[-1].fields)["form_token"]
    for action in ("", "/rotate", "/revoke"):
        assert (
            await browser.post(f"{PATH}/{other['id']}{action}", {"form_token": token})
        ).status == 404
    assert (await browser.get(f"{PATH}/{other['id']}")).status == 404


async def test_signing_keys_are_registered_and_revoked(browser: Browser) -> None:
    await browser.sign_in("owner")
    page = await browser.get(SIGNING)
    assert "No key is registered" in page.text
    refused = await browser.submit(page, SIGNING, name="sealing", jwk="not json")
    assert refused.status == 422
    assert ("jwk", "not json") in refused.form(SIGNING).fields
    private = {**generate_key("EdDSA").public.to_jwk(), "d": "secret"}
    assert (await browser.submit(refused, SIGNING, jwk=json.dumps(private))).status == 422
    for strange in (r'{"kty": "\ud800"}', "[" * 1200 + "]" * 1200, ""):
        refused = await browser.submit(refused, SIGNING, jwk=strange)
        assert refused.status == 422, strange
        assert "<code>jwk</code>" in refused.html
    jwk = generate_key("ES256").public.to_jwk()
    page = await browser.submit(refused, SIGNING, jwk=json.dumps(jwk))
    assert "The key is registered" in page.text
    (revoke,) = [one.action for one in page.forms if one.action.endswith("/revoke")]
    page = await browser.submit(page, revoke)
    assert "The key is revoked" in page.text
    assert not [one for one in page.forms if one.action.endswith("/revoke")]


async def test_a_hostile_name_is_text(browser: Browser) -> None:
    await browser.sign_in("owner")
    made = await browser.api.made("/keys", {"name": "x", "scopes": ["publish"]})
    await browser.api.sql("UPDATE api_keys SET name = %s WHERE id = %s", HOSTILE, made["id"])
    for path in (PATH, f"{PATH}/{made['id']}"):
        page = await browser.get(path)
        assert SHOWN in page.html
        assert "<script>alert" not in page.html
