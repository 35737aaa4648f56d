"""openvino-genai as an engine under test: ContinuousBatchingPipeline with prefix caching.

The checkpoint is converted once, beside itself. Options: `weights`, bf16 or int4 (as `optimum-cli export openvino
--weight-format int4` quantises them); `precision` of inference, bf16 or f32 (where the processor has no bf16); `kv`:
that precision or u8. What is not given is left to OpenVINO.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

from headrace.bench.protocol import Times, serve


class OpenVino:
    """The pipeline with prompts as token ids, stepped."""

    def __init__(self, checkpoint: Path, options: dict[str, Any]) -> None:
        folder = converted_to_int4(checkpoint) if options.get("weights") == "int4" else converted(checkpoint)
        scheduling = genai.SchedulerConfig()
        scheduling.enable_prefix_caching = True
        scheduling.cache_size = 3
        scheduling.max_num_seqs = 256
        scheduling.max_num_batched_tokens = 2048
        names = {"precision": "INFERENCE_PRECISION_HINT", "kv": "KV_CACHE_PRECISION"}
        properties = {names[option]: options[option] for option in names if option in options}
        self.pipeline = genai.ContinuousBatchingPipeline(str(folder), scheduling, "CPU", properties)
        self.count = 0

    def run(self, prompts: list[list[int]], max_tokens: list[int]) -> Times:
        handles, times = [], [[] for _ in prompts]
        began = time.perf_counter()
        for prompt, limit in zip(prompts, max_tokens, strict=True):
            self.count += 1
            config = genai.GenerationConfig(max_new_tokens=limit, ignore_eos=True, do_sample=False)
            handles.append(self.pipeline.add_request(self.count, ov.Tensor(np.array([prompt])), config))
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
            now = time.perf_counter() - began
            for handle, row in zip(handles, times, strict=True):
                while handle.can_read():
                    for output in handle.read().values():
                        row += [now] * len(output.generated_ids)
        return times


def converted(checkpoint: Path) -> Path:
    """The checkpoint in OpenVINO's form, made on first use, with a tokenizer that nothing asks for."""
    folder = checkpoint.with_name(checkpoint.name + "-openvino")
    if not (folder / "openvino_model.xml").exists():
        from optimum.exporters.openvino import main_export
        from optimum.intel import OVConfig

        # A configuration of one's own, though empty, keeps models above 1 B parameters from being quantised.
        main_export(str(checkpoint), folder, task="text-generation-with-past", ov_config=OVConfig())
    return folder


def converted_to_int4(checkpoint: Path) -> Path:
    """The same with the weights that optimum-cli makes of them by default where it is asked for int4."""
    folder = checkpoint.with_name(checkpoint.name + "-openvino-int4")
    if not folder.exists():
        partial = folder.with_suffix(".partial")
        command = [sys.executable, "-c", "from optimum.commands.optimum_cli import main; main()", "export", "openvino"]
        options = ["--weight-format", "int4", "--task", "text-generation-with-past", "--model", str(checkpoint)]
        subprocess.run([*command, *options, str(partial)], check=True)
        partial.rename(folder)
    return folder


if __name__ == "__main__":
    serve(OpenVino, "openvino-genai", "openvino", "optimum-intel")
