"""From settings to a loaded engine: model, tokenizer, KV cache and kernels, sized to the machine."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from headrace.config import EngineConfig, Quantization
from headrace.device import current
from headrace.engine import gpu_memory, ranked_pools, ranks, tiers, torchrun
from headrace.engine.adapters import read_adapters, served
from headrace.engine.below import Below, NothingBelow
from headrace.engine.capacity import Capacity, model_folder
from headrace.engine.executor import Executor
from headrace.engine.footprint import Footprint, draft_kv_bytes, keeps_activations, tokens_in
from headrace.engine.outside import ExpertsOutside
from headrace.engine.preflight import check_fit
from headrace.engine.ranks import Ranks
from headrace.engine.runner import Runner
from headrace.engine.speculation.open_draft import load_draft
from headrace.engine.stored_prefixes import StoredPrefixes
from headrace.engine.streaming import StreamRunner
from headrace.engine.tokenizer import Tokenizer
from headrace.kernels import dispatch
from headrace.kernels.backend import backend_of, verify
from headrace.kv.cache import KVCache
from headrace.kv.storage import KVStorage, StateStorage
from headrace.models.adapter_files import AdapterFacts
from headrace.models.config import ModelConfig, read_config
from headrace.models.decoder import Decoder, compute_dtype, load_decoder
from headrace.models.pooling import read_pooling
from headrace.models.shards import shard
from headrace.offload.identity import fingerprint
from headrace.offload.ranked.peers import TierPeers
from headrace.offload.sessions.session_folder import make_folder
from headrace.offload.streaming import open as streaming
from headrace.offload.streaming.open import StreamSizes
from headrace.offload.weights.read_rate import read_rate
from headrace.parallel import devices
from headrace.parallel.threads import RankThreads
from headrace.parallel.transport import RankLost
from headrace.pooling import Pooling
from headrace.progress import WEIGHTS, LoadPhase, OnPhase, measured, untold
from headrace.types import CHUNK

if TYPE_CHECKING:
    from headrace.engine.sessions import Sessions
    from headrace.engine.speculation.draft_model import DraftModel
    from headrace.engine.structured.answers import StructuredAnswers

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Loaded:
    """All that a running engine consists of. ranks: of several, the group; offload: what is below the pool, if tiers
    are; structured: see structured_answers; sessions: once there is a call about them (engine.session_calls); draft:
    the model that drafts, if one does."""

    config: EngineConfig
    capacity: Capacity
    decoder: Decoder
    tokenizer: Tokenizer | None
    cache: KVCache
    executor: Executor
    ranks: Ranks | None = None
    offload: StoredPrefixes | None = None
    structured: StructuredAnswers | None = None
    sessions: Sessions | None = None
    draft: DraftModel | None = None

    @property
    def below(self) -> Below:
        """What lies below the pool."""
        return NothingBelow(self.cache) if self.offload is None else self.offload

    def structured_answers(self) -> StructuredAnswers:
        """Made for the first structured request, which is when llguidance is imported."""
        if self.structured is None:
            from headrace.engine.structured.answers import StructuredAnswers

            capacity = self.capacity
            self.structured = StructuredAnswers(self.tokenizer, capacity.vocab_size, capacity.eos_token_ids)
        return self.structured

    def close(self) -> None:
        """Ends ranks and threads, and stores what is to be stored. May be called again."""
        if self.structured is not None:
            self.structured.close()
        if self.sessions is not None:
            self.sessions.close()
        if self.ranks is None:
            self.executor.close()
            self.below.close()
            return
        if self.ranks.released():  # else its copies never end
            with suppress(RankLost):
                self.below.close()  # what waits to be stored lies on the other ranks
        self.executor.close()


@dataclass(frozen=True, slots=True)
class Sized:
    """What is known before any weight is read. per_rank: tokens of KV cache of each rank; hidden: width of the inputs
    of the projections, where the pool keeps them; states, state_interval: see KVCache; streamed: KV lies outside."""

    config: EngineConfig
    model: ModelConfig
    capacity: Capacity
    tokenizer: Tokenizer | None
    dtype: torch.dtype
    kv_dtype: torch.dtype
    per_rank: int
    hidden: int | None
    streamed: StreamSizes | None = None
    states: int | None = None
    state_interval: int = CHUNK
    adapters: tuple[AdapterFacts, ...] = ()

    @property
    def pool_bytes(self) -> int:
        """Of each token in a rank's pool, activations included."""
        return _pool_bytes(self.model, self.capacity.kv_bytes_per_token, self.hidden, self.dtype)

    def cache(self, tell: OnPhase) -> KVCache:
        config, capacity = self.config, self.capacity
        folder = model_folder(config.model.folder)
        outlives = (config.tiers is not None and config.tiers.outlive) or config.sessions.dir is not None
        if outlives:
            tell(LoadPhase("fingerprint of the model"))
        identity = tiers.identity(config, capacity) if outlives else tiers.passing_identity(folder, capacity)
        return KVCache(
            capacity.kv_cache_tokens // CHUNK, identity, config.ranks.context, self.states, self.state_interval
        )

    def decoder(self, tell: OnPhase) -> Decoder:
        config = self.config
        tell(LoadPhase(WEIGHTS))
        return load_decoder(
            model_folder(config.model.folder), config.model.dtype, measured(tell, WEIGHTS),
            config.model.quantization, device=ranks.device_of(config), packed=measured(tell, "packing"),
            outside=ranks.expert_file(config, self.model), leave=streaming.leaving(config), adapters=self.adapters,
        )  # fmt: skip


