"""Show the organisations of the installation to its operators, and change them."""

from typing import Any, Final

from litestar import Response, get, post
from litestar.params import FromPath

from rooms.console.administration import JOBS_PATH
from rooms.console.administration import PATH as ADMINISTRATION
from rooms.console.api_client import ApiProblemError, segment
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
from rooms.console.keys import FIELDS as KEY_FIELDS
from rooms.console.keys import show_new_key
from rooms.console.page import Page, PageDep

PATH: Final = f"{ADMINISTRATION}/organisations"
FIELDS: Final = (Field("name"), Field("member_id"), Field("contact"))
QUOTAS: Final = tuple(
    Field(name, Kind.NUMBER)
    for name in (
        "messages_per_s",
        "messages_per_day",
        "bytes_per_day",
        "payload_bytes",
        "stored_messages",
        "subscriptions",
        "expiration_ms",
    )
)
DONE: Final = {
    "organisation-created": "The organisation is created. Its first key lets it begin.",
    "organisation-changed": "The organisation is changed.",
    "organisation-suspended": "The organisation is suspended. Its messages are held, none is lost.",
    "organisation-resumed": "The organisation is active again. Held messages are delivered.",
    "organisation-deleting": "A job deletes the organisation. Its keys are refused already.",
    "quotas-changed": "The quotas are changed.",
}


@get(PATH)
async def list_organisations(page: PageDep) -> Response[str]:
    """List organisations, newest first."""
    found = await page.api.get(
        "/organisations",
        name=page.query("name"),
        member_id=page.query("member_id"),
        cursor=page.query("cursor"),
    )
    return page.render("organisations.html", found=found)


@get(f"{PATH}/new")
async def new_organisation(page: PageDep) -> Response[str]:
    """Ask for the fields of an organisation."""
    return _new(page, {})


@post(PATH)
async def create_organisation(page: PageDep) -> Response[Any]:
    """Create an organisation."""
    form = await page.form()
    try:
        made = await page.api.post("/organisations", read_fields(FIELDS, form))
    except ApiProblemError as exc:
        return _new(page, form.values(), exc)
    return page.redirect(f"{PATH}/{made['id']}", done="organisation-created")


@get(f"{PATH}/{{organisation_id:str}}")
async def show_organisation(page: PageDep, organisation_id: FromPath[str]) -> Response[str]:
    """Show an organisation: what it may do, uses and is called."""
    return await _show(page, organisation_id)


@post(f"{PATH}/{{organisation_id:str}}")
async def change_organisation(page: PageDep, organisation_id: FromPath[str]) -> Response[Any]:
    """Change what was changed of its name, member id and contact."""
    form = await page.form()
    try:
        await page.api.patch(
            f"/organisations/{segment(organisation_id)}", read_changes(FIELDS, form)
        )
    except ApiProblemError as exc:
        typed = typed_texts(FIELDS, form)
        return await _show(page, organisation_id, "fields", typed, exc, shown=form.raw(SHOWN))
    return page.redirect(_path(organisation_id), done="organisation-changed")


@post(f"{PATH}/{{organisation_id:str}}/suspend")
async def suspend_organisation(page: PageDep, organisation_id: FromPath[str]) -> Response[Any]:
    """Suspend it, with a reason that its members read."""
    form = await page.form()
    try:
        await page.api.post(
            f"/organisations/{segment(organisation_id)}/suspend", {"reason": form.text("reason")}
        )
    except ApiProblemError as exc:
        return await _show(page, organisation_id, "suspend", form.values(), exc)
    return page.redirect(_path(organisation_id), done="organisation-suspended")


@post(f"{PATH}/{{organisation_id:str}}/resume")
async def resume_organisation(page: PageDep, organisation_id: FromPath[str]) -> Response[Any]:
    """Let it continue."""
    await page.form()
    await page.api.post(f"/organisations/{segment(organisation_id)}/resume")
    return page.redirect(_path(organisation_id), done="organisation-resumed")


