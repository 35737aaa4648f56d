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
from typing import Any, NamedTuple

from headrace.bench.benchmark import Benchmark, Case, integers, option, token_count
from headrace.bench.server_process import ServerProcess
from headrace.bench.shapes import SHAPES, checkpoint
from headrace.bench.table import Column
from headrace.engine.folders import model_folder
from headrace.models.plain_config import plain_config

READY_S = 300.0
STORED_S = 300.0
ENDS = {"SIGTERM": signal.SIGTERM, "kill -9": signal.SIGKILL}


def rank_counts(name: str, text: str) -> tuple[int, ...]:
    """Numbers of ranks by commas; none for no text."""
    found = integers(name, text) if text else ()
    if any(count < 1 for count in found):
        raise ValueError(f"{name} must be at least 1 each, got {text!r}")
    return found


@dataclass
class RestartBench(Benchmark):
    """Time to first token of a prompt after the server's restart.

    It ends by SIGTERM and by kill -9, and starts again, with as many context ranks or with others (--again 1,2,3).
    """

    name = "restart"
    model: str = option("Model folder, 'tiny', or a shape: S1, S2, S3.", "S1", argument=True)
    tokens: int = option("Tokens of the prompt.", 16_384, min=65, parse=token_count)
    repeats: int = option("Repetitions of each way to end.", 3, min=1)
    directory: Path | None = option("Where to make the directories. Default: /tmp.", None)
    prefault: bool = option("Map the pool's memory at the server's start.", True)
    ranks: int = option("Context ranks of the server that stores.", 1, min=1)
    again: tuple[int, ...] = option(
        "Context ranks of each server that restores, by commas. Default: as many as stored.", "", parse=rank_counts
    )

    def __post_init__(self) -> None:
        """Raises ValueError naming the option."""
        if self.directory is not None and not self.directory.is_dir():
            raise ValueError(f"directory {self.directory} is no directory; name one that there is")

    def cases(self) -> Iterator[Case]:
        """One case for each way to end, repetition and restoring server; each way has a new directory each time."""
        restoring = self.again or (self.ranks,)
        model = str(checkpoint(self.model)) if self.model in SHAPES else self.model
        run = _Run(model, self.tokens, self.prefault)
        for repeat in range(self.repeats):
            for name, sign in ENDS.items():
                with tempfile.TemporaryDirectory(dir=self.directory) as directory:
                    self.progress(f"{name}, {repeat + 1} of {self.repeats}: stored")
                    stored = run.store(Path(directory), self.ranks, sign, seed=repeat)
                    for ranks in restoring:
                        self.progress(f"{name}, {repeat + 1} of {self.repeats}: restored by {ranks}")
                        yield {"end": name} | run.restore(Path(directory), ranks, stored)

    def case_count(self) -> int:
        return self.repeats * len(ENDS) * (1 + len(self.again or (self.ranks,)))

    def columns(self) -> tuple[Column, ...]:
        return (
            Column("ended by", "end"),
            Column("stored", "ranks", "by"),
            Column("again", "again_ranks", "by"),
            Column("prompt", "tokens", "tokens", ",", optional=True),
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


class _Stored(NamedTuple):
    """A prompt that a server answered and stored. cold: what that cost; size: bytes on disk; stored_s: from its answer
    until all was stored, where that was waited for."""

    ranks: int
    prompt: list[int]
    answer: list[int]
    cold: dict[str, Any]
    size: int
    stored_s: float | None


@dataclass(frozen=True, slots=True)
class _Run:
    """What all servers of a benchmark share."""

    model: str
    tokens: int
    prefault: bool

    def options(self, ranks: int) -> list[str]:
        """Each rank may hold the whole prompt: whoever is fastest then may load all of it."""
        options = ["--kv-cache-tokens", str(self.tokens + 1024)]
        options += ["--kv-cache-prefault"] if self.prefault else []
        return options + (["--context-parallel-size", str(ranks)] if ranks > 1 else [])

    def store(self, directory: Path, ranks: int, sign: signal.Signals, seed: int) -> _Stored:
        source, vocabulary = random.Random(seed), plain_config(model_folder(self.model)).vocab_size
        prompt = [source.randrange(min(10, vocabulary - 1), vocabulary) for _ in range(self.tokens)]
        with serving(self.model, directory, self.options(ranks)) as server:
            answer, cold = ask(server, prompt)
            stored_s = wait_stored(server) if sign == signal.SIGKILL else None
            server.end(sign, READY_S)
        size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
        return _Stored(ranks, prompt, answer, cold, size, stored_s)

    def restore(self, directory: Path, ranks: int, stored: _Stored) -> Case:
        with serving(self.model, directory, self.options(ranks)) as server:
            answer, again = ask(server, stored.prompt)
        return {
            "tokens": self.tokens,
            "ranks": stored.ranks,
            "again_ranks": ranks,
            "cold_s": stored.cold["ttft_s"],
            "again_s": again["ttft_s"],
            "of_cold": again["ttft_s"] / stored.cold["ttft_s"],
            "restored_tokens": again["restored_tokens"],
            "same": answer == stored.answer,
            "disk_mb": stored.size / 1e6,
            "stored_s": stored.stored_s,
            "reason": again["restore_reason"],
        }
