"""Give the handler of a page the things it needs: the viewer, the API, the language, rendering."""

import asyncio
import gettext
from collections.abc import Awaitable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast
from urllib.parse import parse_qsl, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined, pass_context
from jinja2.runtime import Context, Macro
from litestar import Request, Response
from litestar.di import NamedDependency
from litestar.params import SkipValidation
from litestar.response import Redirect
from markupsafe import Markup

from rooms.api.deps import ApiServices
from rooms.api.fast_routes import App
from rooms.api.pagination import MAX_LIMIT
from rooms.api.sessions import PORTAL_PATH
from rooms.console import charts
from rooms.console.api_client import ApiProblemError, InProcessApi, segment, wrong_fields
from rooms.console.assets import Asset
from rooms.console.form import Form, read_form
from rooms.console.formatting import (
    LANGUAGES,
    Formatter,
    choose_language,
    direction,
    find_zone,
    pretty_json,
    sentence,
    visible,
)
from rooms.console.labels import label_of, last_answer
from rooms.console.problem_texts import translate
from rooms.console.sessions import (
    Sessions,
    check_origin,
    check_token,
    form_token,
    is_portal_path,
    read_preference,
    session_key,
)
from rooms.domain.ids import KeyId
from rooms.domain.state_machine import Scope
from rooms.errors import ForbiddenError, MalformedError, UnauthenticatedError

if TYPE_CHECKING:
    from rooms.console.oidc import OidcSignIn

IdT = TypeVar("IdT", int, str)

HTML: Final = "text/html"
_SECTIONS: Final = {
    **dict.fromkeys(("directory", "messages"), "rooms"),
    **dict.fromkeys(("queues", "magazines"), "sideline"),
    "deliveries": "subscriptions",
    "jobs": "administration",
}
"""The section of pages whose address is not below that of their section."""
FRAGMENT_HEADER: Final = b"x-rooms-fragment"
"""Set where only the live part of an open page is wanted; such a request extends no session."""
HOME: Final = "/console"
PORTAL: Final = PORTAL_PATH
"""Where pages are that other sites may frame."""
PAGE_STATE: Final = "page"
"""Where a request keeps its page, so that an error is shown on it."""
PUBLIC: Final = "public"
"""The key in a handler's `opt` for pages that need no session."""
DOWNLOAD: Final = "download"
"""The key in a handler's `opt` for what is a file or a stream, and no page: it has no live part."""
MAX_FORM_BYTES: Final = 2 * 1024 * 1024
MAX_PUBLIC_FORM_BYTES: Final = 16 * 1024
"""Bytes of a form that needs no session: anyone may send it."""
_NOT_ALLOWED: Final = frozenset({403, 404})
_THEMES: Final = ("light", "dark")


