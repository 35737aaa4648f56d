"""The profile of a model and its tiers on this machine: a few calls of their own, before any request comes."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch

from headrace import host
from headrace.attention import plan as planning
from headrace.attention import recurrence
from headrace.attention.steps import attention_of
from headrace.device import Device
from headrace.kernels import ops
from headrace.kernels.backend import Backend
from headrace.kv.storage import KVStorage
from headrace.models.decoder import Decoder, TokenBatch
from headrace.models.slots import expert_prefix
from headrace.models.x_turns import XTurns
from headrace.offload import frame
from headrace.offload.copy_streams import copy_alone
from headrace.offload.ranked.words import Prompt
from headrace.offload.restore import timing
from headrace.offload.restore.projector import Projector
from headrace.offload.tiers.base import Read, Tier, name_of
from headrace.offload.tiers.stack import Tiers
from headrace.planner.machine import Machine, ModelShape, TierLink
from headrace.planner.profile import Profile
from headrace.types import CHUNK

LINEAR_ROWS = 256
FORWARD = (512, 128)
"""Tokens of the prefill that is timed: the first that should take less than FORWARD_S; of a large model none."""
FORWARD_S = 0.25
FEW = 32
"""Tokens of the closing step that is timed."""
PIECE = 1 << 21
"""Bytes that are copied and checked at a time, as restores do it."""
ATTENTION = 0.8
"""Rate of one rank's attention as a share of that of the linear layers, until prefills are seen."""
PROBE = name_of(hashlib.sha256(b"headrace probe").digest(), "k")
PROBE_BYTES = 8 << 20
PROBES = 3
"""What is stored and read a few times to see how fast a tier is."""


@torch.inference_mode()
def measure(
    decoder: Decoder,
    storage: KVStorage,
    backend: Backend,
    tiers: Sequence[Tier],
    brief: bool = False,
    profile: Profile | None = None,
    device: Device | None = None,
) -> Profile:
    """The profile, with projecting and moving chunks, in about a second or less. Writes to the first slots of the pool,
    which must be empty. A tier that is not in memory begins as it guesses itself; see `probe`.

    profile: of several ranks, which is completed; None: one rank, whose prefill is measured too. brief: each is timed
    by a single call, as it is anyway while nothing is stored outside memory: first figures last until others are seen.
    device: what decoder and pool lie on, if not in host memory.
    """
    far = [tier for tier in tiers if not tier.in_memory]
    brief |= len(far) == len(tiers) > 0 and not any(tier.stats().blobs for tier in far)
    seconds = timing.brief_seconds if brief else timing.call_seconds
    if device is not None:
        seconds = timing.synchronised(seconds, device)
    alone = profile is None
    if profile is None:
        shape = ModelShape.of(decoder.config, decoder.dtype.itemsize)
        profile = Profile(_one_rank(decoder, seconds), shape)
    project = (
        timing.projection_rate(_Projection(decoder, storage, backend), seconds) if storage.keeps_activations else None
    )
    move = _Move(device)
    near = [tier.kind for tier in tiers if tier.in_memory] or ["memory"]
    moved = {kind: timing.read_rate(kind, move, seconds, shares_cores=device is None) for kind in near}
    guessed = {tier.kind: TierLink(kind=tier.kind, rate=tier.read_guess) for tier in tiers}
    profile.complete([*(guessed | moved).values()], project)
    if alone and decoder.share is None:  # tensor ranks compute together, when all are asked to
        _forward(decoder, storage, backend, profile, seconds, brief)
    return profile


def probe(tiers: Tiers, profile: Profile) -> None:
    """Tells the profile how fast the tiers beyond memory give back a blob, which is stored for the purpose and dropped.
    One that holds nothing yet begins as it guesses."""
    for tier in tiers.tiers:
        stats = tier.stats()
        full = stats.budget_bytes and stats.used_bytes + PROBE_BYTES > stats.budget_bytes
        if tier.in_memory or full or not stats.blobs or not tier.put(PROBE, b"", (bytes(PROBE_BYTES),)):
            continue  # nothing is to be evicted for it
        into = memoryview(bytearray(PROBE_BYTES))
        for _ in range(PROBES):
            began = time.perf_counter()
            if all(tier.read([Read(PROBE, 0, into)])):
                frame.checksum(into)
                profile.observe_load(tier.kind, PROBE_BYTES, 1, time.perf_counter() - began)
        tier.drop([PROBE])
    tiers.leave_out()


