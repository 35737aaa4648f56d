"""Launches of Triton's kernels that take the host little time.

The first launch of a kernel with arguments of some kinds is Triton's own, which compiles it. Those after it hand their
arguments straight to the C launcher of what was compiled (launch_entries). Kinds tell apart at least what Triton
compiles anew for: types, addresses and whole numbers that 16 divides, and a whole number that is 1. So what is launched
is what Triton would have launched. In Triton's interpreter, and wherever something is not as expected, every launch is
Triton's own.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import triton
from torch import Tensor
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from headrace.kernels.triton import launch_agreement
from headrace.kernels.triton.launch_entries import CONTRACTED, SUPPORTED, Blocks, Entry, Unexpected, entry_of

log = logging.getLogger(__name__)

WIDE = 31
"""Bits of the greatest whole number that is certainly one of 32 bits."""

_known: dict[int, DirectKernel] = {}


def direct(kernel: Any) -> DirectKernel:
    """The kernel with the same way to launch it, kernel[grid](...). What it is not compiled for is given in its order,
    without names: tensors, Blocks and numbers. Raises ValueError for such an argument that is named."""
    found = _known.get(id(kernel))
    if found is None:
        found = _known[id(kernel)] = DirectKernel(kernel)
    return found


class DirectKernel:
    """A kernel, and by device, kinds of arguments and constants how it is launched; None: by Triton."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._able = SUPPORTED and isinstance(kernel, JITFunction)
        self._options = CONTRACTED if isinstance(kernel, JITFunction) else {}  # the interpreter takes none of these
        parameters = inspect.signature(kernel.fn).parameters.values()
        self._unnamed = {each.name for each in parameters if "constexpr" not in str(each.annotation)}
        self._entries: dict[tuple[Any, ...], Entry | None] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **constants: self.launch(grid, arguments, constants)

    def launch(self, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        """kernel[grid](*arguments, **constants)."""
        found = self._kinds(arguments) if self._able and not _watched() else None
        if found is None:
            self._by_triton(grid, arguments, constants)
            return
        (kinds, values), active = found, driver.active
        device = active.get_current_device()
        key = (device, *kinds, *constants, *constants.values())
        entry = self._entries.get(key)
        if entry is not None:
            entry(grid, active.get_current_stream(device), values)
            return
        compiled = self._by_triton(grid, arguments, constants)
        if key not in self._entries:
            self._resolve(key, compiled, arguments, constants)

    def _by_triton(self, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> Any:
        if not self._unnamed.isdisjoint(constants):
            named = ", ".join(sorted(self._unnamed & constants.keys()))
            raise ValueError(
                f"{self.kernel.__name__} is not compiled for {named}: give it by its place, without a name"
            )
        taken = [each.form.described(each.tensor) if type(each) is Blocks else each for each in arguments]
        return self.kernel[grid](*taken, **(self._options | constants))

    def _kinds(self, arguments: tuple[Any, ...]) -> tuple[list[Any], list[Any]] | None:
        """What Triton may compile anew for, and more; and the arguments, tensors by their addresses. None: the launch
        is Triton's."""
        kinds: list[Any] = []
        values: list[Any] = []
        for each in arguments:
            kind = type(each)
            if kind is Tensor:
                address = each.data_ptr()
                kinds.append(each.dtype)
                kinds.append(not address & 15)
                # One that is not on the device is of another kind: Triton looks at it, and refuses it.
                kinds.append(each.is_cuda)
                values.append(address)
                continue
            values.append(each)
            if kind is int and each.bit_length() <= WIDE:
                kinds.append(each == 1 if each & 15 else 16)
            elif kind is Blocks:
                kinds += (each.form, each.tensor.dtype, each.tensor.is_cuda)
            elif kind is float:
                kinds.append(float)
            else:
                self._say(f"an argument of type {kind.__name__}, or of more than 32 bits")
                return None
        return kinds, values

    def _resolve(
        self, key: tuple[Any, ...], compiled: Any, arguments: tuple[Any, ...], constants: dict[str, Any]
    ) -> None:
        """Finds out how later launches of these kinds are made."""
        first = next(each for each in arguments if isinstance(each, Tensor | Blocks))
        agreed = launch_agreement.agrees((first.tensor if isinstance(first, Blocks) else first).get_device())
        if agreed is None:
            return
        self._entries[key] = None
        if agreed:
            try:
                self._entries[key] = entry_of(self.kernel, compiled, len(arguments), constants)
            except Unexpected as reason:
                self._say(str(reason))

    def _say(self, reason: str) -> None:
        _say(self.kernel.__name__, reason)


def _watched() -> bool:
    """Whether a profiler wants to be told of launches."""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


@cache
def _say(kernel: str, reason: str) -> None:
    log.debug("%s is launched by Triton: %s", kernel, reason)
