"""`headrace bench serve`: streaming chat requests with a common beginning, to a server that runs already."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from headrace.bench.benchmark import Benchmark, Case, option
from headrace.bench.load import ChatMessage, Sample, ask_all, first_error, new_client, quantile
from headrace.bench.table import Column, show
from headrace.console import ProgressLine, out
from headrace.progress import duration

AT_ONCE = 16
REACH_S = 10.0
"""Seconds in which the server is to answer the first question: which model it serves."""


@dataclass
class ServeBench(Benchmark):
    """Load on a running server: latency and throughput.

    Streaming chat requests with a common beginning.
    """

    name = "serve"
    url: str = option("A running server.", "http://127.0.0.1:8000")
    requests: int = option("How many requests.", 64, min=1)
    at_once: int | None = option(
        f"How many of them at one time. Default: {AT_ONCE}; without a bound with --request-rate.", None, min=1
    )
    request_rate: float | None = option("Requests a second, arriving as a Poisson process.", None)
    shared_words: int = option("Words that all prompts begin with.", 1000, min=0)
    own_words: int = option("Words of each prompt's own.", 50, min=1)
    max_tokens: int = option("Tokens of each answer.", 64, min=1)
    api_key: str | None = option("Key of the server.", None, envvar="HEADRACE_API_KEY")
    seed: int = option("Draws the words.", 0)

    def __post_init__(self) -> None:
        """Raises ValueError naming the option."""
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url must begin with http:// or https://, got {self.url!r}")
        if self.request_rate is not None and not 0 < self.request_rate < float("inf"):
            raise ValueError(f"request_rate must be above 0 requests/s, got {self.request_rate:g}")

    def cases(self) -> Iterator[Case]:
        conversations = _conversations(random.Random(self.seed), self.requests, self.shared_words, self.own_words)
        yield {"name": "serve", **self._sizes(), **asyncio.run(self._measured(conversations))}

    def columns(self) -> tuple[Column, ...]:
        return ()

    def finish(self, done: list[Case]) -> None:
        for case in done:
            out.print(f"{case['model']} at {self.url}: {self._load()}")
            out.print()
            show(TOTALS, [case], out)
            out.print()
            show(LATENCIES, latencies(case), out)

    def _load(self) -> str:
        """'64 requests, 16 at once; 1,000 shared and 50 own words, 64 tokens each'."""
        pace = f"{self.request_rate:g} a second" if self.request_rate is not None else ""
        bound = f"{self._at_once()} at once" if self.request_rate is None or self.at_once is not None else ""
        told = ", ".join(part for part in (f"{self.requests:,} requests", pace, bound) if part)
        return f"{told}; {self.shared_words:,} shared and {self.own_words:,} own words, {self.max_tokens:,} tokens each"

    def _at_once(self) -> int:
        """Without a bound if they arrive at a rate."""
        usual = AT_ONCE if self.request_rate is None else self.requests
        return usual if self.at_once is None else self.at_once

    def _sizes(self) -> dict[str, Any]:
        names = ("shared_words", "own_words", "max_tokens", "request_rate")
        return {"at_once": self._at_once(), **{name: getattr(self, name) for name in names}}

    async def _measured(self, conversations: list[list[ChatMessage]]) -> Case:
        url = self.url.rstrip("/")
        options = {"max_tokens": self.max_tokens, "extra_body": {"ignore_eos": True}}
        async with new_client(url + "/v1", self.api_key) as client:
            model = await served_model(client, url)
            done, began = 0, time.perf_counter()

            def answered() -> None:
                nonlocal done
                done += 1

            def text() -> str:
                spent = duration(time.perf_counter() - began)
                return f"answered {done} of {len(conversations)} requests, {spent}"

            starts = arrivals(random.Random(self.seed), len(conversations), self.request_rate)
            with ProgressLine(text, lambda: done / len(conversations)):
                try:
                    asked = ask_all(client, model, conversations, self._at_once(), answered, starts, **options)
                    samples = await asked
                except BaseExceptionGroup as group:
                    raise RuntimeError(f"a request failed: {told(first_error(group))}") from None
        return {"model": model, **_summed(samples, time.perf_counter() - began)}


def arrivals(rng: random.Random, count: int, rate: float | None) -> list[float]:
    """Seconds after the first at which requests are sent: a Poisson process of this rate, or all at once."""
    if rate is None:
        return [0.0] * count
    gaps = [0.0, *(rng.expovariate(rate) for _ in range(count - 1))]
    return list(itertools.accumulate(gaps))


async def served_model(client: Any, url: str) -> str:
    """The first model of the server. Raises RuntimeError where it cannot be reached, ValueError where it refuses."""
    import openai

    try:
        models = (await client.models.list(timeout=REACH_S)).data
    except openai.APITimeoutError:
        raise RuntimeError(unreachable(url, f"no answer within {REACH_S:.0f} s")) from None
    except openai.APIConnectionError as error:
        raise RuntimeError(unreachable(url, told(error))) from None
    except openai.AuthenticationError:
        raise ValueError(f"{url} refuses the key: give --api-key KEY, or set HEADRACE_API_KEY") from None
    except openai.APIStatusError as error:
        raise RuntimeError(f"{url}/v1/models answers {error.status_code}: is this a server of OpenAI's API?") from None
    if not models:
        raise RuntimeError(f"{url} serves no model")
    return str(models[0].id)


def unreachable(url: str, why: str) -> str:
    return f"cannot reach {url}: {why}; start one with `headrace serve MODEL`, or give --url"


def told(error: BaseException) -> str:
    """The system's reason, if there is one below the error: 'connection refused'."""
    below: BaseException | None = error
    while below is not None:
        if isinstance(below, OSError) and below.errno is not None and below.errno > 0:
            return os.strerror(below.errno).lower()
        if isinstance(below, BaseExceptionGroup):
            below = below.exceptions[0]
        else:
            below = below.__cause__ or below.__context__
    return " ".join(str(error).split()).removesuffix(".") or type(error).__name__


