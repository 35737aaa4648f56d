"""Long contexts on one GPU: planted facts among 128k and 1M tokens, and pools and outputs beyond 2**31 elements.

The facts are found by a model made for it (tools.gpu.lookup_model). The shipped one finds nine of ten at 8,192 tokens
and takes 16,384 at most (docs/tiny.md): it is asked within these.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace import LLM
from headrace.assets.facts import fact_document, question
from headrace.attention.plan import Span, build
from headrace.bench.attention_testbed import GQA, Heads
from headrace.kernels import ops
from headrace.kernels.records import Mask, Pool
from headrace.kernels.triton import backend
from headrace.types import CHUNK, chunks_for
from tools.gpu import lookup_model, sessions
from tools.gpu.attention import ELEMENT, needs
from tools.gpu.engine import release
from tools.gpu.models import USUAL
from tools.gpu.runner import Case, Goal, LeftOut, Row
from tools.gpu.timing import CUDA, event_ms

ELEMENTS = 1 << 31
OUTSIDE: dict[str, Any] = {
    "kv_cache_tokens": None, "offload_schedule": "row", "kv_offloading_size": 0.3, "offload_staging_mb": 700,
}  # fmt: skip
"""All keys and values lie in host memory; a GPU stages those of the model's only layer."""
CONTEXTS = {"128k": 1 << 17, "1M": 1 << 20}


def cases() -> Iterator[Case]:
    yield Case("pool beyond 2**31", far_slots)
    yield Case("outputs beyond 2**31", far_outputs)
    yield Case("attention at 1M", far_positions)
    yield Case("facts in 128k", partial(facts, "128k"))
    yield Case("facts in 1M", partial(facts, "1M"))
    yield Case("facts in 1M, int8 KV", partial(facts, "1M", kv_cache_dtype="int8"))
    yield Case("facts in 1M, restored", partial(facts, "1M", restored=True, kv_offloading_size=0.5))
    yield Case("facts in 1M, KV outside", partial(facts, "1M", **OUTSIDE))
    yield Case("facts, shipped model", shipped)
    release()


@torch.inference_mode()
def far_slots(heads: Heads = GQA, length: int = 700, rows: int = 130) -> Row:
    """Stores and attends at the far end of a pool of more than 2**31 elements: the bits of a small pool."""
    chunk = heads.kv_heads * heads.dim * CHUNK
    count = chunks_for(length)
    slots = ELEMENTS // chunk + count + 1
    needs(2 * slots * chunk * ELEMENT)
    far, near = (empty_pool(each, heads) for each in (slots, count))
    k, v = (torch.randn(length, heads.kv_heads, heads.dim, device=CUDA).bfloat16() for _ in range(2))
    q = torch.randn(rows, heads.heads, heads.dim, device=CUDA).bfloat16()
    found = [attended(pool, first, q, k, v) for pool, first in ((far, slots - count), (near, 0))]
    for ours, small in zip(far.tensors, near.tensors, strict=True):
        assert torch.equal(ours[-count:], small), "what was stored lies elsewhere"
    assert torch.equal(*found), "bits differ at the far end of the pool"
    return Row("pool beyond 2**31", {"elements": slots * chunk, "rows_equal": rows})


def empty_pool(slots: int, heads: Heads, dtype: torch.dtype = torch.bfloat16) -> Pool:
    tails = ((heads.dim, CHUNK), (CHUNK, heads.dim))
    return Pool(*(torch.zeros(slots, heads.kv_heads, *tail, device=CUDA, dtype=dtype) for tail in tails))