@dataclass(frozen=True, kw_only=True)
class ConsoleParts:
    """Hold what all pages of a process share."""

    services: ApiServices
    api: App
    environment: Environment
    assets: Mapping[str, Asset]
    translations: Mapping[str, gettext.NullTranslations]
    sessions: Sessions
    done_texts: Mapping[str, str]
    """The text that a page shows after an action, by the code in its address."""
    oidc: "OidcSignIn | None" = None
    """Sign-in at an OpenID Connect provider; None: it is not set up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Viewer:
    """Describe the person who looks: as `GET /v1/whoami` does."""

    name: str
    organisation: str
    organisation_id: str
    scopes: frozenset[Scope]
    session_id: str
    restricted: bool
    application: str | None = None
    subscriptions: tuple[str, ...] | None = None
    """The only ones that the session is for; None: all that its rooms allow."""
    is_portal: bool = False

    def may(self, *scopes: str) -> bool:
        """Return whether one of these scopes is theirs; `admin` has all but `platform`."""
        wanted = {Scope(scope) for scope in scopes}
        return not self.scopes.isdisjoint(wanted) or (
            Scope.ADMIN in self.scopes and wanted != {Scope.PLATFORM}
        )


@dataclass
class Page:
    """Serve one request: call the API as the viewer, and render a template."""

    request: Request[Any, Any, Any]
    parts: ConsoleParts
    key: str | None
    api: InProcessApi
    language: str
    format: Formatter
    viewer: Viewer | None = None
    _form: dict[str, list[str]] | None = field(default=None, init=False)

    @property
    def is_fragment(self) -> bool:
        """Return whether only the live part of the page is asked for."""
        return self.request.headers.get(FRAGMENT_HEADER.decode()) is not None

    @property
    def is_portal(self) -> bool:
        """Return whether this is a page of a portal."""
        return is_portal_path(self.request.scope["path"])

    @property
    def root(self) -> str:
        """Return where the addresses of the pages begin that this one leads to."""
        return PORTAL if self.is_portal else HOME

    @property
    def subscriptions_path(self) -> str:
        """Return the address of the list of subscriptions."""
        return PORTAL if self.is_portal else f"{HOME}/subscriptions"

    def command(self, text: str) -> str | None:
        """Return a command to show; None in a portal, whose people have no command line."""
        return None if self.is_portal else text

    @property
    def me(self) -> Viewer:
        """Return the viewer, who is signed in."""
        assert self.viewer is not None
        return self.viewer

    def require(self, *scopes: str) -> None:
        """Refuse what none of these scopes is theirs for, before anything is read for it.

        The API refuses it, too. ForbiddenError.
        """
        if not self.me.may(*scopes):
            raise ForbiddenError(f"this needs the scope {' or '.join(scopes)}")

    def text(self, message: str, **values: Any) -> str:
        """Return a text of the catalogue in the viewer's language, `%(name)s` filled in."""
        translated = self.parts.translations[self.language].gettext(message)
        return translated % values if values else translated

    def label_of(self, code: str) -> str:
        """Return the words for a code of the API, in the viewer's language."""
        return self.text(label_of(code))

    @property
    def section(self) -> str:
        """Return the address of the section in the header that this page belongs to."""
        name = self.request.scope["path"].removeprefix(HOME).split("/")[1:2]
        return "/".join([HOME, *(_SECTIONS.get(one, one) for one in name)])

    def sections(self) -> list[tuple[str, str]]:
        """Return the pages that the header links to: those that the viewer may read."""
        me, found = self.me, [(HOME, self.text("Home"))]
        if me.may("view", "manage", "operate", "publish", "subscribe"):
            found.append((f"{HOME}/rooms", self.text("Rooms")))
        if me.may("view", "manage", "operate", "subscribe"):
            found.append((f"{HOME}/subscriptions", self.text("Subscriptions")))
        if me.may("view", "manage", "operate"):
            found.append((f"{HOME}/sideline", self.text("Sideline")))
            found.append((f"{HOME}/analysis", self.text("Analysis")))
        found.append((f"{HOME}/administration", self.text("Administration")))
        return found

    def done_text(self, code: str) -> str | None:
        """Return what to say after an action; None: the code is unknown."""
        return self.parts.done_texts.get(code) and self.text(self.parts.done_texts[code])

    def query(self, name: str) -> str | None:
        """Return a parameter of the page's address; empty ones are not there."""
        return self.request.query_params.get(name) or None

    async def form(self) -> Form:
        """Return the fields of a form that this session's page has sent.

        ForbiddenError: it is not from a page of this session. MalformedError, TooLargeError.
        """
        if self._form is None:
            is_public = self.request.route_handler.opt.get(PUBLIC)
            limit = MAX_PUBLIC_FORM_BYTES if is_public else MAX_FORM_BYTES
            self._form = await read_form(self.request, limit)
            check_origin(self.request.scope)
            if self.key is not None:
                check_token(self.key, self._form.get("form_token", [""])[0])
        return Form(self._form)

    def render(
        self,
        template: str,
        *,
        refused: ApiProblemError | None = None,
        http_status: int = 200,
        **context: Any,
    ) -> Response[str]:
        """Return a page, or its live part; with what was `refused`: problem and wrong fields."""
        values = {
            **self._common(),
            "problem": None if refused is None else refused.problem,
            "wrong": {name: self.text(one) for name, one in wrong_fields(refused).items()},
            **context,
        }
        if values["problem"] is not None:
            values["problem"] = translate(values["problem"], self.text)
        http_status = http_status if refused is None else refused.status
        found = self.parts.environment.get_template(template)
        if self.is_fragment:
            if "live" not in found.blocks:
                return Response("", media_type=HTML, status_code=204)
            rendered = "".join(found.blocks["live"](found.new_context(values)))
        else:
            rendered = found.render(values)
        return Response(rendered, media_type=HTML, status_code=http_status)

    async def optional(self, path: str, /, **query: Any) -> Any:
        """Return the JSON of an answer; None where the viewer may not read it."""
        try:
            return await self.api.get(path, **query)
        except ApiProblemError as exc:
            if exc.status in _NOT_ALLOWED:
                return None
            raise

    async def room_names(self, ids: Iterable[int | None]) -> dict[int, str]:
        """Return the names of the rooms that the viewer may read, by id: own ones and of others."""
        wanted = {one for one in ids if one is not None}
        names = await self._names("/rooms", wanted)
        return names | await self._names("/rooms", wanted - names.keys(), shared=True)

    async def subscription_names(self, ids: Iterable[str | None]) -> dict[str, str]:
        """Return the names of the organisation's own subscriptions, by id."""
        return await self._names("/subscriptions", {one for one in ids if one is not None})

    async def _names(self, path: str, ids: Collection[IdT], **query: Any) -> dict[IdT, str]:
        names: dict[IdT, str] = {}
        ordered = sorted(ids)
        for first in range(0, len(ordered), MAX_LIMIT):
            asked = ",".join(map(str, ordered[first : first + MAX_LIMIT]))
            found = await self.optional(path, id=asked, limit=MAX_LIMIT, **query)
            names |= {} if found is None else {one["id"]: one["name"] for one in found["items"]}
        return names

    def redirect(
        self, path: str, *, done: str | None = None, refused: str | None = None
    ) -> Redirect:
        """Send the browser to another page of the console.

        `done` names what was done, `refused` why nothing was. A page of a portal leads to the same
        page of the portal.
        """
        if self.is_portal and not is_portal_path(path.partition("?")[0]):
            path = PORTAL + path.removeprefix(HOME)
        said = {"done": done, "refused": refused}
        given = {name: code for name, code in said.items() if code is not None}
        if given:
            path = f"{path}{'&' if '?' in path else '?'}{urlencode(given)}"
        return Redirect(path, status_code=303)

    def _common(self) -> dict[str, Any]:
        translations = self.parts.translations[self.language]
        theme = read_preference(self.request.scope, "theme")
        path = self.request.scope["path"]
        return {
            "page": self,
            "viewer": self.viewer,
            "form_token": None if self.key is None else form_token(self.key),
            "translations": translations,
            "language": self.language,
            "languages": LANGUAGES,
            "direction": direction(self.language),
            # In the frame of another site, its colours decide.
            "theme": theme if theme in _THEMES and not self.is_portal else "auto",
            "format": self.format,
            "example_time": self.format.now - timedelta(minutes=3),
            "charts": charts,
            "assets": self.parts.assets,
            "path": path,
            "root": self.root,
            "query": self.request.query_params,
            "done": self.query("done"),
            "refused": self.query("refused"),
            "problem": None,
            "with_query": lambda **changes: with_query(
                path, self.request.scope["query_string"].decode("latin-1"), changes
            ),
        }


