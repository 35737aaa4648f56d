"""Counters and gauges of the engine by room, each with the name and the help of its metric.

A new figure is a field here and the line that counts it: /metrics, sums over restarts and the socket follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, Self

from headrace.types import CHUNK


class Figure(NamedTuple):
    """A metric of a field. `counts`: it only grows; else it is a gauge. `labels`: those that tell it from its like."""

    metric: str
    help: str
    counts: bool
    labels: Mapping[str, str] = {}


def gauge(metric: str, help: str, default: Any = 0) -> Any:
    """A field that tells how things stand."""
    return field(default=default, metadata={"figures": (Figure(metric, help, False),), "counts": False})


def counter(metric: str, help: str, *, also: tuple[str, str] | None = None, default: Any = 0, **labels: str) -> Any:
    """A field that counts. `also`: a second metric that tells the same, and its help."""
    told = [(metric, help)] + ([also] if also else [])
    figures = tuple(Figure(name, text, True, labels) for name, text in told)
    return field(default=default, metadata={"figures": figures, "counts": True})


def by(label: str, kind: Any) -> Any:
    """A field of several: a name, which becomes the metric's label, -> `kind`: a record, or the figure of a count."""
    return field(default_factory=dict, metadata={"by": label, "kind": kind})


class StatsRecord:
    """Figures of one room: a dataclass of `gauge`, `counter` and `by` fields and of such records."""

    __slots__ = ()

    def after(self, earlier: Self) -> Self:
        """These gauges, and these counters on top of those of an engine that ended. Both records stay as they are."""
        found = {
            item.name: _after(getattr(self, item.name), getattr(earlier, item.name), item.metadata.get("counts", True))
            for item in fields(self)  # type: ignore[arg-type]
        }
        return replace(self, **found)  # type: ignore[type-var]

    @classmethod
    def figures(cls) -> Iterator[tuple[Figure, tuple[str, ...]]]:
        """All metrics that the records of this kind have, with the names of their labels."""
        made = cls()
        for item in fields(made):  # type: ignore[arg-type]
            own = getattr(made, item.name)
            if isinstance(own, StatsRecord):
                yield from own.figures()
            elif "by" in item.metadata:
                kind, label = item.metadata["kind"], item.metadata["by"]
                inner = [(kind, ())] if isinstance(kind, Figure) else kind.figures()
                yield from ((figure, (label, *more)) for figure, more in inner)
            else:
                yield from ((figure, tuple(figure.labels)) for figure in item.metadata.get("figures", ()))

    def samples(self) -> Iterator[tuple[Figure, dict[str, str], float]]:
        """Each metric with its labels and its value."""
        for item in fields(self):  # type: ignore[arg-type]
            own = getattr(self, item.name)
            if isinstance(own, StatsRecord):
                yield from own.samples()
            elif "by" in item.metadata:
                kind, label = item.metadata["kind"], item.metadata["by"]
                for name, value in own.items():
                    inner = [(kind, {}, value)] if isinstance(kind, Figure) else value.samples()
                    yield from ((figure, {label: name, **labels}, number) for figure, labels, number in inner)
            else:
                yield from ((figure, dict(figure.labels), own) for figure in item.metadata.get("figures", ()))

    def flat(self) -> dict[str, float]:
        """The numbers by 'room.field'; tables of several are left out."""
        return {
            f"{room.name}.{item.name}": getattr(own, item.name)
            for room in fields(self)  # type: ignore[arg-type]
            if isinstance(own := getattr(self, room.name), StatsRecord)
            for item in fields(own)  # type: ignore[arg-type]
            if "by" not in item.metadata
        }


@dataclass(frozen=True, slots=True)
class Summary:
    """What an engine holds now (requests running and waiting, KV) and has done since its start (all else).

    `cached_share`: of the prompt tokens of admitted requests, those that came from the cache, between 0 and 1; they
    count once a request has ended. Tokens of KV are counted in whole chunks of 64: `kv_tokens` is room for so many,
    `kv_tokens_used` are those of running requests, shared ones once, `kv_tokens_kept` those of ended requests that
    later ones may find; `kv_share` is both over the room.
    """

    requests_running: int
    requests_waiting: int
    requests_finished: int
    requests_aborted: int
    prompt_tokens: int
    cached_tokens: int
    cached_share: float
    output_tokens: int
    kv_tokens: int
    kv_tokens_used: int
    kv_tokens_kept: int
    kv_share: float
    preemptions: int
    evictions: int


