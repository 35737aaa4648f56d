"""How fast a model computes here, from its facts: a few layers of random weights are timed, with its kernels.

The whole model is never read, so a file of any size is answered in seconds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from headrace.attention import plan as planning
from headrace.attention import recurrence
from headrace.attention.steps import attention_of
from headrace.config import EngineConfig, Quantization
from headrace.kernels.backend import Backend, backend_of
from headrace.kernels.block import Blocks, obstacle
from headrace.kernels.quantized import GROUP
from headrace.kv.storage import KVStorage
from headrace.models.decoder import Decoder, TokenBatch, compute_dtype
from headrace.models.sizes import BYTES, LOOKED_UP, compute_type, weight_bytes
from headrace.models.slots import expected
from headrace.models.spec import ModelConfig
from headrace.models.whole_layers import never_whole
from headrace.types import CHUNK, chunks_for

TOKENS = 2048
"""Of the prompt that is timed, and of the context that a token is decoded on."""
LAYER_BYTES = 192 << 20
"""Weights of the layers that are timed before they are quantised, about: beyond the caches, and soon made."""
HEAD_ROWS = 32_768
"""Of the head that is timed."""
PREFILL_FLOPS = 400e9
"""Operations of the prefill that is timed, about."""
STEPS = 7
EXPERTS = 4
INT4_BITS = 6.2
"""Of a stored weight, below which int4 is nearest."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Tokens a second of one sequence. tokens: of its prompt, on which the answer's are decoded; layers: how many were
    timed; weights: the form that they were timed in; obstacle: why a layer is not computed in C++ as a whole, empty
    where it is."""

    tokens: int
    prefill_tokens_s: float
    decode_tokens_s: float
    layers: int
    weights: Quantization
    obstacle: str


@torch.inference_mode()
def expect(facts: ModelConfig, config: EngineConfig) -> Expected:
    """Times the model of these facts as the settings would load it on one rank; weights that are stored quantised in
    the form of ours that is nearest in size."""
    scheme = _scheme(facts, config)
    few = _few(facts, config)
    decoder = Decoder(few, _random(few, compute_dtype(facts, config.model.dtype)), scheme)
    tokens = min(TOKENS, facts.max_model_len - 1, _affordable(few))
    storage = KVStorage(few.attention, chunks_for(tokens + 1), _kv_dtype(config, decoder))
    backend = backend_of(config.model.backend if config.model.backend != "auto" else "cpu")
    prompt, answer = (_Step(decoder, storage, backend, *each) for each in ((0, tokens), (tokens, 1)))
    head, more = _seconds(prompt.head), facts.vocab_size / few.vocab_size
    layers = facts.layers / few.layers
    return Expected(
        tokens,
        tokens / (_seconds(prompt) * layers + head * more),
        1 / (_seconds(answer) * layers + head * more),
        few.layers,
        scheme,
        _obstacle(decoder),
    )


def _obstacle(decoder: Decoder) -> str:
    if isinstance(decoder.layers, Blocks):
        return ""
    if decoder.config.recurrent is not None:
        return "some layers are recurrent"
    return never_whole(decoder.config) or obstacle(decoder.layers.layers, decoder.dtype) or ""


def _scheme(facts: ModelConfig, config: EngineConfig) -> Quantization:
    if facts.stored is None:
        return config.model.quantization
    multiplied = [slot for name, slot in expected(facts).items() if name not in LOOKED_UP]
    size = facts.stored.bytes - (0 if facts.tied else facts.stored.table)
    small = 8 * size / sum(slot.count for slot in multiplied) < INT4_BITS
    return "int4" if small and all((slot.columns or 0) % GROUP == 0 for slot in multiplied) else "int8"


def _few(facts: ModelConfig, config: EngineConfig) -> ModelConfig:
    """The same model with fewer layers and a smaller vocabulary."""
    least = facts.one_of_each_kind
    size = weight_bytes(_cut(facts, least, CHUNK), compute_type(facts, config.model.dtype))
    return _cut(facts, min(facts.layers, max(1, LAYER_BYTES // size) * least), min(facts.vocab_size, HEAD_ROWS))


def _cut(facts: ModelConfig, layers: int, vocabulary: int) -> ModelConfig:
    few = facts.first(layers)
    experts = few.experts
    if experts is not None and facts.experts is not None:
        # a few times those that a row meets stand for all; the first layers may be dense, the last ones are as most are
        plain = replace(experts.routing, groups=1, met_groups=1, summed=1)
        count, of_last = min(experts.count, EXPERTS * experts.chosen), facts.experts.layers[-layers:]
        experts = replace(experts, count=count, layers=of_last, routing=plain)
    return replace(few, vocab_size=vocabulary, experts=experts, stored=None)


def _affordable(few: ModelConfig) -> int:
    """Tokens of a prompt that is soon computed."""
    numbers = weight_bytes(few, "bfloat16") / BYTES["bfloat16"]
    return max(CHUNK, int(PREFILL_FLOPS / (2 * numbers)) // CHUNK * CHUNK)


def _random(few: ModelConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, slot in expected(few).items():
        made = torch.ones(slot.shape(sum(slot.parts)), dtype=torch.float32 if slot.wide else dtype)
        if slot.columns is not None and name not in LOOKED_UP:
            bound = slot.columns**-0.5
            made.uniform_(-bound, bound, generator=generator)
        weights[name] = made
    return weights


def _kv_dtype(config: EngineConfig, decoder: Decoder) -> torch.dtype:
    return torch.int8 if config.cache.dtype == "int8" else decoder.dtype


class _Step:
    """`count` tokens behind `start` others, in the first slots of the pool; `head`: the last one's logits."""

    def __init__(self, decoder: Decoder, storage: KVStorage, backend: Backend, start: int, count: int) -> None:
        self.decoder, end = decoder, start + count
        slots = np.arange(chunks_for(end), dtype=np.int32)
        lengths = torch.full((count,), end) if decoder.config.rope_depends_on_length else None
        self.batch = TokenBatch(torch.arange(count) % CHUNK, torch.arange(start, end), lengths)
        plan = planning.build([planning.Span(slots, start, count)])
        self.attend = attention_of(plan, storage, decoder.config.attention, backend, decoder.key_bias)
        self.recur = recurrence.alone(decoder.config.recurrent, decoder.dtype, count, decoder.device)
        self.hidden = torch.zeros(1, decoder.config.embed_size, dtype=decoder.dtype)

    def __call__(self) -> None:
        self.decoder.forward(self.batch, self.attend, recur=self.recur)

    def head(self) -> None:
        if self.decoder.config.head:
            self.decoder.logits(self.hidden)


def _seconds(work: Callable[[], object]) -> float:
    """Median of a few calls behind one that does not count; of slow ones fewer."""
    work()
    times: list[float] = []
    while len(times) < STEPS and sum(times) < 1.0:
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)
