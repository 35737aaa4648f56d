"""`headrace bench restart`: time to first token of a long prompt whose chunks an earlier server process stored."""

from __future__ import annotations

import json
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.bench.benchmark import Benchmark, Case, option, token_count
from headrace.bench.server_process import ServerProcess
from headrace.bench.shapes import checkpoint
from headrace.bench.table import Column

READY_S = 300.0
STORED_S = 300.0
ENDS = {"SIGTERM": signal.SIGTERM, "kill -9": signal.SIGKILL}


@dataclass
class RestartBench(Benchmark):
    """Time to first token of a prompt after the server's restart.

    It ends by SIGTERM and by kill -9, and starts again.
    """

    name = "restart"
    model: str = option("Model folder, 'tiny', or a shape: S1, S2, S3.", "S1", argument=True)
    tokens: int = option("Tokens of the prompt.", 16_384, min=65, parse=token_count)
    repeats: int = option("Repetitions of each way to end.", 3, min=1)
    directory: Path | None = option("Where to make the directories. Default: /tmp.", None)
    prefault: bool = option("Map the pool's memory at the server's start.", True)

    def cases(self) -> Iterator[Case]:
        """One case for each way to end and repetition; the directory is a new one each time."""
        model = "tiny" if self.model == "tiny" else str(checkpoint(self.model))
        options = ["--kv-cache-tokens", str(self.tokens + 1024), *(["--kv-cache-prefault"] if self.prefault else [])]
        for repeat in range(self.repeats):
            for name, sign in ENDS.items():
                self.progress(f"{name}, {repeat + 1} of {self.repeats}")
                with tempfile.TemporaryDirectory(dir=self.directory) as directory:
                    yield {"end": name} | _once(model, self.tokens, sign, options, Path(directory), seed=repeat)

    def case_count(self) -> int:
        return self.repeats * len(ENDS)

    def columns(self) -> tuple[Column, ...]:
        return (
            Column("ended by", "end"),
            Column("prompt", "tokens", "tokens", ","),
            Column("first token", "cold_s", "cold, s", ",.3f"),
            Column("first token", "again_s", "again, s", ",.3f"),
            Column("of cold", "of_cold", "%", ",.2f", 100),
            Column("restored", "restored_tokens", "tokens", ","),
            Column("same", "same", width=4),
            Column("disk", "disk_mb", "MB", ",.1f", optional=True),
        )


@contextmanager
def serving(model: str, directory: Path, options: list[str]) -> Iterator[ServerProcess]:
    with ServerProcess((model, "--kv-offload-path", str(directory), *options)) as server:
        server.wait_ready(READY_S)
        yield server
        server.end(within_s=READY_S)


def ask(server: ServerProcess, prompt: list[int]) -> tuple[list[int], dict[str, Any]]:
    """A greedy answer of 8 tokens, and what it cost."""
    model = json.loads(server.get("/v1/models"))["data"][0]["id"]
    body = {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True}  # fmt: skip
    reply = json.loads(server.get("/v1/completions", body))
    return reply["choices"][0]["token_ids"], reply["headrace"]


def wait_stored(server: ServerProcess) -> float:
    """Seconds until /metrics says that every chunk is stored. Raises RuntimeError if it does not."""
    began = time.monotonic()
    while time.monotonic() - began < STORED_S:
        if server.metrics().get("kv_unstored_chunks") == 0:
            return time.monotonic() - began
        time.sleep(0.02)
    raise RuntimeError("the chunks were not stored")


def _once(model: str, tokens: int, sign: signal.Signals, options: list[str], directory: Path, seed: int) -> Case:
    source = random.Random(seed)
    prompt = [source.randrange(10, 2_000) for _ in range(tokens)]
    with serving(model, directory, options) as server:
        first, cold = ask(server, prompt)
        stored_s = wait_stored(server) if sign == signal.SIGKILL else None
        server.end(sign, READY_S)
    size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    with serving(model, directory, options) as server:
        second, again = ask(server, prompt)
    return {
        "tokens": tokens,
        "cold_s": cold["ttft_s"],
        "again_s": again["ttft_s"],
        "of_cold": again["ttft_s"] / cold["ttft_s"],
        "restored_tokens": again["restored_tokens"],
        "same": first == second,
        "disk_mb": size / 1e6,
        "stored_s": stored_s,
        "reason": again["restore_reason"],
    }
