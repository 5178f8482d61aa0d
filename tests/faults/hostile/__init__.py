"""Seeded attacks: what strangers, tenants, endpoints and name servers may send, generated without end.

Each suite is a module and is listed in `suites.py`. `tests/faults/test_hostile.py` runs a fixed number of
cases of each; `make attack SECONDS=600` runs all of them for longer, and prints what they did.
"""
