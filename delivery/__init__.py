"""Delivery: what happens to a message after it was accepted."""
