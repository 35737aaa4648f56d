"""The C++ extension as a whole: loading, instruction sets, threads, the dispatch table, and refusals."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from headrace.config import AttentionBackend
from headrace.kernels import cpu, dispatch, extension, ops, registry
from headrace.kernels.backend import backend_of, in_pieces
from headrace.kernels.records import Mask, Pool

pytestmark = pytest.mark.cpu
needs_extension = pytest.mark.skipif(not cpu.available(), reason=str(cpu.unavailable_reason()))


def python(code: str, **environment: str) -> str:
    """Output of a fresh interpreter that runs `code`."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@needs_extension
def test_the_extension_brings_no_openmp() -> None:
    """Kernels have threads of their own; torch's OpenMP is the only one, and not theirs."""
    loaded = python("""
        import importlib.util, sys, pathlib
        folder = pathlib.Path(importlib.util.find_spec("headrace").origin).parent / "kernels"
        spec = importlib.util.spec_from_file_location("headrace.kernels._cpu", next(folder.glob("_cpu*.so")))
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
        assert "torch" not in sys.modules
        print(*{line.split()[-1] for line in open("/proc/self/maps") if "omp" in line.rpartition("/")[2]})
    """)
    assert loaded == ""


@needs_extension
def test_environment_forces_an_instruction_set() -> None:
    code = """
        import os
        from headrace.kernels import cpu
        try:
            cpu.isa()
        except ValueError as error:
            print(error)
        os.environ["HEADRACE_ISA"] = "portable"
        print(cpu.isa())
    """
    refused, forced = python(code, HEADRACE_ISA="mmx").splitlines()
    assert refused == f"HEADRACE_ISA: 'mmx' is not available here; available: {', '.join(cpu.available_isas())}"
    assert forced == "portable"


def test_built_for_another_processor() -> None:
    """An environment that was moved says so, and torch takes over."""
    moved = SimpleNamespace(available_isas=lambda: "", built_isas=lambda: "amx")
    assert extension.usable(moved)[0] is None
    assert "built for amx" in str(extension.usable(moved)[1])


@needs_extension
def test_threads_may_call_at_once() -> None:
    """Also for the first time, when the instruction set is chosen; the thread sanitizer looks at this one."""
    equal = python("""
        from concurrent.futures import ThreadPoolExecutor
        from threading import Barrier
        import torch
        from headrace.kernels import cpu
        x, start = torch.randn(200_000), Barrier(4)
        torch.set_num_threads(2)
        def call(_):
            start.wait()
            return cpu.gelu(x)
        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(call, range(4)))
        print(all(torch.equal(result, cpu.gelu(x)) for result in results))
    """)
    assert equal == "True"


def test_works_without_extension() -> None:
    """With no extension all ops run in torch, attention in the reference, and the reason is told."""
    out = python("""
        import sys
        sys.modules["headrace.kernels._cpu"] = None
        import torch
        from headrace.kernels import cpu, extension, ops, dispatch
        assert not cpu.available()
        ops.rms_norm(torch.ones(2, 8), torch.ones(8), 1e-6)
        assert dispatch.choose("auto", torch.bfloat16) == "reference"
        try:
            dispatch.choose("cpu", torch.bfloat16)
        except ValueError as error:
            print(error)
        print(dispatch.reasons()["attend"])
    """).splitlines()
    assert out[0].startswith("attention_backend 'cpu': extension not built: ")
    assert out[0].endswith("; use 'auto' or 'reference'")
    assert out[1].startswith("torch: extension not built: ")


@needs_extension
def test_choose() -> None:
    assert dispatch.choose("auto", torch.bfloat16) == dispatch.choose("cpu", torch.float32) == "cpu"
    assert dispatch.choose("reference", torch.bfloat16) == "reference"
    assert dispatch.choose("auto", torch.float16) == "reference"
    with pytest.raises(ValueError, match=r"'triton'.*use 'auto'"):
        dispatch.choose("triton", torch.bfloat16)
    with pytest.raises(ValueError, match=r"'cpu'.*float16.*use 'auto'"):
        dispatch.choose("cpu", torch.float16)
    products = {"linear", "linear_int8", "linear_int4", "linear_w8a8"}
    assert set(dispatch.reasons()) == {*dispatch.NATIVE_OPS, *products, "layer"}
    assert dispatch.reasons()["attend"] == f"cpu: C++ {cpu.isa()}"
    assert set(dispatch.reasons(gpu=True)) == {*dispatch.NATIVE_OPS, *products, "linear_fp8_rowwise"}
    assert {name for name, why in dispatch.reasons(gpu=True).items() if why.startswith("triton: ")} == {
        *dispatch.TRITON_OPS,
        "linear_int8",
        "linear_int4",
        "linear_w8a8",
        "linear_fp8_rowwise",
    }


@needs_extension
def test_force_is_undone() -> None:
    x = torch.ones(2, 8)
    assert dispatch.native(x)
    with dispatch.force("torch"):
        assert not dispatch.native(x)
        with dispatch.force("cpu"):
            assert dispatch.native(x)
            with pytest.raises(ValueError, match="float16"):
                ops.gelu(x.half())
        assert not dispatch.native(x)
    assert dispatch.native(x)
    with pytest.raises(ValueError, match="'cuda'"):
        dispatch.force("cuda")  # type: ignore[arg-type]


@needs_extension
def test_gradients_stay_with_torch() -> None:
    x = torch.ones(2, 8, requires_grad=True)
    ops.gelu(x).sum().backward()
    assert x.grad is not None


