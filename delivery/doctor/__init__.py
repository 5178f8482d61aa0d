"""Consistency checks of database, broker and magazines, once on request, with optional repair.

PostgreSQL is the truth: a delivery's row decides, and the other stores are made to agree with it.
"""
