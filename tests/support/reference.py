"""Write docs/reference/*.md from the code: settings, command line, API, metrics and alerts.

    python -m tests.support.reference            # write the pages
    python -m tests.support.reference --check    # name the stale ones, exit code 1 if any

The pages are committed; tests/unit/docs/test_reference.py fails while one is stale.
"""

import argparse
import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import click
import yaml

import rooms.settings as settings_module
from rooms.api.app import create_app
from rooms.api.deps import ApiServices
from rooms.cli import build_cli
from rooms.cli.app import CommandSpec
from rooms.metrics import Metrics

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDER: Final = ROOT / "docs/reference"
_GENERATED: Final = "<!-- Written by `make docs` from the code. Do not edit. -->\n"
_METHODS: Final = ("get", "post", "put", "patch", "delete")
_VALID: Final[Mapping[str, str]] = {
    "networks": "CIDR blocks, separated by commas",
    "optional_address": "`HOST:PORT`",
    "path": "path",
}
_TYPES: Final[Mapping[str, str]] = {"Counter": "counter", "Histogram": "histogram"}


_OTHERS: Final = (
    (
        "ROOMS_URL",
        "commands that call the API",
        "Address of the service; by default that of `ROOMS_LISTEN`.",
    ),
    (
        "ROOMS_API_KEY",
        "commands that call the API",
        "API key; by default the file `api-key` in `ROOMS_DATA`. An empty one is an error.",
    ),
    ("ROOMS_CACHE", "`rooms full`", "Folder for downloaded servers; by default `~/.cache/rooms`."),
    (
        "PROMETHEUS_MULTIPROC_DIR",
        "every process",
        "Folder that processes of one machine share for their counters. `rooms dev` sets it.",
    ),
)


def settings_page() -> str:
    """Return the table of environment variables."""
    lines = [
        "# Settings",
        _GENERATED,
        "Rooms reads its settings from environment variables, once, at the start of each process. It reports every problem at once",
        "and starts nothing until all values are valid. It warns of variables `ROOMS_…` that are no settings.",
        "",
        "| variable | default | valid | description |",
        "| --- | --- | --- | --- |",
    ]
    texts = _field_texts()
    for variable in variables():
        text = texts.get(variable.field) or texts.get(f"{variable.field}_host", "")
        lines.append(
            f"| `{variable.name}` | {variable.default} | {variable.valid} | {_cell(text)} |"
        )
    lines += [
        "",
        "## Read by single commands",
        "",
        "| variable | read by | description |",
        "| --- | --- | --- |",
    ]
    lines += [f"| `{name}` | {reader} | {_cell(text)} |" for name, reader, text in _OTHERS]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """Describe an environment variable: the field that it sets, its default and its valid values, as Markdown."""

    name: str
    field: str
    default: str
    valid: str


def variables() -> list[Variable]:
    """Return the variables that `read_settings` reads, in its order."""
    tree = ast.parse(inspect.getsource(settings_module.read_settings))
    found: dict[str, Variable] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Tuple()], value=value):
                fields = [("listen", value)]
            case ast.Call(func=ast.Name(id="Settings"), keywords=keywords):
                fields = [(word.arg or "", word.value) for word in keywords]
            case _:
                continue
        for field, expression in fields:
            for call in ast.walk(expression):
                match call:
                    case ast.Call(
                        func=ast.Attribute(value=ast.Name(id="read"), attr=kind), args=[name, *rest]
                    ):
                        variable = str(ast.literal_eval(name))
                        found[variable] = _variable(
                            variable, field, kind, [_value(argument) for argument in rest]
                        )
                    case _:
                        pass
    return list(found.values())


def _value(expression: ast.expr) -> Any:
    return eval(compile(ast.Expression(expression), "read_settings", "eval"), vars(settings_module))


def _variable(name: str, field: str, kind: str, arguments: Sequence[Any]) -> Variable:
    default, valid = "", _VALID.get(kind, "")
    match kind, arguments:
        case "number", [number, low, high]:
            default, valid = f"`{number}`", f"{low:,} to {high:,}"
        case "choice", [first, *choices]:
            default, valid = f"`{first}`", ", ".join(f"`{choice}`" for choice in choices)
        case "url", _:
            valid = ", ".join(f"`{scheme}://`" for scheme in settings_module.SCHEMES[name])
        case "ports", _:
            default, valid = "`default`", "`default`, `none`, ports and ranges, separated by commas"
        case "address", [address]:
            default, valid = f"`{address}`", "`HOST:PORT`"
        case "names", [str(names)]:
            default, valid = f"`{names}`", "a part of the default, or `none`"
        case _, [str(text)]:
            default = f"`{text}`"
        case _:
            pass
    return Variable(name=name, field=field, default=default, valid=valid)


