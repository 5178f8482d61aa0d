"""Count usage from the log (`count`), and read what was counted (`read`).

`minutes` has the last hour of each subscription, which the same statement counts.
"""
