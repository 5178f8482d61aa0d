"""Sidelines: what could not be delivered rests in PostgreSQL, its entry in the subscription's magazine.

    decided         row `sidelined`, no slot ─── loader ──► entry in the magazine ──► row knows its slot
    shovel, purge   entry taken ──► row and delivery move on in one statement ──► entry deleted

    a process dies                          what is left, and who puts it right
    ------------------------------------    ------------------------------------------------------------
    before the entry is loaded              a row without a slot: the next load
    between entry and row                   an entry that no row names: the audit deletes it; loaded again
    between taking and the statement        an entry that is stamped, its row as before: the next shovel takes it all the same
    between the statement and the delete    an entry that no row names: the audit
    the magazine is emptied                 rows with slots that are empty: the audit has them loaded again

PostgreSQL wins: whether a delivery rests is what its row says, and nothing is lost with a magazine.
"""
