"""How many chunks of a streamed batch to project from X instead of loading K and V: one layer, steady state.

After KVPR (arXiv 2411.17089, section 3.1), for double-buffered layers: T = max(link in, compute). Seconds and bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCosts:
    """What one layer of one batch costs. kv_bytes, x_bytes: of a chunk. link_s: bytes a second of the link in.
    project_s: seconds of projecting a chunk; compute_s: of all else in the layer. weight_bytes, hidden_bytes: cross the
    link beside the chunks. x_resident: X lies in fast memory. Raises ValueError for a negative figure or no rate.
    """

    kv_bytes: float
    x_bytes: float
    link_s: float
    project_s: float
    compute_s: float = 0.0
    weight_bytes: float = 0.0
    hidden_bytes: float = 0.0
    x_resident: bool = False

    def __post_init__(self) -> None:
        for name in ("kv_bytes", "x_bytes", "project_s", "compute_s", "weight_bytes", "hidden_bytes"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"a layer needs {name} of at least 0, got {getattr(self, name)}")
        if not self.link_s > 0:
            raise ValueError(f"a layer needs link_s above 0, got {self.link_s}")

    def seconds(self, projected: NDArray[np.int64], stored: int) -> NDArray[np.float64]:
        """T if so many of the batch's stored chunks are projected."""
        x = projected * (0.0 if self.x_resident else self.x_bytes)
        crossing = x + (stored - projected) * self.kv_bytes + self.weight_bytes + self.hidden_bytes
        times: NDArray[np.float64] = np.maximum(crossing / self.link_s, projected * self.project_s + self.compute_s)
        return times


def chunks_to_project(stored: int, most: int, costs: LayerCosts) -> int:
    """Of `stored` chunks, how many of the first `most` to project so that T is least; of equals the fewest.

    Every count is tried: some microseconds for thousands of chunks. Raises ValueError unless 0 <= most <= stored.
    """
    if not 0 <= most <= stored:
        raise ValueError(f"cannot project {most} of {stored} chunks")
    return int(np.argmin(costs.seconds(np.arange(most + 1), stored)))
