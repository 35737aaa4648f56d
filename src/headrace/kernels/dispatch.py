"""Which implementation each operation has, and why. The engine, the ops and `headrace doctor` ask here."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from headrace.config import Backend
from headrace.kernels import cpu

log = logging.getLogger(__name__)

Implementation = Literal["cpu", "torch", "ops"]
"""ops: a layer of the decoder one operation at a time, whatever implements those."""

NATIVE_OPS = ("attend", "append", "rms_norm", "layer_norm", "silu_mul", "gelu", "relu", "rotary", "greatest")
LARGEST_TRITON_HEAD = 256
TRITON_OPS = ("attend", "append", "rms_norm", "linear")
TORCH_LINEAR = "torch's matrix product, 32 rows at a time"


@dataclass(frozen=True, slots=True)
class Choice:
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
    taken = cpu.available() and x.is_cpu and cpu.supports(x.dtype) and not (x.requires_grad and torch.is_grad_enabled())
    if _forced == "cpu" and not taken:
        raise ValueError(f"implementation 'cpu' does not take {x.dtype} on {x.device}")
    return taken


def on_gpu(x: Tensor) -> bool:
    """Whether the Triton kernels take x."""
    return x.is_cuda and _forced != "torch" and not (x.requires_grad and torch.is_grad_enabled())


def in_cpp() -> bool:
    """Whether operations that are not on rows of numbers run in C++."""
    return cpu.available() and _forced != "torch"


def table() -> dict[str, Choice]:
    """The choice for each operation on CPU tensors of bfloat16 or float32."""
    products = {"linear": _linear_choice()} | {f"linear_{scheme}": _quantized_choice() for scheme in ("int8", "int4")}
    return {name: _native_choice() for name in NATIVE_OPS} | products | {"layer": layer_choice()}


def layer_choice() -> Choice:
    """How the layers of a decoder are computed whose weights are all packed; all others go op by op."""
    if _forced in ("torch", "ops"):
        return Choice("ops", "forced")
    native = _native_choice()
    if native.implementation == "cpu":
        how = "two calls beside attention (bfloat16; float32 one operation at a time)"
        return Choice("cpu", f"{native.reason}, {how}")
    return Choice("ops", "one operation at a time, since linear is torch's")


def _linear_choice() -> Choice:
    native = _native_choice()
    if native.implementation == "torch":
        return Choice("torch", f"{native.reason}: {TORCH_LINEAR}")
    return Choice("cpu", f"{native.reason}, packed weights, {_how()}")


def _quantized_choice() -> Choice:
    native = _native_choice()
    if native.implementation == "torch":
        return Choice("torch", f"{native.reason}: weights are rounded, but kept in full size")
    return Choice("cpu", f"{native.reason}, {_how()}")


def _how() -> str:
    """How products are computed in C++."""
    return "bfloat16 in pairs (float32 plainly)" if cpu.has_pairs() else "weights to fp32 as they are multiplied"


def _native_choice() -> Choice:
    reason = cpu.unavailable_reason()
    if reason is not None:
        return Choice("torch", reason)
    return Choice("torch", "forced") if _forced == "torch" else Choice("cpu", cpu.describe())


def reasons(gpu: bool = False) -> dict[str, str]:
    """The table as text: operation -> 'cpu: C++ avx512'. gpu: of an engine on a CUDA device."""
    if not gpu:
        return {name: str(choice) for name, choice in table().items()}
    ours = dict.fromkeys(TRITON_OPS, "triton: sums in an order of its own")
    return (
        {name: "torch: one row or element at a time" for name in NATIVE_OPS}
        | ours
        | {"greatest": str(_native_choice())}
    )


def choose(
    backend: Backend, dtype: torch.dtype, device: torch.device | str = "cpu", head_dim: int = 0
) -> Literal["reference", "cpu", "triton"]:
    """The attention backend for `backend` on a device and heads of a size, logged once with its reason.

    Raises ValueError, with the remedy, where the one asked for cannot run here.
    """
    device_type = torch.device(device).type
    if backend == "triton":
        reason = no_triton() or (None if device_type == "cuda" else f"it runs on a CUDA device, not on {device_type}")
        if reason is None and head_dim > LARGEST_TRITON_HEAD:
            reason = f"it takes heads of up to {LARGEST_TRITON_HEAD}, the model's are {head_dim}"
        if reason is not None:
            raise ValueError(f"attention_backend 'triton': {reason}; use 'auto', 'cpu' or 'reference'")
        _log_choice("triton", f"asked for, on {torch.cuda.get_device_name(device)}")
        return "triton"
    obstacle = _obstacle(dtype, device_type)
    if backend == "cpu" and obstacle is not None:
        raise ValueError(f"attention_backend 'cpu': {obstacle}; use 'auto' or 'reference'")
    if backend == "reference":
        _log_choice("reference", "asked for")
        return "reference"
    if obstacle is not None:
        _log_choice("reference", f"the C++ kernels cannot be used: {obstacle}")
        return "reference"
    _log_choice("cpu", cpu.describe())
    return "cpu"


def no_triton() -> str | None:
    """Why there are no Triton kernels here; None where there are."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    return None if find_spec("triton") else "the package triton is missing, which comes with torch's builds for CUDA"


def _obstacle(dtype: torch.dtype, device_type: str) -> str | None:
    """Why the C++ kernels cannot serve this type and device; None where they can."""
    if not cpu.available():
        return cpu.unavailable_reason()
    if device_type != "cpu":
        return f"they run on the CPU, not on {device_type}"
    return None if cpu.supports(dtype) else f"they compute in bfloat16 and float32, not {dtype}"


@cache
def _log_choice(backend: str, reason: str) -> None:
    log.info("attention backend %s (%s)", backend, reason)
    for name, why in reasons(gpu=backend == "triton").items():
        log.info("kernel %s -> %s", name, why)
