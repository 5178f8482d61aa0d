"""Deliver stored messages in every way they leave, and keep the services for it going."""
