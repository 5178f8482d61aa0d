"""Row, broker and magazine held against each other, once, for somebody who asks; with repair, put right as upkeep would.

PostgreSQL wins in every part: what a delivery's row says is so, and the rest is made to agree.
"""
