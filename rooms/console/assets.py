"""Serve the console's own files: a style sheet, a script, an icon. Nothing is fetched elsewhere."""

import hashlib
from dataclasses import dataclass
from importlib.resources import files
from typing import Final

from litestar import Response, get
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath

from rooms.errors import NotFoundError

PREFIX: Final = "/console/static"
_TYPES: Final = {
    "console.css": "text/css; charset=utf-8",
    "console.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
_HASH_LENGTH: Final = 12
_FOR_A_YEAR: Final = "public, max-age=31536000, immutable"


@dataclass(frozen=True, slots=True)
class Asset:
    """Hold a file, and the path that changes with its content."""

    path: str
    content: bytes
    media_type: str


def read_assets() -> dict[str, Asset]:
    """Return every file by its name."""
    folder = files("rooms.console").joinpath("static")
    found = {}
    for name, media_type in _TYPES.items():
        content = folder.joinpath(name).read_bytes()
        digest = hashlib.sha256(content).hexdigest()[:_HASH_LENGTH]
        found[name] = Asset(f"{PREFIX}/{digest}/{name}", content, media_type)
    return found


def assets_route(assets: dict[str, Asset]) -> HTTPRouteHandler:
    """Return the route of these files; a path with another hash is not there."""

    @get(f"{PREFIX}/{{digest:str}}/{{name:str}}", sync_to_thread=False)
    def read_asset(digest: FromPath[str], name: FromPath[str]) -> Response[bytes]:
        found = assets.get(name)
        if found is None or found.path != f"{PREFIX}/{digest}/{name}":
            raise NotFoundError("there is no such file")
        return Response(
            found.content,
            media_type=found.media_type,
            headers={"Cache-Control": _FOR_A_YEAR},
        )

    return read_asset
