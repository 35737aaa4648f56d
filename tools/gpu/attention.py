"""Attention on a GPU beside torch's, each of its backends by name, and beside copies of what is shared.

Times are of the kernels, the calls in turns, caches emptied before each (tools.gpu.timing).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from headrace.attention.plan import Plan, Span, build
from headrace.bench.attention_testbed import GQA, H64, MHA, Heads, decode_spans, private, shared, slots_of
from headrace.kernels.records import Pool, StepInputs
from headrace.kernels.triton import attention
from headrace.types import CHUNK, chunks_for
from tools.gpu import timing
from tools.gpu.runner import Case, Goal, LeftOut, Row
from tools.gpu.timing import CUDA, Run

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
PREFILL_GOALS = (Goal("of_best", 0.65), Goal("of_best", 0.9))
UNSHARED_GOAL = (Goal("of_best", 1.0),)
LONG_GOAL = (Goal("of_read", 0.7),)
ELEMENT = 2
"""Bytes of a bf16 number."""


def cases() -> Iterator[Case]:
    for heads in (MHA, GQA, H64):
        goals = PREFILL_GOALS if heads is not H64 else ()
        yield Case(f"prefill {heads.name} 8192", partial(prefill, heads, 0, 8192, goals))
    yield Case("decode gqa 1x65536", partial(decode, GQA, 1, 65_536, LONG_GOAL))
    for heads in (MHA, GQA, H64):
        for sequences, length in ((16, 2048), (32, 8192)):
            name = f"decode {heads.name} {sequences}x{length}"
            yield Case(name, partial(decode, heads, sequences, length, UNSHARED_GOAL))
    for heads in (MHA, GQA):
        yield Case(f"decode {heads.name} 1x8192", partial(decode, heads, 1, 8192, UNSHARED_GOAL))
    yield Case("decode mha 1x65536", partial(decode, MHA, 1, 65_536, ()))
    for heads in (MHA, GQA, H64):
        for prefix in (8192, 1024):
            yield Case(f"shared {heads.name} 32 on {prefix}", partial(on_a_prefix, heads, 32, prefix))
        yield Case(f"prefill {heads.name} 512 on 8192", partial(prefill, heads, 8192, 512, ()))


def attending(plan: Plan, heads: Heads, pool: Pool) -> Run:
    """Our kernels, given a plan whose work lies on the device: random rows attend over the pool."""
    at, slots, offsets = (torch.from_numpy(x) for x in (plan.positions, plan.row_slots, plan.row_offsets))
    inputs = StepInputs(
        {None: torch.from_numpy(plan.items)}, at, slots, offsets, heads=heads.heads,
        shape=(len(pool.k), heads.kv_heads, heads.dim), dtype=torch.bfloat16, scale=heads.dim**-0.5,
    )  # fmt: skip
    step = attention.TritonStep(inputs, CUDA)
    q = torch.randn(plan.rows, heads.heads, heads.dim, device=CUDA).bfloat16()
    return partial(step.work[None].run, q, pool, step.masks[None])


def drawn_pool(slots: int, heads: Heads) -> Pool:
    """Random keys and values: [slots, Hkv, D, 64] and [slots, Hkv, 64, D]."""
    needs(2 * slots * CHUNK * heads.kv_heads * heads.dim * ELEMENT)
    shapes = ((heads.dim, CHUNK), (CHUNK, heads.dim))
    return Pool(*(torch.randn(slots, heads.kv_heads, *tail, device=CUDA, dtype=torch.bfloat16) for tail in shapes))


def needs(count: int) -> None:
    """Raises LeftOut where the GPU has not so many bytes left."""
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(CUDA)[0]
    if count > 0.95 * free:
        raise LeftOut(f"needs {count / 2**30:.0f} GiB, {free / 2**30:.0f} are free")


def sdpa_runs(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Run]:
    """torch's attention by each backend that takes this work. q [S, Hq, R, D], k and v [S, Hkv, T, D], the rows being
    the last ones of T."""
    runs = {name: partial(_sdpa, backend, q, k, v) for name, backend in BACKENDS.items()}
    return {name: run for name, run in runs.items() if _takes(run)}


def _takes(run: Run) -> bool:
    with warnings.catch_warnings(action="ignore"):  # they say why not
        try:
            run()
        except RuntimeError:
            return False
    return True


def _sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows, keys, grouped = q.shape[2], k.shape[2], q.shape[1] != k.shape[1]
    with sdpa_kernel(backend):
        if rows == keys:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        mask = causal_lower_right(rows, keys) if rows > 1 else None
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)


def copies(sequences: int, rows: int, keys: int, heads: Heads) -> dict[str, Run]:
    """torch's attention of random rows, each sequence with keys and values of its own."""
    needs(2 * sequences * keys * heads.kv_heads * heads.dim * ELEMENT)
    q = torch.randn(sequences, heads.heads, rows, heads.dim, device=CUDA).bfloat16()
    k, v = (
        torch.randn(sequences, heads.kv_heads, keys, heads.dim, device=CUDA, dtype=torch.bfloat16) for _ in range(2)
    )
    return sdpa_runs(q, k, v)