def _after(own: Any, earlier: Any, counts: bool) -> Any:
    if isinstance(own, StatsRecord):
        return own.after(earlier)
    if isinstance(own, dict):
        return earlier | {name: _after(value, earlier.get(name, type(value)()), True) for name, value in own.items()}
    return own + earlier if counts else own


@dataclass(slots=True)
class SchedulerStats(StatsRecord):
    """Times in seconds."""

    running: int = gauge("num_requests_running", "Requests being computed.")
    waiting: int = gauge("num_requests_waiting", "Requests waiting for their turn.")
    preemptions: int = counter("num_preemptions", "Sequences put back into the queue for want of chunks.")
    steps: int = counter("engine_steps", "Steps of the engine.")
    step_s: float = counter("engine_step_seconds", "Time spent in steps.", default=0.0)


@dataclass(slots=True)
class TokenStats(StatsRecord):
    prompt: int = counter(
        "prompt_tokens",
        "Prompt tokens of admitted requests.",
        also=("prefix_cache_queries", "Prompt tokens looked up in the cache."),
    )
    cached: int = counter("prefix_cache_hits", "Prompt tokens found in the cache.")
    prefilled: int = counter("prefilled_tokens", "Prompt tokens computed, not found in the cache.")
    generated: int = counter("generation_tokens", "Tokens generated.")


ENDED = ("request_success", "Requests by how they ended.")


@dataclass(slots=True)
class FinishedStats(StatsRecord):
    stop: int = counter(*ENDED, finished_reason="stop")
    length: int = counter(*ENDED, finished_reason="length")
    abort: int = counter(*ENDED, finished_reason="abort")


@dataclass(slots=True)
class KVStats(StatsRecord):
    chunks_total: int = gauge("kv_chunks_total", "Chunks in the KV pool.")
    chunks_used: int = gauge("kv_chunks_used", "Chunks that running requests hold, shared ones once.")
    chunks_cached: int = gauge("kv_chunks_cached", "Chunks that nobody uses, kept for later requests.")
    chunks_unshared: int = gauge("kv_chunks_unshared", "Chunks that running requests would hold without sharing.")
    copied_tokens: int = counter(
        "kv_copied_tokens", "Prompt tokens found in the cache in a chunk that goes on otherwise, and copied from there."
    )
    evictions: int = counter("evictions", "Cached chunks given up for new ones.")
    chunks_pinned: int = gauge("kv_chunks_pinned", "Chunks that pinned prefixes hold, shared ones once.")
    chunks_protected: int = gauge("kv_chunks_protected", "Chunks that tenants have within their shares of the pool.")
    pins: int = gauge("kv_pins", "Pinned prefixes.")
    pins_refused: int = counter("kv_pins_refused", "Pins that were refused for want of room, or for a wrong field.")
    states_kept: int = gauge("kv_states_kept", "Recurrent states kept behind chunks of the cache.")
    state_evictions: int = counter("kv_state_evictions", "Recurrent states given up for new ones.")


@dataclass(slots=True)
class RestoreStats(StatsRecord):
    """Chunks on their way to the tiers and back; times in seconds."""

    restores: int = counter("kv_restores", "Runs of stored chunks brought back.")
    loaded_tokens: int = counter("kv_restored_tokens", "Tokens whose keys and values were loaded from a tier.")
    projected_tokens: int = counter(
        "kv_projected_tokens", "Tokens whose keys and values were made from stored activations."
    )
    recomputed_tokens: int = counter("kv_recomputed_tokens", "Stored tokens computed anew while others were loaded.")
    loaded_from: dict[str, int] = by(
        "tier", Figure("kv_loaded_tokens", "Tokens whose keys and values were loaded, by tier.", True)
    )
    plans: dict[str, int] = by(
        "plan", Figure("kv_restore_plans", "What was chosen for stored prefixes: load, recompute+load, ...", True)
    )
    seconds: float = counter("kv_restore_seconds", "Time spent bringing chunks back.", default=0.0)
    link_s: float = counter("kv_restore_link_seconds", "Of these, time in which something was on its way.", default=0.0)
    waited_s: float = counter(
        "kv_restore_waited_seconds", "Of these, time in which the engine waited for it.", default=0.0
    )
    failures: int = counter("kv_restore_failures", "Restores that could not load all they had begun to load.")
    unstored: int = gauge("kv_unstored_chunks", "Chunks and blobs waiting to be written to a tier; 0: all are.")


