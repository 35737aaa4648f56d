"""The engines that `headrace bench engine` knows, how each is set up, and whether it can run here.

Peers live in environments of their own under .venv-peers, made by `make bench-peers`; tools/bench_peers has their
scripts, which speak protocol. What is set for a process stands here and nowhere else, so that Contender.setup
says what is done.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headrace.host import python_module

SCRIPTS = Path("tools/bench_peers")
ENVIRONMENTS = Path(".venv-peers")


@dataclass(frozen=True, slots=True)
class Contender:
    """An engine with one set of options. peer: its script and environment; None for Headrace.

    gguf: the weights of a GGUF file that it reads in the checkpoint's place (see gguf_file). beside: the engine of ours
    that is compared with it, where that is measured. home: its environment, where that is not named like the peer.
    preload: libraries for LD_PRELOAD, as patterns below .venv-peers. variables: of the process; {cores} stands for the
    numbers of the cores, {threads} for their count.
    """

    name: str
    precision: str
    peer: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    gpu: bool = False
    gguf: str | None = None
    beside: str = "headrace"
    home: str | None = None
    preload: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)

    def of_file(self, path: Path) -> Contender:
        """The engine with the weights of this GGUF file. Raises ValueError for one that is not measured so."""
        if self.name not in FILE_READERS:
            raise ValueError(f"{self.name} is not measured on files; engine must be one of {', '.join(FILE_READERS)}")
        return replace(self, precision="the file's", gguf=None, options=self.options | {"gguf": str(path)})

    def command(self) -> list[str]:
        if self.peer is None:
            return python_module("headrace.bench.worker")
        return [str(self._root() / "bin" / "python"), str(SCRIPTS / f"{self.peer}_peer.py")]

    def given(self, checkpoint: Path) -> dict[str, Any]:
        """The options that the process gets, a GGUF file's path among them. Raises RuntimeError where none is made."""
        return self.options if self.gguf is None else self.options | {"gguf": str(gguf_file(checkpoint, self.gguf))}

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
        said = {name: text for name, text in found.items() if name != "step_bytes"}
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
        if self.peer is None and self.gguf is None:
            return None
        if not SCRIPTS.exists():
            return "run it in the repository: the peers' scripts are in tools/bench_peers"
        if self.peer is None:
            return None
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


def gguf_file(checkpoint: Path, weights: str) -> Path:
    """The checkpoint as GGUF, `weights` being bf16, q8_0 or q4_k_m, beside it; written on first use, by llama.cpp's
    environment. Raises RuntimeError where that cannot."""
    path = checkpoint.with_name(f"{checkpoint.name}-{weights}.gguf")
    if path.exists() and path.stat().st_mtime >= (checkpoint / "config.json").stat().st_mtime:
        return path
    if reason := _not_installed(ENVIRONMENTS / "llama", "bin/python"):
        raise RuntimeError(f"llama.cpp writes {path.name}, and is {reason}")
    command = [str(ENVIRONMENTS / "llama" / "bin" / "python"), str(SCRIPTS / "gguf_checkpoint.py")]
    made = subprocess.run([*command, str(checkpoint), str(path), weights], capture_output=True, text=True)
    if made.returncode:
        raise RuntimeError(f"{path.name} cannot be written: {made.stderr.strip().splitlines()[-1]}")
    return path


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

ZENTORCH = {"TORCHINDUCTOR_FREEZING": "1", "VLLM_USE_AOT_COMPILE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
"""As zentorch's documentation says for vLLM."""


NGRAMS = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 16, "prompt_lookup_min": 3}
"""vLLM's speculation by prompt lookup: it compares as many tokens as ours (engine.speculation.ngram), and always drafts
so many."""


def _vllm(
    name: str, precision: str, dtype: str, home: str = "vllm", more: dict[str, Any] | None = None, **variables: str
) -> Contender:
    """vLLM as its documentation for processors sets it up: TCMalloc and Intel's OpenMP preloaded, threads bound."""
    options = {"dtype": dtype, "platform": "zen" if variables else None} | (more or {})
    preload = (TCMALLOC, f"{home}/lib/libiomp5.so")
    return Contender(name, precision, "vllm", options, home=home, preload=preload, variables=VLLM | BOUND | variables)


def _llama(name: str, precision: str, gguf: str, beside: str = "headrace", **options: bool) -> Contender:
    options = {"flash": True} | options
    return Contender(name, precision, "llama", options | {"kv_tokens": KV_TOKENS}, gguf=gguf, beside=beside)


def _mistral(name: str, precision: str, beside: str = "headrace", gguf: str | None = None, **options: Any) -> Contender:
    return Contender(name, precision, "mistralrs", options, gguf=gguf, beside=beside)


OURS_Q8, OURS_Q4 = "headrace-gguf-q8", "headrace-gguf-q4km"

