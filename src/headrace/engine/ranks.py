"""A group of ranks for one engine: started, each with its share of the model and of the cache, profiled, and closed.

The driver, rank 0, opens the group; workers make their rank by `make` (parallel.worker calls it by name).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import msgspec
import torch

from headrace import cores
from headrace.config import EngineConfig
from headrace.device import current
from headrace.engine import preflight, ranked_pools, tiers, torchrun
from headrace.engine.adapters import read_adapters
from headrace.engine.capacity import Capacity, model_folder
from headrace.engine.driver import Advise, Driver
from headrace.engine.footprint import keeps_activations, ranks_here
from headrace.engine.outside import ExpertsOutside
from headrace.engine.rank_advice import advice
from headrace.engine.rank_agreement import connect
from headrace.engine.ranked_streams import RankedStreams, answering
from headrace.engine.stored_prefixes import StoredPrefixes
from headrace.host import GIB
from headrace.kernels import dispatch
from headrace.kernels.backend import backend_of, recorded, verify
from headrace.kv.cache import KVCache
from headrace.kv.storage import KVStorage, StateStorage
from headrace.models.config import ModelConfig
from headrace.models.decoder import Decoder, load_decoder
from headrace.models.plain_config import plain_config
from headrace.offload.ranked.agent import AgentThread
from headrace.offload.ranked.peers import TierPeers
from headrace.offload.streaming import open as streaming
from headrace.offload.streaming.open import StreamSizes
from headrace.offload.streaming.staged_store import StagedStore
from headrace.offload.weights.expert_slots import GpuExpertFile
from headrace.offload.weights.experts import ExpertFile
from headrace.parallel import launch, measure, workspace
from headrace.parallel.group import Group, unless_failed
from headrace.parallel.interfaces import interface_name
from headrace.parallel.probe import shape_of
from headrace.parallel.rank import Rank
from headrace.parallel.supervisor import WorkerSupervisor
from headrace.parallel.tensor import TensorGroup
from headrace.parallel.threads import RankThreads
from headrace.parallel.torchrun_environment import started_this
from headrace.parallel.transport import RankLost
from headrace.planner.choice import StrategyChoice
from headrace.planner.machine import Machine, ModelShape
from headrace.planner.profile import Profile
from headrace.planner.tuned_table import TableStamp, TunedTable, load_table
from headrace.progress import WEIGHTS, LoadPhase, OnPhase, measured, untold
from headrace.strategies import OFFERED, RECURRENT, SPARSE
from headrace.types import CHUNK

log = logging.getLogger(__name__)

MAKER = "headrace.engine.ranks:make"

VERDICT_S = 2.0
"""So long after a link broke the supervisor may take to find out why."""


def count(config: EngineConfig) -> int:
    return config.ranks.context * config.ranks.tensor


def set_threads(config: EngineConfig) -> None:
    """Threads of this rank: as given, else its part of the cores that may be used, and no more than OMP_NUM_THREADS.

    Raises ValueError for several in a process that was forked from one where they have computed."""
    ranks = ranks_here(config)
    if config.model.threads is not None:
        torch.set_num_threads(config.model.threads)
    elif ranks > 1:
        torch.set_num_threads(max(1, cores.usable() // ranks))
    else:
        torch.set_num_threads(min(torch.get_num_threads(), cores.usable()))
    if torch.get_num_threads() > 1:
        _refuse_fork()


_with_threads: set[int] = set()
"""This process, and those that it was forked from, where they have had several threads of torch."""


def _refuse_fork() -> None:
    """torch's OpenMP waits for ever for the threads that a fork has not taken along."""
    if _with_threads - {os.getpid()}:
        raise ValueError(
            "threads: this process was forked from one where an LLM computes with several threads, and torch would "
            "hang in it: start it by multiprocessing's 'spawn', or give threads=1"
        )
    _with_threads.add(os.getpid())


