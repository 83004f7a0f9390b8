"""Prometheus metrics, served at `/metrics`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily

from tinker_local_backend.server.access import Tenant
from tinker_local_backend.server.access_log import outcome
from tinker_local_backend.server.sessions import Request
from tinker_local_backend.wire.frames import Frame

QUANTILES = (0.5, 0.99)
LATEST = 4096
"""number of latest operations per kind that quantiles are computed over"""

_SECONDS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


def _gauge(
    name: str, title: str, labels: Sequence[str], values: Iterable[tuple[tuple[str, ...], float]]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, title, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, value)
    return family


class Latest:
    """A Prometheus collector: quantiles of the latest durations by kind of operation."""

    def __init__(self, name: str, description: str):
        self._name, self._description = name, description
        self._seconds: dict[str, deque[float]] = {}

    def observe(self, kind: str, seconds: float) -> None:
        self._seconds.setdefault(kind, deque(maxlen=LATEST)).append(seconds)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Quantiles are nearest ranks: each is one of the durations."""
        ordered = {kind: sorted(latest) for kind, latest in self._seconds.items()}
        values = [
            ((kind, f"{quantile:g}"), seconds[min(len(seconds) - 1, int(quantile * len(seconds)))])
            for kind, seconds in ordered.items()
            for quantile in QUANTILES
        ]
        yield _gauge(self._name, self._description, ["kind", "quantile"], values)


class EngineStats:
    """A Prometheus collector: the latest statistics from the engine."""

    def __init__(self) -> None:
        self.samplers: Mapping[str, Mapping[str, float]] = {}
        """by model: see engine.sampling.sampler.SamplerStats"""
        self.waits: Mapping[str, Mapping[str, float]] = {}
        """by kind of operation: see engine.operation_queue.Wait"""

    def update(self, fields: Mapping[str, Any]) -> None:
        self.samplers, self.waits = fields.get("samplers", {}), fields.get("waits", {})

    def collect(self) -> Iterator[GaugeMetricFamily]:
        quantiles = {"0.5": "wait_p50", "0.99": "wait_p99", "1": "longest_wait"}
        waits = [((model, q), stats[name]) for model, stats in self.samplers.items() for q, name in quantiles.items()]
        title = "from a sampling request to its first token, since the start"
        yield _gauge("tinker_sampling_wait_seconds", title, ["model", "quantile"], waits)
        for name in sorted({name for stats in self.samplers.values() for name in stats} - set(quantiles.values())):
            values = [((model,), stats[name]) for model, stats in self.samplers.items()]
            yield _gauge(f"tinker_sampler_{name}", f"{name} of a model's sampler", ["model"], values)
        longest = [((kind,), wait["longest_seconds"]) for kind, wait in self.waits.items()]
        title = "longest wait of an operation in the queue, by kind"
        yield _gauge("tinker_operation_longest_wait_seconds", title, ["kind"], longest)


class TenantGauges:
    """A Prometheus collector: gauges per tenant."""

    def __init__(self, live: Callable[[], Mapping[str, Mapping[str, float]]]):
        self._live = live

    def collect(self) -> Iterator[GaugeMetricFamily]:
        live = self._live()
        for name in sorted({name for numbers in live.values() for name in numbers}):
            values = [((tenant,), numbers[name]) for tenant, numbers in live.items()]
            yield _gauge(f"tinker_tenant_{name}", f"current {name.replace('_', ' ')}", ["tenant"], values)


class Metrics:
    """Counters, histograms and gauges of one server."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._http = self._counter("http_requests", "HTTP requests", "route", "status")
        self._operations = self._counter("operations", "operations that ended", "kind", "outcome")
        self._tokens = self._counter("tokens", "tokens trained on or sampled", "kind")
        self._tenant_operations = self._counter(
            "tenant_operations", "operations that ended", "tenant", "kind", "outcome"
        )
        self._tenant_tokens = self._counter("tenant_tokens", "tokens trained on or sampled", "tenant", "kind")
        title = "from the arrival of a request to its result"
        self._seconds = Histogram(
            "tinker_operation_seconds", title, ["kind"], buckets=_SECONDS, registry=self._registry
        )
        self._latest = Latest("tinker_latest_seconds", f"{title}, of the latest ones")
        self.engine = EngineStats()
        for collector in (self._latest, self.engine):
            self._registry.register(collector)  # pyright: ignore[reportArgumentType]

    def _counter(self, name: str, title: str, *labels: str) -> Counter:
        return Counter(f"tinker_{name}", title, labels, registry=self._registry)

    def watch_tenants(self, live: Callable[[], Mapping[str, Mapping[str, float]]]) -> None:
        """Add gauges per tenant, read at each scrape."""
        self._registry.register(TenantGauges(live))  # pyright: ignore[reportArgumentType]

    def watch(self, live: Callable[[], Mapping[str, float]]) -> None:
        """Add gauges, read at each scrape."""
        for name in live():
            gauge = Gauge(f"tinker_live_{name}", f"current {name.replace('_', ' ')}", registry=self._registry)
            gauge.set_function(lambda name=name: live()[name])

    def set_executions(self, executions: Mapping[str, Mapping[str, str]]) -> None:
        """Add the execution (device, dtype, ...) of each loaded model."""
        info = Gauge(
            "tinker_execution_info",
            "device, dtype, path and parts of each model, see engine.models.describe",
            ["model", "what", "value"],
            registry=self._registry,
        )
        for model, execution in executions.items():
            for what, value in execution.items():
                info.labels(model, what, value).set(1)

    def answered(self, route: str, status: int) -> None:
        self._http.labels(route, str(status)).inc()

    def ended(self, request: Request, reply: Frame, seconds: float) -> None:
        self._operations.labels(request.kind, outcome(reply)).inc()
        self._seconds.labels(request.kind).observe(seconds)
        self._latest.observe(request.kind, seconds)
        self._tenant_operations.labels(request.tenant.name, request.kind, outcome(reply)).inc()
        if "tokens" in reply.fields:
            self._tokens.labels(request.kind).inc(reply.fields["tokens"])
            self._tenant_tokens.labels(request.tenant.name, request.kind).inc(reply.fields["tokens"])

    def text(self, tenant: Tenant) -> bytes:
        """All metrics for an operator; for others, only those of the tenant."""
        text = generate_latest(self._registry)
        if tenant.terms.operator:
            return text
        label = f'tenant="{tenant.name}"'.encode()
        return b"".join(line for line in text.splitlines(keepends=True) if label in line)
