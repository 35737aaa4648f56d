"""Adapters (LoRA): logits are those of the adapter multiplied into its model, row by row, whatever is beside a row."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from headrace.models.adapter_files import AdapterFacts, read_adapter
from headrace.models.decoder import Decoder, TokenBatch, load_decoder
from tests.support.adapters import with_adapter, write_adapter
from tests.support.checkpoints import FolderOf, TheirsOf
from tests.support.kind_sizes import VOCAB
from tests.support.naive_attention import BatchAttend, batch_of, join, naive

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]

KINDS = (
    "llama_bias", "qwen3", "phi3", "glm4", "opt", "opt350", "falcon7", "falcon40", "gemma3", "granite", "cohere2",
    "olmo2", "mistral3", "qwen3_vl", "granite_moe_shared", "glm4_moe", "deepseek_v2_lora", "gpt_oss",
)  # fmt: skip
"""One of each way in which modules are named, fused, put in order and added up."""
ATTENTION = r".*(q_proj|v_proj|qkv_proj|query_key_value|o_proj)"
COUNTS = (40, 7, 1)


def adapters_of(kind: str, folder: Path, theirs_of: TheirsOf) -> list[AdapterFacts]:
    """Two: of all modules, and of some of attention's."""
    model = theirs_of(kind)
    write_adapter(folder / "all", model, seed=1)
    write_adapter(folder / "some", model, ATTENTION, rank=40, seed=2, use_rslora=True)
    return [read_adapter(name, folder / name) for name in ("all", "some")]


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def together(decoder: Decoder, prompts: list[list[int]], numbers: list[int]) -> list[Tensor]:
    """Logits [T, V] of each prompt, all computed in one step, each with the adapter of that number."""
    batch = join([batch_of(tokens, 0, len(tokens)) for tokens in prompts])
    rows = torch.tensor(numbers).repeat_interleave(torch.tensor([len(tokens) for tokens in prompts]))
    whole = TokenBatch(batch.token_ids, batch.positions, batch.rope_lengths, None if max(numbers) < 0 else rows)
    attend = BatchAttend([naive(decoder) for _ in prompts], [len(tokens) for tokens in prompts])
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
