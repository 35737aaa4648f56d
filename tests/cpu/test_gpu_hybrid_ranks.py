"""Models with recurrent layers over several ranks on a fake device: the bits of one rank, states from tiers too."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is built for Linux only")
if os.environ.get("TRITON_INTERPRET") != "1":  # see tests/conftest.py
    pytest.skip("there is a GPU: tests/gpu has ranks on it", allow_module_level=True)

from headrace import LLM, SamplingParams
from headrace.engine import gpu_memory, preflight
from headrace.engine.runner import Runner
from tests.support.fake_device import FakeDevice
from tests.support.gpu_ranks import interpreted_on
from tests.support.hybrid_checkpoints import make_checkpoint
from tests.support.offloading import flush
from tests.support.thread_group import ranks_as_threads

PLAIN: dict[str, Any] = dict(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip
NETS = PLAIN | dict(
    head_dim=16, linear_key_head_dim=16, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=2,
    layer_types=["linear_attention", "full_attention"],
)  # fmt: skip
KIMI = PLAIN | dict(
    layer_types=["linear_attention", "full_attention"], linear_num_heads=2, linear_head_dim=16, kv_lora_rank=16,
    qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, num_attention_heads=2, num_experts=4,
    num_experts_per_token=2, moe_intermediate_size=64,
)  # fmt: skip
NEMOTRON = PLAIN | dict(
    head_dim=16, mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=16, n_groups=2, hybrid_override_pattern="M-*"
)
CONVOLUTIONS = PLAIN | dict(layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False)
FALCON = PLAIN | dict(
    num_hidden_layers=1, mamba_d_ssm=64, mamba_n_heads=4, mamba_n_groups=2, mamba_d_state=16, head_dim=16
)
GRANITE = PLAIN | dict(layer_types=["mamba", "attention"], mamba_n_heads=4, shared_intermediate_size=64)
SHAPES = {
    "3_5": NETS, "kimi": KIMI, "nemotron": NEMOTRON, "lfm2": CONVOLUTIONS, "falcon_h1": FALCON, "granite": GRANITE,
}  # fmt: skip
PARAMS = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, logprobs=2)
CONTEXT, TENSOR = {"context_parallel_size": 2}, {"tensor_parallel_size": 2}


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    monkeypatch.setattr(preflight, "GPU_DEVICES", ("null",))
    monkeypatch.setattr(Runner, "record", lambda self: None)
    made = FakeDevice()
    with interpreted_on(made, monkeypatch):
        yield made


def engine(folder: Path, **settings: Any) -> LLM:
    given = {"kv_cache_tokens": 128, "max_sequences": 2, "recurrent_states": 8, **settings}
    return LLM(str(folder), attention_backend="triton", dtype="float32", **given)


def answers(folder: Path, **settings: Any) -> list[Any]:
    """Of a prompt of more than a chunk: computed, then restored from its tier, with its state."""
    prompt = torch.randint(60, (67,), generator=torch.Generator().manual_seed(1)).tolist()
    llm, found = engine(folder, kv_offloading_size=0.01, **settings), []
    try:
        for restored in (0, 64):
            [output] = llm.generate([prompt], PARAMS)
            assert output.metrics.restored_tokens == restored
            found.append((output.token_ids, output.logprobs))
            flush(llm)
    finally:
        llm.close()
    assert found[0] == found[1]
    return found


matrix = pytest.mark.matrix


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("lfm2", CONTEXT),
        pytest.param("3_5", TENSOR, marks=matrix),
        pytest.param("nemotron", CONTEXT, marks=matrix),
        pytest.param("kimi", TENSOR, marks=matrix),
        pytest.param("nemotron", TENSOR, marks=matrix),
        pytest.param("lfm2", TENSOR, marks=matrix),
        pytest.param("falcon_h1", TENSOR, marks=matrix),
    ],
)
def test_ranks_give_the_bits_of_one(kind: str, settings: dict[str, int], tmp_path: Path) -> None:
    folder = make_checkpoint(kind, tmp_path / kind, **SHAPES[kind])
    truth = answers(folder)
    with ranks_as_threads():
        assert answers(folder, **settings) == truth


def test_a_group_that_is_normed_is_one_ranks(tmp_path: Path) -> None:
    """Else its norm would be added up in another order than one rank's."""
    folder = make_checkpoint("granite", tmp_path, **SHAPES["granite"])
    told = r"norms 1 groups of heads, and on GPUs a group is one rank's; use 1 or fewer, or context_parallel_size"
    with pytest.raises(ValueError, match=told):
        engine(folder, **TENSOR)


def test_pools_leave_room_for_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short convolution's state is of 2 x 64 numbers; a token takes 2 x 32 in the pool, and what passes through the
    workspace."""
    monkeypatch.setattr(gpu_memory, "bytes_for_cache", lambda *given, **more: 4 << 20)
    folder = make_checkpoint("lfm2", tmp_path, **SHAPES["lfm2"], max_position_embeddings=1 << 16)
    tokens = []
    with ranks_as_threads():
        for states in (8, 8 + 2048):
            llm = engine(folder, kv_cache_tokens=None, recurrent_states=states, **CONTEXT)
            tokens.append(llm.capacity.kv_cache_tokens // 2)
            llm.close()
    per_token = (4 << 20) // tokens[0]
    assert 0.9 < (tokens[0] - tokens[1]) * per_token / (2048 * 2 * 64 * 4) < 1.1