@post(f"{PATH}/{{organisation_id:str}}/delete")
async def delete_organisation(page: PageDep, organisation_id: FromPath[str]) -> Response[Any]:
    """Start the job that deletes it, once its name was typed."""
    form = await page.form()
    try:
        job = await page.api.call(
            "DELETE",
            f"/organisations/{segment(organisation_id)}",
            query={"confirm": form.text("confirm") or ""},
        )
    except ApiProblemError as exc:
        return await _show(page, organisation_id, "delete", form.values(), exc)
    if page.me.may("manage", "operate", "view"):
        return page.redirect(f"{JOBS_PATH}/{job['job_id']}")
    return page.redirect(PATH, done="organisation-deleting")


@post(f"{PATH}/{{organisation_id:str}}/quotas")
async def change_quotas(page: PageDep, organisation_id: FromPath[str]) -> Response[Any]:
    """Set the limits that were changed; an emptied field removes one."""
    form = await page.form()
    try:
        await page.api.patch(
            f"/organisations/{segment(organisation_id)}/quotas", read_changes(QUOTAS, form)
        )
    except ApiProblemError as exc:
        typed = typed_texts(QUOTAS, form)
        return await _show(page, organisation_id, "quotas", typed, exc, shown=form.raw(SHOWN))
    return page.redirect(_path(organisation_id), done="quotas-changed")


@post(f"{PATH}/{{organisation_id:str}}/keys")
async def create_key(page: PageDep, organisation_id: FromPath[str]) -> Response[Any]:
    """Create one of its keys, and show the text once."""
    form = await page.form()
    try:
        made = await page.api.post(
            f"/organisations/{segment(organisation_id)}/keys", read_fields(KEY_FIELDS, form)
        )
    except ApiProblemError as exc:
        return await _show(
            page, organisation_id, "key", form.values(), exc, chosen=form.many("scopes")
        )
    return show_new_key(page, made, back=_path(organisation_id))


def _path(organisation_id: str) -> str:
    return f"{PATH}/{segment(organisation_id)}"


def _new(page: Page, values: dict[str, str], error: ApiProblemError | None = None) -> Response[str]:
    return page.render("organisation_new.html", refused=error, values=values)


async def _show(
    page: Page,
    organisation_id: str,
    form: str | None = None,
    typed: dict[str, str] | None = None,
    error: ApiProblemError | None = None,
    *,
    shown: str = "",
    chosen: list[str] | None = None,
) -> Response[str]:
    """Render the page, with what was typed into one of its forms, and the problem with it.

    `shown`: what that form showed; `chosen`: the scopes that were ticked.
    """
    found = await page.api.get(f"/organisations/{segment(organisation_id)}")
    quotas = await page.api.get(f"/organisations/{segment(organisation_id)}/quotas")
    values: dict[str, dict[str, Any]] = {
        "fields": to_texts(FIELDS, found),
        "quotas": to_texts(QUOTAS, quotas["limits"]),
        "suspend": {},
        "delete": {},
        "key": {},
    }
    shown_by = {name: shown_texts(values[name]) for name in ("fields", "quotas")}
    wrong: dict[str, dict[str, str]] = {name: {} for name in values}
    if form is not None and error is not None:
        values[form] = dict(typed or {})
        shown_by[form] = shown
        wrong[form] = error.fields
    return page.render(
        "organisation.html",
        refused=error,
        one=found,
        quotas=quotas,
        values=values,
        shown=shown_by,
        wrong=wrong,
        open_form=form,
        chosen=["admin"] if chosen is None else chosen,
        is_own=organisation_id == page.me.organisation_id,
    )


ROUTES: Final = (
    list_organisations,
    new_organisation,
    create_organisation,
    show_organisation,
    change_organisation,
    suspend_organisation,
    resume_organisation,
    delete_organisation,
    change_quotas,
    create_key,
)