def load(config: EngineConfig, tell: OnPhase = untold) -> Loaded:
    """Loads the model and sizes its cache, and starts the other ranks if there are to be any.

    tell(LoadPhase) is called as loading gets on. Raises ValueError or UnsupportedModel, naming what is wrong, and
    RankLost where a rank ends. Under torchrun it returns on rank 0 alone: the others serve as workers and exit.
    """
    streaming.check(config)
    make_folder(config.sessions.path)
    if ranks.count(config) > 1:
        if config.model.on_gpu:
            devices.ask_for_queues()
        torchrun.serve_if_worker(config)
    ranks.set_threads(config)
    sized = _size(config, tell)
    opened = _several_ranks if ranks.count(config) > 1 else _one_rank if config.streaming is None else _streamed
    loaded = opened(sized, tell)
    made_by = loaded.cache.identity, loaded.capacity.backend, [each.digest for each in sized.adapters]
    loaded.capacity = replace(loaded.capacity, fingerprint=fingerprint(*made_by))
    return loaded


def _one_rank(sized: Sized, tell: OnPhase) -> Loaded:
    config, decoder = sized.config, sized.decoder(tell)
    drafting = load_draft(config, sized.model, sized.tokenizer, tell)
    tell(LoadPhase("memory for the KV cache"))
    states = _state_storage(sized)
    if config.model.on_gpu and config.cache.tokens is None:
        backend, size = sized.capacity.backend, sized.pool_bytes + draft_kv_bytes(config)
        sized = _fitted(sized, gpu_memory.pool_tokens(config, sized.model, decoder, backend, size))
    capacity, cache = sized.capacity, sized.cache(tell)
    slots, device = sized.per_rank // CHUNK, ranks.device_of(config)
    storage = KVStorage(decoder.config.attention, slots, sized.kv_dtype, sized.hidden, sized.dtype, device)
    if config.cache.prefault:
        storage.prefault()
        if states is not None:
            states.prefault()
    if config.tiers is not None:
        tell(LoadPhase("opening the tiers"))
    rows = _decoding_rows(config, capacity), min(config.scheduler.max_batch_tokens, sized.per_rank)
    runner, offload = Runner(decoder, storage, capacity.backend, states, *rows), None
    if config.model.on_gpu:
        tell(LoadPhase("recording steps"))
        runner.record()
    if config.tiers is not None:
        peers = TierPeers(1, {0: tiers.agent_of(config, runner, capacity.backend)})
        offload = tiers.open_offload(config, capacity, cache, runner, peers)
    draft = None if drafting is None else drafting.open(slots, rows[0], states is not None)
    return Loaded(config, capacity, decoder, sized.tokenizer, cache, runner, offload=offload, draft=draft)


def _fitted(sized: Sized, tokens: int) -> Sized:
    """With pools of so many tokens on each rank, as the memory of GPUs allows beside the weights that lie there now."""
    config, ranks = sized.config, sized.config.ranks.context
    longest = min(config.model.max_len or sized.model.max_model_len, tokens * ranks)
    limit = _length_limit(config, sized.model.max_model_len, longest, None)
    capacity = replace(sized.capacity, kv_cache_tokens=tokens * ranks, max_model_len=longest, length_limit=limit)
    return replace(sized, capacity=capacity, per_rank=tokens)


def _decoding_rows(config: EngineConfig, capacity: Capacity) -> int:
    """Rows of a step in which all sequences decode, each with its draft."""
    drafted = config.speculation.tokens if config.speculation.on else 0
    return min(capacity.max_sequences * (1 + drafted), config.scheduler.max_batch_tokens)