def _field_texts() -> dict[str, str]:
    """Return the documentation of each field of `Settings`."""
    (definition,) = ast.parse(inspect.getsource(settings_module.Settings)).body
    assert isinstance(definition, ast.ClassDef)
    found: dict[str, str] = {}
    for statement, following in zip(definition.body, definition.body[1:], strict=False):
        match statement, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                value=ast.Constant(value=str(text))
            ):
                found[name] = " ".join(text.split())
            case _:
                pass
    return found


def cli_page() -> str:
    """Return every command with its usage, arguments and options."""
    root = build_cli()
    lines = [
        "# Command line",
        _GENERATED,
        "Every command takes `--url`, `--key` and `--json`, in front of its name or behind it. With `--json`, standard output carries",
        "JSON only, and errors are one line of JSON on standard error.",
        "",
        "| exit code | meaning |",
        "| --- | --- |",
        "| 0 | done |",
        "| 1 | refused, failed or unreachable |",
        "| 2 | wrong usage, or an invalid setting |",
        "| 130 | interrupted by Ctrl-C |",
        "",
        "## Global options",
        "",
        *_parameters(root, click.Context(root, info_name="rooms")),
    ]
    sections: dict[str, list[CommandSpec]] = {}
    for mount in root.specs.values():
        sections.setdefault(mount.section, []).append(mount)
    for section, mounts in sections.items():
        lines += [f"## {section}", ""]
        for mount in mounts:
            context = click.Context(mount.load(), info_name=f"rooms {mount.name}")
            lines += _command(context, mount.summary)
    return "\n".join(lines).rstrip() + "\n"


def _command(context: click.Context, summary: str = "") -> Iterator[str]:
    command = context.command
    yield from (f"### {context.command_path}", "")
    yield from (f"{_sentence(inspect.cleandoc(command.help or summary))}", "")
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            if inner is not None and not inner.hidden:
                yield from _command(click.Context(inner, parent=context, info_name=name))
        return
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    yield from ("```text", usage, "```", "")
    yield from _parameters(command, context)


_EVERYWHERE: Final = frozenset({"--url", "--key", "--json", "--help"})


def _parameters(command: click.Command, context: click.Context) -> Iterator[str]:
    rows = []
    for parameter in command.get_params(context):
        if getattr(parameter, "hidden", False) or (
            context.info_name != "rooms" and _EVERYWHERE & {*parameter.opts}
        ):
            continue
        if isinstance(parameter, click.Option):
            names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
            taken = (
                "" if parameter.is_flag or parameter.count else f" {_metavar(parameter, context)}"
            )
            rows.append(f"| {names}{taken} | {_cell(_option_text(parameter))} |")
    if rows:
        yield from ("| option | description |", "| --- | --- |", *rows, "")


def _metavar(option: click.Option, context: click.Context) -> str:
    """Return what the option takes; GitHub ends a cell at each bare bar, in code as well."""
    metavar = option.make_metavar(context)
    choices = metavar.strip("[]").split("|") if "|" in metavar else [metavar]
    return r" \| ".join(f"`{choice}`" for choice in choices)


def _option_text(option: click.Option) -> str:
    text = option.help or ""
    if option.required:
        text += " Required."
    if option.multiple and "epeatable" not in text:
        text += " Repeatable."
    if (
        isinstance(option.default, str | int | float)
        and not isinstance(option.default, bool)
        and "efault" not in text
    ):
        text += f" Default: `{option.default}`."
    return text


def api_page() -> str:
    """Return every route of the HTTP API with its parameters, bodies and answers."""
    document = openapi()
    schemas: Mapping[str, Any] = document.get("components", {}).get("schemas", {})
    lines = [
        "# HTTP API",
        _GENERATED,
        _sentence(document["info"]["description"]),
        "",
        "A running service has the OpenAPI 3.1 document at `/schema/openapi.json` and a page of it at `/schema`.",
        "",
    ]
    for tag in document.get("tags", []):
        lines += [f"## {tag['name'].capitalize()}", "", _sentence(tag.get("description", "")), ""]
        for path, item in document["paths"].items():
            for method in _METHODS:
                operation = item.get(method)
                if operation and tag["name"] in operation.get("tags", []):
                    lines += _operation(method, path, operation)
    lines += ["## Schemas", ""]
    for name in sorted(schemas):
        lines += _schema(name, schemas[name])
    return "\n".join(lines).rstrip() + "\n"