STREAMED = ("kv_stream_bytes", "Bytes that steps on streamed KV moved over the link: KV, X, weights, hidden states.")


@dataclass(slots=True)
class StreamStats(StatsRecord):
    """One rank whose KV stays outside the pool (offload_schedule); times in seconds. A token counts in each step that
    attends it."""

    bytes_in: int = counter(*STREAMED, direction="in")
    bytes_out: int = counter(*STREAMED, direction="out")
    loaded_tokens: int = counter("kv_stream_loaded_tokens", "Tokens whose keys and values steps had streamed in.")
    projected_tokens: int = counter(
        "kv_stream_projected_tokens", "Tokens whose keys and values steps made from streamed or resident X."
    )
    seconds: float = counter("kv_stream_seconds", "Time spent in steps on streamed KV.", default=0.0)
    waited_s: float = counter(
        "kv_stream_waited_seconds", "Of these, time in which the rank waited for what is loaded.", default=0.0
    )
    steps: dict[str, int] = by(
        "schedule", Figure("kv_stream_steps", "Steps on streamed KV, by the schedule that was chosen.", True)
    )

    @property
    def link_bound(self) -> float:
        """Share of the time that was spent waiting for the link, between 0 and 1."""
        return self.waited_s / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class ExpertStats(StatsRecord):
    """Experts in a file, of rank 0 (expert_offload_path). An expert counts once in each step that meets it."""

    outside_bytes: int = gauge("expert_file_bytes", "Bytes of experts in the file.")
    kept_bytes: int = gauge("expert_kept_bytes", "Bytes of these that are kept in memory, the most used ones.")
    met: int = counter("expert_reads", "Experts in the file that steps met.")
    hits: int = counter("expert_hits", "Of these, those that were kept in memory.")
    moved: int = counter("expert_moves", "Experts that were kept in place of others that were used less.")


@dataclass(slots=True)
class StructuredStats(StatsRecord):
    """Answers with a shape; time in seconds."""

    requests: int = counter("structured_requests", "Requests whose answer has a shape.")
    grammars: int = counter("structured_grammars", "Grammars compiled; requests with one shape share one.")
    forced: int = counter("structured_forced_tokens", "Tokens appended unsampled, since a grammar forces them.")
    waited_s: float = counter(
        "structured_mask_wait_seconds", "Time in which a step waited for masks of allowed tokens.", default=0.0
    )


@dataclass(slots=True)
class GraphStats(StatsRecord):
    """Steps on a GPU as CUDA graphs. prompts: of those that were replayed."""

    replayed: int = counter("graph_steps_replayed", "Steps that were a replay of a CUDA graph.")
    ahead: int = counter("graph_steps_ahead", "Of these, those launched while the step before was under way.")
    eager: int = counter(
        "graph_steps_eager", "Steps for which there was no graph: no room in its memory, or many rows."
    )
    prompts: int = counter("graph_prompt_steps_replayed", "Steps with prompts that were a replay of a CUDA graph.")
    recorded: int = counter("graph_recordings", "CUDA graphs recorded.")


@dataclass(slots=True)
class SpeculationStats(StatsRecord):
    drafts: int = counter("spec_decode_num_drafts", "Drafts verified.")
    drafted: int = counter("spec_decode_num_draft_tokens", "Tokens drafted and computed.")
    accepted: int = counter("spec_decode_num_accepted_tokens", "Drafted tokens that were what would have been drawn.")