def _state_storage(sized: Sized) -> StateStorage | None:
    spec, there = sized.model.recurrent, ranks.device_of(sized.config)
    return None if spec is None or sized.states is None else StateStorage(spec, sized.states, sized.dtype, there)


def _streamed(sized: Sized, tell: OnPhase) -> Loaded:
    config, capacity, cache = sized.config, sized.capacity, sized.cache(tell)
    decoder = sized.decoder(tell)
    tell(LoadPhase("memory for the KV cache"))
    assert sized.streamed is not None
    verify(backend_of(capacity.backend), decoder.config.attention, decoder.dtype, sized.kv_dtype)
    streamer = streaming.open_streamer(config, decoder, sized.streamed, sized.kv_dtype, capacity.backend)
    runner = StreamRunner(streamer, streaming.asked_of(config).batches)
    try:
        draft = _draft_beside(sized, cache, tell)
    except BaseException:
        runner.close()
        raise
    return Loaded(config, capacity, decoder, sized.tokenizer, cache, runner, draft=draft)


def _several_ranks(sized: Sized, tell: OnPhase) -> Loaded:
    config = sized.config
    measured = sized.streamed is not None or ranked_pools.measured(config)
    each = config if measured else config.replace(kv_cache_tokens=sized.per_rank)
    each = each if sized.states is None else each.replace(recurrent_states=sized.states)
    group, decoder = ranks.open_ranks(each, tell)
    try:
        sized = _fitted(sized, group.rank.storage.slots * CHUNK) if ranked_pools.measured(config) else sized
        cache, capacity = sized.cache(tell), replace(sized.capacity, ranks=group.told)
        driver = group.driver(cache, config)
        if config.tiers is not None:
            tell(LoadPhase("opening the tiers"))
        offload = group.open_tiers(cache, config, capacity) if config.tiers is not None else None
        draft = _draft_beside(sized, cache, tell, group.rank.threads)
    except BaseException:
        group.close()
        raise
    if offload is not None and offload.states is not None:
        offload.states.home = driver
    return Loaded(config, capacity, decoder, sized.tokenizer, cache, driver, group, offload, draft=draft)


def _draft_beside(sized: Sized, cache: KVCache, tell: OnPhase, threads: RankThreads | None = None) -> DraftModel | None:
    """A draft model in memory, with keys and values behind the slots of all ranks or of the store outside. Of several
    ranks the first has all of it."""
    drafting = load_draft(sized.config, sized.model, sized.tokenizer, tell)
    rows, again = _decoding_rows(sized.config, sized.capacity), sized.states is not None
    return None if drafting is None else drafting.open(cache.pool.total, rows, again, threads, timed=True)


def _size(config: EngineConfig, tell: OnPhase) -> Sized:
    tell(LoadPhase("reading the configuration"))
    folder = model_folder(config.model.folder)
    model = read_config(folder)
    dtype = compute_dtype(model, config.model.dtype)
    spec = model.attention
    capped = spec.score_cap is not None or spec.sinks
    kind = current().type if config.model.on_gpu else "cpu"
    backend = dispatch.choose(config.model.backend, dtype, kind, spec.widest, capped)
    kv_dtype = torch.int8 if config.cache.dtype == "int8" else dtype
    bytes_per_token = KVStorage.bytes_per_token(shard(model, 0, config.ranks.tensor), kv_dtype)
    hidden = model.stream_size if keeps_activations(config, model, dtype.itemsize, kv_dtype.itemsize) else None
    check_fit(config, model)
    streamed = ranks.stream_sizes(config, model, dtype, kv_dtype)
    if streamed is not None:
        per_rank, max_len = streamed.store * CHUNK, streamed.longest
    else:
        each = _pool_bytes(model, bytes_per_token, hidden, dtype) + draft_kv_bytes(config)
        per_rank, max_len = _sizes(config, model, each)
    capacity = _capacity(config, model, backend, dtype, kv_dtype, per_rank, bytes_per_token, max_len, streamed)
    tell(LoadPhase("tokenizer"))
    tokenizer = Tokenizer.load(folder, config.model.chat_template)
    capacity = replace(capacity, eos_token_ids=_eos(model, tokenizer), experts=_experts(config, model))
    facts = read_adapters(config)
    capacity = replace(capacity, adapters=served(facts))
    states, every = gpu_memory.states(config, model)
    if states is not None:
        capacity = replace(capacity, max_sequences=min(capacity.max_sequences, states))
    return Sized(config, model, capacity, tokenizer, dtype, kv_dtype, per_rank, hidden, streamed, states, every, facts)


