"""Gemma 4: heads of published sizes, rounded weights, a pool too small, many layers, what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM

from headrace import LLM, SamplingParams
from headrace.attention.execute import PlanAttention
from headrace.attention.plan import Span, build
from headrace.config import Quantization
from headrace.engine.footprint import Footprint
from headrace.engine.programs import InCpp
from headrace.engine.runner import Runner
from headrace.kernels import cpu, dispatch
from headrace.kernels.backend import backend_of
from headrace.kernels.block import Blocks
from headrace.kernels.model_step import Ends, ModelStep
from headrace.kv.storage import KVStorage
from headrace.models.config import read_config
from headrace.models.decoder import Decoder, load_decoder
from headrace.models.mixed_layers import MixedLayers
from headrace.models.plain_config import plain_config
from headrace.models.sizes import EMBED
from tests.support.checkpoints import FolderOf, make_checkpoint
from tests.support.kind_sizes import VOCAB
from tests.support.naive_attention import batch_of, naive, prompt_logits
from tests.support.traces import Trace, run, same
from tests.support.truth import as_near, exact_logits

PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def prompts() -> list[list[int]]:
    tokens = torch.randint(0, VOCAB, (400,), generator=torch.Generator().manual_seed(1)).tolist()
    return [tokens[:200], tokens[:150] + tokens[300:360], tokens[200:264], tokens[5:10]]


def engine(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), **{"dtype": "bfloat16", "kv_cache_tokens": 8192, **settings})


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 256 and 512, as published models have."""
    sizes = dict(
        head_dim=256, global_head_dim=512, num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"]
    )
    return make_checkpoint("gemma4", tmp_path_factory.mktemp("wide"), **sizes)


@pytest.mark.skipif(not cpu.available(), reason="there are no kernels")
def test_heads_of_published_sizes(isa: str, wide: Path) -> None:
    """In bf16: cut and whole the same bits, and as near to the truth as transformers."""
    tokens, model = prompts()[0], AutoModelForCausalLM.from_pretrained(wide, dtype=torch.float32).eval()
    with torch.no_grad():
        truth = model(torch.tensor([tokens])).logits[0]
        rounded = model.bfloat16()(torch.tensor([tokens])).logits[0].float()
    logits = engine(wide).logits(tokens)
    assert torch.equal(engine(wide, max_batch_tokens=64).logits(tokens), logits)
    assert (logits - truth).norm() <= 1.5 * (rounded - truth).norm()
    exact = prompt_logits(load_decoder(wide, "float32"), tokens)
    assert (exact - truth).abs().max() < 1e-4


@pytest.mark.parametrize(
    "settings", [dict(quantization="int8"), dict(quantization="w8a8"), dict(kv_cache_dtype="int8")]
)
@pytest.mark.parametrize("kind", ["gemma4_small", "gemma4_experts"])
def test_rounded(kind: str, settings: dict[str, Any], folder_of: FolderOf) -> None:
    """Weights, rows, or keys and values: alone, in a batch, cached and in slices the same bits."""
    alone = engine(folder_of(kind), enable_prefix_caching=False, **settings)
    truth = [run(alone, [one], PARAMS)[0] for one in prompts()]
    llm = engine(folder_of(kind), max_batch_tokens=96, **settings)
    same(run(llm, prompts(), PARAMS), truth)
    same(run(llm, prompts(), PARAMS), truth)
    assert llm.engine.stats().tokens.cached > 0


@pytest.mark.parametrize(
    ("kind", "quantization"),
    [
        *((kind, "none") for kind in ("gemma4", "gemma4_small", "gemma4_experts", "gemma4_unified")),
        *(("gemma4_small", quantization) for quantization in ("int8", "w8a8")),
        ("gemma4_experts", "int8"),
    ],
)
def test_whole_layers_have_the_bits_of_single_operations(
    kind: str, quantization: Quantization, folder_of: FolderOf, threads: None
) -> None:
    """Alone with naive attention, with as many rows as go through a layer together, and more; and what `project` makes
    of what entered a layer."""
    fast, slow = both(folder_of(kind), quantization)
    for count in (1, 70, 1030):
        compare(fast, slow, count)


def both(folder: Path, quantization: Quantization = "none") -> tuple[Decoder, Decoder]:
    """By whole layers, and op by op."""
    fast = load_decoder(folder, "bfloat16", quantization=quantization)
    with dispatch.force("ops"):
        slow = load_decoder(folder, "bfloat16", quantization=quantization)
    assert isinstance(fast.layers, Blocks) and isinstance(slow.layers, MixedLayers)
    return fast, slow


def compare(fast: Decoder, slow: Decoder, count: int) -> None:
    entered: list[tuple[int, Tensor]] = []
    tokens = torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(count)).tolist()
    batch = batch_of(tokens, 0, count)
    want = slow.forward(batch, naive(slow))
    got = fast.forward(batch, naive(fast), watch=lambda *at: entered.append((at[0], at[1].clone())))
    assert want.isfinite().all() and want.float().std() > 0.1
    assert torch.equal(got, want), count
    assert [layer for layer, _ in entered] == list(range(fast.config.attention.stored))
    for layer, x in entered:
        made, again = (each.project(layer, x, batch.positions) for each in (slow, fast))
        assert all(map(torch.equal, made, again)), (count, layer)


