"""Keep dead letters of subscriptions, as rows in PostgreSQL with entries in a magazine.

    sideline        row `sidelined`, no slot ─── loader ──► magazine entry ──► slot in the row
    shovel, purge   take entry ──► move row and delivery in one statement ──► delete entry

    a process dies                          effect, and repair
    ------------------------------------    -------------------------------------------------------
    before the entry is loaded              a row without a slot: the loader's next run
    between entry and row                   an orphan entry: the audit deletes it; loaded again
    between taking and the statement        a stamped entry: the next shovel takes it all the same
    between the statement and the delete    an orphan entry: the audit deletes it
    the magazine is emptied                 rows with empty slots: the audit has them loaded again

PostgreSQL is the truth: a delivery is sidelined if its row says so, and a lost magazine loses none.
"""
