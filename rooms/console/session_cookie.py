"""Keep a session in a cookie, and tokens against requests that another site has forged.

The cookie holds the text of the session's key, which no script can read. It is `Secure` and bound
to the host (`__Host-`) wherever the browser came by HTTPS. A form has a token that is derived from
the key, and a request that changes something must come from this origin; the sign-in form, which
has no session, relies on the origin.

A portal has a cookie of its own name, because a browser sends it where another site frames the
portal: it is `SameSite=None` and `Partitioned`, so each framing site has its own. Without HTTPS
browsers refuse such cookies, and only sites of the same host can frame the portal.
"""

import hashlib
import hmac
from collections.abc import Mapping
from http.cookies import CookieError, SimpleCookie
from typing import Any, Final
from urllib.parse import urlsplit

from litestar.datastructures import Cookie

from rooms.api.sessions import PORTAL_PATH
from rooms.errors import ForbiddenError

NAME: Final = "rooms_session"
PORTAL_NAME: Final = "rooms_portal"
_SECURE_PREFIX: Final = "__Host-"
_TOKEN_PURPOSE: Final = b"rooms console form"
MAX_COOKIES: Final = 8192
"""Bytes of the header that are read."""


_MAX_PREFERENCE: Final = 256
"""Bytes of a choice: more than any has, also in quotes."""


class PartitionedCookie(Cookie):
    """Be sent in a frame of another site, apart from the frames of all other sites."""

    def to_header(self, **kwargs: Any) -> str:
        """Return the value of `Set-Cookie`; Python's cookies do not know the attribute."""
        return f"{super().to_header(**kwargs)}; Partitioned"


def is_portal_path(path: str) -> bool:
    """Return whether a path is one of the portal, whose pages other sites may frame."""
    return path == PORTAL_PATH or path.startswith(f"{PORTAL_PATH}/")


def cookies_of(scope: Mapping[str, Any]) -> dict[str, str]:
    """Return the cookies of a request; what cannot be read is none."""
    found: dict[str, str] = {}
    for name, value in scope["headers"]:
        if name == b"cookie" and len(value) <= MAX_COOKIES:
            for part in value.decode("latin-1").split(";"):
                # Only what a browser does not count as part of a name (RFC 6265, 5.2): with other
                # spaces before it, a name passes for one that another host may not set.
                key, _, text = part.strip(" \t").partition("=")
                found.setdefault(key, text)
    return found


def is_secure(scope: Mapping[str, Any]) -> bool:
    """Return whether the browser came by HTTPS, to this process or to the proxy before it.

    A client that sends the proxy's header itself only gets a stricter cookie.
    """
    return scope.get("scheme") == "https" or (b"x-forwarded-proto", b"https") in scope["headers"]


def session_key(scope: Mapping[str, Any]) -> str | None:
    """Return the key that the session's cookie holds; None: there is no session.

    A page of a portal has its own cookie, and no other page reads that one.
    """
    return cookies_of(scope).get(_cookie_name(scope)) or None


def session_cookie(scope: Mapping[str, Any], key: str, *, max_age_s: int) -> Cookie:
    """Return the cookie that begins a session; a `max_age_s` of 0 ends it."""
    kind, fields = _kind_of_cookie(scope)
    return kind(
        key=_cookie_name(scope), value=key, path="/", max_age=max_age_s, httponly=True, **fields
    )


def preference_cookie(scope: Mapping[str, Any], name: str, value: str, *, max_age_s: int) -> Cookie:
    """Return the cookie that keeps what a person chose, for the pages of the same kind."""
    kind, fields = _kind_of_cookie(scope)
    path = PORTAL_PATH if is_portal_path(scope["path"]) else "/console"
    return kind(key=f"rooms_{name}", value=value, path=path, max_age=max_age_s, **fields)


def host_bound_name(scope: Mapping[str, Any], name: str) -> str:
    """Return the name of a cookie that, with HTTPS, no other host of the domain can set.

    Its path must be `/`.
    """
    return _SECURE_PREFIX + name if is_secure(scope) else name


def _cookie_name(scope: Mapping[str, Any]) -> str:
    return host_bound_name(scope, PORTAL_NAME if is_portal_path(scope["path"]) else NAME)


def _kind_of_cookie(scope: Mapping[str, Any]) -> tuple[type[Cookie], dict[str, Any]]:
    secure = is_secure(scope)
    if secure and is_portal_path(scope["path"]):
        return PartitionedCookie, {"secure": True, "samesite": "none"}
    return Cookie, {"secure": secure, "samesite": "lax"}


def form_token(key: str) -> str:
    """Return the token that the forms of a session contain."""
    return hmac.new(key.encode(), _TOKEN_PURPOSE, hashlib.sha256).hexdigest()[:32]


def check_token(key: str, given: object) -> None:
    """Check a form's token. ForbiddenError."""
    if not isinstance(given, str) or not hmac.compare_digest(
        form_token(key).encode(), given.encode("utf-8", "surrogatepass")
    ):
        raise ForbiddenError(
            "this form is not of your session: open the page again, and repeat what you did"
        )


def check_origin(scope: Mapping[str, Any]) -> None:
    """Check that a request that changes something comes from a page of this origin.

    ForbiddenError: another site sent it, or it does not say where it comes from.
    """
    headers = dict(reversed(scope["headers"]))
    site = headers.get(b"sec-fetch-site")
    if site == b"same-origin":
        return
    origin = headers.get(b"origin")
    if site is None and origin is None:
        raise ForbiddenError("the request has no Origin header, which every browser sends")
    host = headers.get(b"host", b"").decode("latin-1")
    # A browser sends no Sec-Fetch-Site to an address without HTTPS.
    if site is not None or _authority((origin or b"").decode("latin-1")) != host:
        raise ForbiddenError("another site sent this form; open the console and do it there")


def _authority(origin: str) -> str | None:
    """Return the host and port of an origin; None: it is no address."""
    try:
        return urlsplit(origin).netloc or None
    except ValueError:
        return None


def read_preference(scope: Mapping[str, Any], name: str) -> str | None:
    """Return what a person chose for this browser: `language`, `theme`, `time_zone` or `times`."""
    value = cookies_of(scope).get(f"rooms_{name}")
    # Python takes time that is quadratic in the length to read a quoted value.
    if value is None or len(value) > _MAX_PREFERENCE:
        return None
    try:
        parsed = SimpleCookie(f"x={value}")
    except CookieError:
        return None
    return parsed["x"].value if "x" in parsed else None
