"""Triton kernels compiled for a GPU that is not there, their PTX executed on the CPU: what a compiler could do wrong.

    python -m tests.support.ptx_launch

Prints how far compiled attention with int8 pools and with sinks is from plain torch, whether heads of 256 and latents
have the same bits both ways, and how often kernels of recurrent layers were launched to compare these, as JSON. In a
process of its own: in the tests' kernels are interpreted. A launch looks at its arguments as Triton does: 1 is a
constant, multiples of 16 are known to be such.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.runtime import jit
from triton.tools.tensor_descriptor import TensorDescriptor

from headrace.kernels.triton import launching
from tests.support.ptx_async import Tiles
from tests.support.ptx_block import Block, Program
from tests.support.ptx_memory import GlobalMemory

TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64",
    torch.int8: "i8", torch.uint8: "u8", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")
LEFT_OUT = ("launch_pdl",)
Reachable = Callable[[], Sequence[tuple[str, Tensor]]]


class Launches:
    """Launches kernels on CPU tensors. reachable: tensors that kernels find by addresses in others. races: see
    SharedMemory, by kernel."""

    def __init__(self, architecture: int, reachable: Reachable = tuple) -> None:
        self.target, self.reachable = GPUTarget("cuda", architecture, 32), reachable
        self.races: set[str] = set()
        self.launched: dict[str, int] = {}
        self._compiled: dict[str, tuple[Program, Any]] = {}

    def __call__(self, kernel: Any, grid: Any, args: Any, given: dict[str, Any]) -> None:
        options = {name: value for name, value in given.items() if name in OPTIONS}
        named = {name: value for name, value in given.items() if name not in (*OPTIONS, *LEFT_OUT)}
        bound = inspect.signature(kernel.fn).bind(*args, **named).arguments
        program, metadata = self._program(kernel, bound, options)
        passed = [bound[p.name] for p in kernel.params if not p.is_constexpr and not _fixed(p, bound[p.name])]
        held = [(name, getattr(value, "base", value)) for name, value in bound.items()]
        tensors = [(name, value) for name, value in held if isinstance(value, Tensor)]
        memory = GlobalMemory([*tensors, *self.reachable()])
        maps = iter(metadata.tensordesc_meta or ())
        raws = [_mapped(each, next(maps)) if _described(each) else [_raw(each)] for each in passed]
        values = [*(raw for each in raws for raw in each), 0, 0]  # scratch memory, which none of them needs
        size = (*grid, 1, 1)[:3]
        for z, y, x in np.ndindex(*size[::-1]):
            block = Block(program, values, memory, metadata.shared, (x, y, z), size)
            block.run()
            self.races |= {f"{kernel.fn.__name__} {race}" for race in block.shared.races}
        self.launched[kernel.fn.__name__] = self.launched.get(kernel.fn.__name__, 0) + 1

    def _program(self, kernel: Any, bound: dict[str, Any], options: dict[str, Any]) -> tuple[Program, Any]:
        signature, constants, known = {}, {}, {}
        for number, each in enumerate(kernel.params):
            value = bound[each.name]
            if each.is_constexpr or _fixed(each, value):
                signature[each.name], constants[number,] = "constexpr", value
                continue
            signature[each.name] = _type(value)
            whole = value.data_ptr() if isinstance(value, Tensor) else value
            if isinstance(whole, int) and whole % 16 == 0 and not each.do_not_specialize:
                known[number,] = [["tt.divisibility", 16]]
        key = repr((kernel.fn.__module__, kernel.fn.__name__, signature, constants, known, options))
        if key not in self._compiled:
            make = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
            source = make(kernel, signature, constexprs=constants, attrs=known)
            done = triton.compile(source, target=self.target, options=options)
            self._compiled[key] = Program(done.asm["ptx"]), done.metadata
        return self._compiled[key]


@contextmanager
def executed(architecture: int = 90, reachable: Reachable = tuple) -> Iterator[Launches]:
    """Within it `kernel[grid](...)` executes compiled kernels, none of which is launched directly. Raises
    ptx_memory.Fault for an access outside."""
    launches = Launches(architecture, reachable)

    def of(kernel: Any, grid: Any) -> Any:
        return lambda *args, **given: launches(kernel, grid, args, given)

    with patch.object(jit.KernelInterface, "__getitem__", of), patch.object(launching, "_watched", lambda: True):
        yield launches


def _fixed(parameter: Any, value: object) -> bool:
    return isinstance(value, int) and value == 1 and not parameter.do_not_specialize


def _described(value: object) -> bool:
    return isinstance(value, TensorDescriptor | GluonDescriptor)


def _type(value: Any) -> str:
    if _described(value):
        layout = f",{value.layout!r}" if isinstance(value, GluonDescriptor) else ""
        return f"tensordesc<{TYPES[value.base.dtype]}{value.block_shape}{layout}>"
    if isinstance(value, Tensor):
        return "*" + TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def _mapped(value: Any, meta: dict[str, Any]) -> list[Any]:
    """What a launch hands over for blocks: the map as the compiled kernel wants it, shape and strides."""
    return [Tiles.of(value, meta), *value.shape, *value.strides]


def _raw(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.data_ptr()
    return int(np.float32(value).view(np.uint32)) if isinstance(value, float) else value & (2**64 - 1)


def differences() -> dict[str, float]:
    """Of attention from plain torch's, by case."""
    from headrace.kernels.triton import layer_check
    from headrace.kernels.triton.heads import Heads

    plain = layer_check.Variant(Heads(2, 1, 32), torch.bfloat16, torch.bfloat16, None, None, False, 32**-0.5)
    cases = {"int8": plain._replace(stored=torch.int8), "sinks": plain._replace(sinks=True, window=40)}
    found: dict[str, float] = {}
    with executed() as launches, patch.object(layer_check, "SEQUENCES", ((1, 70), (16, 18))):
        for name, variant in cases.items():
            for way, difference in layer_check.differences(variant, torch.device("cpu")):
                found[f"{name}, {way}"] = difference
    return found | {"races": len(launches.races)}


