"""Attention on a GPU: sequences on a shared prefix, on copies of their own, and torch's attention on the same work.

    python tools/gpu/attention.py FILE

Times are of the kernels (CUDA events behind a busy GPU, caches emptied before each), medians of 11. FILE takes the
result.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from headrace.attention.plan import Plan, Span, batch_order, build
from headrace.bench.result import machine
from headrace.kernels.records import Mask, Pool
from headrace.kernels.triton import attention
from headrace.types import CHUNK

CUDA = torch.device("cuda", 0)
SHAPES = {"mha": (32, 32, 128), "gqa": (32, 8, 128), "h64": (32, 32, 64)}
"""Query heads, KV heads, head size."""
MOST_BYTES = 40 << 30
"""Of keys and values: larger cases are left out."""


def timed(run: Callable[[], object], rounds: int = 11) -> float:
    """Milliseconds."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device=CUDA)
    for _ in range(3):
        run()
    found = []
    for _ in range(rounds):
        flush.zero_()
        torch.cuda.synchronize()
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(400_000)  # launches wait behind it
        began.record()
        run()
        ended.record()
        torch.cuda.synchronize()
        found.append(began.elapsed_time(ended))
    return sorted(found)[rounds // 2]


def limits() -> dict[str, float]:
    """What the GPU reads and multiplies at best."""
    data = torch.zeros(1 << 29, device=CUDA)
    read = data.nbytes / timed(data.sum) / 1e6
    a = torch.randn(8192, 8192, device=CUDA).bfloat16()
    return {"read_gbps": round(read), "gemm_tflops": round(2 * 8192**3 / timed(lambda: a @ a) / 1e9)}


def decoding(prefix: int, own: int, sequences: int, shared: bool) -> tuple[Plan, int]:
    """The plan of a step of decoding, and how many chunks it names."""
    common, mine = -(-prefix // CHUNK), -(-own // CHUNK)
    slot, spans = common if shared else 0, []
    for _ in range(sequences):
        width = mine if shared else common + mine
        table = [*(range(common) if shared else ()), *range(slot, slot + width)]
        slot += width
        spans.append(Span(np.array(table, np.int32), prefix + own - 1, 1))
    order = batch_order([span.slots for span in spans])
    return build([spans[i] for i in order]), slot


def ours(plan: Plan, slots: int, heads: int, kv_heads: int, dim: int) -> float:
    k, v = (
        torch.randn(slots, kv_heads, *tail, device=CUDA, dtype=torch.bfloat16) for tail in ((dim, CHUNK), (CHUNK, dim))
    )
    q = torch.randn(plan.rows, heads, dim, device=CUDA).bfloat16()
    items, positions = torch.from_numpy(plan.items), torch.from_numpy(plan.positions)
    work = attention.TileWork(items, positions, heads, kv_heads, dim, CUDA)
    mask = Mask(items, positions.int().to(CUDA), scale=dim**-0.5)
    return timed(lambda: work.run(q, Pool(k, v), mask))


def theirs(sequences: int, rows: int, keys: int, heads: int, kv_heads: int, dim: int) -> float:
    q = torch.randn(sequences, heads, rows, dim, device=CUDA).bfloat16()
    k, v = (torch.randn(sequences, kv_heads, keys, dim, device=CUDA, dtype=torch.bfloat16) for _ in range(2))
    mask = causal_lower_right(rows, keys) if rows > 1 else None
    grouped = kv_heads != heads
    return timed(lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped))


def decode(shape: str, prefix: int, own: int, sequences: int) -> dict[str, Any]:
    heads, kv_heads, dim = SHAPES[shape]
    chunk, ops = kv_heads * dim * CHUNK * 4, 4 * sequences * heads * dim * (prefix + own)
    plan, slots = decoding(prefix, own, sequences, True)
    ms = ours(plan, slots, heads, kv_heads, dim)
    case = {"ours_ms": ms, "gbps": slots * chunk / ms / 1e6, "tflops": ops / ms / 1e9}
    apart, copies = decoding(prefix, own, sequences, False)
    if prefix and copies * chunk <= MOST_BYTES:
        case["unshared_ms"] = ours(apart, copies, heads, kv_heads, dim)
        case["gain"] = case["unshared_ms"] / ms
    if copies * chunk <= MOST_BYTES:
        case["sdpa_ms"] = theirs(sequences, 1, prefix + own, heads, kv_heads, dim)
    return {"name": f"decode_{shape}_{sequences}x({prefix}+{own})", **case}


def prefill(shape: str, cached: int, new: int) -> dict[str, Any]:
    heads, kv_heads, dim = SHAPES[shape]
    slots = -(-(cached + new) // CHUNK)
    ms = ours(build([Span(np.arange(slots, dtype=np.int32), cached, new)]), slots, heads, kv_heads, dim)
    ops = 4 * heads * dim * (new * cached + new * new / 2)
    sdpa = theirs(1, new, cached + new, heads, kv_heads, dim)
    return {"name": f"prefill_{shape}_{new}_on_{cached}", "ours_ms": ms, "tflops": ops / ms / 1e9, "sdpa_ms": sdpa}


def main() -> None:
    cases = []
    found = limits()
    for shape in SHAPES:
        decodes = [(0, 8192, 1), (0, 65_536, 1), (0, 2048, 16), *((prefix, 64, 32) for prefix in (1024, 8192, 32_768))]
        for case in (*(decode(shape, *each) for each in decodes), prefill(shape, 0, 8192), prefill(shape, 8192, 512)):
            cases.append({name: round(x, 3) if isinstance(x, float) else x for name, x in case.items()})
            print(cases[-1], flush=True)
    command = "python tools/gpu/attention.py " + sys.argv[1]
    when = datetime.now(UTC).isoformat(timespec="seconds")
    content = {"date": when, "machine": machine() | found, "command": command, "cases": cases}
    Path(sys.argv[1]).write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
