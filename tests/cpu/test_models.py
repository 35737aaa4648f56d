"""Logits of every family and variant as transformers has them, and rows whose bits do not depend on their company.
Through the engine, in bf16 and token by token: test_families.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from headrace.config.routing import CORRECTION
from headrace.kernels import dispatch
from headrace.models.config import read_config
from headrace.models.decoder import Decoder, load_decoder
from headrace.models.plain_config import plain_config
from headrace.models.spec import ModelConfig
from headrace.models.weights import load_weights
from tests.support.checkpoints import (
    EVERY_ALIKE,
    EVERY_KIND,
    FolderOf,
    OursOf,
    TheirsOf,
    build_model,
    make_checkpoint,
)
from tests.support.kind_sizes import VOCAB, WINDOW
from tests.support.naive_attention import (
    BatchAttend,
    NaiveAttend,
    RowAttend,
    batch_of,
    join,
    naive,
    prompt_logits,
)
from tests.support.truth import as_near, exact_logits

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]

TOLERANCE = 1e-4
PROMPT_LENGTH = 300
UNEVEN = (300, 171, 37, 1)
LONG = 200  # beyond the own length of the dynamic NTK model

all_kinds = pytest.mark.parametrize("kind", EVERY_KIND)


def prompt(length: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(0, VOCAB, (length,), generator=generator)]


@torch.no_grad()
def their_logits(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """fp32 logits [T, V] of transformers."""
    logits: Tensor = model(torch.tensor([tokens])).logits[0]
    return logits.float()


def padded_logits(model: PreTrainedModel, prompts: list[list[int]]) -> list[Tensor]:
    """Logits of transformers for prompts of uneven lengths, in one batch padded on the right."""
    longest = max(map(len, prompts))
    ids = torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens in prompts])
    mask = torch.tensor([[1] * len(tokens) + [0] * (longest - len(tokens)) for tokens in prompts])
    with torch.no_grad():
        logits = model(ids, attention_mask=mask).logits
    return [row[: len(tokens)] for row, tokens in zip(logits, prompts, strict=True)]


@all_kinds
def test_fp32_logits_equal_transformers(kind: str, ours_of: OursOf, theirs_of: TheirsOf) -> None:
    tokens = prompt(PROMPT_LENGTH)
    ours, theirs = prompt_logits(ours_of(kind), tokens), their_logits(theirs_of(kind), tokens)
    if kind == "gemma4_experts":  # logits reach 10: in fp32 their own are up to 1.2e-4 from those in fp64
        assert as_near(ours, theirs, exact_logits(theirs_of(kind), tokens))
    else:
        assert (ours - theirs).abs().max() <= TOLERANCE


@all_kinds
def test_fp32_logits_of_an_uneven_batch_equal_transformers(kind: str, ours_of: OursOf, theirs_of: TheirsOf) -> None:
    decoder = ours_of(kind)
    prompts = [prompt(length, seed) for seed, length in enumerate(UNEVEN)]
    attend = BatchAttend([naive(decoder) for _ in prompts], [len(tokens) for tokens in prompts])
    hidden = decoder.forward(join([batch_of(tokens, 0, len(tokens)) for tokens in prompts]), attend)
    if decoder.config.rope_depends_on_length:  # a batch of transformers rotates all its rows for the longest
        expected = [their_logits(theirs_of(kind), tokens) for tokens in prompts]
    else:
        expected = padded_logits(theirs_of(kind), prompts)
    difference = decoder.logits(hidden) - torch.cat(expected)
    assert difference.abs().max() <= TOLERANCE


def test_windows_of_smollm3_are_where_layer_types_names_them(tmp_path: Path) -> None:
    """Whatever use_sliding_window says, as transformers masks."""
    fields = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=WINDOW, use_sliding_window=False)
    decoder = load_decoder(make_checkpoint("smollm3", tmp_path, **fields), "float32")
    assert decoder.config.attention.windows == (WINDOW, None) and plain_config(tmp_path) == read_config(tmp_path)
    tokens, model = prompt(PROMPT_LENGTH), build_model("smollm3", **fields)
    assert (prompt_logits(decoder, tokens) - their_logits(model, tokens)).abs().max() <= TOLERANCE


@all_kinds
def test_a_row_has_the_same_bits_in_every_schedule(kind: str, ours_of: OursOf) -> None:
    """Whole, token by token, and in pieces beside another sequence: the same logits."""
    check_schedules(ours_of(kind, "bfloat16"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama_dynamic", "qwen3", "opt350", "falcon40"])
def test_a_row_has_the_same_bits_on_two_threads(kind: str, dtype: str, ours_of: OursOf) -> None:
    torch.set_num_threads(2)
    try:
        check_schedules(ours_of(kind, dtype))
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("kind", EVERY_ALIKE)
def test_blocks_give_the_bits_of_single_operations(kind: str, folder_of: FolderOf, ours_of: OursOf) -> None:
    """On one thread and two."""
    decoder = ours_of(kind, "bfloat16")
    with dispatch.force("ops"):
        single = load_decoder(folder_of(kind), "bfloat16")
    try:
        for rows in (1, 3, 64, 300):
            batch = batch_of(prompt(rows), 0, rows)
            torch.set_num_threads(1)
            want = single.forward(batch, naive(single))
            for threads in (1, 2):
                torch.set_num_threads(threads)
                assert torch.equal(decoder.forward(batch, naive(decoder)), want), (rows, threads)
    finally:
        torch.set_num_threads(1)


def check_schedules(decoder: Decoder) -> None:
    tokens, other = prompt(40), prompt(25, seed=2)
    whole = _run(decoder, tokens, [40])
    assert torch.equal(whole, _run(decoder, tokens, [1] * 40))
    assert torch.equal(whole, _run(decoder, tokens, [17, 3, 1, 19], other))


def _run(decoder: Decoder, tokens: list[int], steps: list[int], other: list[int] | None = None) -> Tensor:
    """Logits of the first tokens of a long prompt, in pieces of these lengths; `other` rides along while it lasts."""
    attend, beside = naive(decoder, RowAttend), naive(decoder, RowAttend)
    logits, at, there = [], 0, 0
    for count in steps:
        batches = [batch_of(tokens[at : at + count], at, LONG)]
        sequences: list[NaiveAttend] = [attend]
        if other and other[there : there + count]:
            batches.insert(0, batch_of(other[there : there + count], there, LONG))
            sequences.insert(0, beside)
        counts = [len(batch.token_ids) for batch in batches]
        hidden = decoder.forward(join(batches), BatchAttend(sequences, counts))
        logits.append(decoder.logits(hidden)[-count:])
        at, there = at + count, there + count
    return torch.cat(logits)


def _without_windows(config: ModelConfig) -> dict[str, Any]:
    return dict(attention=replace(config.attention, windows=(None,) * config.layers))


def _wider_windows(config: ModelConfig) -> dict[str, Any]:
    wider = tuple(window and window + 1 for window in config.attention.windows)
    return dict(attention=replace(config.attention, windows=wider))


def _plain_rope(config: ModelConfig) -> dict[str, Any]:
    assert config.rope is not None
    return dict(rope=replace(config.rope, kind="default"))


def _even_queries(config: ModelConfig) -> dict[str, Any]:
    assert config.rope is not None
    return dict(rope=replace(config.rope, query_beta=0.0))


def _queries_behind(config: ModelConfig) -> dict[str, Any]:
    assert config.rope is not None
    return dict(rope=replace(config.rope, query_ahead=0))


def _other_blocks(config: ModelConfig) -> dict[str, Any]:
    shorter = tuple(window and window // 2 for window in config.attention.windows)
    return dict(attention=replace(config.attention, windows=shorter))


def _without_sinks(config: ModelConfig) -> dict[str, Any]:
    return dict(attention=replace(config.attention, sinks=False))


def _plain_shares(config: ModelConfig) -> dict[str, Any]:
    assert config.experts is not None
    return dict(experts=replace(config.experts, normalised=False))


def _normalised_shares(config: ModelConfig) -> dict[str, Any]:
    assert config.experts is not None
    return dict(experts=replace(config.experts, normalised=True))


def _fewer_experts(config: ModelConfig) -> dict[str, Any]:
    assert config.experts is not None
    return dict(experts=replace(config.experts, chosen=config.experts.chosen - 1))


def _without_the_shared_one(config: ModelConfig) -> dict[str, Any]:
    assert config.experts is not None
    return dict(experts=replace(config.experts, shared=0))


def _routed_otherwise(**fields: Any) -> Callable[[ModelConfig], dict[str, Any]]:
    def change(config: ModelConfig) -> dict[str, Any]:
        assert config.experts is not None
        return dict(experts=replace(config.experts, routing=replace(config.experts.routing, **fields)))

    return change


BROKEN: dict[str, tuple[str, Any]] = {
    "qk-norm": ("qwen3", dict(qk_norm=False)),
    "final norm": ("opt", dict(final_norm=False)),
    "norm epsilon": ("llama", dict(norm_eps=0.1)),
    "post-norm": ("opt350", dict(block="pre")),
    "pre-norm": ("opt", dict(block="post")),
    "sequential block": ("falcon_rw", dict(block="parallel")),
    "parallel block": ("falcon40", dict(block="pre")),
    "own norm of the MLP": ("falcon40", dict(mlp_norm=False)),
    "learned positions": ("opt", dict(positions="rope")),
    "ALiBi": ("falcon_rw", dict(positions="rope")),
    "rotary positions": ("falcon7", dict(rope=None)),
    "activation": ("falcon7", dict(activation="relu")),
    "window": ("mistral_window", _without_windows),
    "length of the window": ("mistral_window", _wider_windows),
    "windows of some layers": ("qwen3_window", _without_windows),
    "linear": ("llama_linear", _plain_rope),
    "dynamic": ("llama_dynamic", _plain_rope),
    "llama3": ("llama3", _plain_rope),
    "yarn": ("llama_yarn", _plain_rope),
    "factor of queries": ("ministral3", _even_queries),
    "norms after the turn": ("hunyuan", dict(turn_before_norm=False)),
    "blocks of keys": ("llama4", _without_windows),
    "beginnings of blocks": ("llama4", _other_blocks),
    "norms of rotated queries": ("llama4", dict(qk_norm=False)),
    "queries that are neither rotated nor normed": ("llama4", dict(qk_norm_local=False)),
    "factor of queries that are not rotated": ("llama4", _even_queries),
    "the position in it": ("llama4", _queries_behind),
    "weighted inputs of experts": ("llama4", _routed_otherwise(weighs_inputs=False)),
    "squared relu": ("arcee", dict(activation="relu")),
    "norm over all heads": ("olmoe", dict(qk_norm=False, qk_norm_whole=False)),
    "shares that sum up to one": ("mixtral", _plain_shares),
    "shares that do not": ("olmoe", _normalised_shares),
    "sinks": ("gpt_oss", _without_sinks),
    "clamped gate": ("gpt_oss", dict(activation="silu")),
    "number of experts met": ("qwen3_moe", _fewer_experts),
    "shared expert": ("granite_moe_shared", _without_the_shared_one),
    "scores by sigmoids": ("glm4_moe", _routed_otherwise(scores="softmax")),
    "groups of experts": ("glm4_moe_groups", _routed_otherwise(groups=1, met_groups=1)),
    "two best experts of a group": ("glm4_moe_groups", _routed_otherwise(summed=1)),
    "factor of shares": ("glm4_moe", _routed_otherwise(scale=1.0)),
    "xIELU": ("apertus", dict(activation="relu2")),
    "norm of embeddings": ("muse_glimmer", dict(embed_norm=False)),
    "epsilon of norms behind": ("muse_glimmer", dict(out_norm_eps=None)),
    "offset of the last norm": ("muse_glimmer", dict(final_offset=None)),
    "norms without weights": ("muse_glimmer", dict(qk_norm=False)),
}


@pytest.mark.parametrize("feature", BROKEN)
def test_the_checkpoints_show_a_missing_feature(feature: str, folder_of: FolderOf, ours_of: OursOf) -> None:
    """Without the feature the logits are off by far more than parity allows, so the tests above would fail."""
    kind, change = BROKEN[feature]
    sound = ours_of(kind)
    fields = change(sound.config) if callable(change) else change
    broken = Decoder(replace(sound.config, **fields), load_weights(folder_of(kind), sound.config, sound.dtype))
    tokens = prompt(PROMPT_LENGTH)
    assert (prompt_logits(broken, tokens) - prompt_logits(sound, tokens)).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("module", ["qkv", "out", "up", "down"])
def test_the_checkpoints_show_a_missing_bias(module: str, folder_of: FolderOf, ours_of: OursOf) -> None:
    tokens = prompt(20)
    for kind in ("llama_bias", "opt", "falcon7_bias"):
        sound = ours_of(kind)
        weights = load_weights(folder_of(kind), sound.config, sound.dtype)
        del weights[f"layers.0.{module}.bias"]
        broken = Decoder(sound.config, weights)
        assert (prompt_logits(broken, tokens) - prompt_logits(sound, tokens)).abs().max() > 100 * TOLERANCE


VECTORS = [
    ("gpt_oss", "0.attention.sinks"),
    ("gpt_oss", "0.router.bias"),
    ("gpt_oss", "0.experts.3.up.bias"),
    ("gpt_oss", "0.experts.3.down.bias"),
    ("glm4_moe", f"1.{CORRECTION}"),
    ("glm4_moe_groups", f"1.{CORRECTION}"),
    ("minimax_m2", f"0.{CORRECTION}"),
    ("ernie_moe", f"1.{CORRECTION}"),
    ("afmoe", f"1.{CORRECTION}"),
]


@pytest.mark.parametrize(("kind", "name"), VECTORS)
def test_the_checkpoints_show_every_vector(kind: str, name: str, folder_of: FolderOf, ours_of: OursOf) -> None:
    sound, tokens = ours_of(kind), prompt(100)
    weights = load_weights(folder_of(kind), sound.config, sound.dtype)
    weights[f"layers.{name}"].zero_()
    broken = Decoder(sound.config, weights)
    assert (prompt_logits(broken, tokens) - prompt_logits(sound, tokens)).abs().max() > 100 * TOLERANCE
