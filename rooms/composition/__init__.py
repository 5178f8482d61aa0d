"""The composition root: the one place that knows every adapter, and the only part of `rooms` that knows `delivery`.

One module a process: `api`, `worker`, `relay` and `upkeep`, each importing no more than that process needs.
"""
