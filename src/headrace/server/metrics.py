"""/metrics: the engine's counters and gauges, and latencies as the server sees them, under vLLM's suffixes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace.server.engine import Capacity
from headrace.server.job import Job
from headrace.types import EngineStats

PREFIX = "headrace:"

GAUGES = {
    "num_requests_running": ("Requests being computed.", "running"),
    "num_requests_waiting": ("Requests waiting for their turn.", "waiting"),
    "kv_chunks_total": ("Chunks in the KV pool.", "kv_chunks_total"),
    "kv_chunks_used": ("Chunks that running requests hold, shared ones once.", "kv_chunks_used"),
    "kv_chunks_cached": ("Chunks that nobody uses, kept for later requests.", "kv_chunks_cached"),
    "kv_chunks_unshared": ("Chunks that running requests would hold without sharing.", "kv_chunks_unshared"),
    "kv_unstored_chunks": ("Chunks and blobs waiting to be written to a tier; 0: all are.", "writeback_pending"),
}

COUNTERS = {
    "prefix_cache_queries": ("Prompt tokens looked up in the cache.", "prompt_tokens"),
    "prefix_cache_hits": ("Prompt tokens found in the cache.", "cached_tokens"),
    "prompt_tokens": ("Prompt tokens of admitted requests.", "prompt_tokens"),
    "prefilled_tokens": ("Prompt tokens computed, not found in the cache.", "prefilled_tokens"),
    "generation_tokens": ("Tokens generated.", "generated_tokens"),
    "num_preemptions": ("Sequences put back into the queue for want of chunks.", "preemptions"),
    "evictions": ("Cached chunks given up for new ones.", "evictions"),
    "kv_restores": ("Runs of stored chunks brought back.", "restores"),
    "kv_restored_tokens": ("Tokens whose keys and values were loaded from a tier.", "restored_tokens"),
    "kv_projected_tokens": ("Tokens whose keys and values were made from stored activations.", "projected_tokens"),
    "kv_recomputed_tokens": ("Stored tokens computed anew while others were loaded.", "recomputed_tokens"),
    "kv_restore_seconds": ("Time spent bringing chunks back.", "restore_s"),
    "kv_restore_link_seconds": ("Of these, time in which something was on its way.", "restore_link_s"),
    "kv_restore_waited_seconds": ("Of these, time in which the engine waited for it.", "restore_waited_s"),
    "kv_restore_failures": ("Restores that could not load all they had begun to load.", "restore_failures"),
    "engine_steps": ("Steps of the engine.", "steps"),
    "engine_step_seconds": ("Time spent in steps.", "step_s"),
}

TIER_GAUGES = {
    "tier_used_bytes": ("Bytes of KV in the tier.", "used_bytes"),
    "tier_budget_bytes": ("Bytes that the tier may hold; 0: its server decides.", "budget_bytes"),
    "tier_blobs": ("Blobs in the tier: keys and values, or activations, of one chunk each.", "blobs"),
    "tier_degraded": ("1 while the tier is left alone after a failure.", "degraded"),
    "tier_queued_bytes": ("Bytes waiting to be written to the tier.", "queued_bytes"),
}

TIER_COUNTERS = {
    "tier_reads": ("Reads of blobs or parts of them.", "reads"),
    "tier_read_bytes": ("Bytes read.", "read_bytes"),
    "tier_writes": ("Blobs written.", "writes"),
    "tier_written_bytes": ("Bytes written.", "written_bytes"),
    "tier_misses": ("Blobs or parts that were expected and not had.", "misses"),
    "tier_bad": ("Blobs found damaged or foreign.", "bad"),
    "tier_dropped": ("Writes given up: no room, a full queue, a failure.", "dropped"),
    "tier_evictions": ("Blobs given up for others.", "evictions"),
    "tier_errors": ("Calls that failed or took too long.", "errors"),
}

FINISHES = {"stop": "finished_stop", "length": "finished_length", "abort": "finished_abort"}

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


class _EngineCollector(Collector):
    """Reads the latest EngineStats at every scrape."""

    def __init__(self, stats: Callable[[], EngineStats], capacity: Callable[[], Capacity | None], model: str) -> None:
        self.stats, self.capacity, self.model = stats, capacity, model

    def collect(self) -> Iterator[Metric]:
        stats, capacity = self.stats(), self.capacity()
        told = "Bytes of K and V that one token takes, over all layers."
        size = GaugeMetricFamily(PREFIX + "kv_bytes_per_token", told, labels=["model_name"])
        size.add_metric([self.model], 0 if capacity is None else capacity.kv_bytes_per_token)
        yield size
        for name, (told, source) in GAUGES.items():
            yield self._with_value(GaugeMetricFamily(PREFIX + name, told, labels=["model_name"]), stats, source)
        told = "Share of the KV pool in use; 1 is full."
        usage = GaugeMetricFamily(PREFIX + "kv_cache_usage_perc", told, labels=["model_name"])
        usage.add_metric([self.model], stats.kv_chunks_used / max(1, stats.kv_chunks_total))
        yield usage
        for name, (told, source) in COUNTERS.items():
            yield self._with_value(CounterMetricFamily(PREFIX + name, told, labels=["model_name"]), stats, source)
        labels = ["model_name", "finished_reason"]
        ended = CounterMetricFamily(PREFIX + "request_success", "Requests by how they ended.", labels=labels)
        for reason, source in FINISHES.items():
            ended.add_metric([self.model, reason], getattr(stats, source))
        yield ended
        labels = ["model_name", "strategy"]
        prefills = CounterMetricFamily(PREFIX + "prefills", "Prefills by several ranks, by strategy.", labels=labels)
        for strategy, count in stats.strategies.items():
            prefills.add_metric([self.model, strategy], count)
        yield prefills
        yield from self._tiers(stats)

    def _tiers(self, stats: EngineStats) -> Iterator[Metric]:
        kinds: tuple[tuple[type[Metric], dict[str, tuple[str, str]]], ...]
        kinds = ((GaugeMetricFamily, TIER_GAUGES), (CounterMetricFamily, TIER_COUNTERS))
        for kind, table in kinds:
            for name, (told, source) in table.items():
                family = kind(PREFIX + name, told, labels=["model_name", "tier"])
                for tier, own in stats.tiers.items():
                    family.add_metric([self.model, tier], getattr(own, source))
                yield family

    def _with_value(self, family: Metric, stats: EngineStats, source: str) -> Metric:
        family.add_metric([self.model], getattr(stats, source))
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


class ServerMetrics:
    """One registry per server. `refused` counts answers other than 2xx, `gone` requests whose client left, `restarts`
    engines that replaced a failed one."""

    def __init__(self, stats: Callable[[], EngineStats], capacity: Callable[[], Capacity | None], model: str) -> None:
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

    def note_peak(self, stats: EngineStats) -> None:
        """Keeps the moment at which running requests would have held most without sharing."""
        if stats.kv_chunks_unshared > self._peak[1]:
            self._peak = (stats.kv_chunks_used, stats.kv_chunks_unshared)

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
