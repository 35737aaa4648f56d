"""KVPR (arXiv 2411.17089) on a GPU and its real link: decoding on K and V in pinned host memory, part of it made again.

    python tools/gpu/kvpr.py [SECONDS]

OPT's shapes with random weights, 32 sequences of 1,024 tokens, bf16; kernels and solver are the engine's. A step passes
LAYERS of a model's layers through two staging buffers, each behind the events of a copy stream and the computation's
own; their time over LAYERS is that of a layer, times the model's layers that of a token. All layers load the same K, V
and X from host memory (no cache holds so much), and two sets of weights take turns, alike in what makes K and V: every
split must give the same bits. The first whole chunks of all sequences come as X and are projected, the others are
loaded; `split` is what the solver (offload.streaming.decode_split) chooses from rates that are measured before, `best`
the best of a sweep.

p: chunks that are projected; T: rows, H: hidden size.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from headrace.attention.plan import Span, build
from headrace.kernels import ops
from headrace.kernels.records import Pool, StepInputs
from headrace.kernels.triton import attention
from headrace.offload.streaming.decode_split import LayerCosts, chunks_to_project
from headrace.types import CHUNK

CUDA = torch.device("cuda", 0)
SEQUENCES, TOKENS, DIM = 32, 1024, 128
LAYERS = 16
"""Layers that are timed together, of a model's 32 to 48: the first and the last are not overlapped."""
BESIDE = (-0.2, -0.1, -0.05, 0.05, 0.1, 0.2)
"""Splits that are tried beside the chosen one, by how much more of the chunks is projected."""
ROUNDS = 3
BF16 = torch.bfloat16
AT_ONCE = 64
"""Chunks that are projected by one product."""


@dataclass(frozen=True, slots=True)
class Shape:
    """hidden: H, of heads of 128, all of which have keys of their own; layers: of the model."""

    name: str
    hidden: int
    layers: int

    @property
    def heads(self) -> int:
        return self.hidden // DIM


SHAPES = (Shape("OPT-6.7B", 4096, 32), Shape("OPT-13B", 5120, 40), Shape("OPT-30B", 7168, 48))


def randn(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, device=CUDA, dtype=BF16).mul_(scale)


class Weights:
    """One layer's matrices, packed as the decoder has them."""

    def __init__(self, hidden: int) -> None:
        scale = hidden**-0.5
        self.qkv, self.out = randn(3 * hidden, hidden, scale=scale), randn(hidden, hidden, scale=scale)
        self.up, self.down = randn(4 * hidden, hidden, scale=scale), randn(hidden, 4 * hidden, scale=scale / 2)
        self.norm, self.zero = torch.ones(hidden, device=CUDA, dtype=BF16), torch.zeros(hidden, device=CUDA, dtype=BF16)

    def normed(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.norm, self.zero)


