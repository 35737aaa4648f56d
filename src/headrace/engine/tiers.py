"""Opens what lies below the pool, from the settings: tiers, codec, copy streams, rates, write-back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from headrace.config import EngineConfig
from headrace.engine.capacity import Capacity, model_folder
from headrace.engine.stored_prefixes import StoredPrefixes
from headrace.kernels.backend import backend_of
from headrace.kv.cache import KVCache
from headrace.kv.storage import KVStorage
from headrace.models.decoder import Decoder
from headrace.offload.chunk_codec import ChunkCodec
from headrace.offload.copy_streams import ThreadStream
from headrace.offload.emulated_link import EmulatedLink
from headrace.offload.identity import chunk_identity, model_identity
from headrace.offload.ranked import words
from headrace.offload.ranked.agent import Opened, TierAgent
from headrace.offload.ranked.peers import TierPeers, open_everywhere
from headrace.offload.ranked.source import RankedChunks
from headrace.offload.ranked.storing import RankedStorer, RankedTiers
from headrace.offload.restore.profile import measure, probe
from headrace.offload.restore.rates import Rates
from headrace.offload.restore.source import StoredChunks
from headrace.offload.tiers.open import open_tiers
from headrace.offload.tiers.stack import Tiers
from headrace.offload.writeback import PoolStorer, Writeback
from headrace.parallel.rank import Rank

PREDICTED = 2048
"""Tokens of the prompt whose time on several ranks the planner is asked for before one was seen."""


def identity(config: EngineConfig, capacity: Capacity) -> bytes:
    """What names the chunks that outlive this engine: the content of the model, not its place."""
    assert config.tiers is not None
    notes = next((Path(own.directory) for own in config.tiers.each if own.directory), None)
    return chunk_identity(
        model_identity(model_folder(config.model.folder), notes),
        dtype=capacity.dtype,
        kv_dtype=capacity.kv_cache_dtype,
        quantization=capacity.quantization,
        backend=capacity.backend,
        formats=config.tiers.formats,
    )


def open_offload(
    config: EngineConfig, capacity: Capacity, cache: KVCache, decoder: Decoder, storage: KVStorage
) -> StoredPrefixes:
    """Opens the tiers and measures what the solver needs to know. Raises ValueError as open_tiers does."""
    assert config.tiers is not None
    opened = open_here(config, capacity.backend, cache.identity, decoder, storage)
    return StoredPrefixes(
        cache=cache,
        source=StoredChunks(opened.tiers, opened.codec, opened.bringing, opened.looking),
        rates=_rates(config, capacity.backend, decoder, storage, opened.tiers),
        writeback=Writeback(cache, PoolStorer(opened.tiers, opened.codec, opened.storing)),
        tiers=opened.tiers,
        max_batch_tokens=config.scheduler.max_batch_tokens,
    )


def open_here(config: EngineConfig, backend: str, identity: bytes, decoder: Decoder, storage: KVStorage) -> Opened:
    """The tiers of this process, and what moves chunks between them and its pool. Raises ValueError."""
    assert config.tiers is not None
    spec = decoder.config.attention
    layout = backend_of(backend).layout(decoder.dtype, spec.head_dim)
    codec, other = (ChunkCodec(storage, spec, identity, decoder.dtype, layout) for _ in range(2))
    link = EmulatedLink(config.tiers.link.bytes_s, config.tiers.link.latency_s)
    return Opened(open_tiers(config.tiers), codec, other, ThreadStream("restore", link), ThreadStream("look"))


def _rates(config: EngineConfig, backend: str, decoder: Decoder, storage: KVStorage, tiers: Tiers) -> Rates:
    """Measured here, before the first request."""
    assert config.tiers is not None
    rates = measure(decoder, storage, backend_of(backend), tiers.tiers)
    probe(tiers, rates)
    return rates.behind(config.tiers.link.bytes_s, config.tiers.link.latency_s)


def agent_of(config: EngineConfig, rank: Rank, backend: str) -> TierAgent:
    """Gives a rank the tiers of its own pool, which are opened when rank 0 says so."""

    def opener(identity: bytes) -> Opened:
        return open_here(config, backend, identity, rank.decoder, rank.storage)

    agent = TierAgent(opener)
    rank.coming = agent
    rank.tiers = lambda body, answer: agent.obey(words.command(body), lambda word: answer(words.encode(word)))
    return agent


def open_ranked(
    config: EngineConfig,
    capacity: Capacity,
    cache: KVCache,
    rank: Rank,
    peers: TierPeers,
    agent: TierAgent,
    expected_s: Callable[[int, int], float],
) -> StoredPrefixes:
    """As open_offload, on every rank. rank, agent: those of rank 0. expected_s(new tokens, cached tokens): what the
    planner predicts for a prompt. Raises RankLost too."""
    kinds = open_everywhere(peers, cache.identity)
    opened = agent.opened
    rates = _rates(config, capacity.backend, rank.decoder, rank.storage, opened.tiers)
    rates.scale_prefill(0, PREDICTED, expected_s(PREDICTED, 0))
    return StoredPrefixes(
        cache=cache,
        source=RankedChunks(peers, cache, opened.codec, [tier.format for tier in opened.tiers.tiers], kinds[0]),
        rates=rates,
        writeback=Writeback(cache, RankedStorer(peers, cache.pool.per_rank)),
        tiers=RankedTiers(peers),
        max_batch_tokens=config.scheduler.max_batch_tokens,
    )
