"""Show the event types of a room and their versions, and change them."""

from typing import Any, Final

import msgspec
from litestar import Response, get, post
from litestar.params import FromPath

from rooms.console.api_client import ApiProblemError, segment
from rooms.console.form import Form
from rooms.console.formatting import count_indents
from rooms.console.page import Page, PageDep
from rooms.console.rooms import PATH, ROOM, find_room

_TYPES: Final = f"{ROOM}/event-types"
_TYPE: Final = f"{_TYPES}/{{name:str}}"
DONE: Final = {
    "event-type-created": "The event type is created.",
    "version-added": "The version is added.",
    "version-rewritten": "The schema of the version is replaced.",
    "version-deleted": "The version is deleted.",
    "event-type-deleted": "The event type is deleted.",
}
_UNPROCESSABLE: Final = 422
_VERSIONS: Final = 10
"""Versions of a page: each has its whole schema, to be edited."""
_MAX_INDENTS: Final = 100_000
"""Characters of indents beyond which JSON is edited as it is stored."""
_EXAMPLE_SCHEMA: Final = """{
  "type": "object",
  "properties": {"id": {"type": "string"}},
  "required": ["id"],
  "examples": [{"id": "1"}]
}"""


@get(_TYPES)
async def list_event_types(page: PageDep, room_id: FromPath[str]) -> Response[str]:
    """List the event types of a room."""
    room = await find_room(page, room_id)
    return await _list(page, room, {"name": "", "schema": ""})


@post(_TYPES)
async def create_event_type(page: PageDep, room_id: FromPath[str]) -> Response[Any]:
    """Declare an event type with the schema of its first version."""
    form = await page.form()
    page.require("manage")
    room = await find_room(page, room_id)
    try:
        body = {"name": form.text("name") or "", "schema": _schema(form)}
        made = await page.api.post(f"/rooms/{room['id']}/event-types", body)
    except ApiProblemError as exc:
        return await _list(page, room, form.values(), exc)
    return page.redirect(_path(room, made["name"]), done="event-type-created")


@get(_TYPE)
async def show_event_type(
    page: PageDep, room_id: FromPath[str], name: FromPath[str]
) -> Response[str]:
    """Show the versions of an event type with their schemas and examples."""
    room = await find_room(page, room_id)
    return await _show(page, room, name)


@post(f"{_TYPE}/versions")
async def add_version(page: PageDep, room_id: FromPath[str], name: FromPath[str]) -> Response[Any]:
    """Add a version."""
    form = await page.form()
    page.require("manage")
    room = await find_room(page, room_id)
    try:
        await page.api.post(f"{_api(room, name)}/versions", {"schema": _schema(form)})
    except ApiProblemError as exc:
        return await _show(page, room, name, form.values(), exc)
    return page.redirect(_path(room, name), done="version-added")


@post(f"{_TYPE}/versions/{{version:str}}")
async def rewrite_version(
    page: PageDep, room_id: FromPath[str], name: FromPath[str], version: FromPath[str]
) -> Response[Any]:
    """Replace the schema of a version."""
    form = await page.form()
    page.require("manage")
    room = await find_room(page, room_id)
    try:
        await page.api.put(
            f"{_api(room, name)}/versions/{segment(version)}", {"schema": _schema(form)}
        )
    except ApiProblemError as exc:
        return await _show(page, room, name, form.values(), exc, version=version)
    return page.redirect(_path(room, name), done="version-rewritten")


@post(f"{_TYPE}/versions/{{version:str}}/delete")
async def delete_version(
    page: PageDep, room_id: FromPath[str], name: FromPath[str], version: FromPath[str]
) -> Response[Any]:
    """Delete a version."""
    await page.form()
    page.require("manage")
    room = await find_room(page, room_id)
    try:
        await page.api.delete(f"{_api(room, name)}/versions/{segment(version)}")
    except ApiProblemError as exc:
        return await _show(page, room, name, None, exc)
    return page.redirect(_path(room, name), done="version-deleted")