def rank_threads(config: EngineConfig) -> RankThreads:
    """This rank's threads as `set_threads` set them, and those of a step that it computes by itself: the threads of all
    context ranks of this host together. Ray gives each rank cores of its own."""
    share, here, usable = torch.get_num_threads(), ranks_here(config), cores.usable()
    tensor = min(config.ranks.tensor, here)
    if config.ranks.launcher == "ray" and not started_this():
        return RankThreads(share, share)
    crowding = max(1.0, here * share / usable)
    if here == tensor:
        return RankThreads(share, share, crowding)
    whole = usable // tensor
    if config.model.threads is not None:
        whole = min(whole, config.model.threads * here // tensor)
    return RankThreads.of(share, whole, crowding)


def make(config: EngineConfig, group: Group) -> Rank:
    """This rank's share: config.kv_cache_tokens must be set, and is what each rank holds, unless KV is streamed or it
    is measured (ranked_pools); and recurrent_states, where the model has some."""
    torchrun.leave_signals_to_rank_0()
    set_threads(config)
    connect(config, group)
    decoder = load_share(config, group)
    rank = _make(*_with_room(config, group, decoder))
    if config.tiers is not None:
        rank.tiers = AgentThread(tiers.agent_of(config, rank, _backend(config, rank.decoder))).obey
    if isinstance(rank.storage, StagedStore):
        rank.tiers = answering(rank.storage)
    measure.take_part(rank, config.ranks.tensor)
    return rank


def load_share(config: EngineConfig, group: Group | None, tell: OnPhase = untold) -> Decoder:
    tell(LoadPhase(WEIGHTS))
    tensor = TensorGroup(group.tensor) if group is not None and group.tensor.size > 1 else None
    folder = model_folder(config.model.folder)
    facts = _facts(config)
    return load_decoder(
        folder, config.model.dtype, measured(tell, WEIGHTS), config.model.quantization, tensor,
        device=device_of(config), packed=measured(tell, "packing"), outside=expert_file(config, facts), facts=facts,
        leave=streaming.leaving(config), adapters=read_adapters(config),
    )  # fmt: skip


def device_of(config: EngineConfig) -> torch.device:
    """Where this process's rank computes."""
    return current().place if config.model.on_gpu else torch.device("cpu")


def _facts(config: EngineConfig) -> ModelConfig:
    """Of the model, without transformers, which rank 0 has asked already: a rank starts a second earlier."""
    return plain_config(model_folder(config.model.folder))


def expert_file(config: EngineConfig, model: ModelConfig) -> ExpertFile | None:
    """The file in which this rank's experts are to lie; None where they stay in memory."""
    asked = ExpertsOutside.of(config, model)
    if asked is None:
        return None
    if config.model.on_gpu:
        return GpuExpertFile(asked.folder, model, int((config.experts.memory or 0) * GIB))
    return ExpertFile(asked.folder, model, asked.kept)


def _with_room(config: EngineConfig, group: Group, decoder: Decoder) -> tuple[EngineConfig, Group, Decoder, int]:
    """What `_make` takes: the settings with the size of a pool, and bytes that a rank has of its GPU where KV is
    streamed. Raises as ranked_pools.sized."""
    if config.model.on_gpu and config.streaming is not None:
        return config, group, decoder, ranked_pools.free_memory(config, group)
    return ranked_pools.sized(config, group, _facts(config), decoder, _backend(config, decoder)), group, decoder, 0


def _make(config: EngineConfig, group: Group, decoder: Decoder, free: int) -> Rank:
    backend = _backend(config, decoder)
    storage = open_storage(config, decoder, free)
    verify(backend_of(backend), decoder.config.attention, decoder.dtype, storage.dtype)
    threads, states = None if config.model.on_gpu else rank_threads(config), open_states(config, decoder)
    if config.model.on_gpu and states is not None:
        recorded(backend_of(backend)).verify_recurrent(states.spec, decoder.dtype)
    return Rank(decoder, storage, backend, group.context, threads, states)


def open_storage(config: EngineConfig, decoder: Decoder, free: int = 0) -> KVStorage | StagedStore:
    """A rank's pool, or its store outside, with which the decoder's weights may leave too. free: bytes of a GPU, nine
    tenths of which staging and workspace may take."""
    kv_dtype = torch.int8 if config.cache.dtype == "int8" else decoder.dtype
    sized = stream_sizes(config, _facts(config), decoder.dtype, kv_dtype)
    if sized is not None:
        passing = workspace.bytes_per_chunk(decoder.config.attention, kv_dtype) if config.ranks.context > 1 else 0
        free = free * 9 // 10 - sized.staged * passing
        return streaming.open_staged(config, decoder, sized, kv_dtype, _backend(config, decoder), free)
    assert config.cache.tokens is not None, "the driver sizes the cache"
    model, dtype = decoder.config, decoder.dtype
    keeps = keeps_activations(config, model, dtype.itemsize, kv_dtype.itemsize)
    hidden = model.stream_size if keeps else None
    slots, device = config.cache.tokens // CHUNK, device_of(config)
    storage = KVStorage(model.attention, slots, kv_dtype, hidden, dtype, device)
    if config.cache.prefault:
        storage.prefault()
    return storage


def open_states(config: EngineConfig, decoder: Decoder) -> StateStorage | None:
    """A rank's memory for recurrent states, where the model has some."""
    spec, slots = decoder.config.recurrent, config.cache.states
    if spec is None or slots is None:
        return None
    states = StateStorage(spec, slots, decoder.dtype, device_of(config))
    if config.cache.prefault:
        states.prefault()
    return states


def stream_sizes(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, kv_dtype: torch.dtype
) -> StreamSizes | None:
    """The same on every rank; None where KV is not streamed. Raises ValueError naming the setting."""
    if config.streaming is None:
        return None
    return streaming.sizes(config, model, kv_dtype, dtype, workspace.DEPTH if config.ranks.context > 1 else 0)


def _backend(config: EngineConfig, decoder: Decoder) -> str:
    kind = current().type if config.model.on_gpu else "cpu"
    return dispatch.choose(config.model.backend, decoder.dtype, kind)


@dataclass(slots=True)
class Ranks:
    """The driver's group. close() ends the workers; it may be called again.

    told: the group, its profile and how strategies are chosen, in one line. allowed: the strategies.
    """

    group: Group
    rank: Rank
    profile: Profile
    told: str
    allowed: tuple[str, ...]

    def driver(self, cache: KVCache, config: EngineConfig) -> Driver:
        return Driver(
            self.rank, cache, self._workers.send, self._advise(config), self.allowed, end=self.close,
            staged=self.rank.staged, streams=self._streams(), confirm=self._workers.check, copies=self._copies(config),
        )  # fmt: skip

    def _copies(self, config: EngineConfig) -> bool:
        """Whether chunks are copied as a step begins. What tiers bring may be written before, into the very slot."""
        return config.tiers is None and self.rank.staged is None and self.rank.device is None

    def _streams(self) -> RankedStreams | None:
        """What ranks stream, if they do; workers then answer nothing else."""
        if not isinstance(self.rank.storage, StagedStore):
            return None
        streams = RankedStreams({0: self.rank.storage}, sorted(self._workers.pids), self._workers.send_to)
        self._workers.on_answer = streams.heard
        return streams

    def open_tiers(self, cache: KVCache, config: EngineConfig, capacity: Capacity) -> StoredPrefixes:
        """Opens those of every rank. Raises ValueError, RankLost."""
        agent, workers = tiers.agent_of(config, self.rank, capacity.backend), self._workers
        if self.rank.device is not None:  # a copy may end because what it waits for was given up
            agent.spoilt = workers.failed.is_set
        peers = TierPeers(cache.ranks, {0: agent}, workers.send_to, workers.check, config.ranks.tensor)
        workers.on_answer = peers.received
        return tiers.open_offload(config, capacity, cache, self.rank, peers, self.profile)

    @property
    def _workers(self) -> WorkerSupervisor:
        assert self.group.workers is not None, "rank 0 supervises the workers"
        return self.group.workers

    def _advise(self, config: EngineConfig) -> Advise:
        def advise(tokens: int, cached: int, cached_on: Sequence[float], allow: tuple[str, ...]) -> StrategyChoice:
            return self.profile.choose(tokens, cached, cached_on, allow, config.ranks.rule)

        return advise

    def on_failure(self, callback: Callable[[str], None]) -> None:
        """callback(reason) as soon as a worker is gone, hangs or gives up, on a thread of the supervisor."""
        self._workers.on_failure(callback)

    def why_lost(self, error: RankLost) -> str:
        """The supervisor's reason, which says how a process ended; what the link said if it knows of none."""
        self._workers.failed.wait(VERDICT_S)
        return self._workers.reason or str(error)

    def end_workers(self) -> None:
        """Without closing the links, which a transfer under way may hold up. For a process that ends itself."""
        self._workers.close()

    def close(self) -> None:
        if self.group.close():
            self.rank.close()

    def released(self) -> bool:
        """See Group.released."""
        return self.group.released()


def allowed(config: EngineConfig, model: ModelConfig) -> tuple[str, ...]:
    """Strategies that the planner may choose; a forced one falls back to pass-KV where it cannot be, and of a model
    with recurrent layers to single."""
    if config.ranks.strategy != "auto":
        return (config.ranks.strategy,)
    if model.recurrent is not None:
        return tuple(name for name in OFFERED if name in RECURRENT)
    return OFFERED if model.attention.index is None else SPARSE


def open_ranks(
    config: EngineConfig,
    tell: OnPhase = untold,
    maker: str = MAKER,
    start: launch.Starter | None = None,
) -> tuple[Ranks, Decoder]:
    """Starts the other ranks and loads this one's share while they load theirs.

    maker, start: see launch.open_group; a maker's rank must come from `make`, which takes part in the profile.
    config.kv_cache_tokens must be set where `make` needs it. tell: see loader.load. Raises ValueError for settings or a
    tuned table that do not fit, RankLost.
    """
    tell(LoadPhase("starting the ranks"))
    group, rank = launch.open_group(config, maker, start), None
    try:
        assert group.workers is not None
        by = unless_failed(group.workers, lambda: connect(config, group))
        decoder = load_share(config, group, tell)
        tell(LoadPhase("memory for the KV cache"))
        rank = _make(*unless_failed(group.workers, lambda: _with_room(config, group, decoder)))
        tell(LoadPhase("measuring the ranks"))
        machine: Machine = unless_failed(group.workers, lambda: measure.take_part(rank, config.ranks.tensor))
        group.workers.wait_ready()
        shape = shape_of(decoder)
        tuned = _table(config, shape, machine)
        told = describe(config) + (f", tensors by {by}" if by else "")
        told += _profile(config, machine) if config.ranks.context > 1 else ""
        log.debug("%s", told)
        planned_on = _planned_on(machine, tuned)
        _advise_at_start(config, planned_on, shape)
        strategies = allowed(config, decoder.config)
        profile = Profile(planned_on, shape, config.ranks.context, tuned, strategies)
        return Ranks(group, rank, profile, told, strategies), decoder
    except BaseException:
        if group.close() and rank is not None:
            rank.close()
        raise


def _advise_at_start(config: EngineConfig, machine: Machine, shape: ModelShape) -> None:
    """Says what ranks that share this machine gain and lose. Ray places ranks on cores of their own, and those on GPUs
    hardly use them."""
    if config.model.on_gpu or (config.ranks.launcher == "ray" and not started_this()):
        return
    told = advice(config, ranks_here(config), torch.get_num_threads(), cores.usable(), machine, shape)
    if told is not None:
        text, warns = told
        log.log(logging.WARNING if warns else logging.INFO, "%s", text)


def describe(config: EngineConfig) -> str:
    """The group that the settings ask for. Raises ValueError for a rank_interface that this host does not have."""
    context, tensor = config.ranks.context, config.ranks.tensor
    if context * tensor == 1:
        return "1 rank, no links"
    starter = "torchrun" if started_this() else config.ranks.launcher
    interface = f"{interface_name(config.ranks.interface)} ({config.ranks.interface})"
    return f"{context * tensor} ranks ({context} context x {tensor} tensor) started by {starter}, gloo on {interface}"


def _profile(config: EngineConfig, machine: Machine) -> str:
    """What the planner goes by, and how it chooses."""
    how = f"by {config.ranks.rule}" if config.ranks.strategy == "auto" else f"is {config.ranks.strategy}"
    tuned = f", table {config.ranks.table}" if config.ranks.table else ""
    return f"; {measure.describe(machine)}; strategy {how}{tuned}"


def _table(config: EngineConfig, shape: ModelShape, machine: Machine) -> TunedTable | None:
    """The tuned table that the settings name. Raises ValueError where it does not fit this group."""
    if config.ranks.table is None:
        return None
    tuned = load_table(Path(config.ranks.table))
    tuned.check(stamp(config, shape, machine))
    return tuned


def _planned_on(measured: Machine, tuned: TunedTable | None) -> Machine:
    """The table's profile if there is one. Of one engine with all cores it may know nothing: that is measured then."""
    if tuned is None:
        return measured
    return msgspec.structs.replace(tuned.machine, one_engine=tuned.machine.one_engine or measured.one_engine)


def stamp(config: EngineConfig, shape: ModelShape, machine: Machine) -> TableStamp:
    """What a tuned table of this group is made for."""
    return preflight.stamp(config, shape, machine.fingerprint, date.today().isoformat())
