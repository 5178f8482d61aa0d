"""Chaos: a whole service under load, with random faults, and accounting from outside.

`make chaos MINUTES=60`.

| module | what it has |
| --- | --- |
| `stage` | PostgreSQL, Artemis, ZooKeeper and a service whose connections pass through test proxies |
| `faults` | kills, stops, freezes, cuts, full and slow disks, clock steps: each begins and ends |
| `accounting` | what was accepted against what arrived |
"""
