"""What some models' attention alone has, beside plain torch: in Triton's interpreter; tests/gpu asks a device."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is built for Linux only")
if os.environ.get("TRITON_INTERPRET") != "1":  # see tests/conftest.py
    pytest.skip("there is a GPU: tests/gpu has the same kernels, compiled", allow_module_level=True)

from headrace.config import AttentionSpec
from headrace.kernels import reference
from headrace.kernels.triton import attention, layer_check, walk_options
from headrace.kernels.triton.heads import Heads
from headrace.kernels.triton.layer_check import Variant
from headrace.kernels.triton.tile_schedule import Bounds

CPU = torch.device("cpu")
PLAIN = Variant(Heads(2, 1, 16), torch.float32, torch.float32, window=None, cap=None, sinks=False, scale=0.25)
VARIANTS = {
    "sinks": PLAIN._replace(sinks=True, window=100),
    "cap": PLAIN._replace(cap=2.0, scale=0.5),
    "int8": PLAIN._replace(stored=torch.int8),
}


@pytest.fixture(autouse=True)
def stored_by_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes a program for each row; test_triton.py and test_gpu_int8_kv.py have storing."""
    monkeypatch.setattr(attention, "append", reference.append)


@pytest.mark.parametrize("name", VARIANTS)
def test_attention_is_that_of_plain_torch(name: str) -> None:
    found = dict(layer_check.differences(VARIANTS[name], CPU))
    assert found.keys() == {"split, portable kernels", "flash, portable kernels"}
    assert all(0 < difference < 1e-5 for difference in found.values())


def test_tasks_are_those_that_an_engine_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of as many lanes, so that the compiled kernels are the same."""
    chosen, attended, lanes = walk_options.chosen(8, 256, 2, fp32=True), attention.attended, set()

    def seen(heads: Heads, limits: Bounds, *given: Any) -> Tensor:
        lanes.update({limits.lanes, limits.flash_lanes, limits.window_lanes})
        return attended(heads, limits, *given)

    for name in ("walk_options", "flash_options"):
        monkeypatch.setattr(attention, name, lambda *layer: chosen)
    monkeypatch.setattr(attention, "attended", seen)
    assert all(difference < 1e-5 for _, difference in layer_check.differences(VARIANTS["cap"], CPU))
    assert lanes == {32}


@pytest.mark.parametrize("wrong", [1e-3, float("nan")])
def test_a_device_that_computes_it_wrongly_is_refused(wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    attended = attention.attended

    def off(*given: object) -> Tensor:
        return attended(*given) + wrong  # type: ignore[arg-type]

    monkeypatch.setattr(attention, "attended", off)
    layer_check.check.cache_clear()
    with pytest.raises(ValueError, match=r"with attention sinks is off by .* \(split, portable kernels, .*use 'auto'"):
        layer_check.check(VARIANTS["sinks"], CPU)


def test_what_is_asked_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each window of a model with such a feature, once; of others nothing."""
    asked: list[Variant] = []
    monkeypatch.setattr(layer_check, "check", lambda variant, place: asked.append(variant))
    monkeypatch.setattr(layer_check, "current", lambda: SimpleNamespace(place=torch.device("cuda")))
    spec = AttentionSpec(layers=3, heads=4, kv_heads=2, head_dim=16, windows=(8, None, 8), scale=0.25, sinks=True)
    layer_check.verify(spec, torch.bfloat16, torch.bfloat16)
    assert [each.window for each in asked] == [None, 8]
    assert asked[0].heads == Heads(4, 2, 16) and asked[0].sinks
    plain = AttentionSpec(layers=1, heads=4, kv_heads=2, head_dim=16, windows=(None,), scale=0.25)
    layer_check.verify(plain, torch.bfloat16, torch.bfloat16)
    assert len(asked) == 2
    layer_check.verify(plain, torch.bfloat16, torch.int8)
    assert asked[-1].features == ["int8 keys and values"]
