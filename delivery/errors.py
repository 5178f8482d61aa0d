"""The base class of the errors of `delivery`."""


class DeliveryError(Exception):
    """An expected failure of delivery."""
