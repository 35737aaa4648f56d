"""What an engine takes of this host's memory, known before anything is started. Imports no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from headrace import host
from headrace.config import EngineConfig, KVDType
from headrace.engine.adapters import adapter_bytes
from headrace.engine.draft_facts import DraftFacts
from headrace.host import GIB
from headrace.kv.milestones import INTERVAL
from headrace.models.shards import recurrent_share, shard
from headrace.models.sizes import (
    BYTES,
    compute_type,
    expert_bytes,
    kv_bytes_per_token,
    loading_bytes,
    weight_bytes,
)
from headrace.models.spec import ModelConfig
from headrace.types import CHUNK, chunks_for

PROCESS_BYTES = GIB // 4
"""Of a rank's process with torch, before weights and KV."""

AUTO_SHARE = 4
"""The KV cache takes one part in so many of the free memory where its size is not given."""
EXPERTS_SHARE = 2
"""Experts in a file take one part in so many of what the other weights leave free, where that is not given."""
STATES_SHARE = 2
"""Recurrent states take one part in so many of that."""
STATES_EACH = 4
"""States at most for each sequence that may run, where their number is not given."""
SMALL_STATE = 2
"""A state that takes at most one part in so many of a chunk is kept behind every chunk."""


def ranks_here(config: EngineConfig) -> int:
    """Ranks that share this host's cores and memory, as far as is known."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", config.ranks.count))


def draft_kv_bytes(config: EngineConfig) -> int:
    """Bytes that a token of a rank's pool takes for the draft model; 0 without one."""
    draft = DraftFacts.of(config)
    return 0 if draft is None else draft.bytes_beside(config, ranks_here(config))