ENGINES = {
    contender.name: contender
    for contender in (
        Contender("headrace", "bf16", None, OURS),
        Contender("headrace-int8", "int8 weights", None, OURS | {"quantization": "int8"}),
        Contender("headrace-int4", "int4 weights", None, OURS | {"quantization": "int4"}),
        Contender(OURS_Q8, "Q8_0", None, OURS, gguf="q8_0"),
        Contender(OURS_Q4, "Q4_K_M", None, OURS, gguf="q4_k_m"),
        Contender("headrace-triton", "bf16, GPU", None, OURS | {"attention_backend": "triton"}, gpu=True),
        Contender("transformers", "bf16", "transformers"),
        *(
            Contender(f"transformers-cuda{name}", "bf16, GPU", "transformers", {"device": "cuda"} | options, gpu=True)
            for name, options in (("", {}), ("-static", {"static": True}), ("-compiled", {"compiled": True}))
        ),
        Contender("openvino-genai", "bf16", "openvino", {"precision": "bf16", "kv": "bf16"}),
        Contender("openvino-genai-kv8", "bf16, KV u8", "openvino", {"precision": "bf16", "kv": "u8"}),
        Contender("openvino-genai-f32", "fp32", "openvino", {"precision": "f32", "kv": "f32"}),
        Contender("openvino-genai-default", "int4 weights, KV u8", "openvino", {"weights": "int4"}, beside=OURS_Q4),
        _vllm("vllm-cpu", "bf16", "bfloat16"),
        _vllm("vllm-cpu-ngram", "bf16", "bfloat16", more={"speculative": NGRAMS}),
        Contender("vllm-cpu-plain", "bf16", "vllm", {"dtype": "bfloat16"}, variables=VLLM),
        _vllm("vllm-cpu-f32", "fp32", "float32"),
        _vllm("vllm-zentorch", "bf16", "bfloat16", "vllm-zentorch", None, **ZENTORCH),
        _llama("llama.cpp", "bf16", "bf16"),
        _llama("llama.cpp-noflash", "bf16", "bf16", flash=False),
        _llama("llama.cpp-norepack", "bf16", "bf16", extra=False),
        _llama("llama.cpp-q8", "Q8_0", "q8_0", OURS_Q8),
        _llama("llama.cpp-q8-norepack", "Q8_0", "q8_0", OURS_Q8, extra=False),
        _llama("llama.cpp-q4km", "Q4_K_M", "q4_k_m", OURS_Q4),
        _mistral("mistral.rs", "bf16"),
        _mistral("mistral.rs-q8", "Q8_0", OURS_Q8, isq="Q8_0", head=True),
        _mistral("mistral.rs-q8-layers", "Q8_0, head fp32", OURS_Q8, isq="Q8_0", head=False),
        _mistral("mistral.rs-gguf-q8", "Q8_0", OURS_Q8, gguf="q8_0"),
        _mistral("mistral.rs-gguf-q4km", "Q4_K_M", OURS_Q4, gguf="q4_k_m"),
    )
}

FILE_READERS = ("headrace", "headrace-triton", "llama.cpp", "llama.cpp-noflash", "llama.cpp-norepack")
"""Engines that are measured on a GGUF file as it is: those without weights of a form of their own."""


DENSE = {
    "W1_512": 1.0, "W1_2048": 1.0, "W1_8192": 1.11, "W1_16384": 1.18, "W2_2048": 1.0, "W2_8192": 1.3, "W3_2048": 1.6,
    "W3_8192": 2.8, "W4": 2.8, "W5": 1.1,
}  # fmt: skip
"""Times as fast as the fastest peer of the same precision that Headrace was to be on S1 (bench/notes/zen5.md)."""
EXPERTS = {"W1_2048": 1.25, "W1_8192": 1.25, "W2_512": 1.2, "W2_2048": 1.2, "W3_2048": 1.6}
"""The same on S4, in bf16, 8 and 4 bits."""
ONE_FILE = {"llama.cpp": {"W1_2048": 1.43, "W2_512": 1.3, "W2_16384": 1.2},
            "mistral.rs": {"W1_2048": 1.43, "W2_512": 1.1, "W2_16384": 1.2},
            "openvino-genai-default": {"W2_512": 1.1, "W2_2048": 1.1}}  # fmt: skip
"""On S1 from one GGUF file, by the beginning of the peer's name; OpenVINO as it comes beside them."""
READ_GOAL = 0.8
"""Of a plain read's rate, what decoding one sequence on S4 is to read its weights at."""
SECOND_TURN_GOAL = 0.1
"""Of the time of a hybrid's first turn (S5), what a second turn on its 8,192 tokens may take."""


def ahead_goal(case: dict[str, Any]) -> float | None:
    """The goal of a case; None for our own, for other models and precisions, and where nothing was to be compared."""
    engine, workload = case["engine"], case["workload"]
    if engine.startswith("headrace"):
        return None
    if case["model"] == "S4":
        return EXPERTS.get(workload)
    if case["model"] != "S1":
        return None
    if case["precision"] == "bf16":
        return DENSE.get(workload)
    of_file = ENGINES[engine].gguf is not None or engine == "openvino-genai-default"
    goals = (found for begin, found in ONE_FILE.items() if of_file and engine.startswith(begin))
    return next(goals, {}).get(workload)


def read_goal(case: dict[str, Any]) -> float | None:
    return READ_GOAL if case["model"] == "S4" and case["workload"].startswith("W2") else None


def second_turn_goal(case: dict[str, Any]) -> float | None:
    ours = case["engine"].startswith("headrace")
    return SECOND_TURN_GOAL if ours and case["model"] == "S5" and case["workload"].startswith("W6") else None
