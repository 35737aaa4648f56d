"""Finds which kernel of int8 keys and values fails on a GPU: an engine with them ended by an illegal access of memory
on an H200, in a replayed step, and the setting is refused since.

    python -m tools.gpu.int8_kv

Each step runs in a process of its own, all at once: an illegal access ends all CUDA work of a process, and of no other.
The smallest that fails runs again with launches that are waited for (whether it is a race), and under
compute-sanitizer, where there is one: that names the kernel, the address and the thread. `python -m tools.gpu.int8_kv
STEP` runs one. T: rows of a recording.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from headrace import LLM
from headrace.config import combinations
from headrace.device import current
from headrace.kernels import reference
from headrace.kernels.backend import GraphSizes
from headrace.kernels.records import Pool
from headrace.kernels.triton import layer_check
from headrace.kernels.triton.attention import append
from headrace.kernels.triton.graph_step import ROUNDS, GraphMemory, TritonGraphStep
from headrace.kernels.triton.heads import Heads
from headrace.types import CHUNK
from tests.support.traces import prompts_of, run, same
from tools.gpu.bits import eager_steps
from tools.gpu.processes import end_by_signal, ended, started

HEADS = Heads(8, 4, 32)
"""The shipped model's."""
COMPUTED = torch.bfloat16
CHUNKS, KEYS = 40, 700
SECONDS, SANITIZED_SECONDS = 40.0, 90.0
"""For one step, in which kernels are compiled; under compute-sanitizer, with these kernels from the cache."""
LATE = 124
"""Exit status of what took longer."""


def stored() -> None:
    """The kernel that rounds and stores: the codes and scales of the reference."""
    ours, plain = _pools()
    k, v, slots, offsets = _rows(CHUNKS * CHUNK)
    append(ours, k.to(current().place), v.to(current().place), slots, offsets)
    reference.append(plain, k, v, slots, offsets)
    for mine, theirs in zip(ours.tensors, plain.tensors, strict=True):
        assert torch.equal(mine.cpu(), theirs), "codes or scales differ"


def attended() -> None:
    """Both ways of attention, launched, beside plain torch."""
    variant = layer_check.Variant(HEADS, COMPUTED, torch.int8, None, None, False, HEADS.dim**-0.5)
    layer_check.check(variant, current().place)


