"""Triton's own launcher over a CUDA driver without a device (stub_driver.c): what a launch hands to the driver, and how
long the host takes for it. Tensors lie in the host's memory; nothing is computed.
"""

from __future__ import annotations

import ctypes
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler import CompiledKernel, make_backend
from triton.runtime import driver as drivers
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

STREAM = 0x5EED
TARGET = GPUTarget("cuda", 90, 32)
_INCLUDES = Path(nvidia.__file__).parent / "include"


@dataclass(frozen=True)
class Launched:
    """What the driver is asked for: a function, grid, block, dynamic shared memory, stream, attributes, arguments."""

    function: int
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int
    stream: int
    attributes: tuple[tuple[int, int], ...]
    arguments: tuple[bytes, ...]


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_byte * 60))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)), ("count", ctypes.c_uint),
    )  # fmt: skip


_Seen = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Config), ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))


@cache
def _folders() -> tempfile.TemporaryDirectory[str]:
    """Where all of these lie as long as the process lives."""
    return tempfile.TemporaryDirectory(prefix="headrace-stub-")


def _folder() -> Path:
    """A new one."""
    return Path(tempfile.mkdtemp(dir=_folders().name))


@cache
def _library() -> ctypes.CDLL:
    """The stub, loaded under the name by which Triton asks for the driver."""
    folder = _folder()
    made, source = folder / "libcuda.so.1", Path(__file__).with_suffix(".c")
    flags = ["-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", f"-I{_INCLUDES}"]
    subprocess.run(["cc", *flags, str(source), "-o", str(made)], check=True)
    knobs.nvidia.libcuda_path = str(folder)
    return ctypes.CDLL(str(made))


class StubDriver(nvidia.CudaDriver):
    """Triton's driver of an H100, as far as Triton asks for one."""

    def __init__(self) -> None:
        _library()
        super().__init__()
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device: STREAM
        self.get_device_capability = lambda device=None: (9, 0)

    def get_current_target(self) -> GPUTarget:
        return TARGET


def without_code(source: Any, target: GPUTarget, options: dict[str, Any]) -> CompiledKernel:
    """What Triton's compiler returns, but for the machine code: the metadata are those that a launch looks at."""
    chosen = make_backend(target).parse_options(dict(options))
    metadata = {
        "name": source.fn.__name__, "target": vars(target), "num_warps": chosen.num_warps, "num_ctas": 1,
        "shared": 1024, "warp_size": 32, "launch_pdl": chosen.launch_pdl, "launch_cooperative_grid": False,
        "global_scratch_size": 0, "global_scratch_align": 1, "profile_scratch_size": 0, "profile_scratch_align": 1,
        "tmem_size": None, "instrumentation_mode": "",
        "tensordesc_meta": [_described(each) for each in _descriptors(source.signature)],
    }  # fmt: skip
    folder = _folder()
    (folder / "kernel.json").write_text(json.dumps(metadata))
    (folder / "kernel.cubin").write_bytes(b"")
    return CompiledKernel(source, {each.name: str(each) for each in folder.iterdir()}, "")


def _descriptors(signature: dict[str, Any]) -> list[str]:
    return [each for each in signature.values() if isinstance(each, str) and each.startswith("tensordesc")]


def _described(descriptor: str) -> dict[str, Any]:
    """How blocks of 16-bit numbers are copied, as the compiler says it."""
    found = re.search(r"\[([\d, ]+)\]", descriptor)
    assert found
    block = [min(int(each), 64) for each in found[1].split(",")]
    return {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": block, "fp4_padded": False}


def _sizes(kernel: CompiledKernel) -> list[int]:
    """Bytes of each argument that the driver gets."""
    found = []
    for each in kernel.src.signature.values():
        if each.startswith("tensordesc"):
            dims = each.partition("[")[2].partition("]")[0].count(",") + 1
            found += [128] + [4] * dims + [8] * dims
        elif each != "constexpr":
            found.append({"i32": 4, "fp32": 4, "i1": 1}.get(each, 8))
    return [*found, 8, 8]  # scratch


@contextmanager
def stub_driver(compiled_by: Callable[..., CompiledKernel] | None, recorded: bool = True) -> Iterator[list[Launched]]:
    """Triton launches by the stub meanwhile, and the list takes what the driver is asked for, if it is `recorded`.
    compiled_by: what makes a kernel of its source: `without_code`, which takes no time, or None, Triton's compiler."""
    before, compiler = drivers._active, triton.compiler.compile
    made = dict[int, tuple[CompiledKernel, list[int]]]()
    seen: list[Launched] = []

    def compiling(source: Any, **options: Any) -> CompiledKernel:
        kernel = (compiled_by or compiler)(source, **options)
        kernel._init_handles()
        made[kernel.function] = kernel, _sizes(kernel)
        return kernel

    def launched(config: Any, function: int, arguments: Any) -> int:
        found = config.contents
        attributes = tuple((found.attributes[i].id, found.attributes[i].value) for i in range(found.count))
        values = tuple(ctypes.string_at(arguments[i], size) for i, size in enumerate(made[function][1]))
        seen.append(
            Launched(function, tuple(found.grid), tuple(found.block), found.shared, found.stream, attributes, values)
        )
        return 0

    callback = _Seen(launched)
    library = _library()
    drivers.set_active(StubDriver())
    triton.compiler.compile = compiling
    library.stub_seen(callback if recorded else None)
    try:
        yield seen
    finally:
        for kernel, _ in made.values():
            kernel.module = None  # the stub, which would be asked to unload it, is gone by then
        library.stub_seen(None)
        triton.compiler.compile = compiler
        drivers._active = before


def uninterpreted(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    """Kernels of the modules as they are where Triton compiles them."""
    for module in modules:
        for name, kernel in vars(module).copy().items():
            if isinstance(kernel, InterpretedFunction):
                monkeypatch.setattr(module, name, JITFunction(kernel.fn, **kernel.kwargs))
