"""Read pages of the console as a browser without scripts does: follow links, and send forms."""

import asyncio
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from typing import Any, Final

import httpx

from rooms.console.app import Console
from rooms.console.live import LiveStreams
from rooms.console.sessions import Sessions
from tests.integration.rooms.api.conftest import Api

BASE: Final = "http://rooms.test"
_VOID: Final = {"input", "meta", "link", "br", "hr", "img"}


@dataclass
class HtmlForm:
    """Hold a form: where it goes, and its fields as they are."""

    method: str
    action: str
    fields: list[tuple[str, str]] = field(default_factory=list)
    buttons: list[str] = field(default_factory=list)


class Document(HTMLParser):
    """Hold a page: its text, links and forms."""

    def __init__(self, answer: httpx.Response) -> None:
        super().__init__()
        self.status = answer.status_code
        self.html = answer.text
        self.path = answer.url.raw_path.decode()
        self.links: list[str] = []
        self.forms: list[HtmlForm] = []
        self._parts: list[str] = []
        self._form: HtmlForm | None = None
        self._open: list[str] = []
        self._select: str | None = None
        self._area: list[str] | None = None
        self._area_name = ""
        self._chosen: dict[str, str] = {}
        self.feed(self.html)
        self.close()

    @property
    def text(self) -> str:
        """Return the text that a reader sees, with single spaces."""
        return " ".join(" ".join(self._parts).split())

    def form(self, action: str, **hidden: str) -> HtmlForm:
        """Return the only form that is posted to an action, and has these values."""
        found = [
            one
            for one in self.forms
            if one.action == action
            and one.method == "post"
            and all((n, v) in one.fields for n, v in hidden.items())
        ]
        assert len(found) == 1, (action, hidden, [one.action for one in self.forms])
        return found[0]

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        if tag not in _VOID:
            self._open.append(tag)
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "form":
            self._form = HtmlForm(given.get("method", "get").lower(), given.get("action", ""))
            self.forms.append(self._form)
        elif self._form is not None:
            self._field(tag, given)

    def _field(self, tag: str, given: dict[str, str]) -> None:
        form = self._form
        assert form is not None
        name = given.get("name", "")
        if tag == "input" and name:
            if given.get("type") in {"checkbox", "radio"}:
                if "checked" in given:
                    form.fields.append((name, given.get("value", "on")))
            else:
                form.fields.append((name, given.get("value", "")))
        elif tag == "select":
            self._select = name
        elif tag == "option" and self._select:
            if "selected" in given or self._select not in self._chosen:
                self._chosen[self._select] = given.get("value", "")
        elif tag == "textarea":
            self._area, self._area_name = [], name
        elif tag == "button":
            form.buttons.append(name)

    def handle_endtag(self, tag: str) -> None:
        if tag in self._open:
            while self._open.pop() != tag:
                pass
        if tag == "form":
            self._form = None
        elif tag == "select" and self._select and self._form is not None:
            if self._select in self._chosen:
                self._form.fields.append((self._select, self._chosen[self._select]))
            self._chosen, self._select = {}, None
        elif tag == "textarea" and self._area is not None:
            if self._form is not None:
                self._form.fields.append((self._area_name, "".join(self._area)))
            self._area = None

    def handle_data(self, data: str) -> None:
        if self._area is not None:
            self._area.append(data)
        if not {"script", "style"} & set(self._open):
            self._parts.append(data)


_idle: list[Console] = []
"""Consoles without settings of their own, which only keep their services."""


def _use(console: Console, api: Api) -> None:
    """Let a console serve another API."""
    inner: Any = console
    inner._api = api.app
    state = inner._app.state
    state.parts = replace(
        state.parts, services=api.services, api=api.app, sessions=Sessions(api.services)
    )


class Browser:
    """Look at the console over an API, as one person."""

    def __init__(self, api: Api, console: Console) -> None:
        self.api = api
        self.console = console
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app=console), base_url=BASE)

    @classmethod
    async def open(cls, api: Api) -> "Browser":
        """Look at a console over an API; one takes tenths of a second, so a plain one is used again."""
        settings = api.services.settings
        plain = settings.oidc_issuer is None and not settings.frame_ancestors
        if plain and _idle:
            console = _idle.pop()
            _use(console, api)
        else:
            console = await asyncio.to_thread(Console, api.services, api.app, LiveStreams())
        return cls(api, console)

    async def close(self) -> None:
        """Close it, and leave its console to the next test."""
        await self.http.aclose()
        _idle.append(self.console)

    async def sign_in(self, *roles: str, key: str = "admin", name: str = "ada") -> Document:
        """Sign in by a link with these roles, made by the key of that name."""
        body = {"name": name, "roles": list(roles or ("owner",))}
        link = await self.api.made("/sign-in-links", body, key)
        page = await self.get(link["path"])
        return await self.submit(page, "/console/sign-in")

    async def get(self, path: str, **headers: str) -> Document:
        """Open a page, following redirects."""
        return Document(await self.http.get(path, headers=headers, follow_redirects=True))

    async def submit(
        self, page: Document, action: str, *, where: dict[str, str] | None = None, **fields: str
    ) -> Document:
        """Send a form of a page, with some fields typed over, and follow its redirect.

        `where`: values that distinguish it from other forms with the same action.
        """
        form = page.form(action, **(where or {}))
        known = {name for name, _ in form.fields} | set(form.buttons)
        sent: dict[str, list[str]] = {}
        for name, value in form.fields:
            if name not in fields:
                sent.setdefault(name, []).append(value)
        sent |= {name: [value] for name, value in fields.items()}
        unknown = set(fields) - known
        assert all(name in page.html for name in unknown), (action, unknown)
        return await self.post(action, sent)

    async def post(self, path: str, fields: dict[str, Any], **headers: str) -> Document:
        """Post fields as a browser on a page of this origin does, and follow the redirect."""
        headers = {"Origin": BASE, "Sec-Fetch-Site": "same-origin", **headers}
        answer = await self.http.post(path, data=fields, headers=headers, follow_redirects=True)
        return Document(answer)