def attended(pool: Pool, first: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Stores k and v [T, Hkv, D] in the chunks from slot `first` on; attention of the last rows q [R, Hq, D]."""
    length = len(k)
    places = torch.arange(length, dtype=torch.int32)
    backend.append(pool, k, v, first + places // CHUNK, places % CHUNK)
    table = np.arange(first, first + chunks_for(length), dtype=np.int32)
    plan = build([Span(table, length - len(q), len(q))])
    items, positions = torch.from_numpy(plan.items), torch.from_numpy(plan.positions)
    return backend.attend(q, pool, Mask(items, positions, scale=q.shape[-1] ** -0.5))


@torch.inference_mode()
def far_outputs(inputs: int = 64, outputs: int = 128_256) -> Row:
    """A product of more than 2**31 numbers: its last rows have the bits that they have alone."""
    rows = ELEMENTS // outputs + 65
    needs(2 * rows * outputs * ELEMENT)
    x, weight = (torch.randn(*size, device=CUDA).bfloat16() for size in ((rows, inputs), (outputs, inputs)))
    packed = ops.pack(weight)
    assert torch.equal(ops.linear(x, packed)[-64:], ops.linear(x[-64:], packed)), "bits differ in the last rows"
    return Row("outputs beyond 2**31", {"elements": rows * outputs})


@torch.inference_mode()
def far_positions(
    heads: Heads = GQA, length: int = CONTEXTS["1M"], rows: int = 8192, dtype: torch.dtype = torch.bfloat16
) -> Row:
    """The last rows of a million tokens in one step of prefill, and the last one alone, decoded: the same bits."""
    slots = chunks_for(length)
    needs(2 * slots * CHUNK * heads.kv_heads * heads.dim * ELEMENT)
    pool = empty_pool(slots, heads, dtype)
    for each in pool.tensors:
        each.normal_()
    q = torch.randn(rows, heads.heads, heads.dim, device=CUDA, dtype=dtype)
    prefill, decode = (partial(last_rows, pool, q[-count:], length) for count in (rows, 1))
    assert torch.equal(prefill()[-1:], decode()), "a decoded row has other bits than a prefilled one"
    ms = {name: event_ms(run, flush=False) for name, run in (("prefill_ms", prefill), ("decode_ms", decode))}
    read = sum(each.nbytes for each in pool.tensors) / ms["decode_ms"] / 1e6
    return Row(f"attention at {length:,} tokens, {rows:,} rows", {**ms, "decode_gbps": read})


def last_rows(pool: Pool, q: torch.Tensor, length: int) -> torch.Tensor:
    """Attention of the last rows q [R, Hq, D] of a sequence that has all of the pool."""
    plan = build([Span(np.arange(len(pool.k), dtype=np.int32), length - len(q), len(q))])
    items, positions = torch.from_numpy(plan.items), torch.from_numpy(plan.positions)
    return backend.attend(q, pool, Mask(items, positions, scale=q.shape[-1] ** -0.5))


def facts(name: str, restored: bool = False, **settings: Any) -> Row:
    """Facts planted from the first token of a context to its last, each asked for; restored: when the pool has been
    emptied into the tier below. Raises AssertionError for a wrong answer, LeftOut where the settings are refused."""
    length = CONTEXTS[name]
    with tempfile.TemporaryDirectory() as folder:
        lookup_model.write(Path(folder), 2 * length)
        room = {"kv_cache_tokens": length + 64 * CHUNK, "max_batch_tokens": 8192, "max_sequences": 16}
        try:
            llm = LLM(folder, **{**USUAL, **room, **settings})
        except ValueError as why:
            raise LeftOut(str(why)) from None
    with llm:
        text = lookup_model.haystack(length - 1)
        began = time.perf_counter()
        sessions.run(llm, [text.tokens], sessions.answers(1))
        read_s = time.perf_counter() - began
        if restored:
            empty(llm)
        asked = [[*text.tokens, lookup_model.question(number)] for number in range(lookup_model.NAMES)]
        began = time.perf_counter()
        outputs = llm.generate(asked, sessions.answers(1))
        asked_s = time.perf_counter() - began
    if restored:
        back = min(output.metrics.cached_tokens for output in outputs)
        assert back > length - 2 * CHUNK, f"{back:,} tokens were restored or shared, the others computed"
    told = [output.token_ids[0] for output in outputs]
    wrong = text.wrong(told)
    assert not wrong, f"wrong answers for the facts {wrong} of {len(text.values)}"
    kind = "".join(f", {key} {value}" for key, value in settings.items()) + (", restored" if restored else "")
    figures = {"facts": len(told), "read_s": read_s, "read_tok_s": length / read_s, "asked_s": asked_s}
    return Row(f"facts in {length:,} tokens{kind}", figures)


def empty(llm: LLM) -> None:
    """Empties the pool once all is stored below it."""
    below = llm.engine.offload
    assert below is not None and below.writeback.wait(60) and below.tiers.flush(60), "not all is stored after a minute"
    llm.engine.cache.tree.clear()


def shipped(prompts: int = 8, lengths: tuple[int, ...] = (1024, 4096, 8192)) -> list[Row]:
    """One fact each in texts of these lengths, asked of the shipped model: the share of right answers."""
    rows = []
    with LLM("tiny", **{**USUAL, "kv_cache_tokens": prompts * 16_384}) as llm:
        for length in lengths:
            texts, codes = [], []
            for seed in range(prompts):
                text, planted = fact_document(random.Random(seed), n_facts=1, n_tokens_hint=length)
                ((name, code),) = planted.items()
                texts.append(f"{text} {question(name)}")
                codes.append(code)
            told = [output.text for output in llm.generate(texts, sessions.answers(6))]
            right = sum(answer.strip().startswith(code) for answer, code in zip(told, codes, strict=True)) / prompts
            rows.append(Row(f"shipped model, {length:,} tokens", {"right": right}, (Goal("right", 0.9),)))
    return rows
