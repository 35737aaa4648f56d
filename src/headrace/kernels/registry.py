"""The attention backends by name. Another one is a module of its own and a line of BACKENDS."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, cast

from headrace.kernels.backend import Backend, PiecewiseBackend

BACKENDS = {
    "triton": "headrace.kernels.triton.backend",
    "cpu": "headrace.kernels.cpu",
    "reference": "headrace.kernels.reference",
}
"""Each one's module, imported when it is first asked for. 'auto' takes the first that can be used; the last always can.
config.Backend names them as well."""

if TYPE_CHECKING:  # each of them keeps the contract
    from headrace.kernels import cpu, reference
    from headrace.kernels.triton import backend as triton

    _: tuple[PiecewiseBackend, PiecewiseBackend, Backend] = (cpu, reference, triton)


@cache
def backend(name: str) -> Backend:
    """The backend of that name. Raises ValueError for any other name."""
    if name not in BACKENDS:
        raise ValueError(f"attention backend must be one of {', '.join(BACKENDS)}, got {name!r}")
    return cast(Backend, import_module(BACKENDS[name]))


def in_pieces(kernels: Backend) -> PiecewiseBackend:
    """The same backend, which must be able to attend in pieces: ValueError otherwise."""
    if not kernels.capabilities.pieces:
        raise ValueError(f"attention backend {kernels.capabilities.name!r} cannot attend in pieces; use 'cpu'")
    return cast(PiecewiseBackend, kernels)
