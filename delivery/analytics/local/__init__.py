"""Compute runs of small logs in this process, with DuckDB and without Java."""