class Bench:
    """One shape's host memory, staging, weights and plan. Slots go by chunk number, then sequence, so that the first p
    are those that are projected and the others one range of memory: what many copies cost is measured elsewhere."""

    def __init__(self, shape: Shape, sequences: int = SEQUENCES, tokens: int = TOKENS) -> None:
        self.shape, self.sequences, self.numbers = shape, sequences, tokens // CHUNK
        self.chunks = self.numbers * sequences
        heads, hidden = shape.heads, shape.hidden
        self.x, self.k, self.v = (
            torch.empty(self.chunks, *each, dtype=BF16, pin_memory=True)
            for each in ((CHUNK, hidden), (heads, DIM, CHUNK), (heads, CHUNK, DIM))
        )
        self.weights = [Weights(hidden) for _ in range(2)]
        self.weights[1].qkv[hidden:] = self.weights[0].qkv[hidden:]
        self.stage_x = [torch.empty(self.x.shape, dtype=BF16, device=CUDA) for _ in range(2)]
        self.stage = [Pool(*(torch.empty(each.shape, dtype=BF16, device=CUDA) for each in (self.k, self.v)))
                      for _ in range(2)]  # fmt: skip
        self.rows = randn(sequences, hidden)
        self.step = self._step(tokens)
        numbers = torch.arange(self.chunks, dtype=torch.int32, device=CUDA)
        self.slots = numbers.repeat_interleave(CHUNK)
        self.offsets = torch.arange(CHUNK, dtype=torch.int32, device=CUDA).repeat(self.chunks)
        self.copies = torch.cuda.Stream(CUDA)
        self._fill()

    def _fill(self) -> None:
        """Random X, and the K and V that belong to it."""
        self.x.copy_(randn(*self.x.shape))
        self.load_x(0, self.chunks)
        self.project(0, 0, self.chunks)
        for host, pool in zip((self.k, self.v), self.stage[0].tensors, strict=True):
            host.copy_(pool)

    def _step(self, tokens: int) -> attention.TritonStep:
        """Attention of a step in which every sequence has its last token."""
        starts = np.arange(self.numbers, dtype=np.int32) * self.sequences
        plan = build([Span(starts + i, tokens - 1, 1) for i in range(self.sequences)])
        at, slots, offsets = (torch.from_numpy(x) for x in (plan.positions, plan.row_slots, plan.row_offsets))
        shape = (self.chunks, self.shape.heads, DIM)
        inputs = StepInputs(
            {None: torch.from_numpy(plan.items)}, at, slots, offsets, heads=self.shape.heads, shape=shape, dtype=BF16,
            scale=DIM**-0.5,
        )  # fmt: skip
        return attention.TritonStep(inputs, CUDA)

    @property
    def whole(self) -> int:
        """Chunks that may be projected: all but the one that each sequence writes to."""
        return self.chunks - self.sequences

    def load_x(self, buffer: int, p: int) -> None:
        self.stage_x[buffer][:p].copy_(self.x[:p], non_blocking=True)

    def load_kv(self, buffer: int, p: int) -> None:
        for into, source in zip(self.stage[buffer].tensors, (self.k, self.v), strict=True):
            into[p:].copy_(source[p:], non_blocking=True)

    def project(self, layer: int, buffer: int, p: int) -> None:
        """K and V of the first p chunks from their X, into the staging buffer."""
        weights, hidden = self.weights[layer % 2], self.shape.hidden
        matrix = weights.qkv[hidden:]
        for low in range(0, p, AT_ONCE):
            high = min(p, low + AT_ONCE)
            x = weights.normed(self.stage_x[buffer][low:high].view(-1, hidden))
            k, v = ops.linear(x, matrix).view(len(x), 2, -1, DIM).unbind(1)
            rows = slice(low * CHUNK, high * CHUNK)
            attention.append(self.stage[buffer], k, v, self.slots[rows], self.offsets[rows])

    def rest(self, layer: int, buffer: int, x: Tensor) -> Tensor:
        """The layer over the step's rows, x [T, H], whose chunks are staged."""
        weights = self.weights[layer % 2]
        qkv = ops.linear(weights.normed(x), weights.qkv)
        q, k, v = qkv.view(len(x), 3, -1, DIM).unbind(1)
        attended = self.step(self.stage[buffer], q, k, v, None)
        x = x + ops.linear(attended.flatten(1), weights.out)
        return x + ops.linear(F.relu(ops.linear(weights.normed(x), weights.up)), weights.down)

    def run(self, p: int, layers: int = LAYERS) -> tuple[Tensor, torch.cuda.Event, torch.cuda.Event]:
        """A step with p chunks projected: its last states, and events of its begin and its end."""
        compute, x = torch.cuda.current_stream(), self.rows
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        free: list[torch.cuda.Event | None] = [None, None]
        began.record(compute)
        self.copies.wait_event(began)
        for layer in range(layers):
            buffer = layer % 2
            x_there, kv_there, done = (torch.cuda.Event() for _ in range(3))
            with torch.cuda.stream(self.copies):
                if (before := free[buffer]) is not None:
                    self.copies.wait_event(before)
                self.load_x(buffer, p)
                x_there.record(self.copies)
                self.load_kv(buffer, p)
                kv_there.record(self.copies)
            compute.wait_event(x_there)
            self.project(layer, buffer, p)
            compute.wait_event(kv_there)
            x = self.rest(layer, buffer, x)
            done.record(compute)
            free[buffer] = done
        ended.record(compute)
        return x, began, ended

    def layer_ms(self, p: int) -> float:
        _, began, ended = self.run(p)
        torch.cuda.synchronize()
        return began.elapsed_time(ended) / LAYERS

    def costs(self) -> LayerCosts:
        """What the solver is told, by events: the link by half of a layer's K and V, projecting by a quarter of its
        chunks, the rest as it is, each alone."""
        half, some = self.chunks // 2, max(1, self.whole // 4)
        kv, x = (sum(each.nbytes for each in parts) // self.chunks for parts in ((self.k, self.v), (self.x,)))
        link_s = (self.chunks - half) * kv / event_s(partial(self.load_kv, 0, half))
        project_s = event_s(partial(self.project, 0, 0, some)) / some
        compute_s = event_s(lambda: self.rest(0, 0, self.rows))
        return LayerCosts(kv_bytes=kv, x_bytes=x, link_s=link_s, project_s=project_s, compute_s=compute_s)


def event_s(run: Callable[[], object], rounds: int = 5) -> float:
    """Median seconds on the device."""
    found = []
    for _ in range(rounds + 1):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(2_000_000)  # launches wait behind it
        began.record()
        run()
        ended.record()
        torch.cuda.synchronize()
        found.append(began.elapsed_time(ended) / 1e3)
    return statistics.median(found[1:])


def swept(bench: Bench, chosen: int, seconds: float) -> dict[int, list[float]]:
    """Milliseconds of a layer by p, in turns, until the time is over: none, all, the choice and some beside it."""
    beside = [chosen + round(share * bench.chunks) for share in BESIDE]
    counts = sorted({0, chosen, bench.whole, *(min(bench.whole, max(0, p)) for p in beside)})
    found: dict[int, list[float]] = {p: [] for p in counts}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or not all(len(each) >= ROUNDS for each in found.values()):
        for p in counts:
            found[p].append(bench.layer_ms(p))
    return found


Sweep = dict[int, tuple[float, float]]
"""Milliseconds of a layer, measured and predicted, by the chunks that are projected."""


def measured(shape: Shape, seconds: float) -> tuple[dict[str, Any], Sweep]:
    """One row of the table, and its sweep. Raises AssertionError where a split gives other bits."""
    bench = Bench(shape)
    costs = bench.costs()
    chosen = chunks_to_project(bench.chunks, bench.whole, costs)
    loaded, split = (bench.run(p)[0] for p in (0, chosen))
    torch.cuda.synchronize()
    assert torch.equal(loaded, split), f"{chosen} projected chunks give other bits"
    found = {p: statistics.median(each) for p, each in swept(bench, chosen, seconds).items()}
    best = min(found, key=lambda p: found[p])
    predicted = {p: float(costs.seconds(np.array([p]), bench.chunks)[0]) * 1e3 for p in found}
    return {
        "shape": shape.name, "chunks": bench.chunks, "split": chosen, "best": best,
        "link_gbps": costs.link_s / 1e9, "project_tflops": 4 * CHUNK * shape.hidden**2 / costs.project_s / 1e12,
        "rest_ms": costs.compute_s * 1e3,
        "all_loaded_ms": found[0], "split_ms": found[chosen], "best_ms": found[best],
        "predicted_ms": predicted[chosen], "predicted_all_loaded_ms": predicted[0],
        "token_ms": found[chosen] * shape.layers, "token_all_loaded_ms": found[0] * shape.layers,
        "less": 1 - found[chosen] / found[0], "over_best": found[chosen] / found[best] - 1,
        "prediction": predicted[chosen] / found[chosen] - 1,
    }, {p: (found[p], predicted[p]) for p in found}  # fmt: skip


def table(seconds: float) -> dict[str, Any]:
    """Rows of all shapes, measured in about so many seconds beside what allocating takes."""
    rows, sweeps = [], {}
    for shape in SHAPES:
        row, sweeps[shape.name] = measured(shape, seconds / len(SHAPES))
        rows.append(row)
        torch.cuda.empty_cache()
    given = {"device": torch.cuda.get_device_name(CUDA), "sequences": SEQUENCES, "tokens": TOKENS}
    return {**given, "rows": rows, "sweeps_ms": sweeps}


def told(row: dict[str, Any]) -> str:
    return (
        f"{row['shape']:9} link {row['link_gbps']:.1f} GB/s, projecting {row['project_tflops']:.0f} TFLOP/s, rest "
        f"{row['rest_ms']:.2f} ms | all loaded {row['all_loaded_ms']:.2f} ms a layer, split of {row['split']} of "
        f"{row['chunks']} chunks {row['split_ms']:.2f} ({row['less']:.1%} less; {row['over_best']:+.1%} over the best, "
        f"{row['best']}), predicted {row['predicted_ms']:.2f} ({row['prediction']:+.1%})"
    )


def warm() -> None:
    """Compiles what the table runs."""
    for shape in SHAPES:
        bench = Bench(shape, sequences=2)
        loaded, made = bench.run(0, 2)[0], bench.run(bench.whole, 2)[0]
        torch.cuda.synchronize()
        assert torch.equal(loaded, made), shape


def main(seconds: float) -> None:
    found = table(seconds)
    print(found["device"])
    for row in found["rows"]:
        print(told(row))
    print(json.dumps(found))


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 12.0)
