"""The domain: values and pure decisions, on the standard library alone."""