def _conversations(rng: random.Random, count: int, shared: int, own: int) -> list[list[ChatMessage]]:
    words = "stone river light garden winter silver mountain letter harbour window morning kingdom".split()  # noqa: SIM905

    def text(n: int) -> str:
        return " ".join(rng.choice(words) for _ in range(n))

    system = text(shared)
    head = [{"role": "system", "content": system}] if shared else []
    return [[*head, {"role": "user", "content": text(own)}] for _ in range(count)]


def _summed(samples: list[Sample], seconds: float) -> Case:
    """Figures of a run: latencies by quantiles, rates over the whole of it."""
    ttft = [s.ttft_s for s in samples]
    gaps = [(s.total_s - s.ttft_s) / (s.output_tokens - 1) for s in samples if s.output_tokens > 1]
    prompt, output = sum(s.prompt_tokens for s in samples), sum(s.output_tokens for s in samples)
    return {
        "requests": len(samples),
        "seconds": round(seconds, 3),
        "requests_per_s": round(len(samples) / seconds, 3),
        "prompt_tokens": prompt,
        "output_tokens": output,
        "cached_share": round(sum(s.cached_tokens for s in samples) / prompt, 4),
        "prompt_tokens_per_s": round(prompt / seconds, 1),
        "output_tokens_per_s": round(output / seconds, 1),
        "ttft_median_s": round(quantile(ttft, 0.5), 4),
        "ttft_p95_s": round(quantile(ttft, 0.95), 4),
        "time_per_token_median_s": round(quantile(gaps, 0.5), 5) if gaps else None,
        **_quantiles("ttft", ttft),
        **_quantiles("time_per_token", gaps),
        **_quantiles("latency", [s.total_s for s in samples]),
    }


QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def _quantiles(name: str, values: list[float]) -> Case:
    return {f"{name}_{p}_s": round(quantile(values, share), 5) if values else None for p, share in QUANTILES.items()}


TOTALS = (
    Column("requests", form=","),
    Column("seconds", unit="s", form=",.2f"),
    Column("requests", "requests_per_s", "1/s", ",.2f"),
    Column("input", "prompt_tokens_per_s", "tokens/s", ",.0f"),
    Column("from the cache", "cached_share", "%", ".1f", 100),
    Column("output", "output_tokens_per_s", "tokens/s", ",.0f"),
)

LATENCIES = (
    Column("latency", width=len("each further token")),
    *(Column(p, unit="ms", form=",.1f", scale=1e3) for p in QUANTILES),
)


def latencies(case: Case) -> Iterator[Case]:
    """A row for each latency of the case."""
    for name, key in (("first token", "ttft"), ("each further token", "time_per_token"), ("whole answer", "latency")):
        yield {"latency": name, **{p: case[f"{key}_{p}_s"] for p in QUANTILES}}