class _Projection:
    """K and V of some tokens of the first layer, projected and put into the pool, as restores do it."""

    def __init__(self, decoder: Decoder, storage: KVStorage, backend: Backend) -> None:
        self.projector = Projector(decoder.unsent(), storage, backend, XTurns())
        self.most = max(1, min(storage.slots, decoder.config.max_model_len // CHUNK))
        self.of = lru_cache(self._of)

    def __call__(self, tokens: int) -> None:
        self.of(tokens)(0)

    def _of(self, tokens: int) -> Callable[[int], None]:
        chunks = [chunk % self.most for chunk in range(-(-tokens // CHUNK))]
        return self.projector(chunks, chunks, Prompt(0))


class _Move:
    """Bytes from one place in memory to another, checked, and on to a device, if there is one: what a restore from host
    memory takes on the copy stream."""

    def __init__(self, device: Device | None) -> None:
        self.source = torch.ones(timing.SIZES[-1], dtype=torch.uint8)
        self.into, self.on = torch.ones_like(self.source), None
        if device is not None:
            self.into = device.pinned(self.source.shape, torch.uint8)
            self.on = torch.empty(self.source.shape, dtype=torch.uint8, device=device.place)

    def __call__(self, size: int) -> None:
        for at in range(0, size, PIECE):
            end = min(size, at + PIECE)
            copy_alone(self.into[at:end], self.source[at:end])
            frame.checksum(self.into[at:end].numpy().data)
            if self.on is not None:
                self.on[at:end].copy_(self.into[at:end], non_blocking=True)


def _one_rank(decoder: Decoder, seconds: timing.Seconds) -> Machine:
    """By the products of the first layer: at many rows, and of one row, which reads the weights. Of experts as many
    take part as a row meets."""
    experts = decoder.config.experts_of(0)
    unmet = tuple(expert_prefix(0, e) for e in range(experts.chosen, experts.count)) if experts is not None else ()
    of_layer = {name: w for name, w in decoder.matrices.items() if name.startswith("layers.0.")}
    matrices = [w for name, w in of_layer.items() if not name.startswith(unmet)]
    elements = sum(w.shape[0] * w.shape[1] for w in matrices)

    def products(rows: int) -> float:
        inputs = [torch.ones(rows, w.shape[1], dtype=decoder.dtype, device=decoder.device) for w in matrices]
        return seconds(lambda: [ops.linear(x, w) for x, w in zip(inputs, matrices, strict=True)])

    flops_s = 2 * LINEAR_ROWS * elements / products(LINEAR_ROWS)
    return Machine(
        name=host.processor_name(), cores=torch.get_num_threads(), isa="", date="", linear_flops_s=flops_s,
        attention_flops_s=((1, ATTENTION * flops_s),), link_bytes_s=math.inf,
        memory_bytes_s=elements * decoder.dtype.itemsize / products(1),
    )  # fmt: skip


def _forward(
    decoder: Decoder, storage: KVStorage, backend: Backend, found: Profile, seconds: timing.Seconds, brief: bool
) -> None:
    """Tells the profile what a short prompt takes, and a short step after it, where that is soon done."""
    most = min(storage.slots * CHUNK, decoder.config.max_model_len)
    for tokens in FORWARD[-1:] if brief else FORWARD:
        if tokens <= most and float(found.prefill(0, tokens)) <= FORWARD_S:
            break
    else:
        return
    for start, count in ((0, tokens), (tokens - FEW, FEW)):
        forward = _Forward(decoder, storage, backend, start, count)
        found.scale_prefill(start, count, seconds(forward, most_s=FORWARD_S / 2))


class _Forward:
    """A step of `count` tokens, all of them number 0, after `start` others in the first slots of the pool."""

    def __init__(self, decoder: Decoder, storage: KVStorage, backend: Backend, start: int, count: int) -> None:
        self.decoder, end = decoder, start + count
        slots = np.arange(-(-end // CHUNK), dtype=np.int32)
        lengths = torch.full((count,), end) if decoder.config.rope_depends_on_length else None
        self.batch = TokenBatch(torch.zeros(count, dtype=torch.int64), torch.arange(start, end), lengths)
        plan = planning.build([planning.Span(slots, start, count)])
        spec = decoder.config.attention
        self.attend = attention_of(plan, storage, spec, backend, decoder.key_bias, decoder.sinks)
        self.last = torch.tensor([count - 1])
        self.recur = recurrence.alone(decoder.config.recurrent, decoder.dtype, count, decoder.device)

    def __call__(self) -> None:
        hidden = self.decoder.forward(self.batch, self.attend, self.last, recur=self.recur)
        if self.decoder.config.head:
            self.decoder.logits(hidden)
