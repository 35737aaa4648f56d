"""What some models' attention alone has, beside plain torch: in Triton's interpreter; tests/gpu asks a device."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is built for Linux only")
if os.environ.get("TRITON_INTERPRET") != "1":  # see tests/conftest.py
    pytest.skip("there is a GPU: tests/gpu has the same kernels, compiled", allow_module_level=True)

from headrace.config import AttentionSpec
from headrace.kernels import reference
from headrace.kernels.records import Mask, Pool
from headrace.kernels.triton import attention, layer_check, walk_options
from headrace.kernels.triton.heads import Heads
from headrace.kernels.triton.hopper_agreement import Ways
from headrace.kernels.triton.layer_check import Variant
from headrace.kernels.triton.tile_schedule import Bounds

CPU = torch.device("cpu")
PLAIN = Variant(Heads(2, 1, 16), torch.float32, torch.float32, window=None, cap=None, sinks=False, scale=0.25)
VARIANTS = {
    "sinks": PLAIN._replace(sinks=True, window=100),
    "blocks": PLAIN._replace(window=-100),
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


def test_tasks_have_the_lanes_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of 256 on an A100: a task of the 64 lanes of others would be walked half."""
    narrow = walk_options.chosen(8, 256, 2)
    assert narrow.lanes == 32
    for name in ("walk_options", "flash_options"):
        monkeypatch.setattr(attention, name, lambda *given: narrow)
    assert all(difference < 1e-5 for _, difference in layer_check.differences(VARIANTS["cap"], CPU))


@pytest.mark.parametrize("left_out", ["sinks", "cap"])
def test_what_is_left_out_is_seen(left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16, whose bound is the widest; a cap as wide as Gemma 2's."""
    computed = PLAIN._replace(computed=torch.bfloat16, stored=torch.bfloat16)
    variant = computed._replace(sinks=True) if left_out == "sinks" else computed._replace(cap=50.0)

    def without(heads: Heads, limits: Bounds, q: Tensor, pool: Pool, mask: Mask, ways: Ways) -> Tensor:
        return reference.attend(q, Pool(pool.k.nan_to_num(), pool.v.nan_to_num()), replace(mask, sinks=None, cap=None))

    monkeypatch.setattr(attention, "attended", without)
    found = dict(layer_check.differences(variant, CPU))
    assert min(found.values()) > 2 * layer_check.BOUNDS[torch.bfloat16]


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
    shapes, windows = ((2, 256), (1, 512)) * 2, (8, None) * 2
    mixed = AttentionSpec(layers=4, heads=4, kv_heads=2, head_dim=256, windows=windows, scale=1.0, shapes=shapes)
    layer_check.verify(mixed, torch.bfloat16, torch.bfloat16)
    assert [(each.heads.dim, each.window) for each in asked[3:]] == [(512, None)]
    blocks = AttentionSpec(layers=3, heads=4, kv_heads=2, head_dim=16, windows=(-8, None, 8), scale=0.25)
    layer_check.verify(blocks, torch.bfloat16, torch.bfloat16)
    assert [(each.features, each.window) for each in asked[4:]] == [(["blocks of keys"], -8)]
