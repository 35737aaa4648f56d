"""The paper's split (KVPR, arXiv 2411.17089, section 3), and the same question for a batch whose KV is streamed.

Decode on KV that lies beyond a link: keys and values of the first l tokens are projected again from stored activations
X, which are h wide where K and V together are 2 h_kv wide, while those of the others cross the link. h: hidden size;
h_kv: KV heads times head size (the paper has h_kv = h). Units: seconds, bytes, operations. All is of one layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.types import CHUNK


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One decode step of a batch (section 3.1): `batch` sequences of `tokens` tokens each (s'), of which `prompt` (s)
    have stored activations. compute_s: operations a second (v_gpu); link_s: bytes a second (v_com).

    x_resident: the activations lie beside the computation already and cross no link (the paper's row-by-row schedule,
    which drops the first term of equation 10; its figure 3 sends them all the same). Raises ValueError.
    """

    batch: int
    tokens: int
    prompt: int
    hidden: int
    kv_width: int
    compute_s: float
    link_s: float
    element_bytes: int = 2
    x_resident: bool = False

    def __post_init__(self) -> None:
        for name in ("batch", "tokens", "hidden", "kv_width", "compute_s", "link_s", "element_bytes"):
            if not getattr(self, name) > 0:
                raise ValueError(f"a decode step needs {name} above 0, got {getattr(self, name)}")
        if not 0 <= self.prompt <= self.tokens:
            raise ValueError(f"a decode step needs 0 <= prompt <= tokens, got {self.prompt} and {self.tokens}")

    @property
    def x_s(self) -> float:
        """Seconds that the activations of one token of each sequence cross the link for (6)."""
        return 0.0 if self.x_resident else self.batch * self.hidden * self.element_bytes / self.link_s

    @property
    def kv_s(self) -> float:
        """The same for keys and values (6)."""
        return 2 * self.batch * self.kv_width * self.element_bytes / self.link_s

    @property
    def project_s(self) -> float:
        """Seconds of projecting one token of each sequence: 4 b h h_kv operations (8)."""
        return 4 * self.batch * self.hidden * self.kv_width / self.compute_s


def kvpr_time(split: float, step: Step) -> float:
    """Equation (10): seconds in which K and V of all tokens are there if those of the first `split` are projected."""
    return split * step.x_s + max(split * step.project_s, (step.tokens - split) * step.kv_s)


def crossing(step: Step) -> float:
    """Where projecting takes as long as loading the rest: l* = s' / (1 + 2 h v_com / (p v_gpu)), for any h_kv."""
    return step.tokens * step.kv_s / (step.kv_s + step.project_s)


def kvpr_split(step: Step, grain: int = 1) -> int:
    """The l of least kvpr_time in 0 .. prompt, a multiple of `grain`; of equals the least.

    kvpr_time falls as far as the crossing and rises after it, or rises throughout where X is at least as wide as K and
    V together: so one of the crossing's neighbours is best, or 0. Raises ValueError for a grain below 1.
    """
    if grain < 1:
        raise ValueError(f"grain must be at least 1, got {grain}")
    last = step.prompt // grain
    below = min(int(crossing(step) / grain), last)
    return min((0, below * grain, min(below + 1, last) * grain), key=lambda split: (kvpr_time(split, step), split))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """What one layer of one batch costs while decode streams: the steady state of the column schedule (section 3.2),

        T = max(link in, compute, link out)

    with W/batches + X + KV + hidden in on the one link and everything double-buffered; the row schedule has batches = 1
    and no weights. kv_bytes, x_bytes: of a chunk; weight_bytes: of the layer; project_s: seconds of projecting a chunk;
    compute_s: of all else in the layer (attention, MLP); out_bytes: new K, V, X and hidden states; cpu_s_per_byte: what
    each byte that crosses takes from the computing cores; latency_s: of each transfer in (weights, X, KV, hidden).
    Raises ValueError for a negative figure or no rate.
    """

    kv_bytes: float
    x_bytes: float
    link_s: float
    project_s: float
    compute_s: float = 0.0
    weight_bytes: float = 0.0
    batches: int = 1
    hidden_bytes: float = 0.0
    out_bytes: float = 0.0
    out_link_s: float | None = None
    latency_s: float = 0.0
    cpu_s_per_byte: float = 0.0
    x_resident: bool = False

    def __post_init__(self) -> None:
        for name in (
            "kv_bytes", "x_bytes", "project_s", "compute_s", "weight_bytes", "hidden_bytes", "out_bytes", "latency_s",
            "cpu_s_per_byte",
        ):  # fmt: skip
            if not getattr(self, name) >= 0:
                raise ValueError(f"a stream needs {name} of at least 0, got {getattr(self, name)}")
        if not self.link_s > 0 or self.batches < 1 or not (self.out_link_s is None or self.out_link_s > 0):
            raise ValueError(
                f"a stream needs link_s and out_link_s above 0 and batches of at least 1, got {self.link_s}, "
                f"{self.out_link_s}, {self.batches}"
            )

    def link(self, projected: NDArray[np.int64], total: int) -> NDArray[np.float64]:
        """Seconds of the link in if so many of the batch's `total` chunks are projected; and `crossed` likewise."""
        sent = projected * (0 if self.x_resident else 1)
        transfers = (sent > 0) * 1.0 + (projected < total) + (self.weight_bytes > 0) + (self.hidden_bytes > 0)
        return self.crossed(projected, total) / self.link_s + transfers * self.latency_s

    def crossed(self, projected: NDArray[np.int64], total: int) -> NDArray[np.float64]:
        """Bytes in."""
        x = projected * (0.0 if self.x_resident else self.x_bytes)
        return x + (total - projected) * self.kv_bytes + self.weight_bytes / self.batches + self.hidden_bytes

    def compute(self, projected: NDArray[np.int64], total: int) -> NDArray[np.float64]:
        moved = self.crossed(projected, total) + self.out_bytes
        return projected * self.project_s + self.compute_s + moved * self.cpu_s_per_byte

    def out(self) -> float:
        return self.out_bytes / (self.out_link_s or self.link_s) + (self.latency_s if self.out_bytes else 0.0)

    def seconds(self, projected: NDArray[np.int64], total: int) -> NDArray[np.float64]:
        """T."""
        parts: NDArray[np.float64] = np.maximum(self.link(projected, total), self.compute(projected, total))
        return parts.clip(min=self.out())


