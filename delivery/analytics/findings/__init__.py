"""Find incidents, causes, pairs and retry advice in counts that fit into one process.

Everything here is numpy over counts of attempts. Which engine has counted does not matter, and no
module knows one.
"""
