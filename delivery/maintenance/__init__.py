"""Maintain an installation by periodic tasks and jobs that its members share.

    wait ── partition assigned here ──► term ── reassigned, or the epoch ends ──► wait
                                         │
                                         └── SIGTERM: ends after the statement under way

| task | every | does |
| --- | --- | --- |
| `expiry.py` leases | 500 ms | ends expired leases and wakes polls |
| `expiry.py` deliveries | 1 s | expires due deliveries, except attempts under way and live leases |
| `expiry.py` ordering | 1 s | advances ordering keys whose head has ended |
| `jobs.py` | 1 s | runs jobs: deletions, restores, clears, retries, replays |
| `resend.py` migration | 1 s to 10 min | moves work rows after a change of broker |
| `cleanup.py` keys | 1 min | deletes idempotency keys after a day |
| `cleanup.py` partitions | 1 h | creates the partitions of the coming week |
| `cleanup.py` writers | 1 h | deletes writers that died long ago and claim nothing |
| `cleanup.py` sessions | 1 h | deletes ended sessions and expired links |
| `grants.py` | 1 s | suspends subscriptions whose grant has ended, lifts those with a new one |
| `operational_events.py` | 1 s | turns operational events into messages |
| `usage.py` | 10 s | adds the log to the usage of its hours |
| `usage.py` quotas | 30 s | estimates stored messages, for quotas |
| `age_limits.py` usage | 1 h | deletes the usage of old hours |
| `age_limits.py` journal | 1 h | deletes the oldest entries of journals past their retention |
| `retention.py` | 1 h | replaces past days by what must stay of them |

With an external broker also:

| task | every | does |
| --- | --- | --- |
| `due.py` | 500 ms | sends scheduled deliveries once they are due within the look-ahead |
| `resend.py` recovery | 2 s | sends again what the broker lost |
| `native_queues.py` dead letters | 5 s | sidelines what readers of native queues rejected |
| `broker_users.py` | 2 s | keeps the broker's users in step with native subscriptions |
| `native_queues.py` metrics | 10 s | reads disk usage and queue depths |
| `cleanup.py` queues | 1 min | deletes queues whose subscription does not exist |

Each task is a partition of the election (`delivery/leadership`): any number of processes share
them. A task runs where `membership.epoch(partition)` says so, and asks before every statement. That
saves work and keeps order only: every statement is a compare-and-set, and two processes that run
one task at once change nothing twice.

| failure | effect |
| --- | --- |
| the process dies | others take its partitions over, and continue its jobs |
| the process is suspended | others take over after 5 s; resumed, it waits for an assignment |
| no process runs maintenance | leased and expired deliveries stay; partitions last a week |
| the election's store is unavailable | the same: no task runs; `leader_absent_seconds` grows |
| PostgreSQL is unavailable, or refuses | logged once, retried within 5 s |
| one task fails | logged once, retried within 5 s; the others go on |
| the broker is unavailable | its tasks wait; the queue of a deleted subscription goes later |
| a job has invalid arguments | it fails with its error, and the next job runs |
"""
