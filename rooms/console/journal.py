"""Show the journal: who changed what, what was refused, and whether its chain is whole."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from litestar import Response, get
from litestar.response import Stream

from rooms.console.administration import PATH as ADMINISTRATION
from rooms.console.api_client import ApiProblemError, segment
from rooms.console.filters import to_utc
from rooms.console.page import DOWNLOAD, Page, PageDep
from rooms.console.subscriptions import PATH as SUBSCRIPTIONS

PATH: Final = f"{ADMINISTRATION}/journal"
ALL: Final = "*"
_FILTERS: Final = ("actor", "action", "object", "outcome")
_TYPES: Final = {"ndjson": "application/x-ndjson", "csv": "text/csv; charset=utf-8"}
_SUBSCRIPTIONS: Final = "/v1/subscriptions/"
_MAX_SHOWN: Final = 60
"""Differences of one entry; its export has all."""
_MAX_DEPTH: Final = 6
DONE: Final[dict[str, str]] = {}


@get(PATH)
async def list_journal(page: PageDep) -> Response[str]:
    """List entries, newest first, by filters."""
    filters = {name: page.query(name) for name in _FILTERS}
    found = await page.api.get(
        "/journal",
        since=to_utc(page, page.query("since")),
        until=to_utc(page, page.query("until")),
        organisation_id=_whose(page),
        cursor=page.query("cursor"),
        **filters,
    )
    return page.render(
        "journal.html",
        found=found,
        changes={
            one["id"]: list(differences(one["before"], one["after"])) for one in found["items"]
        },
        histories={one["id"]: _history_of(page, one) for one in found["items"]},
        whose=_whose(page) or "",
    )


def _history_of(page: Page, entry: Mapping[str, Any]) -> str | None:
    """Return the page with the history of an entry's subscription, which outlasts it.

    None: the entry is about something else, or the viewer's organisation may not read it.
    """
    _, found, rest = entry["object"].partition(_SUBSCRIPTIONS)
    own = entry["organisation_id"] == page.me.organisation_id
    if not (found and rest and own):
        return None
    return f"{SUBSCRIPTIONS}/{segment(rest.partition('/')[0])}/history"


@get(f"{PATH}/verify")
async def verify_journal(page: PageDep) -> Response[str]:
    """Check every hash and number of one organisation's chain, and say what was found."""
    try:
        report = await page.api.get("/journal/verify", organisation_id=_whose(page))
    except ApiProblemError as exc:
        return page.render(
            "journal_verified.html", http_status=exc.status, report=None, problem=exc.problem
        )
    return page.render("journal_verified.html", report=report)


@get(f"{PATH}/export", opt={DOWNLOAD: True})
async def export_journal(page: PageDep) -> Stream:
    """Stream one organisation's whole journal as NDJSON or CSV."""
    kind = page.query("format") or "ndjson"
    rows = await page.api.stream("/journal/export", format=kind, organisation_id=_whose(page))
    return Stream(
        rows,
        media_type=_TYPES.get(kind, "text/plain"),
        headers={"Content-Disposition": f'attachment; filename="journal.{kind}"'},
    )


def _whose(page: Page) -> str | None:
    """Return whose journal is meant: the own one, unless the viewer may only read the others'."""
    given = page.query("organisation_id")
    if given is None and not page.me.may("audit"):
        return ALL
    return given


def differences(before: Any, after: Any) -> Iterator[tuple[str, str, str]]:
    """Yield (field, before, after) of what an entry says; at most 60.

    `before` has only what was changed, so that a field that only `after` has was given, too.
    """
    old, new = dict(_flat(before)), dict(_flat(after))
    count = 0
    for name in dict.fromkeys((*old, *new)):
        if name in old and name in new and old[name] == new[name]:
            continue
        if count == _MAX_SHOWN:
            yield "…", "", ""
            return
        count += 1
        yield name, old.get(name, ""), new.get(name, "")


def _flat(value: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yield the fields below a value, with dots in the names of inner ones."""
    if isinstance(value, Mapping) and value and depth < _MAX_DEPTH:
        for inner, one in value.items():
            yield from _flat(one, f"{name}.{inner}" if name else str(inner), depth + 1)
    elif isinstance(value, list) and all(not isinstance(one, dict | list) for one in value):
        yield name, ", ".join(_word(one) for one in value) or "[]"
    elif isinstance(value, list) and depth < _MAX_DEPTH:
        for index, one in enumerate(value):
            yield from _flat(one, f"{name}[{index}]", depth + 1)
    elif value is not None or name:
        yield name, _word(value)


def _word(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case _:
            return str(value)


ROUTES: Final = (list_journal, verify_journal, export_journal)