def test_keys_as_values_of_layers_with_the_same_heads(tmp_path: Path) -> None:
    """`project` multiplies by what makes keys and values alone: half as much where keys are both."""
    sizes = dict(head_dim=64, global_head_dim=64, num_global_key_value_heads=2)
    fast, slow = both(make_checkpoint("gemma4_unified", tmp_path, **sizes))
    assert isinstance(fast.layers, Blocks) and fast.layers.without_queries is not None
    assert len(fast.config.attention.every_shape) == 1
    for count in (1, 70):
        compare(fast, slow, count)


def test_the_first_layers_alone(folder_of: FolderOf) -> None:
    """As ranks measure them. The table of their inputs is that of all layers."""
    fast, slow = both(folder_of("gemma4_small"))
    for count in (1, 70):
        compare(fast.first(3), slow.first(3), count)
    batch, whole = batch_of([5], 0, 1), fast.first(fast.config.layers)
    assert torch.equal(whole.forward(batch, naive(whole)), slow.forward(batch, naive(slow)))


def test_inputs_that_do_not_fit_are_refused(folder_of: FolderOf) -> None:
    decoder = load_decoder(folder_of("gemma4_small"), "bfloat16")
    batch, layers = batch_of([5, 6], 0, 2), decoder.layers
    assert isinstance(layers, Blocks)
    (x, turns), attend = decoder.enter(batch), naive(decoder)
    with pytest.raises(ValueError, match="hand these over"):
        layers(x, turns, attend)
    for shape in ((1, 4, 32), (2, 3, 32), (2, 4, 16)):
        with pytest.raises(ValueError, match=re.escape("inputs must be a contiguous CPU tensor [2, 4, 32]")):
            layers(x, turns, attend, inputs=torch.zeros(shape, dtype=torch.bfloat16))
    spec, plan = decoder.config.attention, build([Span(np.zeros(1, np.int32), 0, 2)])
    planned = PlanAttention(plan, KVStorage(spec, 1, torch.bfloat16), spec, backend_of("cpu"))
    without = Ends(layers.shape, decoder.tables[EMBED], decoder.weights, decoder.matrices)
    assert planned.prepared is not None
    with pytest.raises(ValueError, match="a row has 0 inputs, the blocks take 128"):
        ModelStep(without, layers, planned.prepared, None)


@pytest.mark.parametrize("kind", ["gemma4", "gemma4_small", "gemma4_experts"])
def test_steps_in_one_call(kind: str, isa: str, folder_of: FolderOf) -> None:
    """The engine decodes by one call of C++ a step, tokens to logits, and prefills by one for all layers but the
    last."""
    long = SamplingParams(temperature=0.0, max_tokens=70, ignore_eos=True)

    def traces() -> list[Trace]:
        llm = engine(folder_of(kind), max_batch_tokens=96)
        executor = llm.engine.loaded.executor
        assert isinstance(executor, Runner)
        assert isinstance(executor.decoding, InCpp) == isinstance(executor.decoder.layers, Blocks)
        return run(llm, prompts(), long)

    fast = traces()
    with dispatch.force("ops"):
        same(fast, traces())


def test_a_pool_too_small(folder_of: FolderOf) -> None:
    """Sequences are preempted and computed again."""
    long = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    folder, some = folder_of("gemma4_small"), prompts()[:3]
    truth = run(engine(folder), some, long)
    llm = engine(folder, kv_cache_tokens=384, max_model_len=384)
    same(run(llm, some, long), truth)
    assert llm.engine.stats().scheduler.preemptions > 0


def test_memory_is_that_of_the_layers_that_store(folder_of: FolderOf) -> None:
    """Of four layers two have keys and values: 2 heads of 32, and 2 of 64."""
    llm = engine(folder_of("gemma4_small"))
    each = 2 * (2 * 32 + 2 * 64) * 2
    assert llm.capacity.kv_bytes_per_token == each
    assert Footprint.of(llm.config, read_config(folder_of("gemma4_small"))).per_token() == each


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (dict(offload_schedule="row", kv_offloading_size=0.1), "offload_schedule: .* differ in their heads"),
        (dict(attention_backend="triton", context_parallel_size=2), "several ranks: .* differ in their heads"),
    ],
)
def test_what_is_not_built_is_refused(settings: dict[str, Any], told: str, folder_of: FolderOf) -> None:
    with pytest.raises(ValueError, match=told):
        LLM(str(folder_of("gemma4_small")), **settings)


@pytest.mark.parametrize("kind", ["gemma4", "gemma4_unified_multimodal"])
def test_layers_in_tens(kind: str, tmp_path: Path) -> None:
    """transformers numbers them "05" and "11" in per_layer_config."""
    sizes = dict(num_hidden_layers=12, layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 2)
    folder = make_checkpoint(kind, tmp_path, **sizes)
    fields = json.loads((folder / "config.json").read_text())
    assert list(fields.get("text_config", fields)["per_layer_config"]) == ["05", "11"]
    assert plain_config(folder) == read_config(folder)
    tokens, [name] = prompts()[0], fields["architectures"]
    model = getattr(transformers, name).from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        theirs = model(torch.tensor([tokens])).logits[0]
    ours = prompt_logits(load_decoder(folder, "float32"), tokens)
    assert as_near(ours, theirs, exact_logits(model, tokens))  # rounding grows with the depth
