"""How long the host takes for a step that is launched one kernel at a time, on a machine without a GPU:

    python -m tests.support.launched_steps [--profile] [--layers N]

S1's shape with drawn weights on the fake device, kernels compiled for an H100 and launched into a stub of the driver
(stub_driver): whatever the host does for a step, but for torch's own operations, which are the CPU's. Prints
milliseconds that a core is busy with a step; run it in turns with what is to be compared.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace import LLM, SamplingParams
from headrace.bench.shapes import SHAPES, CheckpointShape
from headrace.engine.programs import Eager, Logits, StepRows
from headrace.engine.runner import Runner
from headrace.kernels.triton import agreement, attention, hopper, hopper_agreement, products, rows, tiles
from headrace.types import Request
from tests.support.fake_device import fake_device
from tests.support.stub_driver import stub_driver
from tools.gpu.models import drawn_model

CPU = torch.device("cpu")
VOCAB, STEPS = 512, 15


def as_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors in the host's memory take the ways of an H100's, cuBLAS among them, which computes nothing."""
    for module in (attention, products, tiles):
        monkeypatch.setattr(module, "processors", lambda place: 132)
    for module in (rows, tiles):
        monkeypatch.setattr(module, "overlaps", lambda place: True)
    monkeypatch.setattr(hopper, "present", lambda place: True)
    monkeypatch.setattr(hopper_agreement, "_compared", lambda *given: hopper_agreement.Ways(True, True))
    monkeypatch.setattr(hopper_agreement, "_found", {})
    monkeypatch.setattr(products, "cublas_batches", lambda x, weight: agreement.SIZES if len(weight) > VOCAB else ())
    monkeypatch.setattr(torch, "mm", lambda x, weight, out: out)


def without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the CPU's torch takes long for, and a GPU's does not: large memory, and looking up embeddings."""
    empty, kept = torch.empty, dict[Any, Tensor]()

    def reused(*shape: Any, dtype: torch.dtype | None = None, **given: Any) -> Tensor:
        key = (shape, dtype)
        if key not in kept:
            kept[key] = empty(*shape, dtype=dtype, **given)
        return kept[key]

    monkeypatch.setattr(torch, "empty", reused)
    monkeypatch.setattr(torch, "empty_like", lambda x, **given: reused(x.shape, dtype=x.dtype))
    monkeypatch.setattr(torch.nn.functional, "embedding", lambda ids, w: reused(len(ids), w.shape[1], dtype=w.dtype))


class Timed:
    """Stands where Eager.run does: times steps, whose logits are zeros."""

    def __init__(self, eager: Eager) -> None:
        self.run, self.seconds = eager.run, list[tuple[int, float]]()
        self.profile = cProfile.Profile()

    def __call__(self, step: StepRows) -> Logits:
        begin = time.thread_time()
        found = self.run(step)
        self.seconds.append((len(step.tokens()), time.thread_time() - begin))
        return Logits(torch.zeros_like(found.values))


@contextmanager
def engine(shape: CheckpointShape, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Iterator[LLM]:
    """An engine of drawn weights as on an H100, whose steps with prompts are launched."""
    as_on_hopper(monkeypatch)
    monkeypatch.setattr(Runner, "record", lambda self: None)
    with fake_device(monkeypatch), tempfile.TemporaryDirectory() as folder:
        llm = drawn_model(shape, CPU, Path(folder)).engine(**settings)
        runner: Any = llm.engine.loaded.executor
        runner.mixed = runner.eager
        yield llm


def timed(llm: LLM, decoding: int, prompt: int, profile: cProfile.Profile | None = None) -> list[float]:
    """Milliseconds of steps with a prompt of so many tokens beside so many decoding sequences."""
    engine = llm.engine
    timer = Timed(engine.loaded.executor.eager)
    engine.loaded.executor.eager.run = timer
    generator = torch.Generator().manual_seed(16 * prompt + decoding)  # no prompt is cached
    params = SamplingParams(temperature=0.0, max_tokens=4 * STEPS, ignore_eos=True)
    for i in range(decoding):
        engine.add(Request(f"d{prompt}-{i}", [i + 1] * 300, params, arrival_s=time.monotonic()))
        engine.step()
    found = []
    for i in range(STEPS):
        tokens = torch.randint(VOCAB, (prompt,), generator=generator).tolist()
        one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        engine.add(Request(f"p{prompt}-{i}", tokens, one, arrival_s=time.monotonic()))
        timer.seconds.clear()
        if profile is not None and i > 2:
            profile.enable()
        engine.step()
        if profile is not None:
            profile.disable()
        found += [1000 * seconds for count, seconds in timer.seconds if count > decoding]
    for each in [f"d{prompt}-{i}" for i in range(decoding)]:
        engine.abort(each)
    engine.loaded.executor.eager.run = timer.run
    return found[3:]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--layers", type=int, default=16)
    given = parser.parse_args()
    torch.set_num_threads(1)
    monkeypatch = pytest.MonkeyPatch()
    shape = replace(SHAPES["S1"], layers=given.layers, vocab=VOCAB)
    settings = {"kv_cache_tokens": 40_960, "max_sequences": 16, "max_batch_tokens": 8192 + 16}
    with stub_driver(None, recorded=False), engine(shape, monkeypatch, **settings) as llm:
        for decoding, prompt in ((8, 512), (0, 512), (0, 8192)):
            without_memory(monkeypatch)
            profile = cProfile.Profile() if given.profile else None
            each = timed(llm, decoding, prompt, profile)
            print(f"{decoding} decoding, a prompt of {prompt}: {statistics.median(each):.2f} ms, least {min(each):.2f}")
            if profile is not None:
                pstats.Stats(profile).sort_stats("tottime").print_stats(45)


if __name__ == "__main__":
    main()
