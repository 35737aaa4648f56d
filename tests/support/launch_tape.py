"""What a CUDA graph takes of the code that is recorded: its launches, and nothing else of it.

A replay repeats the operations of torch and the Triton kernels that were launched, on the very tensors and numbers of
then; Python has no say in it. What a recording allocated holds anything when it is replayed, since others share that
memory. And what CUDA and torch refuse of a stream that is captured is refused: the host reads nothing of the device,
waits for nothing, and sends nothing that is not pinned. What other threads read meanwhile is no matter of the stream.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from headrace.kernels.triton.launching import DirectKernel

READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")
"""Methods of a tensor by which the host waits for its numbers."""
WAITS = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "equal",
    "is_nonzero",
    "_unique2",
    "unique_dim",
    "pin_memory",
)
"""Operations that do so, whose results' sizes depend on numbers, or that ask for memory of the host."""
ALLOCATES = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
"""Operations that launch nothing."""


class LaunchTape(TorchDispatchMode):
    """Within it launches are made and noted. allocated: memory that they took."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Callable[[], object]] = []
        self.allocated: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if name in WAITS or _sends(name, args) or _by_mask(name, args):
            raise refused(name)
        made = func(*args, **kwargs)
        known = {_storage(each) for each in tensors_of((args, tuple(kwargs.values())))}
        fresh = [each for each in tensors_of(made) if _storage(each) not in known]
        self.allocated += fresh
        if name not in ALLOCATES and (fresh or func._schema.is_mutable):
            self.launches.append(partial(_again, func, args, kwargs, fresh))
        return made

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Kernels, too, are made and noted; reads of the host are refused, to the thread that records."""
        launch = DirectKernel.launch

        def noted(kernel: DirectKernel, grid: Any, arguments: Any, constants: Any) -> None:
            with _disable_current_modes(), pytest.MonkeyPatch.context() as reading:
                self._allow(reading)
                launch(kernel, grid, arguments, constants)
            self.launches.append(partial(launch, kernel, grid, arguments, constants))

        with pytest.MonkeyPatch.context() as patch, self:
            patch.setattr(DirectKernel, "launch", noted)
            self._reads = {name: getattr(Tensor, name) for name in READS}
            for name in READS:
                patch.setattr(Tensor, name, _refused_here(name, self._reads[name], threading.get_ident()))
            yield

    def _allow(self, patch: pytest.MonkeyPatch) -> None:
        """What a kernel does in Triton's interpreter is not the host's."""
        for name, method in self._reads.items():
            patch.setattr(Tensor, name, method)

    def replay(self) -> None:
        for each in self.allocated:
            spoil(each)
        for launch in self.launches:
            launch()


def refused(name: str) -> RuntimeError:
    return RuntimeError(f"{name}: operation not permitted when stream is capturing")


def _refused_here(name: str, method: Callable[..., object], thread: int) -> Callable[..., object]:
    """The method of a tensor, which `thread` is refused."""

    def read(x: Tensor, *args: object, **kwargs: object) -> object:
        if threading.get_ident() == thread:
            raise refused(name)
        return method(x, *args, **kwargs)

    return read


def _sends(name: str, args: Any) -> bool:
    """Whether numbers of the host are made, in memory that is not pinned. A single one is an argument of the kernel
    that takes it."""
    return name == "lift_fresh" and args[0].dim() > 0


def _by_mask(name: str, args: Any) -> bool:
    """Whether elements are chosen by booleans: the device would have to say how many."""
    if name not in ("index", "index_put_", "index_put"):
        return False
    return any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1])


def _again(func: Any, args: Any, kwargs: Any, fresh: list[Tensor]) -> None:
    made = func(*args, **kwargs)
    known = {_storage(each) for each in tensors_of((args, tuple(kwargs.values())))}
    for place, value in zip(fresh, [each for each in tensors_of(made) if _storage(each) not in known], strict=True):
        place.copy_(value)


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def tensors_of(made: object) -> list[Tensor]:
    """The tensors of what a recording returns or an operation takes: a tensor, or a tuple or list of such things."""
    if isinstance(made, Tensor):
        return [made]
    return [each for part in made for each in tensors_of(part)] if isinstance(made, tuple | list) else []


def spoil(x: Tensor) -> None:
    """Numbers that nobody wants to see again."""
    x.fill_(float("nan") if x.is_floating_point() else torch.iinfo(x.dtype).max if x.dtype != torch.bool else True)