def _capacity(
    config: EngineConfig,
    model: ModelConfig,
    backend: str,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    per_rank: int,
    bytes_per_token: int,
    max_len: int,
    streamed: StreamSizes | None,
) -> Capacity:
    align = 1 if config.ranks.context == 1 else CHUNK
    return Capacity(
        model=config.served.main,
        folder=str(model_folder(config.model.folder)),
        dtype=str(dtype).removeprefix("torch."),
        quantization=config.model.quantization,
        backend=backend,
        kv_cache_dtype=str(kv_dtype).removeprefix("torch."),
        kv_cache_tokens=per_rank * config.ranks.context,
        kv_bytes_per_token=bytes_per_token,
        max_model_len=max_len,
        max_sequences=min(config.scheduler.max_sequences, config.scheduler.max_batch_tokens - align + 1),
        vocab_size=model.vocab_size,
        kernels=_kernels(config.model.quantization, backend),
        context_parallel_size=config.ranks.context,
        tensor_parallel_size=config.ranks.tensor,
        architecture=model.architecture,
        layers=model.layers,
        model_len=model.max_model_len,
        length_limit=_length_limit(config, model.max_model_len, max_len, streamed),
        embedding_size=model.embed_size,
        writes=model.head,
        pooling=_pooling(config, model),
        alike_tokens=model.rope.original_length if model.rope and model.rope_depends_on_length else 0,
    )


def _experts(config: EngineConfig, model: ModelConfig) -> str:
    """What lies outside memory, and the speed to expect; empty where all lies in memory. Raises ValueError where the
    file cannot be."""
    asked = ExpertsOutside.of(config, model)
    if asked is None:
        return ""
    try:
        told = asked.told(read_rate(asked.folder))
    except OSError as error:
        raise ValueError(
            f"expert_offload_path {asked.folder}: nothing can be written there ({error.strerror}); name another"
        ) from None
    log.info("%s", told)
    return told


def _pooling(config: EngineConfig, model: ModelConfig) -> Pooling:
    """A classifier reads the last token's state, as transformers' classes do."""
    if model.labels:
        return Pooling("last", normalize=False, labels=model.labels)
    return read_pooling(model_folder(config.model.folder))


def _length_limit(config: EngineConfig, model_len: int, max_len: int, streamed: StreamSizes | None) -> str:
    """The setting that keeps sequences shorter than the model would; empty where none does."""
    if max_len >= model_len:
        return ""
    if max_len == config.model.max_len:
        return "max_model_len"
    return "kv_cache_tokens" if streamed is None else streamed.bound


def _kernels(quantization: Quantization, backend: str) -> dict[str, str]:
    """Operation -> implementation and reason; of the linear layers those in use."""
    linear = "linear" if quantization == "none" else f"linear_{quantization}"
    choices = dispatch.reasons(gpu=backend == "triton")
    return {name: why for name, why in choices.items() if name == linear or not name.startswith("linear")}


def _pool_bytes(model: ModelConfig, bytes_per_token: int, hidden: int | None, dtype: torch.dtype) -> int:
    return bytes_per_token + model.attention.stored * (hidden or 0) * dtype.itemsize


def _sizes(config: EngineConfig, model: ModelConfig, bytes_per_token: int) -> tuple[int, int]:
    """(tokens of KV cache on each rank, whole chunks; longest sequence, which all context ranks together can hold)."""
    wanted, parts = config.model.max_len or model.max_model_len, config.ranks.context
    if config.cache.tokens is not None:
        tokens = config.cache.tokens // CHUNK * CHUNK
        if config.model.on_gpu:  # of a host's memory preflight has told already
            gpu_memory.check_pool(config, model, config.cache.tokens, bytes_per_token)
        return tokens, min(wanted, tokens * parts)
    tokens = tokens_in(config, model, _free_memory(config, model), bytes_per_token)
    return tokens, min(wanted, tokens * parts)


def _free_memory(config: EngineConfig, model: ModelConfig) -> int:
    """Bytes for the KV cache, as Footprint has it; on a GPU all but the weights, until these are loaded (_fitted)."""
    if config.model.on_gpu:
        return gpu_memory.beside_weights(config, model)
    return Footprint.of(config, model).auto_bytes()


def _eos(model: ModelConfig, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    own = model.eos_token_ids
    extra = tokenizer.eos_token_id if tokenizer else None
    return own if extra is None or extra in own else (*own, extra)
