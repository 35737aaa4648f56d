"""Opens what lies below the pool, from the settings: tiers, codec, copy streams, rates, write-back."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch

from headrace.config import EngineConfig
from headrace.device import Device, current
from headrace.engine.capacity import Capacity, model_folder
from headrace.engine.runner import Runner
from headrace.engine.stored_prefixes import StoredPrefixes
from headrace.host import GIB
from headrace.kernels.backend import backend_of
from headrace.kv.cache import KVCache
from headrace.kv.storage import LAYOUT, KVStorage, StateStorage
from headrace.models.decoder import Decoder
from headrace.models.files import config_content, weight_files
from headrace.offload.chunk_codec import ChunkCodec
from headrace.offload.copy_streams import CudaStream, ThreadStream
from headrace.offload.emulated_link import EmulatedLink
from headrace.offload.identity import chunk_identity, model_identity
from headrace.offload.ranked.agent import Opened, TierAgent
from headrace.offload.ranked.peers import TierPeers, open_everywhere
from headrace.offload.ranked.storing import AllTiers, ChunkStorer
from headrace.offload.restore.profile import measure, probe
from headrace.offload.restore.projector import Projector
from headrace.offload.restore.source import StoredChunks
from headrace.offload.state_codec import StateCodec
from headrace.offload.stored_states import StoredStates
from headrace.offload.tiers.base import HeadShare, Tier
from headrace.offload.tiers.disk import DiskTier
from headrace.offload.tiers.notes import ModelNote
from headrace.offload.tiers.open import open_tiers
from headrace.offload.tiers.pinned import PinnedBuffers
from headrace.offload.writeback import Writeback
from headrace.parallel.rank import Rank
from headrace.parallel.states import RankStates
from headrace.planner.profile import Profile
from headrace.types import CHUNK
from headrace.version import __version__


def identity(config: EngineConfig, capacity: Capacity) -> bytes:
    """What names the chunks that outlive this engine: the content of the model, not its place."""
    each = () if config.tiers is None else config.tiers.each
    notes = next((Path(own.directory) for own in each if own.directory), config.sessions.path)
    return chunk_identity(
        model_identity(model_folder(config.model.folder), notes),
        dtype=capacity.dtype,
        kv_dtype=capacity.kv_cache_dtype,
        quantization=capacity.quantization,
        backend=capacity.backend,
        formats=("raw",) if config.tiers is None else config.tiers.formats,
    )


def passing_identity(folder: Path, capacity: Capacity) -> bytes:
    """The same of chunks that do not outlive the engine: of files their names, sizes and times."""
    facts = [config_content(folder), LAYOUT.encode(), capacity.backend.encode()]
    facts += [capacity.dtype.encode(), capacity.kv_cache_dtype.encode(), capacity.quantization.encode()]
    facts.append(str(folder).encode())
    for path in weight_files(folder):
        facts.append(f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}".encode())
    return hashlib.sha256(b"\0".join(facts)).digest()


def open_here(config: EngineConfig, backend: str, identity: bytes, decoder: Decoder, storage: KVStorage) -> Opened:
    """The tiers of this process, and what moves chunks between them and its pool. Raises ValueError."""
    assert config.tiers is not None
    spec = decoder.config.attention
    layout = backend_of(backend).layout(decoder.dtype, spec.shape(0)[1])
    device = device_of(config)
    codec, other = (ChunkCodec(storage, spec, identity, decoder.dtype, layout, device=device) for _ in range(2))
    link = EmulatedLink(config.tiers.link.bytes_s, config.tiers.link.latency_s)
    bringing = ThreadStream("restore", link) if device is None else CudaStream("restore", device, link)
    project = Projector(decoder, storage, backend_of(backend))
    tiers = open_tiers(config.tiers) if device is None else open_tiers(config.tiers, PinnedBuffers(device))
    return Opened(tiers, codec, other, bringing, ThreadStream("look"), project)


def device_of(config: EngineConfig) -> Device | None:
    """The accelerator whose memory the pool lies in; None where that is the host's."""
    return current() if config.model.on_gpu else None


def _only_idle(config: EngineConfig, codec: ChunkCodec, profile: Profile) -> bool:
    """Whether tiers are written while the engine is idle alone."""
    assert config.tiers is not None
    write = config.tiers.write
    return write == "idle" or (write == "sparing" and _costs_much(config, codec, profile))


