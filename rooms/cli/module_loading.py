"""Load the modules of a long process without collections of garbage."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def module_loading() -> Iterator[None]:
    """Import modules inside it: collections would scan their objects, all of which stay."""
    gc.disable()
    try:
        yield
    finally:
        # Else the first collection afterwards would scan them all.
        gc.freeze()
        gc.enable()
