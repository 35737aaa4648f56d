"""Tensor parallelism: ranks that share heads and outputs give the bits of one rank, whatever the model is made of.

M: tensor ranks, T: rows, H: hidden size, I: MLP width, Hq, Hkv: query and KV heads, D: head size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.attention import plan as planning
from headrace.attention.steps import attention_of
from headrace.config import Quantization
from headrace.kernels import cpu, dispatch, ops
from headrace.kernels.backend import backend_of
from headrace.kv.storage import KVStorage
from headrace.models.config import read_config
from headrace.models.decoder import Decoder, TokenBatch, load_decoder
from headrace.models.layers import OneByOne
from headrace.models.shards import Share, cut
from headrace.models.slots import expected
from headrace.models.weights import load_weights
from headrace.parallel.tensor import TensorGroup
from headrace.parallel.transport import LoopbackHub, RankLost
from headrace.types import chunks_for
from tests.support.checkpoints import make_checkpoint
from tests.support.kind_sizes import VOCAB
from tests.support.tensor_ranks import on_ranks

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]

Model = tuple[str, dict[str, Any]]
MODELS: dict[str, Model] = {
    "MHA": ("llama_bias", {}),
    "GQA": ("llama_gqa", {}),
    "MQA": ("llama", dict(num_key_value_heads=1)),
    "tied": ("llama_tied", {}),
    "dynamic rope": ("llama_dynamic", {}),
    "windows": ("mistral_window", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "experts": ("qwen3_moe_mixed", dict(moe_intermediate_size=128)),
    "norm over all heads": ("olmoe", dict(intermediate_size=128)),
    "experts with biases, sinks": ("gpt_oss", dict(intermediate_size=128)),
    "sparse attention": ("glm_dsa", dict(moe_intermediate_size=128)),
    "shared expert": ("granite_moe_shared", dict(intermediate_size=128, shared_intermediate_size=192)),
    "experts by corrected sigmoids": ("glm4_moe", dict(moe_intermediate_size=128)),
    "opt": ("opt", {}),
    "post-norm, projected embeddings": ("opt350", {}),
    "norms without weights": ("opt_plain", {}),
    "falcon 7": ("falcon7", {}),
    "falcon 7 with biases": ("falcon7_bias", {}),
    "ALiBi": ("falcon_rw", {}),
    "falcon 40": ("falcon40", {}),
    "one norm": ("falcon11", {}),
    "fused matrices, longrope": ("phi4_longrope", {}),
    "layers without positions": ("smollm3", {}),
    "multipliers": ("granite", {}),
    "factor of queries": ("ministral3", {}),
    "norms after the turn": ("hunyuan", {}),
    "squared relus": ("arcee", {}),
    "learned positions, matrices by inputs": ("gpt2", {}),
    "parallel blocks with biases": ("gpt_neox", {}),
    "biases of the head": ("phi", {}),
    "blocks of keys, weighted inputs": ("llama4", {}),
    "norms behind alone": ("olmo2", {}),
    "one norm without biases": ("cohere2", {}),
    "neighbours rotated": ("glm4", {}),
    "soft caps": ("gemma2", {}),
    "two rotations": ("gemma3", {}),
    "heads of two sizes": ("gemma4", {}),
    "shared keys": ("gemma4_small", {}),
    "experts beside": ("gemma4_experts", dict(moe_intermediate_size=128)),
    "latent attention": ("deepseek_v2_lora", dict(moe_intermediate_size=128)),
    "dense latent attention": ("minicpm3", {}),
    "factor of latent queries": ("mistral4", dict(moe_intermediate_size=128)),
    "LayerNorm and biases": ("starcoder2", {}),
    "sinks and two bases": ("granite_swa", {}),
    "norms behind the rotation": ("hunyuan_moe", dict(intermediate_size=128)),
    "xIELU": ("apertus", {}),
    "gates, norms behind experts": ("afmoe", dict(moe_intermediate_size=128)),
    "queries and embeddings normed without weights": ("muse_glimmer", {}),
}
"""Kind of tests.support.checkpoints, and fields of its configuration. All have 4 query heads, H 128, I 192 or 512."""
UNEVEN: dict[str, Model] = {
    "llama": ("llama_gqa", dict(hidden_size=240, intermediate_size=330, num_attention_heads=6, num_key_value_heads=3)),
    "ALiBi": ("falcon_rw_odd", {}),
}
"""Models for three ranks: widths that neither the ranks nor the blocks of packed weights divide."""
STEPS = ((70, 0), (1, 33), (1, 1), (64, 1))
"""Rows of two sequences in each step."""

ISAS = [*(cpu.available_isas() if cpu.available() else ()), "torch"]
PRODUCTS = [*itertools.product(["none", "int8", "int4"], ISAS), *(("w8a8", isa) for isa in ISAS if isa != "torch")]
"""Forms of weights by instruction set; w8a8 needs the C++ kernels."""

every_model = pytest.mark.parametrize("model", MODELS)
every_type = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Model], Path]:
    """The checkpoint of a model, written once."""

    @lru_cache(None)
    def write(kind: str, fields: tuple[tuple[str, Any], ...]) -> Path:
        return make_checkpoint(kind, tmp_path_factory.mktemp(kind), **dict(fields))

    return lambda model: write(model[0], tuple(model[1].items()))


def run(decoder: Decoder, backend: str = "cpu") -> tuple[list[Tensor], KVStorage]:
    """Hidden states of each of STEPS, and the storage that the keys and values went to."""
    spec, seen, hidden = decoder.config.attention, [0, 0], []
    storage = KVStorage(spec, 8, decoder.dtype)
    slots = [np.array([0, 2, 3], dtype=np.int32), np.array([1, 4, 5], dtype=np.int32)]
    for counts in STEPS:
        spans = [
            planning.Span(slots[i][: chunks_for(seen[i] + count)], seen[i], count)
            for i, count in enumerate(counts)
            if count
        ]
        plan = planning.build(spans)
        attend = attention_of(plan, storage, spec, backend_of(backend), decoder.key_bias, decoder.sinks)
        positions = torch.from_numpy(plan.positions)
        batch = TokenBatch((positions * 7 + 3) % VOCAB, positions, (positions + 1).clamp(min=200))
        hidden.append(decoder.forward(batch, attend).clone())
        seen = [before + count for before, count in zip(seen, counts, strict=True)]
    return hidden, storage


def check_same_bits(
    folder: Path, size: int, dtype: Any, quantization: Quantization = "none", backend: str = "cpu"
) -> None:
    whole = load_decoder(folder, dtype, quantization=quantization)
    hidden, storage = run(whole, backend)
    logits = whole.logits(hidden[-1])

    def rank(group: TensorGroup) -> tuple[list[Tensor], KVStorage, Tensor | None]:
        decoder = load_decoder(folder, dtype, quantization=quantization, tensor=group)
        states, mine = run(decoder, backend)
        return states, mine, decoder.logits(states[-1]) if group.rank == 0 else None

    for number, (states, mine, got) in enumerate(on_ranks(size, rank)):
        for step, (one, other) in enumerate(zip(hidden, states, strict=True)):
            assert torch.equal(one, other), f"rank {number}, step {step}"
        share = Share(whole.config, number, size)
        for layer, (pool, part) in enumerate(zip(storage.pools, mine.pools, strict=True)):
            heads = share.kv_heads_of(layer)
            for whole_one, own in zip(pool.tensors, part.tensors, strict=True):
                assert torch.equal(whole_one[:, heads.start : heads.stop], own)
        assert got is None or torch.equal(got, logits)


def backend_here() -> str:
    return "cpu" if cpu.available() else "reference"


@pytest.mark.parametrize("size", [2, 4])
@every_type
@every_model
def test_ranks_give_the_bits_of_one(model: str, dtype: str, size: int, folder: Callable[[Model], Path]) -> None:
    check_same_bits(folder(MODELS[model]), size, dtype, backend=backend_here())


@every_type
@pytest.mark.parametrize("model", UNEVEN)
def test_widths_need_not_divide(model: str, dtype: str, folder: Callable[[Model], Path]) -> None:
    check_same_bits(folder(UNEVEN[model]), 3, dtype, backend=backend_here())


@every_type
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("model", ["GQA", "opt", "falcon 40", "experts", "latent attention"])
def test_quantised_ranks_give_the_bits_of_one(
    model: str, quantization: Quantization, dtype: str, folder: Callable[[Model], Path]
) -> None:
    check_same_bits(folder(MODELS[model]), 4, dtype, quantization, backend_here())


@every_type
@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("model", ["GQA", "falcon 7", "ALiBi", "experts", "latent attention"])
def test_without_the_cpp_kernels_too(
    model: str, quantization: Quantization, dtype: str, folder: Callable[[Model], Path]
) -> None:
    with dispatch.force("torch"):
        check_same_bits(folder(MODELS[model]), 2, dtype, quantization, "reference")


@pytest.mark.parametrize(("quantization", "isa"), PRODUCTS)
@every_type
def test_an_output_has_the_same_bits_among_fewer(dtype: str, quantization: Quantization, isa: str) -> None:
    """The ground of it all: linear's bits do not depend on how many outputs a rank has, nor on which."""
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(333, 320, generator=g).to(getattr(torch, dtype))
    bias = torch.randn(333, generator=g).to(weight.dtype)
    before = cpu.isa() if cpu.available() else None
    try:
        with dispatch.force("torch" if isa == "torch" else None):
            if isa != "torch":
                cpu.use_isa(isa)
            whole = ops.pack(weight, quantization)
            for size in (2, 3, 4, 8):
                shares = [(mine, weight[mine.start : mine.stop]) for mine in cut("width", len(weight), size)]
                packed = [(mine.start, mine.stop, ops.pack(part.clone(), quantization)) for mine, part in shares]
                for rows in (1, 3, 16, 64, 130):
                    x = torch.randn(rows, 320, generator=g).to(weight.dtype)
                    truth = ops.linear(x, whole, bias)
                    for start, stop, share in packed:
                        mine = ops.linear(x, share, bias[start:stop].clone())
                        assert torch.equal(mine, truth[:, start:stop]), (size, start, rows)
    finally:
        if before is not None:
            cpu.use_isa(before)