@dataclass(frozen=True, slots=True)
class DecodeSplit:
    """projected[i]: how many leading chunks of sequence i are projected. Seconds are of one layer of one batch."""

    projected: tuple[int, ...]
    seconds: float
    link_s: float
    compute_s: float
    load_all_s: float
    reason: str


def decode_split(chunks: Sequence[int], stored: Sequence[int], stream: Stream, *, uniform: bool = False) -> DecodeSplit:
    """Which leading chunks of each sequence to project, so that T is least; of equals the fewest.

    chunks[i]: how many chunks of sequence i lie beyond the link; stored[i] <= chunks[i]: how many of these have stored
    activations, from the first on. T depends on their sum alone, so the best sum is spread evenly: l chunks each and
    one more for some. uniform: the same l for all, as in the paper (a sequence that has fewer projects what it has).
    All sums are tried: some microseconds for thousands of chunks. Raises ValueError for counts that do not fit.
    """
    if len(chunks) != len(stored) or any(not 0 <= x <= n for n, x in zip(chunks, stored, strict=True)):
        raise ValueError(f"stored must be between 0 and chunks for each sequence, got {list(stored)}, {list(chunks)}")
    total, most = sum(chunks), np.asarray(stored, np.int64)
    levels = _levels(most)
    sums = levels if uniform else np.arange(int(most.sum()) + 1)
    times = stream.seconds(sums, total)
    best = sums[int(np.argmin(times))]
    projected = _spread(most, levels, int(best))
    link, compute = (float(part(best, total)) for part in (stream.link, stream.compute))
    seconds, load_all = float(times.min()), float(times[0])
    bound = "link" if link >= max(compute, stream.out()) else "compute" if compute >= stream.out() else "link out"
    reason = (
        f"{best * CHUNK} of {total * CHUNK} tokens projected: {seconds * 1e3:.3g} ms a layer, bound by {bound} "
        f"(loading all {load_all * 1e3:.3g} ms)"
    )
    return DecodeSplit(projected, seconds, link, compute, load_all, reason)


def _levels(most: NDArray[np.int64]) -> NDArray[np.int64]:
    """levels[l]: chunks projected if each sequence projects l, or what it has: l = 0 .. the most."""
    counts = np.bincount(most) if len(most) else np.zeros(1, np.int64)
    having = most.size - np.cumsum(counts)[:-1]  # sequences with more than l
    return np.concatenate([[0], np.cumsum(having)]).astype(np.int64)


def _spread(most: NDArray[np.int64], levels: NDArray[np.int64], total: int) -> tuple[int, ...]:
    """`total` chunks over the sequences: as even as they have them, the first ones one more."""
    level = int(np.searchsorted(levels, total, side="right")) - 1
    projected = np.minimum(most, level)
    more = np.flatnonzero(most > level)[: total - int(levels[level])]
    projected[more] += 1
    return tuple(int(count) for count in projected)
