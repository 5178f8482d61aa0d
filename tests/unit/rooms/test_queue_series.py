"""Test that a process exports series of a bounded number of handler queues."""

from rooms.metrics import Metrics
from rooms.queue_series import OTHER, QueueSeries


def exported(metrics: Metrics) -> list[str]:
    """Return the lines of series of handler queues."""
    return [
        line
        for line in metrics.render().decode().splitlines()
        if line.startswith("rooms_handler_queue_") and "_created" not in line
    ]


def test_a_deleted_queue_is_not_exported() -> None:
    metrics = Metrics()
    series = QueueSeries(can_remove=True)
    for queue in ("a", "b"):
        series.of(metrics.queue_depth, queue, "main").set(7)
        series.of(metrics.queue_swept, queue, "main").inc(2)
        series.of(metrics.queue_loaded, queue).inc()
    series.forget("a")
    series.forget("unknown")
    assert exported(metrics) == [
        'rooms_handler_queue_loaded_total{queue="b"} 1.0',
        'rooms_handler_queue_swept_total{magazine="main",queue="b"} 2.0',
        'rooms_handler_queue_depth{magazine="main",queue="b"} 7.0',
    ]


def test_the_queue_that_was_idle_longest_goes_beyond_the_bound() -> None:
    metrics = Metrics()
    series = QueueSeries(can_remove=True, max_queues=2)
    for queue in "abac":
        series.of(metrics.queue_loaded, queue).inc()
    assert exported(metrics) == [
        'rooms_handler_queue_loaded_total{queue="a"} 2.0',
        'rooms_handler_queue_loaded_total{queue="c"} 1.0',
    ]


def test_series_that_cannot_be_removed_are_bounded() -> None:
    metrics = Metrics()
    series = QueueSeries(can_remove=False, max_queues=2)
    for queue in "abcd":
        series.of(metrics.queue_loaded, queue).inc()
        series.of(metrics.queue_depth, queue, "main").set(5)
    series.forget("a")
    assert exported(metrics) == [
        'rooms_handler_queue_loaded_total{queue="a"} 1.0',
        'rooms_handler_queue_loaded_total{queue="b"} 1.0',
        f'rooms_handler_queue_loaded_total{{queue="{OTHER}"}} 2.0',
        'rooms_handler_queue_depth{magazine="main",queue="a"} 0.0',
        'rooms_handler_queue_depth{magazine="main",queue="b"} 5.0',
        f'rooms_handler_queue_depth{{magazine="main",queue="{OTHER}"}} 5.0',
    ]
