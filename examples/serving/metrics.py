"""Metrics in Prometheus' format: what the engine and the front tell, and the process itself."""

import torch
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from examples.serving.request import Request
from examples.serving.scheduler import Scheduler, Step

# Seconds: from a decode step of a small model to a queue that is too long.
_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip


class Metrics:
    """The Watch of an engine, with a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        about = {"namespace": "serving", "registry": self.registry}
        self._requests = Counter(
            "requests", "Requests by how they ended or why they were refused", ["outcome"], **about
        )
        self._tokens = Counter(
            "tokens", "Tokens read, found in the cache, and made", ["kind"], **about
        )
        self._steps = Counter(
            "steps", "Steps, and those of them with a cascade", ["form"], **about
        )
        timed = {"buckets": _BUCKETS, **about}
        self._first = Histogram("time_to_first_token_seconds", "From arrival", **timed)
        self._between = Histogram("time_between_tokens_seconds", "Of one request", **timed)
        self._step = Histogram("step_seconds", "Of the device and the host's part", **timed)

    def read(self, scheduler: Scheduler) -> None:
        """Gauges that are asked when somebody reads the metrics."""
        pages = scheduler.pages
        gauges = {
            "requests_running": ("Requests in the batch", lambda: len(scheduler.running)),
            "requests_waiting": ("Requests in the queue", lambda: len(scheduler.waiting)),
            "pages_usable": ("Pages of the cache", lambda: pages.usable),
            "pages_free": ("Pages that can be taken", lambda: pages.available),
            "pages_cached": ("Of these, full of keys that can be found", lambda: pages.cached),
            "pages_used": ("Pages that requests hold", lambda: pages.used),
            "device_memory_bytes": ("Allocated by torch on the GPU", _allocated),
        }
        for name, (text, value) in gauges.items():
            Gauge(name, text, namespace="serving", registry=self.registry).set_function(value)

    def text(self) -> bytes:
        """All of them, as Prometheus scrapes them."""
        return generate_latest(self.registry)

    def stepped(self, step: Step, seconds: float) -> None:
        """A step has run."""
        self._steps.labels("plain" if step.shared is None else "cascade").inc()
        self._step.observe(seconds)
        self._tokens.labels("prompt").inc(
            sum(max(0, min(p.last, p.request.prompt) - p.first) for p in step.pieces)
        )

    def gave(self, request: Request, first: bool, seconds: float) -> None:
        """A request has got a token, so long after the one before, or after its arrival."""
        self._tokens.labels("made").inc()
        (self._first if first else self._between).observe(seconds)
        if first:
            self._tokens.labels("cached").inc(request.cached)

    def ended(self, request: Request) -> None:
        """A request has left."""
        self._requests.labels(request.ended).inc()

    def refused(self, kind: str) -> None:
        """A request was not taken."""
        self._requests.labels(kind).inc()


def _allocated() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
