"""Attention over latents on a GPU: the kernels that an engine uses there beside the portable ones, and a shared prefix
that is read once beside copies of it.

Times as in tools.gpu.attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from headrace.attention.plan import Plan, Span, build
from headrace.bench.attention_testbed import Heads, decode_spans, private, shared, slots_of
from headrace.kernels.records import Pool, StepInputs
from headrace.kernels.triton import attention
from headrace.kernels.triton.hopper_agreement import PORTABLE
from headrace.types import CHUNK, chunks_for
from tools.gpu import timing
from tools.gpu.attention import ELEMENT, needs
from tools.gpu.runner import Case, Row
from tools.gpu.timing import CUDA, Run

V3 = Heads("latents", 128, 1, 576)
GLM = Heads("latents", 20, 1, 576)
"""Of DeepSeek-V3 and GLM-4.7-Flash."""


def cases() -> Iterator[Case]:
    for heads in (V3, GLM):
        yield Case(f"prefill {heads.heads} heads 8192", partial(prefill, heads, 8192))
        yield Case(f"decode {heads.heads} heads 32x8192", partial(decode, heads, 32, 8192))
        yield Case(f"shared {heads.heads} heads 32 on 8192", partial(on_a_prefix, heads, 32, 8192))


def attending(plan: Plan, heads: Heads, slots: int) -> dict[str, Run]:
    """A plan's work by the kernels that are used here, and by the portable ones: random rows over a random pool."""
    needs(slots * CHUNK * heads.dim * ELEMENT)
    pool = Pool.of([torch.randn(slots, 1, CHUNK, heads.dim, device=CUDA, dtype=torch.bfloat16)], once=True)
    at, row_slots, offsets = (torch.from_numpy(x) for x in (plan.positions, plan.row_slots, plan.row_offsets))
    inputs = StepInputs(
        {None: torch.from_numpy(plan.items)}, at, row_slots, offsets, heads=heads.heads, shape=(slots, 1, heads.dim),
        dtype=torch.bfloat16, scale=heads.dim**-0.5, once=True,
    )  # fmt: skip
    step = attention.TritonStep(inputs, CUDA)
    q = torch.randn(plan.rows, heads.heads, heads.dim, device=CUDA).bfloat16()
    run = partial(step.work[None].run, q, pool, step.masks[None])
    return {"ours": run, "portable": partial(run, ways=PORTABLE)}


def compared(runs: dict[str, Run]) -> dict[str, float]:
    """Milliseconds of each run, and the portable kernels' over ours."""
    found = timing.in_turns(runs)
    figures = {f"{name}_ms": ms for name, ms in found.items()}
    return figures | {"over_portable": found["portable"] / found["ours"]}


def prefill(heads: Heads, rows: int) -> Row:
    """A prompt. Operations are those of both products over 576 numbers."""
    slots = chunks_for(rows)
    figures = compared(attending(build([Span(np.arange(slots, dtype=np.int32), 0, rows)]), heads, slots))
    figures["tflops"] = heads.ops(rows * (rows + 1) // 2) / figures["ours_ms"] / 1e9
    figures["of_gemm"] = figures["tflops"] / timing.gemm_tflops()
    return Row(f"latents, {heads.heads} heads: prefill {rows:,}", figures)


def decode(heads: Heads, sequences: int, length: int) -> Row:
    """One row of each sequence, nothing shared."""
    paths = private(sequences, length)
    figures = compared(attending(build(decode_spans(paths, length)), heads, slots_of(paths)))
    figures["of_read"] = _of_read(sequences * length, heads, figures["ours_ms"])
    return Row(f"latents, {heads.heads} heads: decode {sequences} x {length:,}", figures)


def on_a_prefix(heads: Heads, sequences: int, prefix: int, own: int = CHUNK) -> Row:
    """One row of each sequence: a shared prefix, read once, beside a copy of it for each."""
    length, together = prefix + own, shared([sequences], [prefix], own)
    apart = private(sequences, length)
    runs = attending(build(decode_spans(together, length)), heads, slots_of(together))
    runs["unshared"] = attending(build(decode_spans(apart, length)), heads, slots_of(apart))["ours"]
    figures = compared(runs)
    figures["of_read"] = _of_read(prefix + sequences * own, heads, figures["ours_ms"])
    figures["gain"] = figures["unshared_ms"] / figures["ours_ms"]
    return Row(f"latents, {heads.heads} heads: {sequences} on {prefix:,} + {own}", figures)


def _of_read(keys: int, heads: Heads, ms: float) -> float:
    """Bytes of so many latents, each read once, over what the card reads in that time."""
    return keys * heads.dim * ELEMENT / ms / 1e6 / timing.read_gbps()