def both_ways() -> list[bool]:
    """Whether split tasks and flash tasks, which differ in lanes and columns, give the same bits: of heads of 256, and
    of latents, whose numbers are of two parts."""
    from headrace.kernels.triton import layer_check
    from headrace.kernels.triton.heads import Heads
    from headrace.kernels.triton.walk_options import heads_of

    wide = layer_check.Variant(Heads(4, 1, 256), torch.bfloat16, torch.bfloat16, 40, 20.0, False, 1 / 16)
    latents = heads_of((3, 1, 80), True, torch.device("cpu"))
    return [_both_ways(variant) for variant in (wide, wide._replace(heads=latents, window=None, cap=None))]


def _both_ways(variant: Any) -> bool:
    from headrace.kernels.triton import attention, layer_check

    attended, kept = attention.attended, []

    def keep(*given: Any) -> Tensor:
        kept.append(attended(*given))
        return kept[-1]

    rows = patch.object(layer_check, "SEQUENCES", ((17, 530),))
    with executed(), rows, patch.object(attention, "attended", keep):
        close = all(difference < 2e-2 for _, difference in layer_check.differences(variant, torch.device("cpu")))
    return close and torch.equal(*kept)


def recurrent_layers() -> dict[str, int]:
    """Launches of recurrent layers of each kind, by kernel, and races. Raises ValueError where cuts change their bits,
    or where they are far from plain torch."""
    from headrace.config import RecurrentSpec
    from headrace.kernels.triton import recurrent_check

    net, cuts = RecurrentSpec(1, 1, 2, 32, 16, 4), patch.multiple(recurrent_check, ROWS=6, CUTS=(0, 1, 4, 6))
    with executed() as launches, cuts:
        kimi, mamba = replace(net, kind="kda", key_heads=2), replace(net, kind="mamba2")
        for spec in (net, kimi, mamba, RecurrentSpec.short_convolutions(1, 40, 3)):
            recurrent_check.check(spec, torch.bfloat16, torch.device("cpu"))
    return launches.launched | {"races": len(launches.races)}


if __name__ == "__main__":
    print(json.dumps(differences() | {"both ways": both_ways(), "recurrent layers": recurrent_layers()}))