@post(f"{_TYPE}/delete")
async def delete_event_type(
    page: PageDep, room_id: FromPath[str], name: FromPath[str]
) -> Response[Any]:
    """Delete an event type, once its name was typed."""
    form = await page.form()
    page.require("manage")
    room = await find_room(page, room_id)
    try:
        check_typed(form, "confirm", name)
        await page.api.delete(_api(room, name))
    except ApiProblemError as exc:
        return await _show(page, room, name, None, exc)
    return page.redirect(f"{PATH}/{room['id']}/event-types", done="event-type-deleted")


def check_typed(form: Form, field: str, name: str) -> None:
    """Check that a name was typed. ApiProblemError, as the API refuses a wrong field."""
    if form.text(field) != name:
        raise field_problem(field, "type the name as it is shown, to confirm")


def field_problem(field: str, message: str) -> ApiProblemError:
    """Return the problem of one field of a form."""
    errors = [{"field": field, "message": message}]
    return ApiProblemError(
        _UNPROCESSABLE, {"title": "Invalid request", "detail": "", "errors": errors}
    )


def find_examples(schema: Any) -> list[Any]:
    """Return the examples that a schema names, at most ten."""
    if not isinstance(schema, dict):
        return []
    found = schema.get("examples")
    listed = list(found) if isinstance(found, list) else []
    return [*listed, *([schema["example"]] if "example" in schema else [])][:10]


def parse_json(form: Form, field: str) -> msgspec.Raw:
    """Return the JSON that was typed into a field, with its bytes.

    ApiProblemError: it is none, or nested too deeply to be read.
    """
    text = form.raw(field).strip().encode()
    try:
        # Only looked through: objects and numbers cost up to a thousand times as much, before any
        # limit. The API decodes what it takes.
        return msgspec.json.decode(text, type=msgspec.Raw)
    except RecursionError as exc:
        raise field_problem(field, "is nested too deeply") from exc
    except msgspec.DecodeError as exc:
        raise field_problem(field, f"is not JSON: {exc}") from exc


def _schema(form: Form) -> msgspec.Raw | None:
    return parse_json(form, "schema") if form.text("schema") else None


async def _list(
    page: Page, room: dict[str, Any], values: dict[str, str], error: ApiProblemError | None = None
) -> Response[str]:
    return page.render(
        "event_types.html",
        refused=error,
        room=room,
        found=await page.api.get(f"/rooms/{room['id']}/event-types", cursor=page.query("cursor")),
        values=values,
        example=_EXAMPLE_SCHEMA,
    )


async def _show(
    page: Page,
    room: dict[str, Any],
    name: str,
    values: dict[str, str] | None = None,
    error: ApiProblemError | None = None,
    *,
    version: str | None = None,
) -> Response[str]:
    """`version`: the one whose form was wrong; None: that of a new one."""
    found = await page.api.get(
        f"{_api(room, name)}/versions", cursor=page.query("cursor"), limit=_VERSIONS
    )
    for one in found["items"]:
        one["examples"] = find_examples(one["schema"])
        one["text"] = "" if one["schema"] is None else page_json(one["schema"])
    return page.render(
        "event_type.html",
        refused=error,
        room=room,
        name=name,
        found=found,
        typed_schema=None if values is None else values.get("schema", ""),
        wrong_version=version,
    )


def page_json(value: Any) -> str:
    """Return JSON as a person edits it: with indents, unless they would be most of it."""
    text = msgspec.json.encode(value)
    if count_indents(value) <= _MAX_INDENTS:
        text = msgspec.json.format(text, indent=2)
    return text.decode()


def _api(room: dict[str, Any], name: str) -> str:
    return f"/rooms/{room['id']}/event-types/{segment(name)}"


def _path(room: dict[str, Any], name: str) -> str:
    return f"{PATH}/{room['id']}/event-types/{segment(name)}"


ROUTES: Final = (
    list_event_types,
    create_event_type,
    show_event_type,
    add_version,
    rewrite_version,
    delete_version,
    delete_event_type,
)
