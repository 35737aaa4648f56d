"""What people get wrong at the command line: each must be one line on stderr, with its code, before anything starts.

tests/cpu/test_wrong_uses.py runs them in one process; tools/wrong_uses.py runs each as a process and times it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from headrace.engine.capacity import SHIPPED
from headrace.planner.machine import Machine, ModelShape
from headrace.planner.tuned_table import TableStamp, TunedTable
from headrace.version import __version__

Content = str | bytes | Path
"""Of a file; a path is linked to."""

TINY = SHIPPED["tiny"]
CONFIG: dict[str, Any] = json.loads((TINY / "config.json").read_text())
WEIGHTS = TINY / "model.safetensors"
WORDLESS: dict[str, Content] = {"w/config.json": json.dumps(CONFIG), "w/model.safetensors": WEIGHTS}
CUT = WEIGHTS.read_bytes()[:100_000]
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 5610040\n"


@dataclass(frozen=True)
class WrongUse:
    """A command line without `headrace`, and a part of the line that it must end with; files are made beforehand."""

    about: str
    args: str
    told: str
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, Content] = field(default_factory=dict)
    code: int = 2

    @property
    def words(self) -> list[str]:
        """Quotes keep words with spaces together."""
        parts = self.args.split("'")
        return [word for i, part in enumerate(parts) for word in ([part] if i % 2 else part.split())]

    def make_files(self, folder: Path) -> None:
        for name, content in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, Path):
                path.symlink_to(content)
            else:
                path.write_bytes(content.encode() if isinstance(content, str) else content)


def model(weights: Content | None = WEIGHTS, name: str = "model.safetensors", **fields: Any) -> dict[str, Content]:
    """The shipped model in the folder m, with other fields in config.json, or other weights."""
    files: dict[str, Content] = {"m/config.json": json.dumps(CONFIG | fields)}
    return files if weights is None else files | {f"m/{name}": weights}


def table(**stamp: Any) -> dict[str, Content]:
    """A tuned table t.json of another model on two ranks."""
    shape = ModelShape(layers=24, hidden=2048, heads=16, kv_heads=8, head_dim=128, mlp=5632, vocab=32000)
    made = dict(
        machine="m", model="other", shape=shape, ranks=2, link="gloo on 127.0.0.1", version=__version__, date=""
    )
    rates = dict(linear_flops_s=1e12, attention_flops_s=((1, 1e11),), memory_bytes_s=1e10, link_bytes_s=1e9)
    machine = Machine(name="m", cores=8, isa="avx2", date="2026-01-01", **rates)  # type: ignore[arg-type]
    return {"t.json": msgspec.json.encode(TunedTable(stamp=TableStamp(**made | stamp), machine=machine))}


HUB = "hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de2"
INDEX = json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}})

FLAGS = (
    WrongUse("a flag with a slip", "serve --prot 80", "no such option --prot; did you mean --port?"),
    WrongUse("an unknown flag", "generate hi --gpu-memory-utilization 0.9", "no such option --gpu-memory-utilization"),
    WrongUse("a command with a slip", "sevre tiny", "no such command 'sevre'; did you mean 'serve'?"),
    WrongUse("a model as a command", "tiny", "tiny is a model: headrace chat tiny"),
    WrongUse("a flag before the command", "--port 80 serve", "no such option --port"),
    WrongUse("a word for a number", "serve --port many", "--port must be an integer, got 'many'"),
    WrongUse("a port beyond the last", "serve --port 70000", "port must be between 0 and 65535, got 70000"),
    WrongUse("a flag without its value", "serve --port", "--port needs a value"),
    WrongUse("an argument too many", "serve tiny 8000", "not expected: 8000"),
    WrongUse("two models", "chat tiny -m other", "two models are given, tiny and -m other: leave one out"),
    WrongUse("an unknown type", "serve --dtype int3", "--dtype must be one of auto, bfloat16, float32, got 'int3'"),
    WrongUse("a type of the cache that is not kept", "serve --kv-cache-dtype fp8", "--kv-cache-dtype must be one of"),
    WrongUse(
        "a cache not of the compute type", "serve --kv-cache-dtype fp32", "kept in the compute type, which is bfloat16"
    ),
    WrongUse("an unknown backend", "serve --attention-backend cuda", "--attention-backend must be one of"),
    WrongUse("an unknown strategy", "serve --prefill-strategy ring", "got 'ring'; did you mean ring-q?"),
    WrongUse("an empty key", "serve --api-key ' '", "api_key must not be empty; leave it out"),
    WrongUse("no threads", "serve --threads 0", "threads must be an integer between 1 and 1024, got 0"),
    WrongUse("a negative temperature", "generate hi --temperature -1", "temperature must be"),
    WrongUse("a temperature in words", "generate hi --temperature warm", "--temperature must be a number"),
    WrongUse("a share above one", "generate hi --top-p 2", "top_p must be"),
    WrongUse("an answer's length in words", "generate hi --max-tokens some", "--max-tokens must be a number of tokens"),
    WrongUse("no token asked for", "generate hi --max-tokens 0", "max_tokens must be"),
    WrongUse(
        "a text for a model without a tokenizer",
        "generate hi -m w",
        "w has no tokenizer, and so takes no text; put the model's tokenizer.json there",
        files=WORDLESS,
    ),
    WrongUse("a chat with one", "chat w", "w has no tokenizer, and so takes no text", files=WORDLESS),
    WrongUse("a prompt and a file", "generate hi --file p.txt", "give prompts or --file, not both"),
    WrongUse("a prompt file that is not there", "generate --file p.txt", "cannot read p.txt: "),
    WrongUse("an empty prompt", "generate ''", "the prompt is empty"),
    WrongUse("a model for a prompt", "generate tiny", "generate takes prompts: give the model as -m tiny"),
    WrongUse("two system prompts", "chat --system x --system-file y", "give --system or --system-file, not both"),
    WrongUse("a batch without files", "batch", "missing argument IN"),
    WrongUse("no request to demonstrate", "demo --requests 0", "--requests must be at least 1"),
    WrongUse("an unknown benchmark", "bench prefil", "no such command 'prefil'; did you mean 'prefill'?"),
    WrongUse(
        "a benchmark's flag with a slip", "bench offload --ratse 1", "no such option --ratse; did you mean --rates"
    ),
    WrongUse("a benchmark of no model", "bench prefill /no/such", "no folder with a config.json; give a path"),
    WrongUse("lengths in words", "bench prefill tiny --tokens many", "tokens must be"),
    WrongUse("a result for no folder", "bench cache tiny --json /no/such/x", "there is no directory /no/such; make it"),
    WrongUse("a result for a folder", "bench engine --quick --json /tmp", "--json /tmp is a directory"),
    WrongUse("a rate below nothing", "bench offload --rates 1,-1", "rates must be numbers above 0 by commas"),
    WrongUse("a rate in words", "bench offload --rates fast", "rates must be numbers above 0 by commas"),
    WrongUse("shares beyond all", "bench offload --shares 2", "shares must be numbers from 0 to 1 by commas"),
    WrongUse("directories for no folder", "bench restart --directory /no", "directory /no is no directory"),
    WrongUse("a request that is not there", "why a.json b.json", "a.json cannot be read: No such file"),
    WrongUse("one rank to tune", "tune tiny --out t.json --ranks 1", "ranks must be at least 2, got 1"),
)
SIZES = (
    WrongUse("more tokens than memory", "serve --kv-cache-tokens 99999999999", "kv_cache_tokens 99,999,999,999 needs"),
    WrongUse("the same as 100G", "generate hi --kv-cache-tokens 100G", "tokens fit ("),
    WrongUse(
        "less than a chunk", "serve --kv-cache-tokens 3", "kv_cache_tokens must be an integer of at least 64, got 3"
    ),
    WrongUse(
        "tokens in words", "serve --kv-cache-tokens lots", "a number of tokens, such as 131072, 128k or 1M, got 'lots'"
    ),
    WrongUse("tokens in bytes", "serve --kv-cache-tokens 16GiB", "--kv-cache-tokens must be a number of tokens"),
    WrongUse("a size in words", "serve --kv-offloading-size big", "such as 16, 16GiB, 1.5G or 500MiB"),
    WrongUse("a negative size", "serve --kv-offloading-size -1", "kv_offloading_size must be 0 or more"),
    WrongUse("a tier beyond memory", "serve --kv-offloading-size 100TiB", "kv_offloading_size 102400 GiB is too much"),
    WrongUse(
        "streaming beyond memory",
        "serve --offload-schedule row --kv-offloading-size 100T --max-sequences 100000000",
        "is too much: ",
    ),
    WrongUse("a longer context", "serve --max-model-len 1M", "max_model_len 1048576 exceeds the model's 16384"),
    WrongUse("a context beyond the cache", "serve --max-model-len 8k --kv-cache-tokens 4k", "holds no sequence of"),
    WrongUse("room on no disk", "serve --kv-offload-disk-size 10GiB", "kv_offload_disk_size needs a directory"),
    WrongUse("a format for no tier", "serve --kv-host-format int8", "kv_host_format needs a tier in host memory"),
    WrongUse("a schedule without a place", "serve --offload-schedule row", "offload_schedule needs a place for KV"),
    WrongUse("heads that cannot be shared", "serve -tp 3", "tensor_parallel_size 3 does not divide 8 query heads"),
    WrongUse("no ranks", "serve -cp 0", "context_parallel_size must be an integer of at least 1, got 0"),
    WrongUse("an address elsewhere", "serve -cp 2 --rank-interface 198.51.100.1", "is not an address of this host"),
)
MODELS = (
    WrongUse("a model that is not there", "serve /no/such/model", "no folder with a config.json; give a path"),
    WrongUse("a slip in a name", "serve tinny", "did you mean tiny?"),
    WrongUse(
        "a published model that was not fetched",
        "chat smollm2",
        "not here yet: `headrace pull smollm2` fetches it (93.8 MiB)",
        {"HEADRACE_CACHE_DIR": "cache"},
    ),
    WrongUse("no model to fetch", "pull smolm2", "did you mean smollm2?"),
    WrongUse("nothing to fetch", "pull", "pull takes smollm2, or a name of the hub as ORG/NAME"),
    WrongUse("a GGUF file as a prompt", "generate m.gguf", "give the model as -m m.gguf", {}, {"m.gguf": "GGUF"}),
    WrongUse(
        "a name of the hub",
        "serve Qwen/Qwen3-0.6B",
        "`headrace pull Qwen/Qwen3-0.6B` fetches it",
        {"HF_HUB_CACHE": "hub"},
    ),
    WrongUse(
        "the same, downloaded before and damaged",
        "chat Qwen/Qwen3-0.6B",
        f"{HUB}/config.json: architecture (none) is not supported",
        {"HF_HUB_CACHE": "hub"},
        {f"{HUB}/config.json": "{}"},
    ),
    WrongUse("half a GGUF file", "chat m.gguf", "m.gguf: it ends within its header", files={"m.gguf": "GGUF"}),
    WrongUse(
        "a folder of GGUF files",
        "chat m",
        "holds several GGUF files; give one of them: m/q4.gguf, m/q8.gguf",
        files={"m/q4.gguf": "GGUF", "m/q8.gguf": "GGUF"},
    ),
    WrongUse("an adapter", "chat m", "the folder holds an adapter (LoRA)", files={"m/adapter_config.json": "{}"}),
    WrongUse(
        "a file of weights", "chat m/x.safetensors", "this is a file; give its folder, m", files={"m/x.safetensors": ""}
    ),
    WrongUse("an empty folder", "chat m", "the folder has no config.json", files={"m/README.md": ""}),
    WrongUse("a folder above", "chat up", "give the folder up/m", files={"up/m/config.json": "{}"}),
    WrongUse("no weights", "chat m", "m holds no weights", files=model(None)),
    WrongUse(
        "pickled weights", "chat m", "pytorch_model.bin holds pickled weights", files=model("", "pytorch_model.bin")
    ),
    WrongUse(
        "a shard that is missing",
        "chat m",
        "model-00001-of-00002.safetensors, which is missing",
        files=model(INDEX, "model.safetensors.index.json"),
    ),
    WrongUse(
        "weights cut short", "chat m", "m/model.safetensors is cut short: 5,510,040 bytes are missing", files=model(CUT)
    ),
    WrongUse("a pointer of Git LFS", "chat m", "is a pointer of Git LFS, not the file", files=model(POINTER)),
    WrongUse(
        "an unknown architecture",
        "chat m",
        "architecture BloomForCausalLM is not supported",
        files=model(architectures=["BloomForCausalLM"]),
    ),
    WrongUse(
        "a quantised checkpoint",
        "chat m",
        "quant_method None is not supported",
        files=model(quantization_config={"bits": 4}),
    ),
    WrongUse(
        "an unknown rotation",
        "chat m",
        "rope_type 'su' is not supported",
        files=model(rope_parameters={"rope_type": "su", "factor": 2.0}),
    ),
    WrongUse("a field out of range", "chat m", "num_hidden_layers", files=model(num_hidden_layers=10**9)),
    WrongUse("a config that is no JSON", "chat m", "m/config.json is not valid JSON", files={"m/config.json": "{"}),
)
PLACES = (
    WrongUse(
        "a file for a directory", "serve --kv-offload-path f", "kv_offload_path f is not a directory", files={"f": ""}
    ),
    WrongUse(
        "a directory below a file", "serve --kv-offload-path f/kv", "a part of the path is a file", files={"f": ""}
    ),
    WrongUse("a directory that cannot be", "serve --kv-offload-path /proc/kv", "nothing can be written there"),
    WrongUse("a server by HTTP", "serve --kv-remote-url http://kv:80", "kv_remote_url must be redis://HOST:PORT/DB"),
    WrongUse("a table that is not there", "serve -cp 2 --parallel-table t.json", "no usable tuned table in t.json"),
    WrongUse(
        "a table of another model",
        "serve -cp 2 --parallel-table t.json",
        "model: tuned for 'other', used with 'tiny'",
        files=table(),
    ),
    WrongUse(
        "a table for more ranks",
        "serve -cp 2 --parallel-table t.json",
        "ranks: tuned for 4, used with 2",
        files=table(ranks=4),
    ),
)
VARIABLES = (
    WrongUse("a number in words", "serve", "HEADRACE_PORT must be an integer, got 'many'", {"HEADRACE_PORT": "many"}),
    WrongUse(
        "a size in words",
        "serve",
        "HEADRACE_KV_CACHE_TOKENS must be a number of tokens",
        {"HEADRACE_KV_CACHE_TOKENS": "lots"},
    ),
    WrongUse("an unknown type", "serve", "HEADRACE_DTYPE must be one of", {"HEADRACE_DTYPE": "int3"}),
    WrongUse("neither yes nor no", "serve", "HEADRACE_RESTART must be true or false", {"HEADRACE_RESTART": "maybe"}),
    WrongUse(
        "no room to wait",
        "serve",
        "max_queued_requests must be an integer of at least 1",
        {"HEADRACE_MAX_QUEUED_REQUESTS": "0"},
    ),
    WrongUse("a model that is not there", "chat", "model '/no/such'", {"HEADRACE_MODEL": "/no/such"}),
)

WRONG_USES = {"flags": FLAGS, "sizes": SIZES, "models": MODELS, "places": PLACES, "environment": VARIABLES}
"""By what is wrong."""
