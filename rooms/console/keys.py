"""Show the organisation's API keys, and the public keys by which it signs its messages.

API keys are created, changed, rotated and revoked; signing keys are registered and revoked.
"""

from typing import Any, Final

from litestar import Response, get, post
from litestar.params import FromPath

from rooms.console.administration import PATH as ADMINISTRATION
from rooms.console.api_client import ApiProblemError, segment
from rooms.console.event_types import parse_json
from rooms.console.fields import (
    SHOWN,
    Field,
    Kind,
    read_changes,
    read_fields,
    shown_texts,
    to_texts,
    typed_texts,
)
from rooms.console.page import Page, PageDep

PATH: Final = f"{ADMINISTRATION}/keys"
FIELDS: Final = (
    Field("name"),
    Field("scopes", Kind.MANY),
    Field("application"),
    Field("expires_at"),
    Field("rooms", Kind.NUMBER_LINES),
    Field("event_types", Kind.LINES),
    Field("subscriptions", Kind.LINES),
    Field("networks", Kind.LINES),
)
SIGNING_PATH: Final = f"{ADMINISTRATION}/signing-keys"
DONE: Final = {
    "key-changed": "The key is changed; processes know it within a second.",
    "key-revoked": "The key is revoked for good.",
    "signing-key-registered": "The key is registered: messages that it signs are accepted.",
    "signing-key-revoked": "The key is revoked; what it signed before is still verified with it.",
}


@get(PATH)
async def list_keys(page: PageDep) -> Response[str]:
    """List keys, newest first, with revoked ones."""
    found = await page.api.get(
        "/keys",
        name=page.query("name"),
        prefix=page.query("prefix"),
        cursor=page.query("cursor"),
    )
    return page.render("keys.html", found=found, now=_now(page))


@get(f"{PATH}/new")
async def new_key(page: PageDep) -> Response[str]:
    """Ask for the fields of a key."""
    return _new(page, {}, ["publish"])


@post(PATH)
async def create_key(page: PageDep) -> Response[Any]:
    """Create a key, and show its text once."""
    form = await page.form()
    try:
        made = await page.api.post("/keys", read_fields(FIELDS, form))
    except ApiProblemError as exc:
        return _new(page, form.values(), form.many("scopes"), exc)
    return show_new_key(page, made, back=PATH)


@get(f"{PATH}/{{key_id:str}}")
async def show_key(page: PageDep, key_id: FromPath[str]) -> Response[str]:
    """Show what a key may do, and when it was used."""
    return await _show(page, key_id)


@post(f"{PATH}/{{key_id:str}}")
async def change_key(page: PageDep, key_id: FromPath[str]) -> Response[Any]:
    """Change what a key may do: only the fields that were changed are sent."""
    form = await page.form()
    page.require("admin")
    changes = read_changes(FIELDS, form)
    try:
        if changes:
            await page.api.patch(f"/keys/{segment(key_id)}", changes)
    except ApiProblemError as exc:
        return await _show(page, key_id, typed_texts(FIELDS, form), form.raw(SHOWN), exc)
    return page.redirect(f"{PATH}/{segment(key_id)}", done="key-changed")


@post(f"{PATH}/{{key_id:str}}/rotate")
async def rotate_key(page: PageDep, key_id: FromPath[str]) -> Response[Any]:
    """Give a key a new text, and show it once."""
    form = await page.form()
    seconds = in_seconds(form.number("overlap_h"), 3600)
    try:
        made = await page.api.post(
            f"/keys/{segment(key_id)}/rotate", {} if seconds is None else {"overlap_s": seconds}
        )
    except ApiProblemError as exc:
        return await _show(page, key_id, error=exc)
    return show_new_key(page, made, back=f"{PATH}/{segment(key_id)}")


@post(f"{PATH}/{{key_id:str}}/revoke")
async def revoke_key(page: PageDep, key_id: FromPath[str]) -> Response[Any]:
    """Revoke a key for good."""
    await page.form()
    try:
        await page.api.delete(f"/keys/{segment(key_id)}")
    except ApiProblemError as exc:
        return await _show(page, key_id, error=exc)
    return page.redirect(f"{PATH}/{segment(key_id)}", done="key-revoked")


def show_new_key(page: Page, made: dict[str, Any], *, back: str) -> Response[str]:
    """Render the only page that shows the text of a key."""
    return page.render("key_created.html", http_status=201, made=made, back=back)


def in_seconds(value: float | str | None, unit_s: int) -> int | str | None:
    """Return a time in seconds; what is no number goes to the API, which refuses it."""
    return round(value * unit_s) if isinstance(value, int | float) else value


def _now(page: Page) -> str:
    """Return the time as the API writes times, to compare them."""
    return page.format.now.isoformat().replace("+00:00", "Z")


def _new(
    page: Page, values: dict[str, str], chosen: list[str], error: ApiProblemError | None = None
) -> Response[str]:
    return page.render("key_new.html", refused=error, values=values, chosen=chosen)


async def _show(
    page: Page,
    key_id: str,
    values: dict[str, str] | None = None,
    shown: str = "",
    error: ApiProblemError | None = None,
) -> Response[str]:
    """`values`: what was typed into the form that `shown` describes; None: the key's own."""
    found = await page.api.get(f"/keys/{segment(key_id)}")
    if values is None:
        values = to_texts(FIELDS, found)
        shown = shown_texts(values)
    return page.render(
        "key.html",
        refused=error,
        one=found,
        now=_now(page),
        values=values,
        shown=shown,
        chosen=values["scopes"].split("\n"),
    )


@get(SIGNING_PATH)
async def list_signing_keys(page: PageDep) -> Response[str]:
    """List the keys, with revoked ones."""
    return await _list_signing_keys(page)


@post(SIGNING_PATH)
async def register_signing_key(page: PageDep) -> Response[Any]:
    """Register a public key, typed or pasted as a JWK."""
    form = await page.form()
    try:
        body = {"name": form.text("name") or "", "jwk": parse_json(form, "jwk")}
        await page.api.post("/signing-keys", body)
    except ApiProblemError as exc:
        return await _list_signing_keys(page, form.values(), exc)
    return page.redirect(SIGNING_PATH, done="signing-key-registered")


@post(f"{SIGNING_PATH}/{{kid:str}}/revoke")
async def revoke_signing_key(page: PageDep, kid: FromPath[str]) -> Response[Any]:
    """Revoke a key for good."""
    await page.form()
    await page.api.delete(f"/signing-keys/{segment(kid)}")
    return page.redirect(SIGNING_PATH, done="signing-key-revoked")


async def _list_signing_keys(
    page: Page, values: dict[str, str] | None = None, error: ApiProblemError | None = None
) -> Response[str]:
    found = await page.api.get("/signing-keys", cursor=page.query("cursor"))
    return page.render("signing_keys.html", refused=error, found=found, values=values or {})


ROUTES: Final = (
    list_keys,
    new_key,
    create_key,
    show_key,
    change_key,
    rotate_key,
    revoke_key,
    list_signing_keys,
    register_signing_key,
    revoke_signing_key,
)
