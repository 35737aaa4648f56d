"""Adapters (LoRA): logits are those of the adapter multiplied into its model, row by row, whatever is beside a row."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headrace.config import Quantization
from headrace.kernels import dispatch, ops
from headrace.kernels.adapted_rows import row_numbers
from headrace.models.adapter_files import AdapterFacts, read_adapter
from headrace.models.adapters import load_adapters
from headrace.models.config import read_config
from headrace.models.decoder import Decoder, TokenBatch, load_decoder
from headrace.models.shards import Share
from tests.support.adapters import with_adapter, write_adapter
from tests.support.checkpoints import FolderOf, TheirsOf
from tests.support.kind_sizes import VOCAB
from tests.support.naive_attention import BatchAttend, RowAttend, batch_of, join, naive

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]

KINDS = (
    "llama_bias", "qwen3", "phi3", "glm4", "opt", "opt350", "falcon7", "falcon40", "gemma3", "granite", "cohere2",
    "olmo2", "mistral3", "qwen3_vl", "granite_moe_shared", "glm4_moe", "deepseek_v2_lora", "glm_dsa", "gpt_oss",
    "starcoder2", "qwen2_moe", "hunyuan_moe", "afmoe", "apertus", "gpt2", "gpt_neox", "llama4",
    "gemma4", "gemma4_small", "gemma4_experts",
)  # fmt: skip
"""One of each way in which modules are named, fused, put in order and added up."""
ATTENTION = r".*(q_proj|v_proj|qkv_proj|query_key_value|o_proj|c_attn)"
COUNTS = (40, 7, 1)


def adapters_of(kind: str, folder: Path, theirs_of: TheirsOf) -> list[AdapterFacts]:
    """Two: of all modules, and of some of attention's. PEFT says fan_in_fan_out of matrices that lie by inputs, whose
    adapters lie as all do."""
    model = theirs_of(kind)
    write_adapter(folder / "all", model, seed=1, fan_in_fan_out=kind == "gpt2")
    write_adapter(folder / "some", model, ATTENTION, rank=40, seed=2, use_rslora=True)
    return [read_adapter(name, folder / name) for name in ("all", "some")]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, theirs_of: TheirsOf) -> list[AdapterFacts]:
    return adapters_of("llama_bias", tmp_path_factory.mktemp("adapters"), theirs_of)


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def together(decoder: Decoder, prompts: list[list[int]], numbers: list[int]) -> list[Tensor]:
    """Logits [T, V] of each prompt, all computed in one step, each with the adapter of that number."""
    batch = join([batch_of(tokens, 0, len(tokens)) for tokens in prompts])
    rows = torch.tensor(numbers).repeat_interleave(torch.tensor([len(tokens) for tokens in prompts]))
    whole = TokenBatch(batch.token_ids, batch.positions, batch.rope_lengths, None if max(numbers) < 0 else rows)
    attend = BatchAttend([naive(decoder, RowAttend) for _ in prompts], [len(tokens) for tokens in prompts])
    return list(decoder.logits(decoder.forward(whole, attend)).split([len(tokens) for tokens in prompts]))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_adapters_multiplied_in(
    kind: str, tmp_path: Path, folder_of: FolderOf, theirs_of: TheirsOf
) -> None:
    """Of a step in which every row has another adapter, or none."""
    facts = adapters_of(kind, tmp_path, theirs_of)
    decoder = load_decoder(folder_of(kind), adapters=facts)
    prompts = [prompt(count, seed) for seed, count in enumerate(COUNTS)]
    models = [with_adapter(theirs_of(kind), each.folder) for each in facts] + [theirs_of(kind)]
    for tokens, ours, model in zip(prompts, together(decoder, prompts, [0, 1, -1]), models, strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([tokens])).logits[0].float()
        assert (ours - expected).abs().max() <= 1e-4 * max(1.0, float(expected.abs().max()) / 4)


def same_rows(decoder: Decoder, numbers: list[int]) -> None:
    """Each prompt's bits are those of it alone; those without an adapter, of the layers that a model without adapters
    has."""
    prompts = [prompt(count, seed) for seed, count in enumerate(COUNTS[: len(numbers)])]
    for tokens, number, rows in zip(prompts, numbers, together(decoder, prompts, numbers), strict=True):
        [alone] = together(decoder, [tokens], [number])
        assert torch.equal(rows, alone)


@pytest.mark.parametrize("numbers", [[0, 1, -1], [-1, 0, 0], [1, 1, 1], [1, -1, 0]])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4", "w8a8"])
def test_bits_do_not_depend_on_what_is_beside(
    quantization: Quantization, numbers: list[int], two: list[AdapterFacts], folder_of: FolderOf
) -> None:
    same_rows(load_decoder(folder_of("llama_bias"), "bfloat16", quantization=quantization, adapters=two), numbers)


def test_bits_without_the_kernels(two: list[AdapterFacts], folder_of: FolderOf) -> None:
    with dispatch.force("torch"):
        same_rows(load_decoder(folder_of("llama_bias"), "float32", adapters=two), [1, 0, -1])


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4", "w8a8"])
def test_halves_are_what_is_put_together(quantization: Quantization, gated: bool) -> None:
    """Of a weight whose outputs lie in turn, and of one too narrow for that; with a bias."""
    outputs = 256 if gated else 192
    x, weight, bias = torch.randn(5, 128), torch.randn(outputs, 128), torch.randn(outputs)
    for dtype in (torch.float32, torch.bfloat16):
        packed = ops.pack(weight.to(dtype), quantization, gated=True)
        assert isinstance(packed, torch.Tensor) or packed.gated == gated
        halves = ops.halves_linear(x.to(dtype), packed, bias.to(dtype))
        assert torch.equal(ops.gated(halves, "silu"), ops.gated_linear(x.to(dtype), packed, bias.to(dtype)))
        assert torch.equal(halves, ops.linear(x.to(dtype), ops.pack(weight.to(dtype), quantization), bias.to(dtype)))


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_share_is_cut_as_the_weights_are(ranks: int, two: list[AdapterFacts], folder_of: FolderOf) -> None:
    """Of q, k and v, of gates and of the rest: a rank's rows of what an adapter adds are those of its weights."""
    config = read_config(folder_of("llama_bias"))
    whole = load_adapters(two, config, torch.float32)
    for share in (Share(config, rank, ranks) for rank in range(ranks)):
        part = load_adapters(two, config, torch.float32, share)
        assert part.pairs.keys() == whole.pairs.keys() and part.nbytes < whole.nbytes
        for name, pairs in whole.pairs.items():
            for pair, own in zip(pairs, part.pairs[name], strict=True):
                assert (pair is None) == (own is None)
                if pair is not None and own is not None:
                    x, rows = torch.randn(3, pair.up.shape[1]), share.rows(f"{name}.weight")
                    assert rows is not None
                    columns = torch.cat([torch.arange(each.start, each.stop) for each in rows])
                    assert torch.equal(ops.linear(x, own.up), ops.linear(x, pair.up)[:, columns])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bits_do_not_depend_on_which_adapters_there_are(
    dtype: Literal["bfloat16", "float32"], two: list[AdapterFacts], folder_of: FolderOf
) -> None:
    """Though all are padded to the rank of the largest: chunks in a tier outlive the set that they were made with."""
    alone, beside = (load_decoder(folder_of("llama_bias"), dtype, adapters=facts) for facts in (two[:1], two))
    assert alone.adapters is not None and beside.adapters is not None
    ranks = [each.adapters.pairs["layers.0.qkv"][0].down.shape[0] for each in (alone, beside)]  # type: ignore[union-attr]
    assert ranks[0] < ranks[1]
    tokens = prompt(COUNTS[0], 0)
    assert torch.equal(*(together(each, [tokens], [0])[0] for each in (alone, beside)))


def test_a_step_without_adapters_is_the_models_own(two: list[AdapterFacts], folder_of: FolderOf) -> None:
    plain = load_decoder(folder_of("llama_bias"), "bfloat16")
    adapted = load_decoder(folder_of("llama_bias"), "bfloat16", adapters=two)
    prompts = [prompt(count, seed) for seed, count in enumerate(COUNTS)]
    expected = together(plain, prompts, [-1] * 3)
    assert all(map(torch.equal, together(adapted, prompts, [-1] * 3), expected))
    assert torch.equal(together(adapted, prompts, [0, 0, -1])[2], expected[2])
    with pytest.raises(ValueError, match="this decoder has none"):
        together(plain, prompts, [0, 0, 0])


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(-1, 2), st.integers(0, 12)), max_size=6))
def test_which_rows_have_an_adapter(runs: list[tuple[int, int, int, int]]) -> None:
    given_runs = [(begin, begin + length, number, start) for begin, length, number, start in runs]
    found = row_numbers(given_runs)
    wanted = [n if p >= start else -1 for begin, end, n, start in given_runs for p in range(begin, end)]
    assert (found is None and all(n < 0 for n in wanted)) or (found is not None and found.tolist() == wanted)