def launched(replayed: bool = False) -> None:
    """A layer of a step as graphs record it: more programs than tasks, rows of padding; one round, then all."""
    pool, _ = _pools()
    k, v, slots, offsets = _rows(KEYS)
    place = current().place
    append(pool, k.to(place), v.to(place), slots, offsets)
    sizes = GraphSizes(4, 0, 1024, frozenset([None]), HEADS.heads, pool.shape, torch.int8, COMPUTED, 0.2)
    step = TritonGraphStep(GraphMemory.of(sizes, None), 4)
    heads = torch.randn(4, HEADS.heads + 2 * HEADS.kv_heads, HEADS.dim, device=place).to(COMPUTED)
    q, k, v = heads.split((HEADS.heads, HEADS.kv_heads, HEADS.kv_heads), dim=1)
    for rounds in (1, ROUNDS):
        run = _layer(step, rounds, pool, q, k, v)
        out = run()  # no rows: tasks are none, and all else is padding
        graph = current().graph(run)[0] if replayed else None
        rows = np.array([KEYS - 1, KEYS - 1], np.int64)
        items = np.array([[n, CHUNK * n, 0, 2] for n in range(-(-KEYS // CHUNK))], np.int32)
        last = np.array([items[-1, 0], -1], np.int32)
        assert step.fill({None: items}, rows, last) is not None
        step.send([0, 0], rows, (rows % CHUNK).astype(np.int32))
        truth = run().clone()
        out.zero_()
        graph.replay() if graph is not None else run()
        current().synchronize()
        assert torch.equal(out[:2], truth[:2]) and truth[:2].isfinite().all(), "replayed and launched differ"
        step.clear()
        current().synchronize()


def engine(rows: int, eager: bool = False, engines: int = 1) -> None:
    """The shipped model: prompts together and alone. engines: one after another in this process."""
    allowed = tuple(each for each in combinations.EXCLUSIONS if {each.one, each.other} != {"gpu", "int8_kv"})
    with patch.object(combinations, "EXCLUSIONS", allowed):
        for _ in range(engines):
            llm = LLM(
                "tiny", attention_backend="triton", dtype="bfloat16", kv_cache_dtype="int8", kv_cache_tokens=40_000,
                max_sequences=rows,
            )  # fmt: skip
            executor: Any = llm.engine.loaded.executor
            prompts = prompts_of(llm)[-rows:]
            with eager_steps(executor) if eager else nullcontext():
                together = run(llm, prompts)
                llm.engine.cache.tree.clear()
                same(run(llm, prompts[:1]), together[:1])


STEPS: dict[str, Callable[[], None]] = {
    "stored": stored,
    "attended": attended,
    "launched": launched,
    "replayed": lambda: launched(replayed=True),
    "engine_launched": lambda: engine(1, eager=True),
    "engine_of_one_row": lambda: engine(1),
    "engine_of_16_rows": lambda: engine(16),
    "three_engines": lambda: engine(16, engines=3),
}
"""The smallest first."""


def _pools() -> tuple[Pool, Pool]:
    def on(place: torch.device) -> Callable[[Any, torch.dtype], Tensor]:
        return lambda shape, dtype: torch.zeros(shape, dtype=dtype, device=place)

    shape = (CHUNKS, HEADS.kv_heads, HEADS.dim, torch.int8)
    return Pool.make(*shape, on(current().place)), Pool.make(*shape, on(torch.device("cpu")))


def _rows(count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """k, v [T, Hkv, D], and their slots and offsets."""
    generator = torch.Generator().manual_seed(1)
    k, v = (torch.randn(count, HEADS.kv_heads, HEADS.dim, generator=generator).to(COMPUTED) for _ in range(2))
    at = torch.arange(count, dtype=torch.int32)
    return k, v, at // CHUNK, at % CHUNK


def _layer(step: TritonGraphStep, rounds: int, pool: Pool, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    return lambda: step.layers(rounds, 4)(pool, q, k, v, None)


class Apart:
    """A step in a process of its own, from now on. before: what runs it. waited: each launch is waited for, which would
    hide a race, and tells which one failed."""

    def __init__(self, name: str, *before: str, waited: bool = False) -> None:
        environment = os.environ | ({"CUDA_LAUNCH_BLOCKING": "1"} if waited else {})
        self.command = [*before, sys.executable, "-m", "tools.gpu.int8_kv", name]
        self.began = time.monotonic()
        self.output = tempfile.TemporaryFile("w+")  # noqa: SIM115 - until `done` has read it
        self.process = started(self.command, env=environment, stdout=self.output, stderr=subprocess.STDOUT)

    def done(self, seconds: float = SECONDS) -> subprocess.CompletedProcess[str]:
        """Waits until so many seconds after the beginning; what runs then is ended."""
        try:
            status = self.process.wait(max(0.1, self.began + seconds - time.monotonic()))
        except subprocess.TimeoutExpired:
            status = LATE
        self.end()
        self.output.seek(0)
        return subprocess.CompletedProcess(self.command, status, self.output.read())

    def end(self) -> None:
        """Ends what runs, a sanitizer's too."""
        ended(self.process)


def main() -> int:
    """The exit status: 1 where a step fails."""
    end_by_signal()
    with ExitStack() as ending:

        def begun(name: str, *before: str, waited: bool = False) -> Apart:
            made = Apart(name, *before, waited=waited)
            ending.callback(made.end)
            return made

        running = {name: begun(name) for name in STEPS}
        failed = None
        for name, step in running.items():
            done = step.done()
            print(f"{name}: {told(done)}", flush=True)
            if done.returncode and failed is None:
                failed = name
                print(done.stdout[-3000:], flush=True)
        if failed is None:
            return 0
        again = begun(failed, waited=True).done()
        print(f"{failed}, each launch waited for: {told(again)}\n{again.stdout[-1500:]}", flush=True)
        if sanitizer := shutil.which("compute-sanitizer"):
            named = begun(failed, sanitizer, "--print-limit", "3").done(SANITIZED_SECONDS)
            print(f"{failed}, under compute-sanitizer: {told(named)}\n{named.stdout[-6000:]}", flush=True)
    return 1


def told(done: subprocess.CompletedProcess[str]) -> str:
    """'right', or how it ended."""
    if done.returncode == 0:
        return "right"
    return "took too long" if done.returncode == LATE else f"failed (status {done.returncode})"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        STEPS[sys.argv[1]]()
    else:
        sys.exit(main())
