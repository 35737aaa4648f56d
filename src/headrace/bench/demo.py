"""`headrace demo`: a server on the shipped model, one long document, many questions at once; what the cache saved."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from headrace.assets.facts import fact_document, question
from headrace.bench.load import Sample, ask, ask_all, first_error, new_client, quantile
from headrace.bench.server_process import ServerProcess
from headrace.bench.table import Column, show
from headrace.config import SETTINGS
from headrace.console import ProgressLine, out, working
from headrace.progress import duration
from headrace.types import CHUNK

MODEL = "tiny"
FACTS = 8
START_S = 120.0
LEAST_RIGHT = 0.75
"""The shipped model is small: so many of its answers must be right, or something is broken."""

MIB = 2**20
TRIES = 3
"""So often all questions are asked at once until some are answered together, which a busy machine may prevent."""


def run(requests: int, system_tokens: int, seed: int) -> None:
    """Raises RuntimeError for whatever went wrong: the server, a request, the cache, a leak, the end."""
    rng = random.Random(seed)
    document, facts = fact_document(rng, FACTS, system_tokens)
    names = [list(facts)[i % FACTS] for i in range(requests)]
    rng.shuffle(names)
    with _server() as server:
        measured = asyncio.run(_ask_everything(server, document, names))
        _wait_idle(server)
        after = server.metrics()
    right = _show_answers(names, facts, measured.samples)
    _show_table(measured, after)
    _check(measured, after, right)


@dataclass(slots=True)
class DemoFigures:
    """What the demo saw."""

    cold: Sample
    warm: Sample
    samples: list[Sample]
    seconds: float


# ---- the server ------------------------------------------------------------------------------------------------------


@contextmanager
def _server() -> Iterator[ServerProcess]:
    """Started, ready, and ended with SIGTERM; raises RuntimeError where any of that fails."""
    # Settings of the user's own servers (a key, a name, a size) are not meant for this one.
    settings = {item.env for item in SETTINGS.values()}
    fresh = (MODEL, "--kv-offload-path", "none")  # what an earlier run kept would be no first prefill
    with ServerProcess(fresh, {name: value for name, value in os.environ.items() if name not in settings}) as server:
        with working("starting the server (usually 5 to 20 s)"):
            server.wait_ready(START_S)
        yield server
        if code := server.end():
            raise RuntimeError(f"the server ended with {code}: {server.last_words()}")


# ---- the questions ---------------------------------------------------------------------------------------------------


async def _ask_everything(server: ServerProcess, document: str, names: list[str]) -> DemoFigures:
    """One cold request, one from the cache, then all at once."""
    talks = [_messages(document, name) for name in names]
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 16}
    async with new_client(server.url + "/v1", None) as client:
        done, total, started = 0, len(names) + 2, time.perf_counter()

        def answered() -> None:
            nonlocal done
            done += 1

        def text() -> str:
            return f"answered {done} of {total} questions, {duration(time.perf_counter() - started)}"

        with ProgressLine(text, lambda: done / total):
            try:
                cold = await ask(client, MODEL, talks[0], **options)
                answered()
                warm = await ask(client, MODEL, talks[-1], **options)
                answered()
                for _ in range(TRIES):
                    done, began = 2, time.perf_counter()
                    samples = await ask_all(client, MODEL, talks, len(talks), answered, **options)
                    seconds = time.perf_counter() - began
                    if _shared(await asyncio.to_thread(server.metrics)):
                        break
            except Exception as error:
                raise RuntimeError(f"a request failed: {first_error(error)}") from None
    return DemoFigures(cold, warm, samples, seconds)


def _shared(metrics: dict[str, float]) -> bool:
    """Whether requests that ran at the same time have shared chunks."""
    return metrics["kv_chunks_used_peak"] < metrics["kv_chunks_unshared_peak"]


def _messages(document: str, name: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": document}, {"role": "user", "content": question(name)}]


def _wait_idle(server: ServerProcess) -> None:
    """The engine tells its counters after each step, so the last ones may come a moment later."""
    deadline = time.monotonic() + 5
    while server.metrics()["num_requests_running"] and time.monotonic() < deadline:
        time.sleep(0.05)


# ---- what it shows ---------------------------------------------------------------------------------------------------


def _show_answers(names: list[str], facts: dict[str, str], samples: list[Sample]) -> int:
    """Prints every answer; how many are right."""
    right = 0
    for name, sample in zip(names, samples, strict=True):
        good = facts[name] in sample.text
        right += good
        mark = "[green]right[/]" if good else f"[red]wrong, it is {facts[name]}[/]"
        out.print(f"{question(name):30} {' '.join(sample.text.split()):34} {mark}")
    return right


COLUMNS = (
    Column("measure", width=35),
    Column("value", form=",.1f", width=9),
    Column("unit", width=8),
    Column("saved", width=22),
)


def _show_table(m: DemoFigures, metrics: dict[str, float]) -> None:
    out.print(f"\n{len(m.samples)} requests over one prompt of {m.cold.prompt_tokens:,} tokens\n")
    names = [column.head for column in COLUMNS]
    show(COLUMNS, (dict(zip(names, row, strict=True)) for row in table_rows(m, metrics)), out)


def table_rows(m: DemoFigures, metrics: dict[str, float]) -> list[tuple[str, float, str, str]]:
    """(Measure, value, unit, what sharing saved)."""
    chunk = metrics["kv_bytes_per_token"] * CHUNK / MIB
    prompt, cached = (sum(getattr(s, name) for s in m.samples) for name in ("prompt_tokens", "cached_tokens"))
    held, apart = metrics["kv_chunks_used_peak"] * chunk, metrics["kv_chunks_unshared_peak"] * chunk
    return [
        ("first token, cold", m.cold.ttft_s * 1e3, "ms", ""),
        ("first token, cached, alone", m.warm.ttft_s * 1e3, "ms", f"{m.cold.ttft_s / m.warm.ttft_s:.1f} times as fast"),
        ("first token, cached, all at once", _median_ttft(m) * 1e3, "ms", ""),
        ("answered tokens", sum(s.output_tokens for s in m.samples) / m.seconds, "tokens/s", ""),
        ("prompt tokens", prompt / m.seconds, "tokens/s", ""),
        ("prompt tokens from the cache", 100 * cached / prompt, "%", f"{cached:,} of {prompt:,}"),
        ("KV memory held", held, "MiB", f"{1 - held / apart:.0%}" if apart else ""),
        ("KV memory if none were shared", apart, "MiB", ""),
    ]


def _median_ttft(m: DemoFigures) -> float:
    return quantile([s.ttft_s for s in m.samples], 0.5)


def _check(m: DemoFigures, after: dict[str, float], right: int) -> None:
    """Raises RuntimeError unless everything that the demo is to show did happen."""
    whole = m.cold.prompt_tokens // CHUNK * CHUNK
    faults = {
        f"only {right} of {len(m.samples)} answers are right": right < LEAST_RIGHT * len(m.samples),
        "the first request found something in an empty cache": m.cold.cached_tokens > 0,
        "a later request took less than half of its prompt from the cache": any(
            s.cached_tokens < whole / 2 for s in (m.warm, *m.samples)
        ),
        "a cached request was not faster than the cold one": m.warm.ttft_s >= m.cold.ttft_s,
        "nothing was shared between running requests": len(m.samples) > 1 and not _shared(after),
        "chunks are held after the last answer": after["kv_chunks_used"] > 0,
        "requests are left over": after["num_requests_running"] + after["num_requests_waiting"] > 0,
    }
    found = [told for told, wrong in faults.items() if wrong]
    if found:
        raise RuntimeError("the demo failed: " + "; ".join(found))
