"""Upkeep: what must be done by one process alone, whoever asks for it or nobody.

    wait ── the duty's partition is assigned here ──► turn ── it goes to another, the epoch ends ──► wait
                                                       │
                                                       └── SIGTERM: the statement under way ends, then the process

| duty | how often | what it does |
| --- | --- | --- |
| `leases.py` | 250 ms | a lease whose time is up ends: its delivery is available again, and whoever polls is woken |
| `expiry.py` | 1 s | unfinished deliveries whose lifetime is over expire, but for attempts under way and live leases |
| `jobs.py` | 1 s | deletes subscriptions and rooms, a batch at a time |
| `idempotency.py` | 1 min | forgets idempotency keys after their day |
| `partitions.py` | 1 h | makes the partitions of the coming week |
| `retention.py` | 1 h | replaces days that are over by what must stay of them |
| `writers.py` | 1 h | forgets writers that are long dead and claim nothing |
| `horizon.py` | 500 ms | with another broker: has sent what was scheduled beyond its horizon and has come near, from the due buckets that are this member's |
| `recovery.py` | 2 s | with another broker: has sent again what it lost, all of it or a queue's |
| `queues.py` | 1 min | with another broker: deletes queues whose subscription is gone |

Each duty is a partition of the election (`delivery/elections`): any number of processes share them, and a duty runs
where `membership.epoch(partition)` says so, asked before every statement. That saves work and keeps order; every
statement is a compare-and-set all the same, and two upkeeps at once change nothing twice.

| what fails | what follows |
| --- | --- |
| the process dies | others take its duties over, or the restarted one; a job that was begun is continued |
| the process freezes | its lease is over after 5 s and others take over; thawed, it waits for a share |
| nobody does upkeep | leases and expired deliveries stay as they are, and are not handed out; partitions last a week |
| the election's store is away | the same: nobody acts; `leader_absent_seconds` grows |
| PostgreSQL is away, or refuses | told once, tried again within 5 s at most |
| one duty breaks | told once, tried again within 5 s at most; the others go on |
| the broker is away | its duties wait; the queue of a deleted subscription goes when it is back |
| a job makes no sense | it fails with its error, the next one is done |
"""
