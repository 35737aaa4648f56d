"""Which heads and columns each tensor rank has, and which sizes cannot be shared.

Hq, Hkv: query and KV heads.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headrace.config import AttentionSpec
from headrace.models.shards import LEAST, Share, cut
from headrace.models.spec import ExpertsSpec, ModelConfig
from headrace.parallel.tensor import shard

pytestmark = pytest.mark.cpu


def config_of(heads: int, kv_heads: int, **fields: int) -> ModelConfig:
    spec = AttentionSpec(2, heads, kv_heads, 16, 0.25, (None, 100))
    sizes = dict(vocab_size=64, hidden_size=256, intermediate_size=512, embed_size=256, layers=2, max_model_len=64)
    return ModelConfig(
        architecture="", attention=spec, dtype="float32", positions="rope", norm="rms", norm_eps=1e-5,
        activation="silu", gated=True, **sizes | fields,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "mine"),
    [(8, 8, 4, [[0, 1], [2, 3], [4, 5], [6, 7]]), (8, 4, 2, [[0, 1], [2, 3]]), (8, 2, 4, [[0], [0], [1], [1]]),
     (8, 1, 4, [[0]] * 4), (12, 3, 6, [[0], [0], [1], [1], [2], [2]])],
)  # fmt: skip
def test_a_rank_has_the_kv_heads_that_its_heads_attend(
    heads: int, kv_heads: int, size: int, mine: list[list[int]]
) -> None:
    config = config_of(heads, kv_heads)
    group = config.attention.group
    for rank in range(size):
        share = Share(config, rank, size)
        assert list(share.kv_heads) == mine[rank]
        assert sorted({head // group for head in share.heads}) == mine[rank]
        spec = shard(config, rank, size)
        assert spec == replace(config.attention, heads=heads // size, kv_heads=len(mine[rank]))
        assert {head // spec.group for head in range(spec.heads)} == set(range(spec.kv_heads))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "fitting"),
    [(8, 8, 3, "1, 2, 4, 8"), (12, 3, 2, "1, 3, 6, 12"), (12, 3, 4, "1, 3, 6, 12"), (8, 2, 16, "1, 2, 4, 8")],
)
def test_heads_that_cannot_be_shared_are_refused(heads: int, kv_heads: int, size: int, fitting: str) -> None:
    with pytest.raises(ValueError, match=f"tensor_parallel_size {size} does not divide .* can use {fitting}$"):
        shard(config_of(heads, kv_heads), 0, size)


def test_a_rank_outside_its_group_is_refused() -> None:
    with pytest.raises(ValueError, match="tensor rank 2 does not exist in a group of 2"):
        shard(config_of(8, 8), 2, 2)


@pytest.mark.parametrize("name", ["hidden_size", "intermediate_size"])
def test_widths_too_narrow_to_share_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"less than {LEAST} of {name} 127 to a rank; use 3 or fewer"):
        Share(config_of(8, 8, **{name: 127}), 0, 4)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(8, 8, 2), (8, 2, 2), (8, 2, 4), (8, 1, 8)])
def test_keys_of_all_ranks_are_those_of_the_model(heads: int, kv_heads: int, size: int) -> None:
    config = replace(config_of(heads, kv_heads), qk_norm=True, qk_norm_whole=True)
    keys = torch.arange(3 * kv_heads * 16).view(3, -1)
    shares = [Share(config, rank, size) for rank in range(size)]
    parts = [keys[:, each.columns("keys").start : each.columns("keys").stop] for each in shares]
    assert [part.shape[1] for part in parts] == shares[0].widths("keys")
    for share in shares:
        assert torch.equal(share.each_once(torch.cat(parts, dim=1)), keys)


def test_experts_are_cut_by_their_width() -> None:
    """Of each expert's gates and ups, and of its outputs, a rank has the same part."""
    config = replace(config_of(8, 8), experts=ExpertsSpec(4, 2, 128, True, (True, False)))
    share = Share(config, 1, 2)
    assert share.rows("layers.0.experts.3.up.weight") == [range(64, 128), range(192, 256)]
    assert share.rows("layers.0.experts.3.down.weight") == [range(128, 256)]
    assert share.rows("layers.1.up.weight") == [range(256, 512), range(768, 1024)]
    assert share.rows("layers.0.router.weight") is None
    assert share.widths("expert_inner") == [64, 64]
    with pytest.raises(ValueError, match="less than 32 of an expert's width 128 to a rank; use 4 or fewer"):
        Share(config, 0, 8)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("total", [256, 300, 1001, 5632, 11008])
def test_a_cut_leaves_no_gap_and_whole_blocks(total: int, size: int) -> None:
    parts = cut("width", total, size)
    assert [column for part in parts for column in part] == list(range(total))
    unit = 64 if total >= 64 * size else 32
    assert all(part.start % unit == 0 for part in parts)
    assert max(map(len, parts)) - min(map(len, parts)) < 2 * unit