def openapi() -> dict[str, Any]:
    """Return the OpenAPI document of the whole API; no server runs for it."""
    services = cast("ApiServices", SimpleNamespace(settings=settings_module.read_settings({})))
    return create_app(services).openapi_schema.to_schema()


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"### {method.upper()} {path}", "", _sentence(operation.get("summary", "")), "")
    if (text := operation.get("description", "")) and text != operation.get("summary"):
        yield from (_sentence(text), "")
    rows = [
        f"| `{parameter['name']}` | {parameter['in']} | {_type(parameter.get('schema', {}))} | "
        f"{'required. ' if parameter.get('required') else ''}{_cell(_description(parameter))} |"
        for parameter in operation.get("parameters", [])
    ]
    if rows:
        yield from (
            "| parameter | in | type | description |",
            "| --- | --- | --- | --- |",
            *rows,
            "",
        )
    body = operation.get("requestBody", {}).get("content", {})
    answers = [
        f"body: {_type(content.get('schema', {}))} (`{media}`)" for media, content in body.items()
    ]
    for status, answer in operation.get("responses", {}).items():
        if status < "400":
            shown = [
                _type(content.get("schema", {}))
                for content in (answer.get("content") or {}).values()
            ]
            answers.append(f"{status}: {' or '.join(filter(None, shown)) or 'no body'}")
    problems = [f"{status}" for status in operation.get("responses", {}) if status >= "400"]
    if problems:
        answers.append(f"problems: {', '.join(problems)}")
    yield from (*(f"- {answer}" for answer in answers), "")
    for content in body.values():
        yield from _fields(content.get("schema", {}))


def _schema(name: str, schema: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"### {name}", "")
    if text := schema.get("description"):
        yield from (_sentence(text), "")
    fields = list(_fields(schema))
    yield from fields or (f"{_type(schema)}", "")


def _fields(schema: Mapping[str, Any]) -> Iterator[str]:
    rows = list(_rows(schema))
    if rows:
        yield from ("| field | type | description |", "| --- | --- | --- |", *rows, "")


