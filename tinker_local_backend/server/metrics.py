"""Numbers for Prometheus, at `/metrics`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily

from tinker_local_backend.server.access import Tenant
from tinker_local_backend.server.access_log import outcome
from tinker_local_backend.server.sessions import Request
from tinker_local_backend.wire.frames import Frame

QUANTILES = (0.5, 0.99)
LATEST = 4096
"""operations of a kind over which quantiles are taken"""

_SECONDS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Latest:
    """Quantiles of the latest durations, by kind of operation; as a collector of Prometheus'."""

    def __init__(self, name: str, description: str):
        self._name, self._description = name, description
        self._seconds: dict[str, deque[float]] = {}

    def observe(self, kind: str, seconds: float) -> None:
        self._seconds.setdefault(kind, deque(maxlen=LATEST)).append(seconds)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Nearest ranks: a quantile is one of the durations."""
        family = GaugeMetricFamily(self._name, self._description, labels=["kind", "quantile"])
        for kind, latest in self._seconds.items():
            ordered = sorted(latest)
            for quantile in QUANTILES:
                family.add_metric([kind, f"{quantile:g}"], ordered[min(len(ordered) - 1, int(quantile * len(ordered)))])
        yield family


class EngineStats:
    """What the engine says of itself, as it said it last; as a collector of Prometheus'."""

    def __init__(self) -> None:
        self.samplers: Mapping[str, Mapping[str, float]] = {}
        """by model: see engine.waits.SamplerStats"""
        self.waits: Mapping[str, Mapping[str, float]] = {}
        """by kind of operation: see engine.operation_queue.Wait"""

    def collect(self) -> Iterator[GaugeMetricFamily]:
        quantiles = GaugeMetricFamily(
            "tinker_sampling_wait_seconds",
            "from a sampling request to its first token, since the start",
            labels=["model", "quantile"],
        )
        for model, stats in self.samplers.items():
            for quantile, name in (("0.5", "wait_p50"), ("0.99", "wait_p99"), ("1", "longest_wait")):
                quantiles.add_metric([model, quantile], stats[name])
        yield quantiles
        numbers = sorted({name for stats in self.samplers.values() for name in stats if "wait_" not in name})
        for name in [name for name in numbers if name != "longest_wait"]:
            family = GaugeMetricFamily(f"tinker_sampler_{name}", f"{name} of a model's sampler", labels=["model"])
            for model, stats in self.samplers.items():
                family.add_metric([model], stats[name])
            yield family
        longest = GaugeMetricFamily(
            "tinker_operation_longest_wait_seconds", "longest wait of a kind until it was begun", labels=["kind"]
        )
        for kind, wait in self.waits.items():
            longest.add_metric([kind], wait["longest_seconds"])
        yield longest


class OfTenants:
    """Numbers of each tenant; as a collector of Prometheus'."""

    def __init__(self, live: Callable[[], Mapping[str, Mapping[str, float]]]):
        self._live = live

    def collect(self) -> Iterator[GaugeMetricFamily]:
        found = self._live()
        for name in sorted({name for numbers in found.values() for name in numbers}):
            title = f"{name.replace('_', ' ')} there are now"
            family = GaugeMetricFamily(f"tinker_tenant_{name}", title, labels=["tenant"])
            for tenant, numbers in found.items():
                family.add_metric([tenant], numbers[name])
            yield family


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
        self._latest = Latest(
            "tinker_latest_seconds", "from the arrival of a request to its result, of the latest ones"
        )
        self._registry.register(self._latest)  # pyright: ignore[reportArgumentType]
        self._of_tenants = Counter(
            "tinker_tenant_operations", "operations that ended", ["tenant", "kind", "outcome"], registry=self._registry
        )
        self._tokens_of_tenants = Counter(
            "tinker_tenant_tokens", "tokens trained on or sampled", ["tenant", "kind"], registry=self._registry
        )
        self.engine = EngineStats()
        self._registry.register(self.engine)  # pyright: ignore[reportArgumentType]

    def watch_tenants(self, live: Callable[[], Mapping[str, Mapping[str, float]]]) -> None:
        """Show these numbers of each tenant as they are at the time of asking."""
        self._registry.register(OfTenants(live))  # pyright: ignore[reportArgumentType]

    def watch(self, live: Callable[[], Mapping[str, float]]) -> None:
        """Show these numbers as they are at the time of asking."""
        for name in live():
            gauge = Gauge(f"tinker_live_{name}", f"{name.replace('_', ' ')} there are now", registry=self._registry)
            gauge.set_function(lambda name=name: live()[name])

    def serves(self, executions: Mapping[str, Mapping[str, str]]) -> None:
        """Show what each model runs on, which is settled once it is loaded."""
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
        self._of_tenants.labels(request.tenant.name, request.kind, outcome(reply)).inc()
        if "tokens" in reply.fields:
            self._tokens.labels(request.kind).inc(reply.fields["tokens"])
            self._tokens_of_tenants.labels(request.tenant.name, request.kind).inc(reply.fields["tokens"])

    def text(self, tenant: Tenant) -> bytes:
        """For an operator all of it, for anybody else what is his own."""
        text = generate_latest(self._registry)
        if tenant.terms.operator:
            return text
        own = f'tenant="{tenant.name}"'.encode()
        return b"".join(line for line in text.splitlines(keepends=True) if own in line)