def test_the_test_can_fail(folder: Callable[[Model], Path]) -> None:
    """Shares put together in another order give other hidden states."""

    class Reversed(TensorGroup):
        def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
            return torch.cat(super().gather(x, widths).split(list(widths), dim=1)[::-1], dim=1)

    path = folder(MODELS["GQA"])
    (expected_states, _) = run(load_decoder(path, "float32"), backend_here())
    wrong = on_ranks(
        2, lambda group: run(load_decoder(path, "float32", tensor=Reversed(group.transport)), backend_here())[0]
    )
    assert not torch.equal(wrong[0][0], expected_states[0])


# What a rank holds


@pytest.mark.parametrize("size", [2, 4])
@every_model
def test_shares_make_up_every_weight(model: str, size: int, folder: Callable[[Model], Path]) -> None:
    """Rows of `out`, `up`, `down` and of what latent attention has by head lie on one rank each, those of qkv too but
    for shared KV heads."""
    path = folder(MODELS[model])
    config = read_config(path)
    whole = load_weights(path, config, torch.float32)
    parts = [load_weights(path, config, torch.float32, share=Share(config, rank, size)) for rank in range(size)]
    assert [("head.weight" in part) for part in parts] == [True] + [False] * (size - 1)
    for name, tensor in whole.items():
        module, held = name.split(".")[-2], sum(len(part[name]) for part in parts if name in part)
        if module in ("out", "up", "down", "queries", "heads") or name.endswith(".sinks"):
            assert held == len(tensor)
        elif module == "qkv":
            layer = int(name.split(".")[1])
            kv_heads, dim = config.attention.shape(layer)
            copies = (len(config.projected_heads(layer)) - 1) * dim * (max(size, kv_heads) - kv_heads)
            assert held == len(tensor) + copies
        elif module != "head":
            assert all(torch.equal(part[name], tensor) for part in parts)
    assert set(parts[0]) == set(expected(config))


