"""What lies between a layer's projected heads and attention: norms of queries and keys, and the rotation.

T: rows; Hq, Hkv: query and KV heads, D: head size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from headrace.kernels import dispatch, ops


@dataclass(frozen=True, slots=True)
class QKRotary:
    """heads, kv_heads: Hq and Hkv; cos_sin [T, N] fp32 as in ops.rotary, None: nothing is rotated; q_norm, k_norm [D]:
    weights of a root-mean-square norm of each head, to which `offset` is added, None: no norm."""

    heads: int
    kv_heads: int
    cos_sin: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0
    offset: float = 0.0

    @property
    def plain(self) -> bool:
        """Whether queries and keys are taken as they are projected."""
        return self.cos_sin is None and self.k_norm is None

    def __call__(self, heads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """heads [T, Hq + 2 Hkv, D], as projected -> q [T, Hq, D], k and v [T, Hkv, D], maybe views of `heads`."""
        if dispatch.on_gpu(heads) and not self.plain:
            from headrace.kernels.triton import rotary

            return rotary.rotate(heads, self)
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        return self._turned(q, self.q_norm), self._turned(k, self.k_norm), v

    def _turned(self, heads: Tensor, weight: Tensor | None) -> Tensor:
        if weight is not None:
            heads = ops.rms_norm(heads, weight, self.eps, self.offset)
        return heads if self.cos_sin is None else ops.rotary(heads, self.cos_sin)
