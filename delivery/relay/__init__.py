"""Send copies of due deliveries from the outbox to an external broker: the relay.

    claims.py   which rows it claims: for backlogged organisations in turn, and for all others
    relay.py    the loops that claim, send and mark

    outbox: to send ── claim ── send ── receipt ── mark ──► outbox: sent
        ▲                         │
        ├── broker unavailable ◄──┤
        │                         └── rejected: sidelined `unreadable`, or `cancelled` if its
        │                             subscription is deleted
        └── claim's end ◄── this process died, or was frozen

Any number of relays may run. The outbox row stays when its copy is sent, until the delivery is
settled. So cancelling, expiring, counting and recovering deliveries work as without a relay.

| the relay dies or is frozen | consequence |
| --- | --- |
| after the claim | another relay has the row within 2 s if it died, at the claim's end if not |
| after the receipt | the copy is sent again: the broker drops it, or it is found to be outdated |
| after the mark | none |
| beyond its claim | it marks nothing: another relay sends the row again |

A worker may have the copy before the mark. Then the row is that worker's, and the mark skips it.
"""
