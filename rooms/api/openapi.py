"""Serve the OpenAPI document at `/schema`, as one page without scripts or external files, too.

Litestar builds the document on the event loop when it is first asked for, which takes some tenths
of a second. `openapi_router` has it built in a thread before. Litestar's own plugin keeps it, so
this module assumes that the plugin is found by name and has `provide_openapi_schema`.
"""

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import Any, Final

from litestar import Request, Router
from litestar.enums import MediaType
from litestar.handlers import HTTPRouteHandler
from litestar.openapi.plugins import OpenAPIRenderPlugin
from litestar.openapi.spec import (
    OpenAPIMediaType,
    OpenAPIResponse,
    OpenAPIType,
    Operation,
    RequestBody,
    Schema,
)

from rooms.api.errors import documented_responses

CSV: Final = "text/csv"
_METHODS: Final = ("get", "post", "put", "patch", "delete")
_CODE: Final = re.compile("`([^`]+)`")
STYLE: Final = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 62rem; padding: 1rem;
  color: #1c2230; background: #fff; overflow-wrap: anywhere; }
nav { display: flex; flex-wrap: wrap; gap: .25rem 1rem; }
code, pre { font-family: ui-monospace, monospace; font-size: .875em; }
pre { background: #f3f5f9; padding: .75rem; overflow: auto; }
details { border: 1px solid #d5dbe6; border-radius: .4rem; margin: .5rem 0; }
summary { cursor: pointer; padding: .5rem .75rem; } details > div { padding: 0 .75rem .75rem; }
.method { display: inline-block; min-width: 4.5rem; font-weight: 700; text-transform: uppercase; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; vertical-align: top; padding: .25rem .75rem .25rem 0; }
@media (prefers-color-scheme: dark) { body { color: #e4e8f0; background: #14181f; }
  pre { background: #1f2530; } a { color: #8ab4ff; } details { border-color: #39414f; } }
"""


def openapi_router() -> Router:
    """Return the router for the document and its page."""
    return Router(
        "/schema",
        route_handlers=[],
        before_request=_build_document,
        include_in_schema=False,
    )


async def _build_document(request: Request[Any, Any, Any]) -> None:
    plugin: Any = request.app.plugins.get("OpenAPIPlugin")
    await asyncio.to_thread(plugin.provide_openapi_schema)


@dataclass
class OptionalBodyOperation(Operation):
    """Describe an operation whose body may be left out: Litestar says that each is required."""

    def __post_init__(self) -> None:
        if isinstance(self.request_body, RequestBody):
            self.request_body.required = False


@dataclass
class TableOperation(Operation):
    """Describe an operation that can answer with CSV, too: Litestar knows one media type."""

    def __post_init__(self) -> None:
        found = (self.responses or {}).get("200")
        if isinstance(found, OpenAPIResponse) and found.content is not None:
            found.content[CSV] = OpenAPIMediaType(schema=Schema(type=OpenAPIType.STRING))


def declare_answers(handler: HTTPRouteHandler) -> None:
    """Document the problems of every route, where the route documents none of its own."""
    handler.responses = handler.responses or documented_responses()


def declare_body(handler: HTTPRouteHandler) -> None:
    """Document whether the body may be left out."""
    data = handler.parsed_fn_signature.parameters.get("data")
    if data is not None and data.has_default:
        handler.operation_class = OptionalBodyOperation


class PageRenderPlugin(OpenAPIRenderPlugin):
    """Render the page; Litestar's own renderers all load scripts from other hosts."""

    def __init__(self) -> None:
        super().__init__(path="/", media_type=MediaType.HTML)

    def render(self, request: Request[Any, Any, Any], openapi_schema: dict[str, Any]) -> bytes:
        """Return the page."""
        return "".join(_page(openapi_schema, self.get_openapi_json_route(request))).encode()


def _page(document: dict[str, Any], source: str) -> Iterator[str]:
    info = document["info"]
    yield "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
    yield "<meta name='viewport' content='width=device-width, initial-scale=1'>"
    yield f"<title>{escape(info['title'])} API</title><style>{STYLE}</style></head><body>"
    yield f"<h1>{escape(info['title'])} API</h1><p>{_prose(info.get('description'))}</p>"
    yield f"<p><a href='{escape(source)}'>OpenAPI 3.1 document</a></p><nav>"
    tags = document.get("tags", [])
    for tag in tags:
        yield f"<a href='#{_anchor(tag['name'])}'>{escape(tag['name'])}</a>"
    yield "</nav><main>"
    schemas = document.get("components", {}).get("schemas", {})
    for tag in tags:
        yield f"<h2 id='{_anchor(tag['name'])}'>{escape(tag['name'])}</h2>"
        yield f"<p>{_prose(tag.get('description'))}</p>"
        for path, item in document["paths"].items():
            for method in _METHODS:
                operation = item.get(method)
                if operation and tag["name"] in operation.get("tags", []):
                    yield from _operation(method, path, operation)
    yield "<h2 id='schemas'>Schemas</h2>"
    for name, schema in sorted(schemas.items()):
        yield f"<details id='schema-{escape(name)}'>"
        yield f"<summary><code>{escape(name)}</code></summary><div>"
        yield f"{_json(schema)}</div></details>"
    yield "</main></body></html>"


def _operation(method: str, path: str, operation: dict[str, Any]) -> Iterator[str]:
    yield f"<details id='{escape(operation['operationId'])}'>"
    yield f"<summary><span class='method'>{method}</span>"
    yield f"<code>{escape(path)}</code> {escape(operation.get('summary', ''))}</summary><div>"
    yield f"<p>{_prose(operation.get('description'))}</p>"
    parameters = operation.get("parameters", [])
    if parameters:
        yield "<table><tr><th>parameter</th><th>in</th><th></th></tr>"
        for parameter in parameters:
            needed = " (needed)" if parameter.get("required") else ""
            yield f"<tr><td><code>{escape(parameter['name'])}</code>{needed}</td>"
            yield f"<td>{escape(parameter['in'])}</td>"
            yield f"<td>{_prose(parameter.get('description'))}</td></tr>"
        yield "</table>"
    for media, content in operation.get("requestBody", {}).get("content", {}).items():
        yield f"<h4>Body, {escape(media)}</h4>{_json(content.get('schema', {}))}"
    yield "<h4>Answers</h4><table>"
    for status, answer in operation.get("responses", {}).items():
        description = ", ".join(
            _link(content.get("schema", {}).get("$ref", "")) or escape(media)
            for media, content in (answer.get("content") or {}).items()
        )
        yield f"<tr><td>{escape(status)}</td><td>{_prose(answer.get('description'))}</td>"
        yield f"<td>{description}</td></tr>"
    yield "</table></div></details>"


def _prose(text: str | None) -> str:
    """Return a description as HTML; what is in backticks is code."""
    return _CODE.sub(r"<code>\1</code>", escape(text or ""))


def _json(value: Any) -> str:
    return f"<pre>{escape(json.dumps(value, indent=2, ensure_ascii=False))}</pre>"


def _link(reference: str) -> str:
    name = reference.rpartition("/")[2]
    return f"<a href='#schema-{escape(name)}'>{escape(name)}</a>" if name else ""


def _anchor(name: str) -> str:
    return "tag-" + name.replace(" ", "-")