def compared(runs: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Milliseconds of each run, and the best other one over ours."""
    found = timing.in_turns(runs)
    figures = {f"{name}_ms": ms for name, ms in found.items()}
    others = [ms for name, ms in found.items() if name in BACKENDS]
    return figures | ({"of_best": min(others) / found["ours"]} if others else {})


def prefill(heads: Heads, cached: int, new: int, goals: tuple[Goal, ...]) -> Row:
    """The last `new` tokens of one sequence."""
    slots = chunks_for(cached + new)
    plan = build([Span(np.arange(slots, dtype=np.int32), cached, new)])
    runs = {"ours": attending(plan, heads, drawn_pool(slots, heads)), **copies(1, new, cached + new, heads)}
    figures = compared(runs)
    ops = heads.ops(new * cached + new * (new + 1) // 2)
    figures["tflops"] = ops / figures["ours_ms"] / 1e9
    figures["of_gemm"] = figures["tflops"] / timing.gemm_tflops()
    return Row(f"prefill {heads.name} {new:,} on {cached:,}", figures, goals)


def decode(heads: Heads, sequences: int, length: int, goals: tuple[Goal, ...]) -> Row:
    """One row of each sequence, nothing shared."""
    paths = private(sequences, length)
    plan = build(decode_spans(paths, length))
    runs = {"ours": attending(plan, heads, drawn_pool(slots_of(paths), heads)), **copies(sequences, 1, length, heads)}
    figures = compared(runs)
    figures["of_read"] = _of_read(sequences * length, heads, figures["ours_ms"])
    return Row(f"decode {heads.name} {sequences} x {length:,}", figures, goals)


def on_a_prefix(heads: Heads, sequences: int, prefix: int, own: int = CHUNK) -> Row:
    """One row of each sequence: a shared prefix, read once, beside a copy of it for each."""
    length, together = prefix + own, shared([sequences], [prefix], own)
    apart = private(sequences, length)
    plans = {"ours": together, "unshared": apart}
    runs: dict[str, Run] = {
        name: attending(build(decode_spans(paths, length)), heads, drawn_pool(slots_of(paths), heads))
        for name, paths in plans.items()
    }
    figures = compared(runs | copies(sequences, 1, length, heads))
    figures["of_read"] = _of_read(prefix + sequences * own, heads, figures["ours_ms"])
    figures["gain"] = figures["unshared_ms"] / figures["ours_ms"]
    return Row(f"shared {heads.name} {sequences} on {prefix:,} + {own}", figures)


def _of_read(keys: int, heads: Heads, ms: float) -> float:
    """Bytes of so many keys and values, each read once, over what the card reads in that time."""
    return keys * heads.token_bytes / ms / 1e6 / timing.read_gbps()
