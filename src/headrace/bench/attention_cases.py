"""Cases of `headrace bench attention`: kernels beside torch's, beside themselves unshared, beside the machine.

A case times its runs in turn, the machine's limits among them, over as many layers as leave the caches behind: ours,
torch's scaled_dot_product_attention (in fp32 where torch multiplies that faster), our kernel on private copies
(unshared), our kernel reading shared pages once per sequence (pages), our kernel on bf16 where the case is int8 (bf16).
GB/s count every chunk that the plan names once; FLOP/s count the pairs that the causal mask lets through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from headrace.attention.plan import Plan, Span, build
from headrace.bench.attention_testbed import (
    ELEMENT,
    GQA,
    H64,
    MHA,
    AttentionTestbed,
    Heads,
    chunk_first,
    decode_spans,
    pairs,
    private,
    shared,
    slots_of,
    unmerged,
)  # fmt: skip
from headrace.bench.benchmark import Case
from headrace.bench.limits import Limits, TimedCall, alternate, threads
from headrace.kernels import dispatch, ops, quantized
from headrace.types import CHUNK

CaseFamily = tuple[str, Callable[[], Iterator[Case]]]
"""What the names of some cases begin with, and how to measure these."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured. `scale` divides the lengths of the issue's cases."""

    repeats: int = 7
    scale: int = 1
    sequences: int = 32
    weight: tuple[int, int] = (11008, 4096)
    read_bytes: int = 256 << 20
    gemm_size: int = 2048

    def short(self, tokens: int) -> int:
        """`tokens` on this scale, in whole chunks."""
        return -(-tokens // self.scale // CHUNK) * CHUNK


QUICK = Sizes(repeats=1, scale=32, sequences=4, weight=(256, 128), read_bytes=1 << 20, gemm_size=128)


class AttentionCases:
    """All cases, one after another. `counts`: numbers of threads, the last one being the machine's."""

    def __init__(self, sizes: Sizes, counts: list[int]) -> None:
        self.sizes, self.counts = sizes, counts
        self.limits = Limits(sizes.read_bytes, sizes.gemm_size)
        self.backend = dispatch.choose("auto", torch.bfloat16)

    def machine(self) -> dict[str, Any]:
        """The limits of this machine in this process."""
        return {**self.limits.figures(self.counts, self.sizes.repeats), "backend": self.backend, **_kernel_names()}

    @torch.inference_mode()
    def cases(self, chosen: str = "", begins: Callable[[str], None] = lambda name: None) -> Iterator[Case]:
        """Measures the cases whose names begin with `chosen`, or with one of them, by commas. Raises ValueError for
        beginnings that no case has."""
        wanted, found = _beginnings(chosen), False
        for prefix, run in self.chosen(chosen):
            begins(prefix.rstrip("_"))
            for case in run():
                if case["name"].startswith(wanted):
                    found = True
                    yield case
        if not found:
            raise ValueError(f"--cases {chosen!r}: no case begins so; they begin with decode_, prefill_ or linear_")

    def chosen(self, chosen: str) -> Iterator[CaseFamily]:
        """The families that have such cases."""
        wanted = _beginnings(chosen)
        for family in (self.decode, self.shared, self.tree, self.prefill, self.linear):
            for prefix, run in family():
                if prefix.startswith(wanted) or any(each.startswith(prefix) for each in wanted):
                    yield prefix, run

    def decode(self) -> Iterator[CaseFamily]:
        for heads in (MHA, GQA, H64):
            for sequences, length in ((1, 8192), (16, 2048)):
                yield f"decode_{heads.name}_", partial(self._decode, heads, sequences, length)
                name = f"decode_{heads.name}_{sequences}x{self.sizes.short(length)}_kv8"
                yield name, partial(self._decode_int8, name, heads, sequences, length)

    def shared(self) -> Iterator[CaseFamily]:
        for heads in (MHA, GQA):
            for prefix in (0, 1024, 2048, 4096, 8192):
                yield f"decode_shared_{heads.name}_{prefix}", partial(self._shared, heads, prefix)

    def tree(self) -> Iterator[CaseFamily]:
        for heads in (MHA, GQA):
            yield f"decode_shared_tree_{heads.name}", partial(self._tree, heads)

    def prefill(self) -> Iterator[CaseFamily]:
        for heads in (MHA, GQA, H64):
            for new, cached in ((8192, 0), (512, 8192)):
                yield f"prefill_{heads.name}_", partial(self._prefill, heads, new, cached)

    def linear(self) -> Iterator[CaseFamily]:
        for rows in (1, 4, 16, 64, 256, 2048):
            yield f"linear_{rows}", partial(self._linear, rows)

    def _decode(self, heads: Heads, sequences: int, length: int) -> Iterator[Case]:
        length = self.sizes.short(length)
        paths = private(sequences, length)
        plan = build(decode_spans(paths, length))
        work = RooflineWork(sequences * length * heads.token_bytes, heads.ops(pairs(plan)))
        testbed = AttentionTestbed(heads, slots_of(paths), self.backend, layers=self._layers(work.bytes))
        runs: dict[str, TimedCall] = {
            "ours": testbed.attend(plan),
            "sdpa": self._sdpa(heads, sequences, length, length),
        }
        for count in self.counts:
            yield self._case(f"decode_{heads.name}_{sequences}x{length}", count, runs, work)

    def _decode_int8(self, name: str, heads: Heads, sequences: int, length: int) -> Iterator[Case]:
        """Decoding from int8 keys and values beside bf16 ones: gbps counts the int8 bytes."""
        length = self.sizes.short(length)
        paths = private(sequences, length)
        plan = build(decode_spans(paths, length))
        testbeds = {"ours": torch.int8, "bf16": torch.bfloat16}
        work = RooflineWork(sequences * length * heads.token_bytes_int8, heads.ops(pairs(plan)))
        layers = self._layers(work.bytes)
        runs: dict[str, TimedCall] = {
            run: AttentionTestbed(heads, slots_of(paths), self.backend, stored, layers).attend(plan)
            for run, stored in testbeds.items()
        }
        for count in self.counts:
            case = self._case(name, count, runs, work)
            yield case | {"over_bf16": round(case["bf16_ms"] / case["ours_ms"], 2)}

    def _shared(self, heads: Heads, prefix: int) -> Iterator[Case]:
        """Sequences on one prefix; without a prefix, a kilotoken of their own each: sharing must cost nothing."""
        prefix, own, count = self.sizes.short(prefix), CHUNK if prefix else self.sizes.short(1024), self.counts[-1]
        paths = shared([self.sizes.sequences], [prefix], own)
        plan = build(decode_spans(paths, prefix + own))
        testbed = self._testbed(heads, paths)
        name = f"decode_shared_{heads.name}_{prefix}"
        yield self._compared(name, heads, testbed, paths, prefix + own)
        if prefix:
            first = chunk_first(plan)
            work = RooflineWork(prefix * heads.token_bytes, heads.ops(pairs(first)))
            yield self._case(f"{name}_chunk_first", count, {"ours": testbed.attend(first)}, work)

    def _tree(self, heads: Heads) -> Iterator[Case]:
        """Groups of 8 that share 4,096 tokens, of which the first 1,024 are everyone's."""
        groups, top, within = [max(1, self.sizes.sequences // 8), 8], self.sizes.short(1024), self.sizes.short(3072)
        paths = shared(groups, [top, within], CHUNK)
        testbed = self._testbed(heads, paths)
        yield self._compared(f"decode_shared_tree_{heads.name}", heads, testbed, paths, top + within + CHUNK)

    def _compared(
        self, name: str, heads: Heads, testbed: AttentionTestbed, paths: list[list[int]], length: int
    ) -> Case:
        """A plan that shares, beside private copies, pages read per sequence, and torch.

        of_model: the gain over private copies as a share of what bytes and operations predict, every item taking the
        longer of its bytes at the read rate and its operations at the matrix product's rate.
        """
        plan, alone = build(decode_spans(paths, length)), private(len(paths), length)
        copies = AttentionTestbed(heads, slots_of(alone), self.backend)
        plain = build(decode_spans(alone, length))
        runs: dict[str, TimedCall] = {
            "ours": testbed.attend(plan),
            "unshared": copies.attend(plain),
            "pages": testbed.attend(unmerged(paths, length)),
            "sdpa": self._sdpa(heads, len(paths), length, length, one_copy=True),
        }
        work = RooflineWork(len(plan.items) * CHUNK * heads.token_bytes, heads.ops(pairs(plan)))
        case = self._case(name, self.counts[-1], runs, work)
        gain = case["unshared_ms"] / case["ours_ms"]
        rates = case["read_gbps"] * 1e9, case["gemm_gflops"] * 1e9
        promised = predicted(plain, heads, *rates) / predicted(plan, heads, *rates)
        return case | {"gain": round(gain, 2), "predicted_gain": round(promised, 2), "of_model": _ratio(gain, promised)}

    def _prefill(self, heads: Heads, new: int, cached: int) -> Iterator[Case]:
        new, cached = self.sizes.short(new), self.sizes.short(cached)
        path = private(1, cached + new)
        plan = build([Span(decode_spans(path, 1)[0].slots, cached, new)])
        testbed = AttentionTestbed(heads, slots_of(path), self.backend)
        runs: dict[str, TimedCall] = {
            "ours": testbed.attend(plan),
            "sdpa": self._sdpa(heads, 1, cached + new, cached + 1),
        }
        work = RooflineWork((cached + new) * heads.token_bytes, heads.ops(pairs(plan)))
        name = f"prefill_{heads.name}_{new}" + (f"_on_{cached}" if cached else "")
        yield self._case(name, self.counts[-1], runs, work)

    def _linear(self, rows: int) -> Iterator[Case]:
        out, width = self.sizes.weight
        weight = (torch.randn(out, width) * width**-0.5).bfloat16()
        x = torch.randn(rows, width).bfloat16()
        plain, torchs = partial(ops.linear, x, ops.pack(weight)), partial(F.linear, *self._for_torch(x, weight))
        runs: dict[str, TimedCall] = {"ours": plain, "torch": torchs}
        work = RooflineWork(weight.numel() * ELEMENT, 2 * rows * weight.numel())
        yield self._case(f"linear_{rows}x{width}x{out}", self.counts[-1], runs, work)
        for scheme in (each for each in quantized.FORMATS if each not in quantized.GPU_ALONE):
            packed = ops.pack(weight, scheme)
            runs = {"ours": partial(ops.linear, x, packed), "bf16": plain, "torch": torchs}
            work = RooflineWork(packed.nbytes, 2 * rows * weight.numel())
            yield self._case(f"linear_{rows}x{width}x{out}_{scheme}", self.counts[-1], runs, work)

    def _for_torch(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(each.to(self.limits.type) for each in tensors)

    def _sdpa(self, heads: Heads, sequences: int, length: int, first: int, *, one_copy: bool = False) -> TimedCall:
        """torch's attention of the rows at first .. length of each sequence, causal, on tensors in its own best layout.

        one_copy: all sequences read the same keys and values through stride 0, which favours torch's caches.
        """
        new = length - first + 1
        shape = (1 if one_copy else sequences, heads.kv_heads, length, heads.dim)
        k, v, q = self._for_torch(
            *(torch.randn(shape) for _ in range(2)), torch.randn(sequences, heads.heads, new, heads.dim)
        )
        k, v = (each.expand(sequences, -1, -1, -1) for each in (k, v))
        options: dict[str, Any] = {"enable_gqa": True} if heads.kv_heads != heads.heads else {}
        if new == length:
            options["is_causal"] = True
        elif new > 1:
            options["attn_mask"] = torch.ones(new, length, dtype=torch.bool).tril(first - 1)
        return lambda: F.scaled_dot_product_attention(q, k, v, **options)

    def _testbed(self, heads: Heads, paths: list[list[int]]) -> AttentionTestbed:
        slots = slots_of(paths)
        return AttentionTestbed(heads, slots, self.backend, layers=self._layers(slots * CHUNK * heads.token_bytes))

    def _layers(self, size: int) -> int:
        """How many layers of `size` bytes are more than any cache holds. (One call on less would not only find some of
        it in the cache: after a run that swept the caches, it would wait for Python's own memory.)"""
        return min(8, -(-self.sizes.read_bytes // 2 // size))

    def _case(self, name: str, count: int, runs: Mapping[str, TimedCall], work: RooflineWork) -> Case:
        """Times the runs and the limits in turn on `count` threads."""
        limits: dict[str, TimedCall] = {
            "read": self.limits.read(count), "gemm": self.limits.gemm, "peak": self.limits.peak(count),
        }  # fmt: skip
        with threads(count):
            times = alternate({**runs, **limits}, self.sizes.repeats)
        times = {run: each / getattr(runs.get(run), "calls", 1) for run, each in times.items()}
        read, gemm = self.limits.gbps(times["read"]), self.limits.gflops(times["gemm"])
        peak = self.limits.peak_gflops(times["peak"], count)
        gbps, gflops = work.bytes / times["ours"] / 1e9, work.ops / times["ours"] / 1e9
        measured = {f"{run}_ms": _ms(times.get(run)) for run in dict.fromkeys(("ours", "sdpa", "unshared", *runs))}
        return {
            "name": name, **measured, "gbps": round(gbps, 2), "gflops": round(gflops, 1),
            "of_bandwidth": _ratio(gbps, read), "of_gemm": _ratio(gflops, gemm),
            "of_peak": _ratio(gflops, peak), "threads": count, "read_gbps": round(read, 1),
            "gemm_gflops": round(gemm, 1), "peak_gflops": round(peak, 1),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class RooflineWork:
    """What a case cannot do without: bytes to read once, operations."""

    bytes: int
    ops: int


def _beginnings(chosen: str) -> tuple[str, ...]:
    return tuple(each.strip() for each in chosen.split(","))


def predicted(plan: Plan, heads: Heads, read: float, gemm: float) -> float:
    """Seconds that the items of a decode plan take at these rates, each bound by its bytes or by its operations."""
    rows = plan.items[:, 3] - plan.items[:, 2]
    chunk = CHUNK * heads.token_bytes / read
    return float(sum(max(chunk, heads.ops(int(count) * CHUNK) / gemm) for count in rows))


def _kernel_names() -> dict[str, str]:
    return {f"kernel_{name}": why for name, why in dispatch.reasons().items() if name.startswith(("attend", "linear"))}


def _ms(duration: float | None) -> float | None:
    return None if duration is None else round(1e3 * duration, 4)


def _ratio(value: float, limit: float) -> float:
    return round(value / limit, 3)