@dataclass(slots=True)
class RankStats(StatsRecord):
    """`prefills` by the strategy that several ranks computed them with."""

    prefills: dict[str, int] = by("strategy", Figure("prefills", "Prefills by several ranks, by strategy.", True))


@dataclass(slots=True)
class TierStats(StatsRecord):
    """One tier. degraded: it is left alone for a while after a failure, of which `reason` tells."""

    used_bytes: int = gauge("tier_used_bytes", "Bytes of KV in the tier.")
    budget_bytes: int = gauge("tier_budget_bytes", "Bytes that the tier may hold; 0: its server decides.")
    blobs: int = gauge("tier_blobs", "Blobs in the tier: keys and values, or activations, of one chunk each.")
    reads: int = counter("tier_reads", "Reads of blobs or parts of them.")
    read_bytes: int = counter("tier_read_bytes", "Bytes read.")
    writes: int = counter("tier_writes", "Blobs written.")
    written_bytes: int = counter("tier_written_bytes", "Bytes written.")
    misses: int = counter("tier_misses", "Blobs or parts that were expected and not had.")
    bad: int = counter("tier_bad", "Blobs found damaged or foreign.")
    dropped: int = counter("tier_dropped", "Writes given up: no room, a full queue, a failure.")
    evictions: int = counter("tier_evictions", "Blobs given up for others.")
    errors: int = counter("tier_errors", "Calls that failed or took too long.")
    queued_bytes: int = gauge("tier_queued_bytes", "Bytes waiting to be written to the tier.")
    degraded: bool = gauge("tier_degraded", "1 while the tier is left alone after a failure.", default=False)
    reason: str = field(default="", metadata={"counts": False})


@dataclass(slots=True)
class TenantStats(StatsRecord):
    """One tenant, where the scheduler shares between tenants (engine.fairness)."""

    waiting: int = gauge("tenant_requests_waiting", "Sequences of a tenant that wait for their turn.")
    waiting_tokens: int = gauge("tenant_waiting_tokens", "Tokens of these.")
    prefilled: int = counter("tenant_prefilled_tokens", "Prompt tokens computed for a tenant.")
    preemptions: int = counter("tenant_preemptions", "Sequences of a tenant that gave way to another tenant's.")


@dataclass(slots=True)
class EngineStats(StatsRecord):
    """All figures of the engine, taken between steps. `tiers`: of each tier by its kind (host, disk, remote); `stream`:
    of each rank by its number, where KV is streamed; `tenants`: of each by its name, "" being whoever has none."""

    scheduler: SchedulerStats = field(default_factory=SchedulerStats)
    tokens: TokenStats = field(default_factory=TokenStats)
    finished: FinishedStats = field(default_factory=FinishedStats)
    kv: KVStats = field(default_factory=KVStats)
    restore: RestoreStats = field(default_factory=RestoreStats)
    ranks: RankStats = field(default_factory=RankStats)
    experts: ExpertStats = field(default_factory=ExpertStats)
    structured: StructuredStats = field(default_factory=StructuredStats)
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    graphs: GraphStats = field(default_factory=GraphStats)
    tiers: dict[str, TierStats] = by("tier", TierStats)
    stream: dict[str, StreamStats] = by("rank", StreamStats)
    tenants: dict[str, TenantStats] = by("tenant", TenantStats)

    def summary(self) -> Summary:
        """The figures that people ask for, by plain names."""
        now, tokens, ended, kv = self.scheduler, self.tokens, self.finished, self.kv
        held = kv.chunks_used + kv.chunks_cached
        return Summary(
            requests_running=now.running,
            requests_waiting=now.waiting,
            requests_finished=ended.stop + ended.length,
            requests_aborted=ended.abort,
            prompt_tokens=tokens.prompt,
            cached_tokens=tokens.cached,
            cached_share=tokens.cached / tokens.prompt if tokens.prompt else 0.0,
            output_tokens=tokens.generated,
            kv_tokens=kv.chunks_total * CHUNK,
            kv_tokens_used=kv.chunks_used * CHUNK,
            kv_tokens_kept=kv.chunks_cached * CHUNK,
            kv_share=held / kv.chunks_total if kv.chunks_total else 0.0,
            preemptions=now.preemptions,
            evictions=kv.evictions,
        )