def attend_arguments() -> dict[str, Any]:
    return {
        "q": torch.zeros(3, 4, 32),
        "k": torch.zeros(2, 2, 32, 64),
        "v": torch.zeros(2, 2, 64, 32),
        "items": torch.tensor([[0, 0, 0, 3], [1, 64, 0, 3]], dtype=torch.int32),
        "positions": torch.tensor([70, 71, 72]),
        "scale": 1.0,
    }


def items(*rows: tuple[int, int, int, int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32)


@needs_extension
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(3, 4, 32).bfloat16()}, "k_pool must be"),
        ({"q": torch.zeros(3, 4, 32).half(), "k": torch.zeros(2, 2, 32, 64).half()}, "v_pool must be"),
        ({"q": torch.zeros(3, 128)}, "q must be"),
        ({"q": torch.zeros(3, 32, 4).transpose(1, 2)}, "row must be contiguous"),
        ({"q": torch.zeros(3, 3, 32)}, "3 query heads, 2 KV heads"),
        ({"k": torch.zeros(2, 2, 64, 32)}, "k_pool must be"),
        ({"v": torch.zeros(2, 2, 32, 64).transpose(2, 3)}, "v_pool must be"),
        ({"items": torch.zeros(2, 4, dtype=torch.int64)}, "items must be"),
        ({"items": items((2, 0, 0, 3))}, r"items\[0\] = \(2, 0, 0, 3\) does not fit 2 slots"),
        ({"items": items((0, 0, 0, 3), (-1, 64, 0, 3))}, r"items\[1\]"),
        ({"items": items((0, 0, 0, 4))}, "3 rows"),
        ({"items": items((0, 0, 2, 1))}, r"items\[0\]"),
        ({"items": items((0, 32, 0, 3))}, "starts inside a chunk"),
        ({"positions": torch.zeros(2, dtype=torch.int64)}, "positions must be"),
        ({"window": 0}, "window 0"),
        ({"bias": torch.zeros(2, 80)}, "bias must be"),
        ({"bias": torch.zeros(4, 72)}, r"bias covers 72 keys, positions\[2\] is 72"),
    ],
)
def test_attend_refuses(change: dict[str, Any], message: str) -> None:
    attend(**attend_arguments())
    with pytest.raises(ValueError, match=message):
        attend(**(attend_arguments() | change))


def attend(q: Tensor, k: Tensor, v: Tensor, items: Tensor, positions: Tensor, **options: Any) -> Tensor:
    return cpu.attend(q, Pool(k, v), Mask(items, positions, **options))


@needs_extension
@pytest.mark.parametrize(
    ("slot", "offset", "heads", "message"),
    [(2, 0, 2, "slot 2, offset 0"), (-1, 0, 2, "slot -1"), (0, 64, 2, "offset 64"), (0, 0, 3, "k_pool must be")],
)
def test_append_refuses(slot: int, offset: int, heads: int, message: str) -> None:
    new = torch.zeros(1, heads, 32)
    place = [torch.tensor([x], dtype=torch.int32) for x in (slot, offset)]
    with pytest.raises(ValueError, match=message):
        cpu.append(Pool(torch.zeros(2, 2, 32, 64), torch.zeros(2, 2, 64, 32)), new, new, *place)


@needs_extension
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: cpu.rms_norm(x, torch.ones(7), 1e-6), "weight must be"),
        (lambda x: cpu.rms_norm(x.half(), torch.ones(8).half(), 1e-6), "bfloat16 or float32"),
        (lambda x: cpu.layer_norm(x, torch.ones(8), torch.ones(8).bfloat16(), 1e-6), "bias must be"),
        (lambda x: cpu.gated(x[:, :7], "silu"), "even width"),
        (lambda x: cpu.gelu(x.to("meta")), "CPU tensors"),
        (lambda x: cpu.rotary(x, torch.ones(2, 8)), "rows, heads"),
        (lambda x: cpu.rotary(x[:, None], torch.ones(2, 10)), "cannot rotate 10 of 8"),
        (lambda x: cpu.rotary(x[:, None], torch.ones(1, 8)), "cos_sin must be"),
    ],
)
def test_ops_refuse(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(2, 8))


def test_backends_are_what_they_declare() -> None:
    assert {"auto", *registry.BACKENDS} == set(get_args(AttentionBackend))
    for name in registry.BACKENDS:
        kernels = backend_of(name)
        assert kernels.capabilities.name == name
        assert kernels.capabilities.pieces == hasattr(kernels, "partial")
    whole: Any = SimpleNamespace(capabilities=replace(backend_of("cpu").capabilities, name="whole", pieces=False))
    with pytest.raises(ValueError, match="'whole' cannot attend in pieces"):
        in_pieces(whole)
    with pytest.raises(ValueError, match="must be one of triton, cpu, reference, got 'flash'"):
        backend_of("flash")


def test_triton_is_chosen_where_it_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.kernels.triton import backend

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(backend, "find_spec", lambda name: object())
    assert dispatch.choose("triton", torch.bfloat16, "cuda", head_dim=512) == "triton"
    assert dispatch.choose("auto", torch.bfloat16) != "triton"
    with pytest.raises(ValueError, match="heads of up to 512, the model's are 513; use 'auto'"):
        dispatch.choose("triton", torch.bfloat16, "cuda", head_dim=513)
    assert dispatch.choose("triton", torch.bfloat16, "cuda", capped=True) == "triton"
    with pytest.raises(ValueError, match="runs on a CUDA device, not on cpu"):
        dispatch.choose("triton", torch.bfloat16, "cpu")
    monkeypatch.setattr(backend, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="the package triton is missing"):
        dispatch.choose("triton", torch.bfloat16, "cuda")
