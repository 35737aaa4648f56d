"""What of Triton's insides a direct launch uses: the C launcher of a compiled kernel, and tensor maps that are kept.

Triton 3.6 compiles a launcher for each signature, Triton 3.9 has one for all (triton/backends/nvidia/driver.py). Other
versions are not known here: their kernels are launched by Triton.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton.backends import nvidia
from triton.runtime import driver

CONTRACTED = {"enable_fp_fusion": True}
"""Of each kernel that is compiled: a product that is added to is one multiply-add, which Triton up to 3.9 does unasked;
bits follow from it."""

MAPS = 4096
"""Tensor maps that an argument of a compiled kernel keeps: those of all weights, and of many other tensors."""


class Unexpected(Exception):
    """Why a compiled kernel is not launched directly."""


class BlockForm:
    """Blocks by which a GPU copies a tensor by itself (TMA). layout: in shared memory, of a kernel in Gluon. flat: the
    tensor is taken as rows of a block's width."""

    def __init__(self, block: tuple[int, ...], layout: object, flat: bool) -> None:
        self.block, self.layout, self.flat = list(block), layout, flat

    def described(self, tensor: Tensor) -> Any:
        """As Triton takes the tensor. Raises AssertionError for one that cannot be copied so."""
        tensor = tensor.view(-1, self.block[-1]) if self.flat else tensor
        if self.layout is None:
            from triton.tools.tensor_descriptor import TensorDescriptor

            return TensorDescriptor.from_tensor(tensor, self.block)
        from triton.experimental.gluon.nvidia import hopper

        return hopper.TensorDescriptor.from_tensor(tensor, self.block, self.layout)


@cache
def block_form(*block: int, layout: object = None, flat: bool = False) -> BlockForm:
    """The one form of its kind: forms are told apart by identity."""
    return BlockForm(block, layout, flat)


class Blocks(NamedTuple):
    """A tensor that a kernel takes by blocks: its rows begin at multiples of 16 bytes."""

    tensor: Tensor
    form: BlockForm


class TensorMaps:
    """Tensor maps of one argument of a compiled kernel, each made once. A map says where a tensor lies, its shape and
    its strides, and nothing else: one that is kept is right for whatever tensor has these, and keeps none alive."""

    def __init__(self, encoded: Callable[[Any], list[Any]]) -> None:
        self._encoded = encoded
        self._made: dict[tuple[Any, ...], list[Any]] = {}

    def __call__(self, blocks: Blocks) -> list[Any]:
        """What the launcher takes of the tensor: map, shape, strides."""
        tensor = blocks.tensor
        key = (tensor.data_ptr(), tensor.shape, tensor.stride())
        found = self._made.get(key)
        if found is None:
            if len(self._made) == MAPS:
                self._made.clear()
            found = self._made[key] = self._encoded(blocks.form.described(tensor))
        return found


class Entry:
    """A compiled kernel, launched with values of the kinds that it was compiled for: addresses, numbers, Blocks."""

    def __init__(self, compiled: Any, tail: tuple[Any, ...], maps: list[tuple[int, TensorMaps]]) -> None:
        self.compiled = compiled  # it goes with its machine code
        self.tail, self.maps = tail, maps[::-1]  # what is put in place of one moves those behind it
        self.launcher, self.given = self._launcher(compiled)

    def __call__(self, grid: tuple[int, ...], stream: int, values: list[Any]) -> None:
        for place, maps in self.maps:
            values[place : place + 1] = maps(values[place])
        self._launch((*grid, 1, 1)[:3], stream, values)

    def _launcher(self, compiled: Any) -> tuple[Any, tuple[Any, ...]]:
        """The C launcher, and what it takes between the stream and the arguments."""
        raise NotImplementedError

    def _launch(self, grid: tuple[int, ...], stream: int, values: list[Any]) -> None:
        raise NotImplementedError


class Entry36(Entry):
    """Of Triton 3.6."""

    def _launcher(self, compiled: Any) -> tuple[Any, tuple[Any, ...]]:
        runner = compiled.run
        launch = runner.launch
        if self.maps:  # Triton makes the maps in a function around it
            launch = inspect.getclosurevars(launch).nonlocals["launcher"]
        flags = (runner.launch_cooperative_grid, runner.launch_pdl)
        scratch, hooks = (None, None), (None, None, None)
        return launch, (compiled.function, *flags, *scratch, compiled.packed_metadata, *hooks)

    def _launch(self, grid: tuple[int, ...], stream: int, values: list[Any]) -> None:
        self.launcher(*grid, stream, *self.given, *values, *self.tail)


class Entry39(Entry):
    """Of Triton 3.9."""

    def _launcher(self, compiled: Any) -> tuple[Any, tuple[Any, ...]]:
        runner = compiled.run
        if runner.gsan_enabled:
            raise Unexpected("it is watched by a sanitizer")
        flags = (runner.launch_cooperative_grid, runner.launch_pdl)
        scratch, hooks = (None, None), (None, None, None)
        how = (runner.arg_annotations, runner.kernel_signature)
        given = (compiled.function, *flags, compiled.packed_metadata, *hooks, *scratch, *how)
        return driver.active.utils.launch, given

    def _launch(self, grid: tuple[int, ...], stream: int, values: list[Any]) -> None:
        self.launcher(*grid, stream, *self.given, (*values, *self.tail))


_ENTRIES: dict[str, type[Entry]] = {"3.6": Entry36, "3.9": Entry39}
VERSION = ".".join(triton.__version__.split(".")[:2])
SUPPORTED = VERSION in _ENTRIES


def entry_of(kernel: Any, compiled: Any, count: int, constants: dict[str, Any]) -> Entry:
    """The compiled kernel of arguments of which the first `count` are no constants. Raises Unexpected."""
    try:
        return _entry_of(kernel, compiled, count, constants)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Unexpected(f"Triton {triton.__version__} is not as expected: {error!r}") from error


def _entry_of(kernel: Any, compiled: Any, count: int, constants: dict[str, Any]) -> Entry:
    names, runner, metadata = kernel.arg_names, compiled.run, compiled.metadata
    if kernel.pre_run_hooks:
        raise Unexpected("it has hooks")
    if runner.global_scratch_size or runner.profile_scratch_size:
        raise Unexpected("it needs memory of its own")
    if any(param.is_constexpr for param in kernel.params[:count]):
        raise Unexpected("a constant is no keyword")
    tail = tuple(constants[name] for name in names[count:])
    signature = list(compiled.src.signature.values())
    places = [i for i, each in enumerate(signature) if isinstance(each, str) and each.startswith("tensordesc")]
    described = getattr(metadata, "tensordesc_meta", None) or []
    if len(described) != len(places) or None in described:
        raise Unexpected("its blocks are not copied by the GPU")
    maps = [(place, TensorMaps(_encoder(meta))) for place, meta in zip(places, described, strict=True)]
    return _ENTRIES[VERSION](compiled, tail, maps)


def _encoder(meta: dict[str, Any]) -> Callable[[Any], list[Any]]:
    """What makes a map of a tensor that is described."""
    make = nvidia.driver.make_tensordesc_arg
    return (lambda each: make(each, meta)) if VERSION == "3.6" else (lambda each: make(each, meta, None))
