"""Headrace as an engine under test: see protocol."""

from __future__ import annotations

import time
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.bench.protocol import Times, serve

if TYPE_CHECKING:
    from headrace.models.decoder import Decoder


class Headrace:
    """The engine in this process, driven step by step. Options are those of EngineConfig; gguf: a file to read in the
    checkpoint's place."""

    def __init__(self, checkpoint: Path, options: dict[str, Any]) -> None:
        import torch

        from headrace.engine.llm import LLM
        from headrace.kernels import cpu

        settings = dict(options)
        self.llm = LLM(settings.pop("gguf", str(checkpoint)), **settings)
        self.engine = self.llm.engine
        self.count = 0
        self.facts = {"threads": str(torch.get_num_threads()), "kernels": cpu.isa() if cpu.available() else "none"}
        self.facts["step_bytes"] = str(step_bytes(self.engine.loaded.decoder))

    def run(self, prompts: list[list[int]], max_tokens: list[int]) -> Times:
        from headrace.types import Request, SamplingParams

        times: dict[str, list[float]] = {}
        began = time.perf_counter()
        for prompt, limit in zip(prompts, max_tokens, strict=True):
            self.count += 1
            name = str(self.count)
            times[name] = []
            params = SamplingParams(temperature=0.0, max_tokens=limit, ignore_eos=True)
            self.engine.add(Request(name, prompt, params, arrival_s=time.monotonic()))
        while self.engine.has_work:
            deltas = self.engine.step()
            now = time.perf_counter() - began
            for delta in deltas:
                times[delta.request_id] += [now] * len(delta.token_ids)
        return list(times.values())


def step_bytes(decoder: Decoder) -> int:
    """Bytes of the weights that one row meets: all matrices, and of the experts as many as it is sent to."""
    spec = decoder.config.experts
    met = Fraction(1) if spec is None else Fraction(spec.chosen, spec.count)
    sizes = {name: matrix.nbytes for name, matrix in decoder.matrices.items()}
    return int(sum(size * (met if ".experts." in name else 1) for name, size in sizes.items()))


if __name__ == "__main__":
    serve(Headrace, "headrace", "torch")
