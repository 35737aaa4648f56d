"""/metrics: the engine's counters and gauges (stats.py declares them), and latencies as the server sees them, under
vLLM's suffixes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace.server.abandoned import AbandonedPrefills
from headrace.server.engine import ServedCapacity
from headrace.server.job import Job
from headrace.server.keyring import Keyring
from headrace.stats import EngineStats

PREFIX = "headrace:"

TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
GAP = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80)
WHOLE = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6)

HISTOGRAMS = {
    "time_to_first_token_seconds": ("From the request's arrival to its first token.", TTFT),
    "inter_token_latency_seconds": ("Between tokens of one sequence.", GAP),
    "request_time_per_output_token_seconds": ("Mean time per token after the first, by request.", GAP),
    "e2e_request_latency_seconds": ("From arrival to the last token.", WHOLE),
    "request_queue_time_seconds": ("Time a request waited for its turn.", WHOLE),
    "request_prompt_tokens": ("Prompt tokens by request.", TOKENS),
    "request_generation_tokens": ("Generated tokens by request.", TOKENS),
}


ABANDONED = "Prefills whose client left, by whether they were finished."
TENANT_COUNTS = {
    "requests": ("Requests by tenant.", ""),
    "tokens": ("Tokens of prompts, of them cached ones, and of answers.", "kind"),
    "limited": ("Requests refused since a limit of their tenant was reached.", "limit"),
}
"""What is counted -> its help, and the label that tells kinds apart."""


class _EngineCollector(Collector):
    """Reads the latest EngineStats at every scrape."""

    def __init__(
        self, stats: Callable[[], EngineStats], capacity: Callable[[], ServedCapacity | None], model: str
    ) -> None:
        self.stats, self.capacity, self.model = stats, capacity, model

    def collect(self) -> Iterator[Metric]:
        stats, capacity = self.stats(), self.capacity()
        size = 0 if capacity is None else capacity.kv_bytes_per_token
        yield self._gauge("kv_bytes_per_token", "Bytes of K and V that one token takes, over all layers.", size)
        used = stats.kv.chunks_used / max(1, stats.kv.chunks_total)
        yield self._gauge("kv_cache_usage_perc", "Share of the KV pool in use; 1 is full.", used)
        yield self._link_bound(stats)
        families: dict[str, Metric] = {}
        for figure, labels in EngineStats.figures():
            kind = CounterMetricFamily if figure.counts else GaugeMetricFamily
            names = ["model_name", *labels]
            families.setdefault(figure.metric, kind(PREFIX + figure.metric, figure.help, labels=names))
        for figure, told, value in stats.samples():
            families[figure.metric].add_metric([self.model, *told.values()], value)
        yield from families.values()

    def _link_bound(self, stats: EngineStats) -> Metric:
        told = "Share of the time of steps on streamed KV in which the rank waited for the link; 1 is all."
        family = GaugeMetricFamily(PREFIX + "kv_stream_link_bound_perc", told, labels=["model_name", "rank"])
        for rank, own in stats.stream.items():
            family.add_metric([self.model, rank], own.link_bound)
        return family

    def _gauge(self, name: str, told: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, told, labels=["model_name"])
        family.add_metric([self.model], value)
        return family


class _PeakCollector(Collector):
    """The moment at which sharing saved most since the start."""

    def __init__(self, peak: Callable[[], tuple[int, int]], model: str) -> None:
        self.peak, self.model = peak, model

    def collect(self) -> Iterator[Metric]:
        told = ("Chunks held when most would have been held unshared.", "Most chunks ever held, were none shared.")
        for name, text, value in zip(
            ("kv_chunks_used_peak", "kv_chunks_unshared_peak"), told, self.peak(), strict=True
        ):
            family = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
            family.add_metric([self.model], value)
            yield family


class ServerCounts(Collector):
    """What tenants have had, each under its name, and prefills that went on without their client."""

    def __init__(self, keys: Keyring, abandoned: AbandonedPrefills) -> None:
        self.keys, self.abandoned = keys, abandoned

    def collect(self) -> Iterator[Metric]:
        ended = CounterMetricFamily(PREFIX + "prefills_after_disconnect", ABANDONED, labels=["outcome"])
        for outcome, count in self.abandoned.counts.items():
            ended.add_metric([outcome], count)
        yield ended
        tenants = list(self.keys.tenants.values())
        if not tenants:
            return
        running = GaugeMetricFamily(PREFIX + "tenant_requests_running", "Requests not answered yet.", labels=["tenant"])
        for tenant in tenants:
            running.add_metric([tenant.name], tenant.under_way)
        yield running
        for what, (told, label) in TENANT_COUNTS.items():
            labels = ["tenant", *([label] if label else [])]
            family = CounterMetricFamily(f"{PREFIX}tenant_{what}", told, labels=labels)
            for tenant in tenants:
                for (counted, kind), count in sorted(tenant.counts.items()):
                    if counted == what:
                        family.add_metric([tenant.name, *([kind] if label else [])], count)
            yield family


class ServerMetrics:
    """One registry per server. `refused` counts answers other than 2xx, `gone` requests whose client left, `restarts`
    engines that replaced a failed one."""

    def __init__(
        self, stats: Callable[[], EngineStats], capacity: Callable[[], ServedCapacity | None], model: str
    ) -> None:
        self.registry = CollectorRegistry()
        self.model = model
        self.registry.register(_EngineCollector(stats, capacity, model))
        ProcessCollector(registry=self.registry)
        self._peak = (0, 0)
        self.registry.register(_PeakCollector(lambda: self._peak, model))
        self.histograms = {
            name: Histogram(PREFIX + name, told, ["model_name"], buckets=buckets, registry=self.registry).labels(model)
            for name, (told, buckets) in HISTOGRAMS.items()
        }
        self.refused = Counter(
            PREFIX + "http_errors", "Answers other than 2xx, by status.", ["status"], registry=self.registry
        )
        self.restarts = Counter(
            PREFIX + "engine_restarts", "Times a failed engine was started again.", registry=self.registry
        )
        self.gone = Counter(PREFIX + "clients_gone", "Requests whose client left early.", registry=self.registry)

    def watch(self, name: str, told: str, value: Callable[[], float]) -> None:
        """A gauge whose value is asked for at every scrape."""
        Gauge(PREFIX + name, told, registry=self.registry).set_function(value)

    def register(self, collector: Collector) -> None:
        """More figures for the page."""
        self.registry.register(collector)

    def note_peak(self, stats: EngineStats) -> None:
        """Keeps the moment at which running requests would have held most without sharing."""
        if stats.kv.chunks_unshared > self._peak[1]:
            self._peak = (stats.kv.chunks_used, stats.kv.chunks_unshared)

    def observe(self, job: Job) -> None:
        """Takes one ended request into the histograms."""
        h, end = self.histograms, job.end_s or job.arrival_s
        if job.first_s is not None:
            h["time_to_first_token_seconds"].observe(job.first_s - job.arrival_s)
            rest = job.output_tokens - len(job.choices)
            if rest > 0:
                h["request_time_per_output_token_seconds"].observe((end - job.first_s) / rest * len(job.choices))
        for gap in job.gaps:
            h["inter_token_latency_seconds"].observe(gap)
        for m in job.metrics:
            h["request_queue_time_seconds"].observe(m.queue_s)
        h["e2e_request_latency_seconds"].observe(end - job.arrival_s)
        h["request_prompt_tokens"].observe(job.prompt_tokens)
        h["request_generation_tokens"].observe(job.output_tokens)

    def page(self) -> bytes:
        return generate_latest(self.registry)
