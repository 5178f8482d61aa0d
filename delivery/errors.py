"""Define the base class of the errors of `delivery`."""


class DeliveryError(Exception):
    """Report an expected failure of delivery."""
