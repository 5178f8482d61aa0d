"""Upkeep: what must happen once in the whole installation, whoever asks for it or nobody.

    stand by ── lock taken ──► term ── lock lost, ping late ──► duties stop at once ──► stand by
        ▲                        │
        └── PostgreSQL away ◄────┴── SIGTERM: the statement under way ends, then the process

| duty | how often | what it does |
| --- | --- | --- |
| `leases.py` | 250 ms | a lease whose time is up ends: its delivery is available again, and whoever polls is woken |
| `expiry.py` | 1 s | unfinished deliveries whose lifetime is over expire, but for attempts under way and live leases |
| `jobs.py` | 1 s | deletes subscriptions and rooms, a batch at a time |
| `idempotency.py` | 1 min | forgets idempotency keys after their day |
| `partitions.py` | 1 h | makes the partitions of the coming week |
| `writers.py` | 1 h | forgets writers that are long dead and claim nothing |

Of several processes one has the term (`term.py`), the others stand by. A term is a session lock on a connection that
the server closes when it was silent for 5 s; the process itself trusts it for less, so a frozen process has lost its
term before another gets it. The lock saves work only: every statement is a compare-and-set, and two upkeeps at once
change nothing twice.

| what fails | what follows |
| --- | --- |
| the process dies | another takes the term at once, or the restarted one; a job that was begun is continued |
| the process freezes | its session ends after 5 s and another takes the term; thawed, it stands by |
| nobody does upkeep | leases and expired deliveries stay as they are, and are not handed out; partitions last a week |
| PostgreSQL is away, or refuses | told once, tried again within 5 s at most |
| one duty breaks | told once, tried again within 5 s at most; the others go on |
| a job makes no sense | it fails with its error, the next one is done |
"""
