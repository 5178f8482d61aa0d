"""The records: tables, everyday queries (SQLAlchemy Core) and the few hot statements (text, on psycopg).

Where a delivery's work stands, by the state of its row (a row is in exactly one of these):

    queued, scheduled   `outbox`   claimed by a push worker, a pull, or (with another broker) the relay
    held                `held`     waits for its cause to end
    leased              `leases`   until acknowledged, refused or run out
    anything else       none       at rest or final: only `deliveries` and the log know it

`messages`, `deliveries` and `log_entries` grow and are cut by day; the work tables are narrow and empty themselves.
"""
