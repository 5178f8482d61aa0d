"""The whole service, as people and programs use it."""
