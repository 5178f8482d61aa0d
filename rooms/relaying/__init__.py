"""The relay: takes copies from the outbox to a broker that is not PostgreSQL. Any number of them may run.

    outbox: to send ── claim ── send ── receipt ── mark ──► outbox: sent
        ▲                         │
        ├── broker away ◄─────────┤
        │                         └── refused: sidelined `unreadable`, or `cancelled` with its subscription
        └── claim's end ◄── this process died, or stood still

The row stays when its copy is sent, until the delivery is decided: so what withdraws, expires, counts and recovers
deliveries finds them where it finds them without a relay.

| dies, or stands still | what follows |
| --- | --- |
| after the claim | its session's lock is gone: another relay has the row within 2 s; of one that stands still at the claim's end |
| after the receipt | the same copy is sent again under the same name: the broker drops it, or its row's step tells a worker so |
| after the mark | nothing |
| asleep past its claim | it marks nothing: what it believes to be sent may have been lost since, and somebody else sends it |

The copy may be with a worker before the mark: then the row is that worker's, and the mark leaves it alone.
"""
