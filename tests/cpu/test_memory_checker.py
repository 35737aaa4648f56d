"""Memory that kernels touch (tests.support.memory_checker): single kernels, and whole engines on the fake device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is built for Linux only")
if os.environ.get("TRITON_INTERPRET") != "1":  # see tests/conftest.py
    pytest.skip("there is a GPU, on which compute-sanitizer checks memory", allow_module_level=True)

import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from headrace import LLM, SamplingParams
from headrace.bench.shapes import CheckpointShape, write_checkpoint
from headrace.config import combinations
from headrace.engine.runner import Runner
from headrace.kernels.adapted_rows import AdaptedRows, Pair, placed
from headrace.kernels.records import QKRotary
from headrace.kernels.triton import rotary
from headrace.kernels.triton.experts import GpuExperts
from tests.support.checkpoints import make_checkpoint
from tests.support.fake_device import fake_device
from tests.support.memory_checker import MemoryChecker, checked_memory
from tests.support.traces import run, same

SHAPE = CheckpointShape(hidden=32, layers=1, heads=2, kv_heads=1, head_dim=16, mlp=32, vocab=64, context=1024)
THREE = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)


@triton.jit
def moved(x, out, by, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at + by, mask=at < count, other=0.0))


@pytest.mark.parametrize(
    ("by", "count", "room", "told"),
    [
        (0, 8, 16, None),
        (0, 8, 15, "stores 4 bytes at byte 60 of out, which has 60"),
        (1, 8, 16, "loads 4 bytes at byte 32 of x, which has 32"),
        (-1, 8, 16, "loads 4 bytes at byte -4 of x"),
    ],
)
def test_one_kernel(by: int, count: int, room: int, told: str | None) -> None:
    """x is a view: behind and before it lies more of the same memory."""
    x, out = torch.ones(24)[8:16], torch.empty(16)[:room]
    with checked_memory() as checker:
        if told is None:
            moved[(1,)](x, out, by, count, BLOCK=16)
            assert checker.launches == {"moved": 24} and out.sum() == 8
            return
        with pytest.raises(InterpreterError, match=told):
            moved[(1,)](x, out, by, count, BLOCK=16)


def test_heads_behind_which_there_are_no_values() -> None:
    """Two queries and a key, whose projection is the value, too: behind the last row there is nothing to read."""
    heads, norm = torch.randn(2, 3, 16), torch.ones(16)
    with checked_memory() as checker:
        q, k, v = rotary.rotate(heads, QKRotary(rotary.rotate, 2, 1, torch.ones(2, 16), norm, norm, 1e-6))
    assert (q.shape, k.shape, v.shape) == ((2, 2, 16), (2, 1, 16), (2, 0, 16))
    assert "rotate_heads" in checker.launches and q.isfinite().all() and k.isfinite().all()


def test_new_memory_holds_nothing_of_use() -> None:
    with checked_memory():
        assert torch.empty(3).isnan().all() and torch.empty_like(torch.zeros(2)).isnan().all()
        assert torch.empty(2, dtype=torch.int32).tolist() == [0x5A5A5A5A] * 2
    assert not hasattr(torch.empty, "__wrapped__")


@pytest.fixture
def checker(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryChecker]:
    """Of a fake device, whose experts' matrices are found by a table of addresses."""
    monkeypatch.setattr(Runner, "record", lambda self: None)
    allowed = tuple(each for each in combinations.EXCLUSIONS if {each.one, each.other} != {"gpu", "int8_kv"})
    monkeypatch.setattr(combinations, "EXCLUSIONS", allowed)
    experts: list[GpuExperts] = []
    make = GpuExperts.__init__

    def kept(self: GpuExperts, *given: Any) -> None:
        make(self, *given)
        experts.append(self)

    monkeypatch.setattr(GpuExperts, "__init__", kept)
    reachable = lambda: [tensor for each in experts for one in each.operands for tensor in one]  # noqa: E731
    with fake_device(monkeypatch), checked_memory(reachable) as found:
        yield found


def test_what_adapters_add(checker: MemoryChecker) -> None:
    """To the last outputs of a matrix, of rows two of which have no adapter, and one an adapter that has nothing: what
    nobody wrote is added to none."""
    pair = Pair(torch.randn(32, 20), torch.randn(33, 32))
    rows, made = AdaptedRows(torch.tensor([2, -1, 0, 1, -1, 0])), torch.zeros(6, 28)
    rows.added(placed([pair, None, pair]), torch.randn(6, 20), made, 5)
    assert made.isfinite().all() and made.any(dim=1).tolist() == [True, False, True, False, False, True]
    assert {"arrange", "product", "add_changes"} <= checker.launches.keys()


def answered(llm: LLM, prompts: list[list[int]]) -> None:
    """Together, then each alone: the same bits (one sequence's products are numpy's, whatever rows ride along)."""
    together = run(llm, prompts, THREE)
    assert all(logits.isfinite().all() for trace in together for logits in trace.values())
    llm.engine.cache.tree.clear()
    same(run(llm, prompts[:1], THREE), together[:1])


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(SHAPE.vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.matrix
def test_an_engine_with_int8_keys_and_values(checker: MemoryChecker, tmp_path: Path) -> None:
    """A prompt beside decoding, replayed steps with a row of padding, one row that enters a chunk."""
    llm = LLM(
        str(write_checkpoint(SHAPE, tmp_path)), attention_backend="triton", dtype="float32", kv_cache_dtype="int8",
        kv_cache_tokens=256, max_sequences=4,
    )  # fmt: skip
    answered(llm, [tokens(63, 4), tokens(2, 5), tokens(1, 6)])
    assert llm.engine.stats().graphs.replayed and {"walk", "merge_spans"} <= checker.launches.keys()


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["gpt_oss", "gemma2", "glm_lite"])
def test_engines_of_other_families(kind: str, checker: MemoryChecker, tmp_path: Path) -> None:
    """Sinks, windows of several kinds, experts with biases; caps; latents; a 1-row bucket."""
    fields: dict[str, Any] = dict(
        num_hidden_layers=2, sliding_window=8, head_dim=16, hidden_size=32, intermediate_size=32,
        vocab_size=SHAPE.vocab, num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    if kind == "gpt_oss":
        fields["num_local_experts"] = 4
    if kind == "glm_lite":
        fields |= dict(kv_lora_rank=20, qk_rope_head_dim=8, qk_nope_head_dim=12, v_head_dim=10, n_routed_experts=4)
        fields |= dict(mlp_layer_types=["dense", "sparse"], num_key_value_heads=2)
    llm = LLM(
        str(make_checkpoint(kind, tmp_path, **fields)), attention_backend="triton", dtype="float32",
        kv_cache_tokens=256, max_sequences=2,
    )  # fmt: skip
    together = run(llm, [tokens(12, 5), tokens(2, 6)], THREE)
    assert all(logits.isfinite().all() for trace in together for logits in trace.values())