def _rows(schema: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield a row for each field, also of objects within it and where null is allowed, too."""
    for part in (*schema.get("oneOf", ()), *schema.get("anyOf", ())):
        yield from _rows(part, prefix)
    if items := schema.get("items"):
        yield from _rows(items, f"{prefix[:-1]}[]." if prefix else "[].")
    needed = set(schema.get("required", ()))
    for field, inner in schema.get("properties", {}).items():
        required = "required. " if field in needed else ""
        name = f"{prefix}{field}"
        yield f"| `{name}` | {_type(inner)} | {required}{_cell(_description(inner))} |"
        yield from _rows(inner, f"{name}.")


def _description(schema: Mapping[str, Any]) -> str:
    text: str = schema.get("description") or ""
    for part in (*schema.get("oneOf", ()), *schema.get("anyOf", ()), schema.get("schema", {})):
        text = text or part.get("description") or ""
    return text


def _type(schema: Mapping[str, Any]) -> str:
    """Return a short name of a schema's type, with a link where it is another schema."""
    if reference := schema.get("$ref"):
        name = reference.rpartition("/")[2]
        return f"[{name}](#{_anchor(name)})"
    for several in ("oneOf", "anyOf"):
        if several in schema:
            return " or ".join(dict.fromkeys(_type(part) for part in schema[several]))
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    kind = schema.get("type", "any")
    if isinstance(kind, list):
        return " or ".join(kind)
    if kind == "array":
        return f"array of {_type(schema.get('items', {}))}"
    return str(schema.get("format") or kind)


def _anchor(title: str) -> str:
    return re.sub(r"[^\w]+", "-", title.lower()).strip("-")


def metrics_page() -> str:
    """Return every metric with its labels, as the source defines them."""
    rows = sorted(set(_metrics()))
    lines = [
        "# Metrics",
        _GENERATED,
        "Prometheus scrapes `/metrics` of an API process. Processes that share `PROMETHEUS_MULTIPROC_DIR` are added up there.",
        "",
        "| metric | type | labels | description |",
        "| --- | --- | --- | --- |",
        *(f"| `{name}` | {kind} | {labels} | {_cell(text)} |" for name, kind, labels, text in rows),
        "",
        "## Label values",
        "",
        *(
            f"- {_label_values(part)}"
            for part in (inspect.getdoc(Metrics) or "").partition("\n\n")[2].split(";")
        ),
    ]
    return "\n".join(lines) + "\n"


def _label_values(text: str) -> str:
    text = _sentence(text)
    return text[:1].upper() + text[1:]


def _metrics() -> Iterator[tuple[str, str, str, str]]:
    for package in ("rooms", "delivery"):
        for file in sorted((ROOT / package).rglob("*.py")):
            source = file.read_text()
            if '"rooms_' in source:
                yield from _metrics_of(ast.parse(source))


_METRIC: Final = re.compile("rooms_[a-z_]+")


def _metrics_of(tree: ast.AST) -> Iterator[tuple[str, str, str, str]]:
    texts = {
        target.id: str(node.value.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                func=function, args=[ast.Constant(value=str(name)), text, *rest], keywords=keywords
            ):
                help_text = (
                    text.value
                    if isinstance(text, ast.Constant)
                    else texts.get(getattr(text, "id", ""))
                )
                if (
                    not _METRIC.fullmatch(name)
                    or not isinstance(help_text, str)
                    or " " not in help_text
                ):
                    continue
                kind = _TYPES.get(getattr(function, "id", ""), "gauge")
                labels = _labels(
                    [
                        *rest,
                        *(
                            word.value
                            for word in keywords
                            if word.arg in {"labels", "labelnames", "label"}
                        ),
                    ]
                )
                yield name + ("_total" if kind == "counter" else ""), kind, labels, help_text
            case _:
                pass


def _labels(arguments: Sequence[ast.expr]) -> str:
    for argument in arguments:
        match argument:
            case ast.List(elts=elements) | ast.Tuple(elts=elements):
                return ", ".join(f"`{ast.literal_eval(element)}`" for element in elements)
            case ast.Constant(value=str(label)):
                return f"`{label}`"
            case _:
                pass
    return ""


def alerts_page() -> str:
    """Return the alert rules of docs/alerts.yml."""
    groups = yaml.safe_load((ROOT / "docs/alerts.yml").read_text())["groups"]
    lines = [
        "# Alerts",
        _GENERATED,
        "[alerts.yml](../alerts.yml) has these rules for Prometheus: name it under `rule_files`. A test runs each rule over recorded series.",
        "",
    ]
    for group in groups:
        lines += [f"## {group['name']}", ""]
        for rule in group["rules"]:
            lines += [
                f"### {rule['alert']}",
                "",
                _sentence(rule["annotations"]["summary"]),
                "",
                f"Severity: {rule['labels']['severity']}. Fires after: {rule.get('for', '0s')}.",
                "",
                "```text",
                rule["expr"].strip(),
                "```",
                "",
            ]
    return "\n".join(lines).rstrip() + "\n"


def _sentence(text: str) -> str:
    text = " ".join(text.replace("\b", "").split())
    return text if not text or text.endswith((".", "!", "?", ":")) else f"{text}."


def _cell(text: str) -> str:
    return _sentence(text).replace("|", "\\|").replace("<", "&lt;")


PAGES: Final[Mapping[str, Callable[[], str]]] = {
    "settings.md": settings_page,
    "cli.md": cli_page,
    "api.md": api_page,
    "metrics.md": metrics_page,
    "alerts.md": alerts_page,
}


def stale() -> list[str]:
    """Return the pages that are not what the code says."""
    return [
        name
        for name, page in PAGES.items()
        if not (FOLDER / name).exists() or (FOLDER / name).read_text() != page()
    ]


def main(arguments: list[str] | None = None) -> int:
    """Write the pages, or check them, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.reference", description="Write docs/reference."
    )
    parser.add_argument("--check", action="store_true", help="write nothing; name the stale pages")
    if parser.parse_args(arguments).check:
        names = stale()
        print(*(f"docs/reference/{name} is stale: run `make docs`" for name in names), sep="\n")
        return int(bool(names))
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
