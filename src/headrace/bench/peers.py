"""The engines that `headrace bench engine` knows, how each is set up, and whether it can run here.

Peers live in environments of their own under .venv-peers, made by `make bench-peers`; tools/bench_peers has their
scripts, which speak protocol. What is set for a process stands here and nowhere else, so that Contender.setup
says what is done.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCRIPTS = Path("tools/bench_peers")
ENVIRONMENTS = Path(".venv-peers")


@dataclass(frozen=True, slots=True)
class Contender:
    """An engine with one set of options. peer: its script and environment; None for Headrace.

    home: its environment, where that is not named like the peer. preload: libraries for LD_PRELOAD, as patterns below
    .venv-peers. variables: of the process; {cores} stands for the numbers of the cores, {threads} for their count.
    """

    name: str
    precision: str
    peer: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    gpu: bool = False
    home: str | None = None
    preload: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)

    def command(self) -> list[str]:
        if self.peer is None:
            return [sys.executable, "-m", "headrace.bench.worker"]
        return [str(self._root() / "bin" / "python"), str(SCRIPTS / f"{self.peer}_peer.py")]

    def environment(self) -> dict[str, str]:
        """Variables for the process: peers import the protocol from here."""
        if self.peer is None:
            return self.own_variables()
        found = {"PYTHONPATH": str(Path(__file__).parents[2])} | self.own_variables()
        if self.preload:
            found["LD_PRELOAD"] = ":".join(str(_library(pattern)) for pattern in self.preload)
        return found

    def own_variables(self) -> dict[str, str]:
        """What is set for this engine in particular, libraries apart."""
        cores = sorted(os.sched_getaffinity(0))
        words = {"cores": ",".join(map(str, cores)), "threads": str(len(cores))}
        return {name: text.format(**words) for name, text in self.variables.items()}

    def setup(self, found: dict[str, str]) -> str:
        """How the engine was set up. found: what its process says of itself (see protocol)."""
        said = dict(found)
        parts = [said.pop("versions", ""), self.precision]
        if preloaded := said.pop("preloaded", ""):
            parts.append(f"preloaded {preloaded}")
        parts += [f"{name} {text}" for name, text in said.items() if text]
        parts += [" ".join(f"{name}={text}" for name, text in self.own_variables().items())]
        parts += [" ".join(f"{name}={value}" for name, value in self.options.items() if value is not None)]
        return "; ".join(filter(None, parts))

    def obstacle(self) -> str | None:
        """Why the engine cannot be started; None where it can be tried."""
        if self.gpu:
            from headrace.kernels.backend import backend_of

            if (reason := backend_of("triton").missing()) is not None:
                return reason
        if self.peer is None:
            return None
        if not (SCRIPTS / f"{self.peer}_peer.py").exists():
            return "run it in the repository: the peers' scripts are in tools/bench_peers"
        if reason := _not_installed(self._root(), "bin/python"):
            return reason
        missing = (pattern for pattern in self.preload if _library(pattern) is None)
        for pattern in missing:
            home, _, rest = pattern.partition("/")
            return f"cannot preload {Path(rest).name}: " + (_not_installed(ENVIRONMENTS / home, rest) or "")
        return None

    def _root(self) -> Path:
        assert self.peer is not None
        return ENVIRONMENTS / (self.home or self.peer)


def _library(pattern: str) -> Path | None:
    """The first file below .venv-peers that fits."""
    return next((path.absolute() for path in sorted(ENVIRONMENTS.glob(pattern))), None)


def _not_installed(root: Path, pattern: str) -> str | None:
    """Why there is nothing that fits below `root`; None where there is."""
    if (root / "failed.txt").exists():
        return "not installed: " + (root / "failed.txt").read_text().strip()
    return None if any(root.glob(pattern)) else "not installed: run `make bench-peers`"


KV_TOKENS = 65_536

OURS = {"kv_cache_tokens": KV_TOKENS, "kv_cache_prefault": True, "dtype": "bfloat16"}
"""vLLM, too, has the memory of its cache before the first request; OpenVINO maps its own as it grows."""

VLLM = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "3", "VLLM_NO_USAGE_STATS": "1"}
"""Its engine in the process that is measured: processes of its own would take turns with it on few cores, and its
`VLLM_CPU_OMP_THREADS_BIND=auto` would keep one core for them."""

BOUND = {
    "OMP_NUM_THREADS": "{threads}",
    "KMP_AFFINITY": "granularity=fine,explicit,proclist=[{cores}]",
    "KMP_BLOCKTIME": "5",
    "KMP_TPAUSE": "0",
}
"""What vLLM sets for its worker processes with VLLM_CPU_OMP_THREADS_BIND and libiomp5; in one process it does not."""

TCMALLOC = "tcmalloc/usr/lib/*/libtcmalloc_minimal.so.4"

LLAMA_Q8 = {"weights": "q8_0", "flash": True, "kv_tokens": KV_TOKENS}

ZENTORCH = {"TORCHINDUCTOR_FREEZING": "1", "VLLM_USE_AOT_COMPILE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
"""As zentorch's documentation says for vLLM."""


def _vllm(name: str, precision: str, dtype: str, home: str = "vllm", **variables: str) -> Contender:
    """vLLM as its documentation for processors sets it up: TCMalloc and Intel's OpenMP preloaded, threads bound."""
    options = {"dtype": dtype, "platform": "zen" if variables else None}
    preload = (TCMALLOC, f"{home}/lib/libiomp5.so")
    return Contender(name, precision, "vllm", options, home=home, preload=preload, variables=VLLM | BOUND | variables)


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
        Contender("openvino-genai-default", "int4 weights, KV u8", "openvino", {"weights": "int4"}),
        _vllm("vllm-cpu", "bf16", "bfloat16"),
        Contender("vllm-cpu-plain", "bf16", "vllm", {"dtype": "bfloat16"}, variables=VLLM),
        _vllm("vllm-cpu-f32", "fp32", "float32"),
        _vllm("vllm-zentorch", "bf16", "bfloat16", "vllm-zentorch", **ZENTORCH),
        Contender("llama.cpp", "bf16", "llama", {"weights": "bf16", "flash": True, "kv_tokens": KV_TOKENS}),
        Contender("llama.cpp-noflash", "bf16", "llama", {"weights": "bf16", "flash": False, "kv_tokens": KV_TOKENS}),
        Contender("llama.cpp-q8", "Q8_0", "llama", LLAMA_Q8),
        Contender("llama.cpp-q8-norepack", "Q8_0", "llama", LLAMA_Q8 | {"extra": False}),
        Contender("mistral.rs-q8", "Q8_0", "mistralrs", {"isq": "Q8_0", "head": True}),
        Contender("mistral.rs-q8-layers", "Q8_0, head fp32", "mistralrs", {"isq": "Q8_0", "head": False}),
    )
}


GOALS = {
    "W1_512": 1.0, "W1_2048": 1.0, "W1_8192": 1.11, "W1_16384": 1.18, "W2_2048": 1.0, "W2_8192": 1.3, "W3_2048": 1.6,
    "W3_8192": 2.8, "W4": 2.8, "W5": 1.1,
}  # fmt: skip
"""Times as fast as the fastest peer of the same precision that Headrace was to be on S1 (bench/notes/zen5.md)."""


def ahead_goal(case: dict[str, Any]) -> float | None:
    """The goal of a case; None for our own, for other models and precisions, and where nothing was to be compared."""
    ours = case["engine"].startswith("headrace")
    return None if ours or case["model"] != "S1" or case["precision"] != "bf16" else GOALS.get(case["workload"])