def keeps_activations(config: EngineConfig, model: ModelConfig, element_bytes: int, kv_element_bytes: int) -> bool:
    """Whether the pool keeps the inputs of the projections beside K and V, to store them below: KVPR, section 3.2.

    They pay where they are smaller than K and V, which is not so where several query heads share a KV head. Ranks keep
    them if asked to: context ranks have those of chunks whose owner computed all rows, often few, and the pool of each
    tensor rank has room for those of all chunks.
    """
    if config.tiers is None or config.tiers.activations == "off":
        return False
    if model.recurrent is not None:
        return False
    if config.ranks.count > 1:
        return config.tiers.activations == "on"
    spec = model.attention
    stored = spec.kv_bytes_per_token(kv_element_bytes)
    smaller = model.stream_size * element_bytes * spec.stored < stored
    return smaller or config.tiers.activations == "on"


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of all ranks on this host. free: what can be had; weights: what stays in memory of them, with what the
    processes take themselves, and loading: the same before they are quantised. rest: bytes of a rank's weights but for
    experts in a file; outside: of these experts. draft: the model that drafts, which is part of weights and loading."""

    config: EngineConfig
    model: ModelConfig
    free: int
    weights: int
    loading: int
    rest: int = 0
    outside: int = 0
    draft: DraftFacts | None = None

    @classmethod
    def of(cls, config: EngineConfig, model: ModelConfig, free: int | None = None) -> Footprint:
        compute = compute_type(model, config.model.dtype)
        forms, on_gpu, ranks = [config.model.quantization, "none"], config.model.on_gpu, config.ranks.tensor
        kept = weight_bytes(model, compute, config.model.quantization, ranks=ranks, on_gpu=on_gpu)
        loading = loading_bytes(model, compute, ranks, on_gpu)
        outside, unrounded = 0, 0
        if config.expert_folder is not None:
            outside, unrounded = (expert_bytes(model, compute, form, ranks) for form in forms)
        rest, loading = kept - outside, loading - unrounded
        kept = rest
        if config.streaming is not None and config.streaming.weights and config.streaming.path is not None:
            kept = 0  # they lie in a file
        free = host.memory_available() if free is None else free
        here = ranks_here(config)
        draft = DraftFacts.of(config)
        beside, drafting = PROCESS_BYTES + adapter_bytes(config), 0 if draft is None else draft.weight_bytes
        weights, loading = ((each + beside) * here + drafting for each in (kept, loading))
        taken = cls(config, model, free, weights, loading, rest, outside, draft)
        return replace(taken, weights=taken.weights + taken.kept_experts() * here)

    def rank_weights(self) -> int:
        """Bytes of all weights of a rank, wherever they lie."""
        return self.rest + self.outside

    def kept_experts(self) -> int:
        """Bytes of experts in a file that each rank keeps in memory: as given, else a part of what is free."""
        given = self.config.experts.memory
        drafting = 0 if self.draft is None else self.draft.weight_bytes
        room = (self.free - drafting) // ranks_here(self.config) - self.rest - PROCESS_BYTES
        size = max(0, room) // EXPERTS_SHARE if given is None else int(given * GIB)
        return min(self.outside, size)

    def check(self) -> None:
        """Raises ValueError, with what is needed, what is free and what fits, where it is more than there is."""
        ray = self.config.ranks.launcher == "ray" and self.config.ranks.count > 1
        pinned = self.config.streaming is not None and self.config.streaming.weights
        if ray:
            return  # ranks on hosts of which nothing is known
        if self.config.model.on_gpu and not pinned:  # the rest is a GPU's memory, which the engine looks at
            self._check_pinned()
            return
        if self.loading > self.free:
            raise ValueError(
                f"the weights of {self.config.model.folder} need {gib(self.loading)}, but {gib(self.free)} are free: "
                f"take a smaller model, or free memory{self._experts_remedy()}"
            )
        if self.weights > self.free:
            raise ValueError(
                f"expert_memory_size {gib(self.kept_experts())}{self._each()} is too much: {self._what_is_free()}; "
                f"lower it"
            )
        if self.config.streaming is not None:
            self._check_streamed()
            return
        if self.state_bytes() > self.free - self.weights:
            raise ValueError(
                f"recurrent_states {self.states():,} need {gib(self.state_bytes())}; {self._what_is_free()}: "
                f"lower recurrent_states, or free memory"
            )
        if self.config.cache.tokens is not None and self.kv_bytes() > self.free - self.weights - self.state_bytes():
            raise ValueError(self._too_many_tokens(self.config.cache.tokens))
        self._check_host_tier()

    def per_token(self, kv_dtype: KVDType | None = None) -> int:
        """Bytes of a token of the pool on each rank, of the settings' type unless another is asked for."""
        config, spec = self.config, shard(self.model, 0, self.config.ranks.tensor)
        compute = compute_type(self.model, config.model.dtype)
        kv_dtype = kv_dtype or config.cache.dtype
        kv_element = 1 if kv_dtype == "int8" else BYTES[compute]
        kept = keeps_activations(config, self.model, BYTES[compute], kv_element)
        activations = spec.stored * self.model.stream_size * BYTES[compute] if kept else 0
        return kv_bytes_per_token(spec, compute, kv_dtype) + activations + self._drafts_per_token()

    def _drafts_per_token(self) -> int:
        """Of them a draft model's."""
        return 0 if self.draft is None else self.draft.bytes_beside(self.config, ranks_here(self.config))

    def states(self) -> int | None:
        """Recurrent states in memory; None for a model that has none."""
        spec, given = self.model.recurrent, self.config.cache.states
        if spec is None or given is not None:
            return given if spec is not None else None
        running = self.config.scheduler.max_sequences
        each = 1 + self.config.speculation.on  # a draft takes a second one
        if self.state_interval() == CHUNK:
            return self._chunks_with_states() + each * running
        return max(each, min(self._room() // STATES_SHARE // self._state_size(), STATES_EACH * running))

    def state_interval(self) -> int:
        """Tokens between the states that are kept within prompts (kv.milestones): a chunk where they are small."""
        small = SMALL_STATE * self._state_of_a_rank() <= CHUNK * self.per_token()
        return CHUNK if small else INTERVAL

    def _chunks_with_states(self) -> int:
        """Of all context ranks, each of which has memory for the states of all."""
        parts = self.config.ranks.context
        if self.config.cache.tokens is not None:
            return self.config.cache.tokens // CHUNK * parts
        each = CHUNK * self.per_token() + parts * self._state_of_a_rank()
        return min(self._room() // ranks_here(self.config) // each, self._most_tokens() // CHUNK) * parts

    def _room(self) -> int:
        """Bytes for the KV cache and recurrent states where nothing is given."""
        return max(0, min(self.free // AUTO_SHARE, self.free - self.weights))

    def _state_size(self) -> int:
        """On all ranks here: each has memory for all states."""
        return self._state_of_a_rank() * ranks_here(self.config)

    def _state_of_a_rank(self) -> int:
        spec = recurrent_share(self.model, self.config.ranks.tensor)
        return 0 if spec is None else spec.state_bytes(BYTES[compute_type(self.model, self.config.model.dtype)])

    def state_bytes(self) -> int:
        """Of all recurrent states, on all ranks here."""
        return (self.states() or 0) * self._state_size()

    def kv_bytes(self) -> int:
        """Of the pools of all ranks here."""
        return self._tokens() * self.per_token() * ranks_here(self.config)

    def auto_bytes(self) -> int:
        """For a rank's pool whose size is not given: its part of a quarter of the free memory, and of what the weights
        leave."""
        return max(0, self._room() - self.state_bytes()) // ranks_here(self.config)

    def _tokens(self) -> int:
        """Of one rank's pool, as the loader sizes it."""
        if self.config.cache.tokens is not None:
            return self.config.cache.tokens // CHUNK * CHUNK
        return min(self.auto_bytes() // self.per_token(), self._most_tokens())

    def _most_tokens(self) -> int:
        """That as many sequences as may run, of the greatest length, can fill."""
        length = self.config.model.max_len or self.model.max_model_len
        return self.config.scheduler.max_sequences * chunks_for(length) * CHUNK

    def _fitting(self, kv_dtype: KVDType) -> int:
        room = (self.free - self.weights - self.state_bytes()) // ranks_here(self.config)
        return max(0, room // self.per_token(kv_dtype) // CHUNK * CHUNK)

    def _too_many_tokens(self, tokens: int) -> str:
        several = ranks_here(self.config) > 1
        each = f" on {ranks_here(self.config)} ranks" if several else ""
        fit, small = self._fitting(self.config.cache.dtype), self._fitting("int8")
        int8 = f" ({small:,} with --kv-cache-dtype int8)" if self.config.cache.dtype != "int8" else ""
        return (
            f"kv_cache_tokens {tokens:,} needs {gib(self.kv_bytes())}{each}; {self._what_is_free()}: "
            f"at most {fit:,} tokens{' a rank' if several else ''} fit{int8}"
        )

    def _check_host_tier(self) -> None:
        """The tier's memory is taken as it fills, so an engine would die hours later."""
        size = sum(own.size for own in self.config.tiers.each if own.kind == "host") if self.config.tiers else 0
        here = ranks_here(self.config)
        room = (self.free - self.weights - self.kv_bytes()) // here
        if size * GIB > room:
            raise ValueError(
                f"kv_offloading_size {size:g} GiB{self._each()} is too much: "
                f"{self._what_is_free()} and {gib(self.kv_bytes())} for the KV cache in the pool: at most {gib(room)} "
                f"{'a rank fit' if here > 1 else 'fit'}"
            )

    def _check_pinned(self) -> None:
        """A host tier, or streamed KV, of ranks on GPUs: the system can move nothing else into its place."""
        streaming, here = self.config.streaming, ranks_here(self.config)
        size = sum(own.size for own in self.config.tiers.each if own.kind == "host") if self.config.tiers else 0
        taken = int(size * GIB)
        if streaming is not None and streaming.path is None:
            size, taken = streaming.host.size, self._streamed_bytes()
        room = self.free // here - PROCESS_BYTES
        if taken > room:
            raise ValueError(
                f"kv_offloading_size {size:g} GiB{self._each()} is too much: it is pinned, and {gib(self.free)} are "
                f"free: at most {gib(room)} {'a rank fit' if here > 1 else 'fit'}"
            )

    def _check_streamed(self) -> None:
        """Where KV is streamed from host memory, all of it lies there, each rank's own."""
        streaming, here = self.config.streaming, ranks_here(self.config)
        assert streaming is not None
        drafts = self._streamed_drafts() * here
        stored = 0 if streaming.path is not None else self._streamed_bytes() * here
        if stored + drafts > self.free - self.weights:
            name, size = streaming.room
            told = f" and {gib(drafts)} for keys and values of the draft model" if drafts else ""
            raise ValueError(
                f"{name} {size:g} GiB is too much: {self._what_is_free()}{told}: "
                f"at most {gib(self._most_streamed())} fit{self._each()}"
            )

    def _most_streamed(self) -> int:
        """Bytes of KV outside beside which a rank here has memory for what of them lies there, and for the draft
        model's of as many tokens."""
        streaming, here = self.config.streaming, ranks_here(self.config)
        assert streaming is not None
        drafts = self._drafts_per_token()
        each = self.per_token() - drafts
        taken = drafts + (each if streaming.path is None else 0)
        return max(0, self.free - self.weights) // here // max(1, taken) * each

    def _streamed_bytes(self) -> int:
        """Of KV that a rank streams from host memory: no more than all sequences can have."""
        streaming = self.config.streaming
        assert streaming is not None
        return min(int(streaming.host.size * GIB), self._most_tokens() * self.per_token())

    def _streamed_drafts(self) -> int:
        """Bytes in memory that each rank here has, in the mean, of a draft model's keys and values, of all tokens that
        lie outside."""
        beside = self._drafts_per_token()
        if not beside or self.config.streaming is None:
            return 0
        room = int(self.config.streaming.room[1] * GIB) // (self.per_token() - beside)
        return min(room, self._most_tokens()) * beside

    def _experts_remedy(self) -> str:
        if self.model.experts is None or self.config.expert_folder is not None:
            return ""
        return ", or leave its experts in a file: --expert-offload-path DIR"

    def _each(self) -> str:
        return f" on each of {ranks_here(self.config)} ranks" if ranks_here(self.config) > 1 else ""

    def _what_is_free(self) -> str:
        return f"{gib(self.free)} are free, {self.weights / GIB:.1f} of them for the weights"


def tokens_in(config: EngineConfig, model: ModelConfig, free: int, bytes_per_token: int) -> int:
    """Tokens of a rank's pool in `free` bytes, whole chunks, and no more than all sequences can have. Raises ValueError
    where that is none."""
    longest = config.model.max_len or model.max_model_len
    affordable = free // bytes_per_token // CHUNK * CHUNK
    tokens = min(affordable, config.scheduler.max_sequences * chunks_for(longest) * CHUNK)
    if tokens < CHUNK:
        raise ValueError(f"no memory for a KV cache: {bytes_per_token} bytes a token; set kv_cache_tokens")
    return tokens


def gib(size: int) -> str:
    return f"{max(0, size) / GIB:,.1f} GiB"
