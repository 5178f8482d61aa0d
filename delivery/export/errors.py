"""The errors of the export:

ExportError
├── DestinationError       the place for segments cannot be written
└── InterruptedExportError the turn ended, or the process is stopping; what was planned is taken up again
"""

from delivery.errors import DeliveryError


class ExportError(DeliveryError):
    """The export cannot go on."""


class DestinationError(ExportError):
    """The place for segments cannot be written."""


class InterruptedExportError(ExportError):
    """The turn ended, or the process is stopping."""
