"""Store rooms, messages, deliveries and their log in PostgreSQL.

Everyday queries use SQLAlchemy Core. The few hot statements are SQL text that psycopg runs.

The state of a delivery decides which work table holds its row. There is never more than one row:

    queued, scheduled   `outbox`   claimed by a push worker, a pull, or the relay to another broker
    held                `held`     waits until the reason for the hold ends
    leased              `leases`   until it is acknowledged, rejected or expires
    sidelined           none       `sidelined` names where its magazine entry is
    anything else       none       the delivery has ended: only `deliveries` and the log have it

`messages`, `deliveries` and `log_entries` grow and are partitioned by day. The work tables are
narrow and become empty again.
"""
