"""Show the public keys by which the organisation signs its messages; register and revoke them."""

from typing import Any, Final

from litestar import Response, get, post
from litestar.params import FromPath

from rooms.console.administration import PATH as ADMINISTRATION
from rooms.console.api_client import ApiProblemError, segment
from rooms.console.event_types import parse_json
from rooms.console.page import Page, PageDep

PATH: Final = f"{ADMINISTRATION}/signing-keys"
DONE: Final = {
    "signing-key-registered": "The key is registered: messages that it signs are accepted.",
    "signing-key-revoked": "The key is revoked; what it signed before is still verified with it.",
}


@get(PATH)
async def list_signing_keys(page: PageDep) -> Response[str]:
    """List the keys, with revoked ones."""
    return await _list(page)


@post(PATH)
async def register_signing_key(page: PageDep) -> Response[Any]:
    """Register a public key, typed or pasted as a JWK."""
    form = await page.form()
    try:
        body = {"name": form.text("name") or "", "jwk": parse_json(form, "jwk")}
        await page.api.post("/signing-keys", body)
    except ApiProblemError as exc:
        return await _list(page, form.values(), exc)
    return page.redirect(PATH, done="signing-key-registered")


@post(f"{PATH}/{{kid:str}}/revoke")
async def revoke_signing_key(page: PageDep, kid: FromPath[str]) -> Response[Any]:
    """Revoke a key for good."""
    await page.form()
    await page.api.delete(f"/signing-keys/{segment(kid)}")
    return page.redirect(PATH, done="signing-key-revoked")


async def _list(
    page: Page, values: dict[str, str] | None = None, error: ApiProblemError | None = None
) -> Response[str]:
    found = await page.api.get("/signing-keys", cursor=page.query("cursor"))
    return page.render("signing_keys.html", refused=error, found=found, values=values or {})


ROUTES: Final = (list_signing_keys, register_signing_key, revoke_signing_key)
