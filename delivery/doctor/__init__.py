"""Check database, broker and magazines for consistency, on request, with optional repair.

PostgreSQL is the truth: a delivery's row decides, and the other stores are made to agree with it.
"""
