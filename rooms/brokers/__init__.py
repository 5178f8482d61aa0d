"""Brokers by URL: the scheme says which adapter, and the table of schemes is what the contract suite runs over."""