def test_progress_counts_what_is_left_out(folder: Callable[[Model], Path]) -> None:
    calls: list[tuple[int, int]] = []
    path = folder(MODELS["GQA"])
    config = read_config(path)
    load_weights(path, config, torch.float32, lambda *at: calls.append(at), Share(config, 1, 2))
    total = 4 * sum(slot.count for slot in expected(config).values())
    assert calls[-1] == (total, total)


def test_only_rank_0_has_logits(folder: Callable[[Model], Path]) -> None:
    path = folder(MODELS["GQA"])
    decoders = on_ranks(2, lambda group: load_decoder(path, "float32", tensor=group))
    assert decoders[0].logits(torch.zeros(1, 128)).shape == (1, VOCAB)
    with pytest.raises(ValueError, match="ask rank 0"):
        decoders[1].logits(torch.zeros(1, 128))


def test_a_group_of_one_is_no_group(folder: Callable[[Model], Path]) -> None:
    path = folder(MODELS["GQA"])
    alone = load_decoder(path, "bfloat16", tensor=TensorGroup(LoopbackHub(1).transport(0)))
    plain = load_decoder(path, "bfloat16")
    assert type(alone.layers) is type(plain.layers)
    assert alone.config == plain.config
    (decoder, _) = on_ranks(2, lambda group: load_decoder(path, "bfloat16", tensor=group))
    assert isinstance(decoder.layers, OneByOne)


# Traffic


@pytest.mark.parametrize(("model", "exchanges"), [("GQA", 4), ("opt", 4), ("falcon 40", 3)])
@pytest.mark.parametrize("size", [2, 4])
def test_bytes_sent_are_as_documented(model: str, exchanges: int, size: int, folder: Callable[[Model], Path]) -> None:
    """A rank sends its share of Hq D + 2 H + I elements (a parallel block: Hq D + H + I) to each other rank."""
    path = folder(MODELS[model])
    config = read_config(path)

    def sent(group: TensorGroup) -> tuple[int, int]:
        run(load_decoder(path, "bfloat16", tensor=group), backend_here())
        traffic = group.transport.traffic
        return sum(traffic.bytes.values()), sum(traffic.messages.values())

    totals = on_ranks(size, sent)
    spec, rows = config.attention, sum(map(sum, STEPS))
    outputs = 1 if config.block == "parallel" else 2
    gathered = spec.heads * spec.head_dim + outputs * config.hidden_size + config.intermediate_size
    assert sum(sent for sent, _ in totals) == (size - 1) * gathered * rows * config.layers * 2
    assert {count for _, count in totals} == {(size - 1) * exchanges * config.layers * len(STEPS)}


def test_a_lost_rank_ends_the_forward_of_the_others(folder: Callable[[Model], Path]) -> None:
    path, hub = folder(MODELS["GQA"]), LoopbackHub(2)

    def work(group: TensorGroup) -> None:
        decoder = load_decoder(path, "float32", tensor=group)
        if group.rank == 1:
            hub.fail("rank 1 is gone")
            return
        with pytest.raises(RankLost, match="rank 1 is gone"):
            run(decoder, backend_here())

    on_ranks(2, work, hub)
