"""Numbers for Prometheus, at `/metrics`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tinker_local_backend.server.frames import Frame
from tinker_local_backend.server.sessions import Request

_SECONDS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """Counts and durations of one server."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._http = Counter("tinker_http_requests", "HTTP requests", ["route", "status"], registry=self._registry)
        self._operations = Counter(
            "tinker_operations", "operations that ended", ["kind", "outcome"], registry=self._registry
        )
        self._tokens = Counter("tinker_tokens", "tokens trained on or sampled", ["kind"], registry=self._registry)
        self._seconds = Histogram(
            "tinker_operation_seconds",
            "from the arrival of a request to its result",
            ["kind"],
            buckets=_SECONDS,
            registry=self._registry,
        )

    def watch(self, live: Callable[[], Mapping[str, float]]) -> None:
        """Show these numbers as they are at the time of asking."""
        for name in live():
            gauge = Gauge(f"tinker_live_{name}", f"{name.replace('_', ' ')} there are now", registry=self._registry)
            gauge.set_function(lambda name=name: live()[name])

    def answered(self, route: str, status: int) -> None:
        self._http.labels(route, str(status)).inc()

    def ended(self, request: Request, reply: Frame) -> None:
        outcome = reply.fields.get("category", "error") if "error" in reply.fields else "ok"
        self._operations.labels(request.kind, outcome).inc()
        self._seconds.labels(request.kind).observe(time.monotonic() - request.created)
        if "tokens" in reply.fields:
            self._tokens.labels(request.kind).inc(reply.fields["tokens"])

    def text(self) -> bytes:
        return generate_latest(self._registry)