def agent_of(config: EngineConfig, rank: Runner | Rank, backend: str) -> TierAgent:
    """Gives a rank, or the runner of the only one, the tiers of its own pool, which are opened when rank 0 says so."""

    def opener(identity: bytes) -> Opened:
        return open_here(config, backend, identity, rank.decoder, _pool_of(rank))

    agent = TierAgent(opener)
    if isinstance(rank, Rank):
        agent = TierAgent(opener, rank.decoder.turns, head_share(rank.decoder), rank.fence.here)
    rank.coming = agent
    return agent


def _pool_of(rank: Runner | Rank) -> KVStorage:
    return rank.storage if isinstance(rank, Runner) else rank.pool


def head_share(decoder: Decoder) -> HeadShare:
    """The KV heads that a decoder computes. More tensor ranks than heads hold, and store, copies of them."""
    if decoder.share is None:
        return HeadShare()
    parts = max(min(decoder.share.size, heads) for heads, _ in decoder.share.config.attention.every_shape)
    return HeadShare(decoder.share.rank * parts // decoder.share.size, parts)


def open_offload(
    config: EngineConfig,
    capacity: Capacity,
    cache: KVCache,
    rank: Runner | Rank,
    peers: TierPeers,
    profile: Profile | None = None,
) -> StoredPrefixes:
    """Opens the tiers of every rank and measures what the solver needs to know. rank: rank 0. profile: that of several
    ranks. Raises ValueError as open_tiers does, RankLost."""
    assert config.tiers is not None
    open_everywhere(peers, cache.identity)
    opened = peers.agents[0].opened
    brief, backend = config.tiers.write == "sparing", backend_of(capacity.backend)
    profile = measure(rank.decoder, _pool_of(rank), backend, opened.tiers.tiers, brief, profile, device_of(config))
    probe(opened.tiers, profile)
    profile.behind(config.tiers.link.bytes_s, config.tiers.link.latency_s)
    keep_notes(config, capacity, cache.identity, opened.tiers.tiers)
    storer = ChunkStorer(peers, cache.pool.per_rank, opened.tiers)
    only_idle, states = _only_idle(config, opened.codec, profile), None
    storage = _state_memory(rank)
    if cache.states is not None and storage is not None:
        states = StoredStates(cache.states, StateCodec(storage, cache.identity), opened.tiers, only_idle)
    return StoredPrefixes(
        cache=cache,
        source=StoredChunks(peers, cache, opened.codec, opened.tiers),
        profile=profile,
        writeback=Writeback(cache, storer, only_idle),
        states=states,
        tiers=AllTiers(peers),
        max_batch_tokens=config.scheduler.max_batch_tokens,
    )


def _state_memory(rank: Runner | Rank) -> StateStorage | None:
    """Where rank 0 has states as tiers store them: those of tensor ranks one at a time."""
    if not isinstance(rank.states, RankStates):
        return rank.states
    return rank.states.storage if rank.states.whole is None else rank.states.whole.room


WRITE_S, WRITE_BYTE_S = 0.7e-3, 2.9e-9
"""Seconds of a core, about, to write a chunk to a tier (a file, the index), and per byte (two copies, a checksum)."""
MOST_SHARE = 0.02


def _costs_much(config: EngineConfig, codec: ChunkCodec, profile: Profile) -> bool:
    """Whether writing a chunk takes more than MOST_SHARE of the cores for as long as computing it takes."""
    assert config.tiers is not None
    size = sum(codec.blob_bytes("k", own.format) for own in config.tiers.each if own.outlives)
    computing = float(profile.prefill(0, CHUNK)) * torch.get_num_threads()
    return WRITE_S + size * WRITE_BYTE_S > MOST_SHARE * computing


def keep_notes(config: EngineConfig, capacity: Capacity, identity: bytes, tiers: Sequence[Tier]) -> None:
    """Says in the directories of the tiers whose chunks these are, for people (headrace cache ls)."""
    assert config.tiers is not None
    for own, tier in zip(config.tiers.each, tiers, strict=True):
        if isinstance(tier, DiskTier):
            folder = model_folder(config.model.folder).resolve()
            note = ModelNote(
                model=config.model.folder, folder=str(folder), dtype=capacity.dtype,
                kv_dtype=capacity.kv_cache_dtype, quantization=capacity.quantization, format=own.format,
                budget_bytes=int(own.size * GIB), version=__version__,
            )  # fmt: skip
            tier.keep_note(identity, note)
