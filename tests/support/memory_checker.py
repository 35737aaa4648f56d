"""A memory checker for Triton's interpreter: what a kernel loads and stores lies in tensors that its launch was given.

A lane that is not masked must stay within one argument, a view being its own bounds: an address behind it is an error
even where other memory lies there. What `torch.empty` gives holds NaN and numbers that are no places, so that what
nobody wrote is found where it matters. Races, and what only a compiled kernel does, it does not see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor

UNWRITTEN = 0x5A
"""Of each byte of new memory of whole numbers: far outside of all that these count or point at."""

Reachable = Callable[[], Sequence[Tensor]]


@dataclass
class MemoryChecker:
    """launches: kernels that ran, and how many accesses of a lane were looked at. reachable: tensors that kernels find
    by addresses in others."""

    reachable: Reachable = tuple
    launches: dict[str, int] = field(default_factory=dict)
    _kernel: str = ""
    _names: list[str] = field(default_factory=list)
    _begin: Any = None
    _end: Any = None

    def enter(self, kernel: str, given: dict[str, object]) -> None:
        """A launch with these arguments begins."""
        spans = [(name, *bounds(each)) for name, each in _tensors(given)]
        spans += [("reachable", *bounds(each)) for each in self.reachable()]
        spans.sort(key=lambda span: span[1])
        self._kernel, self._names = kernel, [name for name, *_ in spans]
        self._begin = np.array([begin for _, begin, _ in spans], np.int64)
        self._end = np.array([end for *_, end in spans], np.int64)

    def look(self, pointers: Any, mask: Any, doing: str) -> None:
        """Raises AssertionError for an address outside of all arguments."""
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        mask = np.broadcast_to(mask.data, pointers.data.shape)
        at = np.unique(pointers.data[mask]).astype(np.int64)
        self.launches[self._kernel] = self.launches.get(self._kernel, 0) + int(mask.sum())
        inside = (self._begin[None] <= at[:, None]) & (at[:, None] + size <= self._end[None])
        outside = at[~inside.any(1)]
        if len(outside):
            near = int(np.argmin(np.maximum(self._begin - outside[0], outside[0] - self._end)))
            told, room = outside[0] - self._begin[near], self._end[near] - self._begin[near]
            raise AssertionError(
                f"{self._kernel} {doing} {size} bytes at byte {told} of {self._names[near]}, which has {room}"
            )


def bounds(x: Tensor) -> tuple[int, int]:
    """First byte of a view, and the one behind its last."""
    if not x.numel():
        return x.data_ptr(), x.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


@contextmanager
def checked_memory(reachable: Reachable = tuple) -> Iterator[MemoryChecker]:
    """Within it every launch in the interpreter is checked: triton's InterpreterError tells of an access outside."""
    checker, builder, executor = MemoryChecker(reachable), interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store, atomic = builder.create_masked_load, builder.create_masked_store, builder.create_atomic_rmw
    prepare = executor._init_args_hst

    def prepared(self: Any, args: Any, kwargs: Any) -> Any:
        given, named = prepare(self, args, kwargs)
        checker.enter(self.fn.__name__, dict(zip(self.arg_names, given, strict=False)) | named)
        return given, named

    def loaded(self: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        checker.look(pointers, mask, "loads")
        return load(self, pointers, mask, *others)

    def stored(self: Any, pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
        checker.look(pointers, mask, "stores")
        return store(self, pointers, value, mask, *others)

    def changed(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
        checker.look(pointers, mask, "changes")
        return atomic(self, operation, pointers, value, mask, *others)

    changes = {"create_masked_load": loaded, "create_masked_store": stored, "create_atomic_rmw": changed}
    with patch.multiple(builder, **changes), patch.object(executor, "_init_args_hst", prepared), unwritten():
        yield checker


@contextmanager
def unwritten() -> Iterator[None]:
    """torch.empty and its like give memory that holds nothing of use."""

    def filled(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, **kwargs: spoil(make(*args, **kwargs))

    changes = {name: filled(getattr(torch, name)) for name in ("empty", "empty_like")}
    with patch.multiple(torch, **changes), patch.object(Tensor, "new_empty", filled(Tensor.new_empty)):
        yield


def spoil(x: Tensor) -> Tensor:
    """Fills x with NaN, or with whole numbers that are no places."""
    if x.is_floating_point():
        return x.fill_(float("nan"))
    if x.is_contiguous() and x.dtype != torch.bool and x.numel():
        x.view(torch.uint8).fill_(UNWRITTEN)
    return x


def _tensors(given: dict[str, object]) -> Iterator[tuple[str, Tensor]]:
    for name, each in given.items():
        found = each.base if isinstance(each, TensorDescriptor) else each
        if isinstance(found, Tensor):
            yield name, found
