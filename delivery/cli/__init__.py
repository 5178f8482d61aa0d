"""Commands about delivery: sidelines, magazines, what fails. The composition root adds them to the command line of `rooms`."""

from typing import Final

from rooms.cli.group import Mount

_DELIVERY: Final = "Delivery"
_SERVICE: Final = "The service"
_ANALYSIS: Final = "The analysis of the log"

MOUNTS: Final = (
    Mount("status", "delivery.cli.status:status", "Which subscriptions are failing, since when and why.", _DELIVERY),
    Mount(
        "sideline", "delivery.cli.sideline:sideline", "What could not be delivered: look, bring back, end.", _DELIVERY
    ),
    Mount("queue", "delivery.cli.queue:queue", "Handler queues: make, set, send.", _DELIVERY),
    Mount("handlers", "delivery.cli.queue:handlers", "A process that serves handler queues.", _SERVICE),
    Mount("magazine", "delivery.cli.magazine:magazine", "The stores behind sidelines.", _DELIVERY),
    Mount("doctor", "delivery.cli.doctor:doctor", "Row, broker and magazine held against each other.", _SERVICE),
    Mount("export", "delivery.cli.analysis:export", "The log, as Parquet segments.", _ANALYSIS),
    Mount("analyze", "delivery.cli.analysis:analyze", "Export, and analyse what is new.", _ANALYSIS),
    Mount("incidents", "delivery.cli.findings:incidents", "What failed together, when, and why.", _ANALYSIS),
    Mount("reconcile", "delivery.cli.findings:reconcile", "Was anything lost?", _ANALYSIS),
    Mount("advise", "delivery.cli.findings:advise", "How retries should be set.", _ANALYSIS),
    Mount("report", "delivery.cli.report:report", "All of it as one HTML file with charts.", _ANALYSIS),
)
