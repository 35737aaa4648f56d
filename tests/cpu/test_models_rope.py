"""Tables of positions: rotations and ALiBi against transformers, and the same bits whenever they are computed."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import AutoConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.falcon.modeling_falcon import build_alibi_tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

from headrace.config import AttentionSpec
from headrace.models.alibi import alibi_bias
from headrace.models.config import read_config
from headrace.models.rope import Rope
from headrace.models.spec import RopeSpec
from tests.support.checkpoints import FolderOf
from tests.support.kind_sizes import SHORT_LENGTH

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]

ROPES = ["llama", "llama_linear", "llama_dynamic", "llama3", "llama_yarn", "qwen3"]


def rope_of(folder_of: FolderOf, kind: str) -> Rope:
    config = read_config(folder_of(kind))
    assert config.rope is not None
    return Rope(config.rope, config.attention.head_dim)


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("length", [SHORT_LENGTH - 1, SHORT_LENGTH, SHORT_LENGTH + 1, 5000])
def test_rotations_equal_transformers(kind: str, length: int, folder_of: FolderOf) -> None:
    positions = torch.arange(length)
    theirs = LlamaRotaryEmbedding(AutoConfig.from_pretrained(folder_of(kind)))
    cos, sin = theirs(torch.empty(0, dtype=torch.float32), positions[None])
    half = cos.shape[-1] // 2
    expected = torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)
    ours = rope_of(folder_of, kind).at(positions, torch.full((length,), length))
    assert torch.allclose(ours, expected, rtol=0, atol=5e-7)


@pytest.mark.parametrize("kind", [kind for kind in ROPES if kind not in ("llama", "qwen3")])
@pytest.mark.parametrize("length", [SHORT_LENGTH, 5000])
def test_stretched_frequencies_have_the_bits_of_transformers(kind: str, length: int, folder_of: FolderOf) -> None:
    rope, theirs = rope_of(folder_of, kind), AutoConfig.from_pretrained(folder_of(kind))
    given = torch.tensor(length) if length > theirs.max_position_embeddings else None
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope.spec.kind](theirs, seq_len=given)
    assert torch.equal(rope._compute_frequencies(length)[0], frequencies)
    assert rope._compute_frequencies(length)[1] == factor


@pytest.mark.parametrize("parameters", [{}, {"factor": 8.0}, {"partial_rotary_factor": 0.5}], ids=str)
def test_proportional_frequencies_have_the_bits_of_transformers(parameters: dict[str, float]) -> None:
    """Slow pairs of a head are not turned at all."""
    given = dict(rope_type="proportional", rope_theta=1e6, partial_rotary_factor=0.25) | parameters
    theirs = LlamaConfig(head_dim=64, rope_parameters=given)
    frequencies, factor = ROPE_INIT_FUNCTIONS["proportional"](theirs)
    rope = Rope(RopeSpec("proportional", tuple(sorted(given.items())), 512), 64)
    ours, one = rope._compute_frequencies(512)
    assert torch.equal(ours, frequencies) and one == factor and 0 < ours.count_nonzero() < 32 and rope.width == 64


def test_queries_are_multiplied_as_transformers_does_it(folder_of: FolderOf) -> None:
    """By a factor of their position, behind the keys' rotation in a row of the table."""
    rope, positions = rope_of(folder_of, "ministral3"), torch.arange(300)
    keys, queries = rope.at(positions, None).chunk(2, dim=-1)
    factor = get_llama_4_attn_scale(positions[None], 0.5, 64)[0, 0]
    assert factor.unique().numel() == 5 and torch.equal(queries, keys * factor)


@pytest.mark.parametrize("kind", [*ROPES, "ministral3"])
def test_a_rotation_has_the_same_bits_whenever_it_is_computed(kind: str, folder_of: FolderOf) -> None:
    positions = torch.arange(700)
    lengths = (positions + 1).clamp(min=200)  # a prompt of 200, then decoding
    whole = rope_of(folder_of, kind).at(positions, lengths)
    backwards = rope_of(folder_of, kind)
    for start in range(600, -1, -100):
        rows = slice(start, start + 100)
        assert torch.equal(backwards.at(positions[rows], lengths[rows]), whole[rows])
    single = rope_of(folder_of, kind)
    for row in (0, 199, 200, 450, 699):
        assert torch.equal(single.at(positions[row : row + 1], lengths[row : row + 1])[0], whole[row])


def test_dynamic_follows_transformers_through_generation(folder_of: FolderOf) -> None:
    """A prompt rotated for its length, then one token after another, each for the length it makes."""
    theirs = LlamaRotaryEmbedding(AutoConfig.from_pretrained(folder_of("llama_dynamic")))
    rope, prompt, steps = rope_of(folder_of, "llama_dynamic"), SHORT_LENGTH - 20, 60
    for first, last in [(0, prompt)] + [(i, i + 1) for i in range(prompt, prompt + steps)]:
        positions = torch.arange(first, last)
        cos, _ = theirs(torch.empty(0, dtype=torch.float32), positions[None])
        ours = rope.at(positions, (positions + 1).clamp(min=prompt)).chunk(2, -1)[0]
        assert torch.allclose(ours, cos[0].chunk(2, -1)[0], rtol=0, atol=5e-7)


def test_dynamic_needs_the_lengths(folder_of: FolderOf) -> None:
    assert read_config(folder_of("llama_dynamic")).rope_depends_on_length
    assert not read_config(folder_of("llama_yarn")).rope_depends_on_length
    with pytest.raises(ValueError, match="rope_lengths"):
        rope_of(folder_of, "llama_dynamic").at(torch.arange(3), None)


@pytest.mark.parametrize("heads", [1, 2, 6, 8, 12, 32, 64, 71])
def test_alibi_equals_transformers(heads: int) -> None:
    length = 3000
    spec = AttentionSpec(1, heads, heads, 48, 48**-0.5, (None,), alibi=True)
    theirs = build_alibi_tensor(torch.ones(1, length, dtype=torch.long), heads, torch.float32)
    assert torch.equal(alibi_bias(spec, length), theirs[:, 0] / math.sqrt(48))
