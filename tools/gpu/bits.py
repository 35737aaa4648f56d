"""The promise on a GPU: whole engines whose schedules differ give the same bits, and so do kernels (tests/gpu).

A trace holds the logits behind every token of every answer; they are compared by torch.equal, on the shipped model
and on S1's shape with drawn weights. Processes beside run tests/gpu and compile the kernels of larger models, since
nothing is timed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from headrace import LLM, SamplingParams
from tests.support.traces import GREEDY, Trace, alone, prompts_of, run, same
from tools.gpu import device_tests, timing
from tools.gpu.device_tests import DeviceTests
from tools.gpu.engine import release
from tools.gpu.models import MODELS, USUAL, drawn_model
from tools.gpu.runner import Case, LeftOut, Row
from tools.gpu.warm import Warming

TESTS_SECONDS = 100.0
"""For tests/gpu from the start, beside the engines; the section device_tests runs the rest."""

WARMING_SECONDS = 20.0
"""For other models' kernels, behind everything else: no later section has to compile them then."""
FEW = {"max_sequences": 16}
"""Steps of fewer sizes have to be recorded."""

SCHEDULES = ("batch", "cached", "eager", "preempted", "prefilled", "buckets", "unshared")
"""Methods of Bits."""

Make = Callable[..., LLM]


def cases() -> Iterator[Case]:
    tests, warming = DeviceTests(device_tests.OUTCOMES), Warming([name for name in MODELS if name != "S1"])
    try:
        yield from of_model("tiny", shipped)
        drawn = drawn_model(MODELS["S1"], timing.CUDA)
        yield from of_model("S1", partial(drawn.engine, **FEW))
        yield Case("tests/gpu", partial(tests.result, TESTS_SECONDS), TESTS_SECONDS)
        yield Case("kernels of larger models", partial(warming.result, WARMING_SECONDS))
    finally:
        device_tests.leave(tests, device_tests.FOLLOWS)
        warming.stop()
        release()


def shipped(**settings: Any) -> LLM:
    """An engine of the shipped model on the GPU."""
    return LLM("tiny", **{**USUAL, **FEW, **settings})


def of_model(name: str, make: Make) -> Iterator[Case]:
    """All schedules of one model against each prompt alone on an empty cache."""
    bits = Bits(name, make)
    try:
        for schedule in SCHEDULES:
            yield Case(f"{name} {schedule}", getattr(bits, schedule))
        for budget in (64, 96, 1000):
            yield Case(f"{name} cut at {budget}", partial(bits.cut, budget))
        yield Case(f"{name} speculated", bits.speculated)
    finally:
        bits.llm.close()


@dataclass
class Bits:
    """make: an engine of the model, by its settings."""

    name: str
    make: Make

    def __post_init__(self) -> None:
        self.llm = self.make()
        self.prompts = prompts_of(self.llm)
        self.truth = alone(self.llm)

    def equal(self, schedule: str, traces: list[Trace], truth: list[Trace] | None = None) -> Row:
        """Raises AssertionError where bits differ."""
        same(traces, self.truth if truth is None else truth)
        return Row(f"{self.name} {schedule} = alone", {"rows_equal": sum(map(len, traces))})

    def batch(self) -> Row:
        self.llm.engine.cache.tree.clear()
        return self.equal("batch", run(self.llm, self.prompts))

    def cached(self) -> Row:
        run(self.llm, self.prompts)
        return self.equal("cached", [run(self.llm, [prompt])[0] for prompt in self.prompts])

    def eager(self) -> Row:
        """Steps that are launched kernel by kernel against those that are replayed."""
        executor: Any = self.llm.engine.loaded.executor
        self.llm.engine.cache.tree.clear()
        with eager_steps(executor):
            return self.equal("eager", run(self.llm, self.prompts))

    def cut(self, budget: int) -> Row:
        with self.make(max_batch_tokens=budget) as llm:
            return self.equal(f"cut at {budget}", run(llm, self.prompts))

    def unshared(self) -> Row:
        with self.make(enable_prefix_caching=False) as llm:
            return self.equal("unshared", run(llm, self.prompts))

    def preempted(self) -> Row:
        long = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
        with self.make(kv_cache_tokens=1024, max_batch_tokens=200) as small:
            row = self.equal("preempted", run(small, self.prompts, long), run(self.llm, self.prompts, long))
            preemptions = small.engine.stats().scheduler.preemptions
        assert preemptions, "nothing was preempted"
        return Row(row.name, row.figures | {"preemptions": preemptions})

    def prefilled(self) -> Row:
        """Rows that were decoded against the same rows of a prompt."""
        count = 0
        for prompt, trace in zip(self.prompts, self.truth, strict=True):
            answer = [int(trace[position].argmax()) for position in sorted(trace)]
            logits = self.llm.logits(prompt + answer[:-1])
            for position, row in trace.items():
                assert torch.equal(logits[position], row), f"bits differ after position {position}"
                count += 1
        return Row(f"{self.name} decoded = prefilled", {"rows_equal": count})

    def buckets(self) -> Row:
        """Batches of so many sequences, whose steps are of different sizes."""
        compared = 0
        for count in (1, 2, 3, 5, 9, 13, len(self.prompts)):
            self.llm.engine.cache.tree.clear()
            traces = run(self.llm, self.prompts[:count])
            same(traces, self.truth[:count])
            compared += sum(map(len, traces))
        return Row(f"{self.name} between row buckets", {"rows_equal": compared})

    def speculated(self) -> Row:
        try:
            llm = self.make(speculative="ngram")
        except ValueError as why:
            raise LeftOut(str(why)) from None
        with llm:
            asked = llm.generate(self.prompts, GREEDY)
        for prompt, trace, answer in zip(self.prompts, self.truth, asked, strict=True):
            assert answer.token_ids == [int(trace[at].argmax()) for at in sorted(trace)], f"after {len(prompt)} tokens"
        return Row(f"{self.name} speculated = alone", {"answers_equal": len(asked)})


@contextmanager
def eager_steps(executor: Any) -> Iterator[None]:
    """No step is replayed within."""
    before = executor.decoding, executor.mixed
    executor.decoding = executor.mixed = executor.eager
    try:
        yield
    finally:
        executor.decoding, executor.mixed = before