PageDep = NamedDependency[SkipValidation[Page]]
"""The argument `page` of a handler."""


def with_query(path: str, present: str, changes: Mapping[str, Any]) -> str:
    """Return the address of a page with parameters changed; None removes one."""
    values: dict[str, Any] = {**dict(parse_qsl(present)), **changes}
    for said_once in ("done", "refused"):
        values.pop(said_once, None)
    kept = {name: value for name, value in values.items() if value not in {None, ""}}
    return f"{path}?{urlencode(kept)}" if kept else path


@cache
def make_environment() -> Environment:
    """Return the environment of the templates: everything is escaped, and unknown names fail.

    All consoles of a process share it, since reading and compiling the templates takes a second.
    """
    environment = Environment(
        loader=PackageLoader("rooms.console"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=visible,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
        extensions=["jinja2.ext.i18n", "jinja2.ext.do"],
    )
    environment.filters["json"] = pretty_json
    environment.filters["segment"] = segment
    environment.filters["sentence"] = sentence
    environment.filters["typed"] = _typed
    environment.globals.update(gettext=_gettext, ngettext=_ngettext, _=_gettext)
    environment.globals.update(label_of=_label_of, last_answer=_last_answer)
    # an attribute of the extension
    environment.extend(newstyle_gettext=True)
    # As globals, because the live part of a page is rendered without the imports of its template.
    macros = environment.get_template("parts.html").module
    environment.globals.update(
        {name: macro for name, macro in vars(macros).items() if isinstance(macro, Macro)}
    )
    return environment


def load_templates(environment: Environment) -> None:
    """Read and compile every template, so that no page does it between messages of the service."""
    for name in environment.list_templates():
        environment.get_template(name)


def _typed(text: object) -> Markup:
    """Return the value of a field, escaped and otherwise as it is: a form must send it back so."""
    return Markup.escape(text)


@pass_context
def _gettext(context: Context, message: str, /, **values: Any) -> Markup:
    """Return a text of the catalogue; values are escaped, and without control characters."""
    return _fill(context["translations"].gettext(message), values)


@pass_context
def _ngettext(context: Context, singular: str, plural: str, count: int, /, **values: Any) -> Markup:
    return _fill(context["translations"].ngettext(singular, plural, count), values | {"num": count})


@pass_context
def _label_of(context: Context, code: str, /) -> str:
    """Return the words for a code of the API, in the language of the page."""
    words: str = context["translations"].gettext(label_of(code)) if code else ""
    return words


@pass_context
def _last_answer(context: Context, observed: Mapping[str, Any], /) -> str:
    """Return what an endpoint answered last, in the language of the page."""
    return last_answer(observed, context["translations"].gettext)


def _fill(text: str, values: Mapping[str, Any]) -> Markup:
    return Markup(text) % {name: visible(value) for name, value in values.items()}  # noqa: S704 - our own texts


def unsigned_page(request: Request[Any, Any, Any]) -> Page:
    """Return a page without a viewer."""
    parts: ConsoleParts = request.app.state.parts
    # From here on the client is the browser, also behind a trusted proxy.
    request.scope["client"] = parts.services.callers.source(
        dict(reversed([*request.scope["headers"]])), request.scope.get("client")
    )
    key = session_key(request.scope)
    language = choose_language(
        read_preference(request.scope, "language"), request.headers.get("accept-language", "")
    )
    zone = find_zone(read_preference(request.scope, "time_zone"))
    return Page(
        request=request,
        parts=parts,
        key=key,
        api=InProcessApi(parts.api, cast("dict[str, Any]", request.scope), key),
        language=language,
        format=Formatter(
            language,
            zone,
            datetime.now(UTC),
            exact_times=read_preference(request.scope, "times") == "exact",
        ),
    )


async def all_parts(*parts: Awaitable[Any]) -> list[Any]:
    """Read parts of a page at once, which mostly wait for PostgreSQL. Raise the first error."""
    found = await asyncio.gather(*parts, return_exceptions=True)
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return found


async def no_part() -> None:
    """Stand for a part that a page does not have for its viewer."""


async def provide_page(request: Request[Any, Any, Any]) -> Page:
    """Return what a page's handler gets. UnauthenticatedError: the page needs a session."""
    page = unsigned_page(request)
    request.state[PAGE_STATE] = page
    if page.is_fragment and request.route_handler.opt.get(DOWNLOAD):
        # Its whole length would be held in memory.
        raise MalformedError("this is no page: it has no live part")
    key = page.key
    if key is not None:
        page.viewer = await find_viewer(page.api)
        if page.viewer is not None and page.viewer.is_portal != page.is_portal:
            page.viewer = None  # a key of one kind in the cookie of the other
        if page.viewer is None:
            page.key = None
        elif not page.is_fragment:
            # An open page that only refreshes itself is not used.
            await page.parts.sessions.extend(KeyId(page.viewer.session_id))
    if page.viewer is None and not request.route_handler.opt.get(PUBLIC):
        raise UnauthenticatedError("sign in to see this page")
    return page


async def find_viewer(api: InProcessApi) -> Viewer | None:
    """Return the person whose session this is; None: it has ended."""
    try:
        found = await api.get("/whoami")
    except ApiProblemError as exc:
        if exc.status == 401:  # noqa: PLR2004 - unauthorised
            return None
        raise
    return Viewer(
        name=found["key_name"],
        organisation=found["organisation"]["name"],
        organisation_id=found["organisation"]["id"],
        scopes=frozenset(Scope(scope) for scope in found["scopes"]),
        session_id=found["key_id"],
        restricted=any(
            found[name] is not None for name in ("rooms", "event_types", "subscriptions")
        ),
        application=found["application"],
        subscriptions=None if found["subscriptions"] is None else tuple(found["subscriptions"]),
        is_portal=found["portal"],
    )
