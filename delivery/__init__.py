"""Delivery: every way in which a stored message leaves, and the services that keep it going."""
