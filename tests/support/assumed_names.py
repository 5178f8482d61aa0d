"""Read what a class of another package has, of which our code assumes names."""

import ast
import inspect
import textwrap
from collections.abc import Iterator


def names_of(kind: type) -> set[str]:
    """Return the names of a class and those that its methods assign to `self`."""
    return (
        set(dir(kind))
        | {name for parent in kind.__mro__[:-1] for name in _assigned(parent)}
        | set(getattr(kind, "__dataclass_fields__", ()))
    )


def _assigned(kind: type) -> Iterator[str]:
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):
        return
    for node in ast.walk(ast.parse(textwrap.dedent(source))):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and is_self(node.value)
        ):
            yield node.attr


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def parameters(function: object) -> list[str]:
    """Return the names of a function's parameters."""
    assert callable(function)
    return list(inspect.signature(function).parameters)
