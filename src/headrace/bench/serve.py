"""`headrace bench serve`: streaming chat requests with a common beginning, to a server that runs already."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

from rich.progress import Progress

from headrace.bench.benchmark import Benchmark, Case, option
from headrace.bench.load import ChatMessage, Sample, ask_all, first_error, new_client, quantile
from headrace.console import err


@dataclass
class ServeBench(Benchmark):
    """Load on a running server: latency and throughput.

    Streaming chat requests with a common beginning.
    """

    name = "serve"
    url: str = option("A running server.", "http://127.0.0.1:8000")
    requests: int = option("How many requests.", 64, min=1)
    at_once: int = option("How many of them at one time.", 16, min=1)
    shared_words: int = option("Words that all prompts begin with.", 1000, min=0)
    own_words: int = option("Words of each prompt's own.", 50, min=1)
    max_tokens: int = option("Tokens of each answer.", 64, min=1)
    api_key: str | None = option("Key of the server.", None, envvar="HEADRACE_API_KEY")
    seed: int = option("Draws the words.", 0)

    def cases(self) -> Iterator[Case]:
        conversations = _conversations(random.Random(self.seed), self.requests, self.shared_words, self.own_words)
        found = asyncio.run(_measured(self.url.rstrip("/"), self.api_key, conversations, self.at_once, self.max_tokens))
        yield {"name": "serve", **self._sizes(), **found}

    def line(self, case: Case) -> str:
        hidden = {"name", *self._sizes()}
        return "\n".join(f"{name:32} {value}" for name, value in case.items() if name not in hidden)

    def _sizes(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("at_once", "shared_words", "own_words", "max_tokens")}


def _conversations(rng: random.Random, count: int, shared: int, own: int) -> list[list[ChatMessage]]:
    words = "stone river light garden winter silver mountain letter harbour window morning kingdom".split()  # noqa: SIM905

    def text(n: int) -> str:
        return " ".join(rng.choice(words) for _ in range(n))

    system = text(shared)
    head = [{"role": "system", "content": system}] if shared else []
    return [[*head, {"role": "user", "content": text(own)}] for _ in range(count)]


async def _measured(
    url: str, api_key: str | None, conversations: list[list[ChatMessage]], at_once: int, max_tokens: int
) -> Case:
    async with new_client(url + "/v1", api_key) as client:
        model = (await client.models.list()).data[0].id
        with Progress(console=err, transient=True) as progress:
            bar = progress.add_task("requests", total=len(conversations))
            options = {"max_tokens": max_tokens, "extra_body": {"ignore_eos": True}}
            began = time.perf_counter()
            try:
                samples = await ask_all(client, model, conversations, at_once, lambda: progress.advance(bar), **options)
            except BaseExceptionGroup as group:
                raise RuntimeError(f"a request failed: {first_error(group)}") from None
    return _summed(samples, time.perf_counter() - began)


def _summed(samples: list[Sample], seconds: float) -> Case:
    """Figures of a run: latencies as medians and 95 %, rates over the whole of it."""
    ttft = [s.ttft_s for s in samples]
    gaps = [(s.total_s - s.ttft_s) / (s.output_tokens - 1) for s in samples if s.output_tokens > 1]
    prompt, output = sum(s.prompt_tokens for s in samples), sum(s.output_tokens for s in samples)
    return {
        "requests": len(samples),
        "seconds": round(seconds, 3),
        "requests_per_s": round(len(samples) / seconds, 3),
        "prompt_tokens": prompt,
        "cached_share": round(sum(s.cached_tokens for s in samples) / prompt, 4),
        "output_tokens_per_s": round(output / seconds, 1),
        "ttft_median_s": round(quantile(ttft, 0.5), 4),
        "ttft_p95_s": round(quantile(ttft, 0.95), 4),
        "time_per_token_median_s": round(quantile(gaps, 0.5), 5) if gaps else None,
    }
