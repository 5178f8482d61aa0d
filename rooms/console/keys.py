"""Show the organisation's API keys; create, change, rotate and revoke them."""

from typing import Any, Final

from litestar import Response, get, post
from litestar.params import FromPath

from rooms.console.administration import PATH as ADMINISTRATION
from rooms.console.api_client import ApiProblemError, segment
from rooms.console.fields import whole_number
from rooms.console.form import Form
from rooms.console.page import Page, PageDep

PATH: Final = f"{ADMINISTRATION}/keys"
_LISTS: Final = ("rooms", "event_types", "subscriptions", "networks")
DONE: Final = {
    "key-changed": "The key is changed; processes know it within a second.",
    "key-revoked": "The key is revoked for good.",
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
        made = await page.api.post("/keys", key_fields(form))
    except ApiProblemError as exc:
        return _new(page, form.values(), form.many("scopes"), exc)
    return show_new_key(page, made, back=PATH)


@get(f"{PATH}/{{key_id:str}}")
async def show_key(page: PageDep, key_id: FromPath[str]) -> Response[str]:
    """Show what a key may do, and when it was used."""
    return await _show(page, key_id)


@post(f"{PATH}/{{key_id:str}}")
async def change_key(page: PageDep, key_id: FromPath[str]) -> Response[Any]:
    """Change what a key may do: only the fields that differ are sent."""
    form = await page.form()
    now = await page.api.get(f"/keys/{segment(key_id)}")
    wanted = key_fields(form)
    shown = _as_typed(now)
    changes = {
        name: value
        for name, value in wanted.items()
        if (sorted(value) != now["scopes"] if name == "scopes" else _typed(value) != shown[name])
    }
    try:
        if changes:
            await page.api.patch(f"/keys/{segment(key_id)}", changes)
    except ApiProblemError as exc:
        return await _show(page, key_id, form.values(), form.many("scopes"), exc)
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


def key_fields(form: Form) -> dict[str, Any]:
    """Return the fields of a key as they were typed; null where a restriction is left out."""
    fields: dict[str, Any] = {
        "name": form.text("name") or "",
        "scopes": form.many("scopes"),
        "application": form.text("application"),
        "expires_at": form.text("expires_at"),
    }
    fields |= {name: form.lines(name) or None for name in _LISTS}
    if fields["rooms"] is not None:
        fields["rooms"] = [whole_number(one) for one in fields["rooms"]]
    return fields


def in_seconds(value: float | str | None, unit_s: int) -> int | str | None:
    """Return a time in seconds; what is no number goes to the API, which refuses it."""
    return round(value * unit_s) if isinstance(value, int | float) else value


def _typed(value: Any) -> str:
    """Return a value as the form shows it."""
    if value is None:
        return ""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _now(page: Page) -> str:
    """Return the time as the API writes times, to compare them."""
    return page.format.now.isoformat().replace("+00:00", "Z")


def _as_typed(key: dict[str, Any]) -> dict[str, str]:
    return {
        name: _typed(key[name]) for name in ("name", "scopes", "application", "expires_at", *_LISTS)
    }


def _new(
    page: Page, values: dict[str, str], chosen: list[str], error: ApiProblemError | None = None
) -> Response[str]:
    return page.render("key_new.html", refused=error, values=values, chosen=chosen)


async def _show(
    page: Page,
    key_id: str,
    values: dict[str, str] | None = None,
    chosen: list[str] | None = None,
    error: ApiProblemError | None = None,
) -> Response[str]:
    found = await page.api.get(f"/keys/{segment(key_id)}")
    return page.render(
        "key.html",
        refused=error,
        one=found,
        now=_now(page),
        values=values or _as_typed(found),
        chosen=chosen or found["scopes"],
    )


ROUTES: Final = (list_keys, new_key, create_key, show_key, change_key, rotate_key, revoke_key)
