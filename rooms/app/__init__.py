"""Compose the processes: the one package that knows every adapter, and `delivery`.

One module a process: `api`, `worker`, `relay`, `maintenance`, each importing only what that process
needs.
"""
