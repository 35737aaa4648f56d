"""What the server says on its terminal: capacity at the start, one line per request, a line every few seconds."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from headrace.config import EngineConfig, KVStreaming
from headrace.server.job import Job
from headrace.server.replies import figures
from headrace.stats import EngineStats

log = logging.getLogger("headrace.server")


def address(config: EngineConfig) -> str:
    host = f"[{config.server.host}]" if ":" in config.server.host else config.server.host
    return f"http://{host}:{config.server.port}"


def capacity_lines(capacity: Any, config: EngineConfig, model: str) -> list[str]:
    """Ranks if there are several, tiers if there are any, KV capacity in tokens, and how many sequences that holds."""
    tokens, length = capacity.kv_cache_tokens, capacity.max_model_len
    held = tokens * capacity.kv_bytes_per_token / 2**30
    kernels = ", ".join(f"{op}: {name}" for op, name in capacity.kernels.items())
    return [
        f"{model} is ready on {address(config)} "
        f"({capacity.backend}, {capacity.dtype}{'; ' + kernels if kernels else ''})",
        *([capacity.ranks] if capacity.ranks else []),
        *tier_lines(capacity, config),
        f"KV cache: {tokens:,} tokens in {held:.2f} GiB ({capacity.kv_bytes_per_token:,} bytes per token, "
        f"{capacity.kv_cache_dtype})",
        f"concurrency: {tokens / length:.1f} sequences of {length:,} tokens, unshared; "
        f"at most {capacity.max_sequences} at once; "
        f"up to {config.server.max_queued_requests:,} requests and {config.server.max_queued_tokens:,} prompt tokens "
        "may wait",
    ]


BYTES_PER_ELEMENT = {"int8": 1.0625, "int4": 0.5625}
"""About, with the scales; raw: as in the pool."""


def tier_lines(capacity: Any, config: EngineConfig) -> list[str]:
    """Where KV is kept below the pool, how much of it and in which format; passwords are left out."""
    if config.streaming is not None:
        return [_streamed_line(config.streaming)]
    if config.tiers is None:
        return []
    element = {"bfloat16": 2.0, "float32": 4.0}.get(capacity.kv_cache_dtype, 1.0625)
    lines = []
    for tier in config.tiers.each:
        each = BYTES_PER_ELEMENT.get(tier.format, element)
        tokens = tier.size * 2**30 / capacity.kv_bytes_per_token * element / each
        size = f"{tier.size:g} GiB, about {tokens:,.0f} tokens" if tier.size else "as much as the server keeps"
        lines.append(f"KV in {tier.label}: {tier.place + ', ' if tier.place else ''}{size}, stored as {tier.format}")
    return lines


def _streamed_line(asked: KVStreaming) -> str:
    where = "host memory" if asked.path is None else f"a file in {asked.path}"
    weights = "; the weights too" if asked.weights else ""
    _, gib = asked.room
    return f"KV lies in {where}, {gib:g} GiB, and is streamed at each step, schedule {asked.schedule}{weights}"


def job_line(job: Job, outcome: str) -> str:
    """What was asked, what came of it, and what it cost where that is known: the engine tells it at the end."""
    reasons = sorted({choice.finish_reason for choice in job.choices if choice.finish_reason})
    head = f"{job.request_id}: {outcome} ({', '.join(reasons) or 'unfinished'}), prompt {job.prompt_tokens}"
    if not job.metrics:
        return f"{head}, output {job.output_tokens}"
    told = figures(job)
    speed = f"{told['decode_tokens_per_s']:.1f} tok/s" if told["decode_tokens_per_s"] else "- tok/s"
    how = f", prefill by {job.strategy} ({job.strategy_reason})" if job.strategy else ""
    how += f", restore: {job.restore_reason}" if job.restore_reason else ""
    restored = f", of these {job.restored_tokens} restored" if job.restored_tokens else ""
    return (
        f"{head} ({told['cached_tokens']} cached{restored}, {told['new_tokens']} new), output {job.output_tokens}, "
        f"ttft {told['ttft_s']:.3f} s, queue {told['queue_s']:.3f} s, {speed}{how}"
    )


class StatusLines:
    """A line per interval in which the engine had work."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self.stats = stats

    async def run(self, interval_s: float) -> None:
        before, at = self.stats().flat(), time.monotonic()
        while True:
            await asyncio.sleep(interval_s)
            now, clock = self.stats().flat(), time.monotonic()
            busy = now["scheduler.running"] or now["scheduler.waiting"]
            if busy or now["scheduler.steps"] != before["scheduler.steps"]:
                log.info(status_line(before, now, clock - at))
            before, at = now, clock


def status_line(before: dict[str, float], now: dict[str, float], seconds: float) -> str:
    """Rates are those of the interval, levels those of its end."""
    grown = {name: now[name] - before[name] for name in now}
    share = grown["tokens.cached"] / grown["tokens.prompt"] if grown["tokens.prompt"] else 0.0
    return (
        f"running {now['scheduler.running']}, waiting {now['scheduler.waiting']}, "
        f"prefill {grown['tokens.prefilled'] / seconds:,.0f} tok/s, "
        f"decode {grown['tokens.generated'] / seconds:,.1f} tok/s, "
        f"cached share {share:.0%}, KV in use {now['kv.chunks_used'] / max(1, now['kv.chunks_total']):.1%} "
        f"({now['kv.chunks_used']:,.0f} chunks; {now['kv.chunks_unshared']:,.0f} if unshared)"
        f"{_tier_levels(grown, now)}"
    )


def _tier_levels(grown: dict[str, float], now: dict[str, float]) -> str:
    """Empty where no tier is in use."""
    back = grown["restore.loaded_tokens"] + grown["restore.projected_tokens"]
    if not (back or grown["restore.failures"] or now["restore.unstored"]):
        return ""
    failed = f", {grown['restore.failures']:,.0f} restores failed" if grown["restore.failures"] else ""
    return f", restored {back:,.0f} tokens{failed}, {now['restore.unstored']:,.0f} chunks to be stored"
