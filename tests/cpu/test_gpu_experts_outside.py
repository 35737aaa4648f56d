"""Experts in a file for a GPU: on a fake device, the bits of one that has them all in its memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is built for Linux only")
if os.environ.get("TRITON_INTERPRET") != "1":  # see tests/conftest.py
    pytest.skip("there is a GPU: tests/gpu has such engines on it", allow_module_level=True)

from headrace import LLM, SamplingParams
from headrace.host import GIB
from headrace.kernels import ops
from headrace.kernels.experts import OutsideColumn
from headrace.models.layers import Matrices
from headrace.models.slots import expert_of
from headrace.offload.weights.expert_slots import ExpertSlots, GpuExpertFile
from headrace.offload.weights.experts import PAGE, ExpertFile
from headrace.offload.weights.layers import tensors_of
from headrace.offload.weights.streamed import ends_of, placed_in
from tests.support.checkpoints import make_checkpoint
from tests.support.fake_device import FakeDevice
from tests.support.small_gpu_engines import recorded_when_needed
from tests.support.traces import run, same

pytestmark = pytest.mark.usefixtures("one_thread")

TWO = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
PROMPTS = [[3, 1, 4, 1, 5]]
SIZES: dict[str, Any] = dict(
    vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=1, num_key_value_heads=1, head_dim=16,
    moe_intermediate_size=32, num_experts=2, num_experts_per_tok=1,
)  # fmt: skip


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    with recorded_when_needed(monkeypatch) as device:
        yield device


def engine(folder: Path, **settings: Any) -> LLM:
    given = dict(max_sequences=2, max_batch_tokens=64, kv_cache_tokens=256)
    return LLM(str(folder), attention_backend="triton", dtype="float32", **given | settings)


def test_the_bits_of_experts_in_memory(fake: FakeDevice, tmp_path: Path) -> None:
    """Slots for three of four experts: steps bring some, find others, and are launched. What profiles multiply by lies
    in the device's memory too, not in the file."""
    folder = make_checkpoint("qwen3_moe", tmp_path / "model", **SIZES)
    resident = engine(folder)
    runner: Any = resident.engine.loaded.executor
    runner.decoding = runner.mixed = runner.eager
    truth = run(resident, PROMPTS, TWO)
    matrices = resident.engine.loaded.decoder.matrices
    (each,) = {end for end in [sum(ends_of([experts_of(matrices, e)]).values()) for e in range(2)]}
    room = 3.5 * each / GIB
    llm = engine(folder, expert_offload_path=str(tmp_path), expert_memory_size=room)
    slots = slots_of(llm).room
    assert len(slots) == 3
    there = {name: w for name, w in llm.engine.loaded.decoder.matrices.items() if expert_of(name)}
    ends = slots[0].data_ptr(), slots[1].data_ptr()
    assert there and all(ends[0] <= x.data_ptr() < ends[1] for w in there.values() for x in tensors_of(w).values())
    same(run(llm, PROMPTS, TWO), truth)
    told = llm.engine.stats().experts
    assert 0 < told.hits < told.met and told.kept_bytes * 4 == told.outside_bytes * 3
    assert not llm.engine.stats().graphs.replayed


def experts_of(matrices: Matrices, expert: int) -> dict[str, ops.Weight]:
    return {part: matrices[f"layers.0.experts.{expert}.{part}.weight"] for part in ("up", "down")}


def slots_of(llm: LLM) -> ExpertSlots:
    file = llm.engine.loaded.decoder.outside
    assert isinstance(file, GpuExpertFile)
    return file.slots


def test_room_for_them(fake: FakeDevice, tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3_moe", tmp_path / "model", **SIZES)
    with pytest.raises(ValueError, match="expert_offload_path: set expert_memory_size"):
        engine(folder, expert_offload_path=str(tmp_path))
    with pytest.raises(ValueError, match=r"expert_memory_size: a layer has 2 experts.*2.29e-05 GiB of the GPU"):
        engine(folder, expert_offload_path=str(tmp_path), expert_memory_size=2e-5)


@pytest.mark.parametrize(("rounding", "written"), [("none", 0), ("int8", 2)])
def test_too_little_room_is_refused_before_experts_are_written(
    rounding: str, written: int, fake: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By their facts, or by the first of them."""
    names: list[str] = []
    place = ExpertFile.place

    def noted(self: ExpertFile, name: str, weight: ops.Weight) -> ops.Weight:
        names.append(name)
        return place(self, name, weight)

    monkeypatch.setattr(ExpertFile, "place", noted)
    folder = make_checkpoint("qwen3_moe", tmp_path / "model", **SIZES)
    with pytest.raises(ValueError, match="expert_memory_size: a layer has 2 experts"):
        engine(folder, expert_offload_path=str(tmp_path), expert_memory_size=4e-6, quantization=rounding)
    assert len(names) == written


def test_what_rows_meet_is_in_slots() -> None:
    """Whatever was met before; what is met together does not push each other out."""
    layers, count = 3, 4
    slots, random = ExpertSlots(torch.zeros(count + 1, 512, dtype=torch.uint8)), Random(1)
    sources: list[list[dict[str, ops.Weight]]] = [
        [{"up": torch.full((4,), 10.0 * layer + e), "down": torch.full((2,), -10.0 * layer - e)} for e in range(count)]
        for layer in range(layers)
    ]
    room = {"up": slots.room[0, :256], "down": slots.room[0, 256:]}
    first = [[placed_in(each, room) for each in of_layer] for of_layer in sources]
    tables = torch.zeros(layers, count, len(OutsideColumn), dtype=torch.int64)
    tables[:, :, OutsideColumn.begin] = torch.zeros(1).data_ptr() // PAGE * PAGE
    for _ in range(100):
        layer, met = random.randrange(layers), [random.random() < 0.5 for _ in range(count)]
        begin = torch.tensor([0, *accumulate(met)], dtype=torch.int32)
        by = slots.bring(layer, tables[layer], sources[layer], first[layer], begin)
        for e in range(count):
            if met[e]:
                held = slots.room.view(-1)[int(by[e]) :][:512].view(torch.float32)
                assert held[:4].eq(10.0 * layer + e).all() and held[64:66].eq(-10.0 * layer - e).all()
    kept = tables[:, :, OutsideColumn.kept]
    assert kept.sum() == count + 1 and tables[:, :, OutsideColumn.hits].sum() > 0
