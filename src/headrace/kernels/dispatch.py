"""Which implementation each operation has, and why. The engine, the ops and `headrace doctor` ask here."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args

import torch
from torch import Tensor

from headrace.config import AttentionBackend, Quantization
from headrace.device import current
from headrace.kernels import cpu, registry
from headrace.kernels.backend import backend_of, listed
from headrace.kernels.quantized import GPU_ALONE

log = logging.getLogger(__name__)

Implementation = Literal["cpu", "torch", "ops"]
"""ops: a layer of the decoder one operation at a time, whatever implements those."""

NATIVE_OPS = ("attend", "append", *cpu.OPERATIONS)
QUANTIZED = tuple(scheme for scheme in get_args(Quantization) if scheme != "none")
TRITON_OPS = (
    "attend", "append", "linear", "rms_norm", "layer_norm", "silu_mul", "gelu_tanh_mul", "swiglu_oai_mul",
    "sigmoid_mul", "gelu",
)  # fmt: skip
TORCH_LINEAR = "torch's matrix product, 32 rows at a time"


@dataclass(frozen=True, slots=True)
class OpChoice:
    """One row of the table."""

    implementation: Implementation
    reason: str

    def __str__(self) -> str:
        return f"{self.implementation}: {self.reason}"


_forced: Implementation | None = None


class force:
    """force("torch") makes every op take that implementation, force("cpu") the C++ one, force(None) the best.

    force("ops") makes models loaded under it compute their layers one operation at a time, each at its best.
    Holds until the next call, or until the end of the `with` block if used in one. For tests and for measuring.
    """

    def __init__(self, implementation: Implementation | None) -> None:
        global _forced
        if implementation not in ("cpu", "torch", "ops", None):
            raise ValueError(f"implementation must be 'cpu', 'torch', 'ops' or None, got {implementation!r}")
        if implementation == "cpu" and not cpu.available():
            raise ValueError(f"implementation 'cpu': {cpu.unavailable_reason()}")
        self._before, _forced = _forced, implementation

    def __enter__(self) -> force:
        return self

    def __exit__(self, *_: object) -> None:
        global _forced
        _forced = self._before


def native(x: Tensor) -> bool:
    """Whether the C++ kernels take x. They know no gradients, so torch keeps a tensor that asks for one."""
    if _forced == "torch":
        return False
    wants_gradient = x.requires_grad and torch.is_grad_enabled()
    taken = cpu.available() and x.is_cpu and cpu.supports(x.dtype) and not wants_gradient and not on_gpu(x)
    if _forced == "cpu" and not taken:
        raise ValueError(f"implementation 'cpu' does not take {x.dtype} on {x.device}")
    return taken


def on_gpu(x: Tensor) -> bool:
    """Whether the Triton kernels take x."""
    return current().holds(x) and _forced != "torch" and not (x.requires_grad and torch.is_grad_enabled())


def in_cpp() -> bool:
    """Whether operations that are not on rows of numbers run in C++."""
    return cpu.available() and _forced != "torch"


def table() -> dict[str, OpChoice]:
    """The choice for each operation on CPU tensors of bfloat16 or float32."""
    products = {"linear": _linear_choice()} | {
        f"linear_{scheme}": _w8a8_choice() if scheme == "w8a8" else _quantized_choice()
        for scheme in QUANTIZED
        if scheme not in GPU_ALONE
    }
    return {name: _native_choice() for name in NATIVE_OPS} | products | {"layer": layer_choice()}


def layer_choice() -> OpChoice:
    """How the layers of a decoder are computed whose weights are all packed; all others go op by op."""
    if _forced in ("torch", "ops"):
        return OpChoice("ops", "forced")
    native = _native_choice()
    if native.implementation == "cpu":
        how = "two calls beside attention (bfloat16; float32 one operation at a time)"
        return OpChoice("cpu", f"{native.reason}, {how}")
    return OpChoice("ops", "one operation at a time, since linear is torch's")


def _linear_choice() -> OpChoice:
    native = _native_choice()
    if native.implementation == "torch":
        return OpChoice("torch", f"{native.reason}: {TORCH_LINEAR}")
    return OpChoice("cpu", f"{native.reason}, packed weights, {_how()}")


def _w8a8_choice() -> OpChoice:
    native = _native_choice()
    if native.implementation == "torch":
        return OpChoice("torch", f"{native.reason}: not available")
    return OpChoice("cpu", f"{native.reason}, whole numbers")


def _quantized_choice() -> OpChoice:
    native = _native_choice()
    if native.implementation == "torch":
        return OpChoice("torch", f"{native.reason}: weights are rounded, but kept in full size")
    return OpChoice("cpu", f"{native.reason}, {_how()}")


def _how() -> str:
    """How products are computed in C++."""
    return "bfloat16 in pairs (float32 plainly)" if cpu.has_pairs() else "weights to fp32 as they are multiplied"


def _native_choice() -> OpChoice:
    reason = cpu.unavailable_reason()
    if reason is not None:
        return OpChoice("torch", reason)
    return OpChoice("torch", "forced") if _forced == "torch" else OpChoice("cpu", cpu.describe())


def reasons(gpu: bool = False) -> dict[str, str]:
    """The table as text: operation -> 'cpu: C++ avx512'. gpu: of an engine on a CUDA device."""
    if not gpu:
        return {name: str(choice) for name, choice in table().items()}
    ours = dict.fromkeys(TRITON_OPS, "triton: sums in an order of its own, one launch")
    ours |= {f"linear_{scheme}": "triton: codes are widened as they are multiplied" for scheme in ("int8", "int4")}
    ours |= {"linear_w8a8": "triton: whole numbers", "linear_fp8_rowwise": "triton: FP8 in feed-forward layers"}
    return (
        {name: "torch: one row or element at a time" for name in NATIVE_OPS}
        | ours
        | dict.fromkeys(("greatest", "softmax_sums"), str(_native_choice()))
    )


def choose(
    backend: AttentionBackend,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    head_dim: int = 0,
    capped: bool = False,
) -> str:
    """The name of the attention backend for `backend` on a device and heads of a size, logged once with its reason.
    capped: whether the model's scores are.

    Raises ValueError, with the remedy, where the one asked for cannot run here.
    """
    place, names = torch.device(device), list(registry.BACKENDS)
    if backend == "auto":
        return _best(dtype, place, head_dim, capped)
    reason = obstacle(backend, dtype, place, head_dim, capped)
    if reason is not None:
        others = ["auto", *names[names.index(backend) + 1 :]]
        remedy = listed([repr(each) for each in others], "or")
        raise ValueError(f"attention_backend {backend!r}: {reason}; use {remedy}")
    _log_choice(backend, backend_of(backend).described(place))
    return backend


def _best(dtype: torch.dtype, device: torch.device, head_dim: int, capped: bool) -> str:
    """The first backend that may be chosen and has no obstacle."""
    why = None
    for name in registry.BACKENDS:
        kernels = backend_of(name)
        if not kernels.capabilities.automatic:
            continue
        reason = obstacle(name, dtype, device, head_dim, capped)
        if reason is None:
            _log_choice(name, why or kernels.described(device))
            return name
        why = why or f"{kernels.capabilities.kernels} cannot be used: {reason}"
    raise ValueError(f"no attention backend computes in {dtype} on {device}")


def obstacle(
    name: str, dtype: torch.dtype, device: torch.device, head_dim: int = 0, capped: bool = False
) -> str | None:
    """Why a backend cannot serve this type, device, head size and capped scores; None where it can."""
    kernels = backend_of(name)
    return kernels.missing() or kernels.capabilities.obstacle(dtype, device.type, head_dim, capped)


@cache
def _log_choice(backend: str, reason: str) -> None:
    log.debug("attention backend %s (%s)", backend, reason)
    for name, why in reasons(gpu=backend == "triton").items():
        log.debug("kernel %s -> %s", name, why)
