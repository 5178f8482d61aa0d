"""Schemas that are made to cost much, with payloads that make them: what is accepted is checked within its deadline.

What must hold: a schema is accepted or refused with a problem; then a message of its type is accepted or refused with a problem;
the event loop was never held up for long; and what was accepted does fit, by a validator without bounds, where that can say so.
"""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import Any, NamedTuple

import jsonschema_rs

from rooms.errors import FieldProblem, InvalidError, TransientError
from rooms.metrics import Metrics
from rooms.publishing.deferred_checks import Checker, DeferredChecks
from rooms.publishing.json_schema import PayloadSchema
from rooms.publishing.sandbox.client import CheckSandbox
from tests.faults.hostile.suite import Suite
from tests.faults.hostile.watch import watching

HELD_UP_S = 3.0
"""Far beyond what one check may hold the loop up for, far below what the attacks took; a loaded machine needs the room."""


class Case(NamedTuple):
    schema: Any
    payload: bytes


def _generate(rng: Random) -> Case:
    return Case(rng.choice(_SCHEMAS)(rng), _payload(rng))


def _payload(rng: Random) -> bytes:
    kind = rng.randrange(8)
    size = rng.choice((1, 10, 1000, 50_000))
    if kind == 0:
        return json.dumps([rng.randrange(3)] * size).encode()
    if kind == 1:
        return json.dumps("ab" * size + rng.choice("abc!")).encode()
    if kind == 2:
        depth = min(size, 900)
        return b"[" * depth + b"1" + b"]" * depth
    if kind == 3:
        return json.dumps({f"p{number}": {"a": [1]} for number in range(size // 10 + 1)}).encode()
    if kind == 4:
        return b"9" * size
    if kind == 5:
        return json.dumps([{"a": {"b": [number % 7]}} for number in range(size)]).encode()
    if kind == 6:
        number = rng.choice(("1e308", "-1e-308", "9" * 100, "{}", "0.1"))
        return f"[{','.join([number] * size)}]".encode()
    return rng.choice((b"1", b"null", b"1e308", b"-0", b'""', b'{"a":{"a":{"a":1}}}', b"1.5e-300"))


def _shared(rng: Random) -> Any:
    """References that double at each level."""
    levels, width = rng.choice((3, 9, 14, 22, 90)), rng.choice((1, 2, 3))
    word = rng.choice(("anyOf", "oneOf", "allOf"))
    under = rng.choice(("$defs", "definitions", "odd"))
    named = {f"a{n}": {word: [{"$ref": f"#/{under}/a{n + 1}"}] * width} for n in range(levels)}
    return {under: {**named, f"a{levels}": _leaf(rng)}, "$ref": f"#/{under}/a0"}


def _recursive(rng: Random) -> Any:
    reference = rng.choice(({"$ref": "#"}, {"$dynamicRef": "#here"}, {"$ref": "#/$defs/x"}))
    inner = {rng.choice(("anyOf", "oneOf", "allOf")): [reference] * rng.choice((1, 2, 3))}
    where = rng.choice(
        ("items", "additionalProperties", "not", "if", "contains", "anyOf", "unevaluatedItems")
    )
    body = {
        where: [inner] if where == "anyOf" else inner,
        "type": rng.choice(("array", "object", "integer")),
    }
    return {"$dynamicAnchor": "here", **body, "$defs": {"x": body}}


def _wide(rng: Random) -> Any:
    count = rng.choice((10, 500, 5000))
    return rng.choice(
        (
            {"items": {"anyOf": [_leaf(rng) for _ in range(count)]}},
            {"items": {"enum": [{"a": {"b": [number]}} for number in range(count)]}},
            {"required": [f"p{number}" for number in range(count)]},
            {"items": {"required": [f"p{number}" for number in range(count)]}},
            {"items": {rng.choice(("const", "not")): {"enum": [[]] * count}}},
            {"items": {"multipleOf": rng.choice((0.1, 7, 1e-308)), "minimum": 1e-300}},
            {"propertyNames": {"maxLength": 1}},
            {
                "properties": {f"p{number}": _leaf(rng) for number in range(count)},
                "additionalProperties": False,
            },
            {"patternProperties": {f"^p.*{number}$": _leaf(rng) for number in range(count)}},
            {"items": {"uniqueItems": True}, "uniqueItems": True},
            {"dependentSchemas": {f"p{number}": _leaf(rng) for number in range(count)}},
        )
    )


def _odd(rng: Random) -> Any:
    """Return a schema, valid by its grammar or not."""
    deep: Any = _leaf(rng)
    for _ in range(rng.choice((5, 90, 150, 500))):
        deep = {rng.choice(("items", "not", "additionalProperties")): deep}
    return rng.choice(
        (
            deep,
            True,
            5,
            {"$id": "urn:x", "$ref": "urn:x"},
            {
                "$ref": rng.choice(
                    (
                        "#/a~1b",
                        "#/%61",
                        "#/items/0",
                        "//x",
                        "file:///etc/passwd",
                        "#/" + "x/" * 500,
                        "#x",
                    )
                )
            },
            {
                "$defs": {"a": {"$id": "urn:a", "properties": {"x": {"$ref": "#"}}}},
                "$ref": "#/$defs/a/properties/x",
            },
            {
                "$schema": rng.choice(
                    ("http://json-schema.org/draft-07/schema#", "urn:none", 5, [])
                ),
                "type": "object",
            },
            {
                "maximum": rng.choice((1e300, 10**200, -1, "x")),
                "multipleOf": rng.choice((1e-300, 3, 0)),
            },
            {
                "format": rng.choice(("regex", "email", "idn-hostname", "uri-template", 5)),
                "pattern": None,
            },
            {
                "items": [_leaf(rng)] * 3,
                "prefixItems": 5,
                "properties": [1],
                "anyOf": {},
                "enum": 1,
            },
        )
    )


def _leaf(rng: Random) -> Any:
    pattern = rng.choice(
        (
            "^a+$",
            "(a+)+$",
            "(?=(a+)+b)c",
            "[ab]*a[ab]{900}c",
            "(x{1000}){1000}",
            "\\w{1,300}",
            "(",
            "(.)\\1",
        )
    )
    return rng.choice(
        (
            True,
            {},
            {"type": "string"},
            {"type": "integer", "minimum": 1},
            {"const": rng.random()},
            {"pattern": pattern},
        )
    )


_SCHEMAS: tuple[Callable[[Random], Any], ...] = (_shared, _recursive, _wide, _odd)


@asynccontextmanager
async def _target(_: str) -> AsyncIterator[Callable[[Case], Awaitable[str]]]:
    metrics = Metrics()
    async with (
        CheckSandbox(processes=2, cpu_ms=100, memory_bytes=1 << 28, metrics=metrics) as sandbox,
        watching() as watch,
    ):
        checker = Checker(sandbox, max_schema_bytes=256 * 1024)

        async def run(case: Case) -> str:
            watch.begin()
            problems: Sequence[FieldProblem] = ()
            try:
                await checker.check_schema("tenant", case.schema, field="schema")
            except InvalidError as exc:
                problems = exc.problems
            if problems:
                assert all(problem.field.startswith("schema") for problem in problems), problems
                outcome = "schema refused"
            else:
                outcome = await _checked(PayloadSchema(case.schema), case.payload, sandbox)
            assert watch.longest_s < HELD_UP_S, f"the loop was held up for {watch.longest_s:.3f} s"
            return outcome

        yield run


async def _checked(schema: PayloadSchema, payload: bytes, sandbox: CheckSandbox) -> str:
    cost_ns = schema.cost_ns(len(payload))
    found = (
        schema.problems(payload, "payload", lambda ns: cost_ns + ns < 20_000_000)
        if cost_ns is not None and cost_ns < 20_000_000
        else None
    )
    way = "inline"
    if found is None:
        way, checks = "sandbox", DeferredChecks()
        checks.problems(schema, 0, payload, "payload")
        try:
            await checks.run(sandbox, "tenant")
        except TransientError:
            return "refused for now"
        found = checks.problems(schema, 0, payload, "payload")
        assert not checks.pending
    assert len(found) <= 20
    assert all(len(problem.message) <= 400 for problem in found)
    if any("takes" in problem.message or "takes more" in problem.message for problem in found):
        return f"{way}: late"
    # What is invalid in the sandbox may take a validator without bounds for ever.
    if not found or way == "inline":
        fits = _fits(schema.text, payload)
        assert fits is None or fits is not bool(found), (fits, found)
    return f"{way}: {'invalid' if found else 'valid'}"


def _fits(schema: bytes, payload: bytes) -> bool | None:
    """Return what a validator without bounds says, or None where it cannot say anything."""
    try:
        return jsonschema_rs.is_valid(json.loads(schema), json.loads(payload))
    except (jsonschema_rs.ValidationError, ValueError, RecursionError):
        return None


SUITE = Suite(name="schemas", cases=120, generate=_generate, target=_target)
