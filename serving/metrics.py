"""Prometheus metrics of the server."""

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from metaphrase.serving.batcher import Batcher, BatchFacts

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_SHARES = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)


class Metrics:
    """Metrics of one server, in a registry of their own."""

    def __init__(self, batcher: Batcher, num_requests: Callable[[], int]):
        """Register the metrics.

        Args:
            batcher: Tells each batch, and the sentences that wait.
            num_requests: Returns the number of requests that wait or run.
        """
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "metaphrase_requests", "Answered requests", ("route", "status"), registry=self._registry
        )
        self._seconds = Histogram(
            "metaphrase_request_seconds", "Time of a request", ("route",), buckets=_SECONDS, registry=self._registry
        )
        self._tokens = Counter(
            "metaphrase_tokens", "Tokens that the models read or wrote", ("side",), registry=self._registry
        )
        self._sentences = Counter("metaphrase_sentences", "Decoded sentences", registry=self._registry)
        self._batch_seconds = Histogram(
            "metaphrase_batch_seconds", "Time of a batch", buckets=_SECONDS, registry=self._registry
        )
        self._fill = Histogram(
            "metaphrase_batch_fill",
            "Share of the largest batch that a batch fills",
            buckets=_SHARES,
            registry=self._registry,
        )
        gauges = {
            "metaphrase_sentences_waiting": ("Sentences that wait for the engine", lambda: batcher.num_waiting),
            "metaphrase_requests_running": ("Requests that wait or run", num_requests),
            "metaphrase_expected_seconds": ("Time that the waiting sentences will take", batcher.expected_seconds),
        }
        for name, (text, function) in gauges.items():
            Gauge(name, text, registry=self._registry).set_function(function)
        batcher.observe = self._observe_batch

    def observe_request(self, route: str, status: int, started: float) -> None:
        """Count an answered request; `started` is its `time.perf_counter()`."""
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(time.perf_counter() - started)

    def _observe_batch(self, facts: BatchFacts) -> None:
        self._tokens.labels("source").inc(facts.num_source_tokens)
        self._tokens.labels("target").inc(facts.num_target_tokens)
        self._sentences.inc(facts.num_sentences)
        self._batch_seconds.observe(facts.seconds)
        self._fill.observe(facts.num_sentences / facts.largest_batch)

    def render(self) -> bytes:
        """Return all metrics as Prometheus reads them."""
        return generate_latest(self._registry)
