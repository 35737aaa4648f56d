"""What the server says while it works: a line per request, and a line every few seconds on the whole."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from headrace.logs import short_id, shown
from headrace.progress import Prefill, percent, reading
from headrace.server.engine import ServedEngine
from headrace.server.job import Job
from headrace.server.replies import figures
from headrace.server.start import Line
from headrace.stats import EngineStats
from headrace.types import SamplingParams

log = logging.getLogger("headrace.server")

LONG_QUEUE_S = 0.1
"""A request's time in the queue is told from here on."""

SHORT = {"client gone": "left"}
"""How a request ended -> in a column."""

MOST_TEXT = 200
"""Characters of a prompt and of an answer that --log-requests text shows."""


def arrival_line(job: Job, text: str | None) -> Line:
    """A request with the parameters that differ from their defaults. text: of its prompt, where that may be told."""
    params = job.prompts[0].params
    asked = {name: value for name, value in _changed(params).items() if name != "n"}
    told = "".join(f"  {name}={shown(value, 60)}" for name, value in asked.items())
    count = f"  x {len(job.choices)} answers" if len(job.choices) > 1 else ""
    begins = "" if text is None else f"  '{shown(text, MOST_TEXT)}'"
    line = f"{_head(job, 'arrived')}  prompt {job.prompt_tokens:>7,}{count}{told}{begins}"
    named = {"request_id": job.request_id, "event": "arrived", "prompt_tokens": job.prompt_tokens, "params": asked,
             "choices": len(job.choices), **_tenant(job)}  # fmt: skip
    return Line(line, named if text is None else {**named, "prompt": text[:MOST_TEXT]})


def _changed(params: SamplingParams) -> dict[str, Any]:
    default = SamplingParams()
    return {
        name: getattr(params, name)
        for name in SamplingParams.__dataclass_fields__
        if getattr(params, name) != getattr(default, name)
    }


UNREMARKABLE = ("first", "continued")
"""Causes of a missed prefix that log lines leave out: nothing could have been better."""


def job_line(job: Job, outcome: str, texts: bool = False) -> Line:
    """What came of a request, and what it cost where that is known: the engine tells it at the end. texts: with the
    beginning of its answers."""
    reasons = ", ".join(sorted({choice.finish_reason for choice in job.choices if choice.finish_reason}))
    head = _head(job, reasons or "done" if outcome == "done" else SHORT.get(outcome, outcome))
    answers = [shown(choice.text, MOST_TEXT) for choice in job.choices] if texts else []
    said = "".join(f"  '{answer}'" for answer in answers)
    named = {"request_id": job.request_id, "event": "ended", "outcome": outcome, "finish_reason": reasons or None,
             "prompt_tokens": job.prompt_tokens, "output_tokens": job.output_tokens,
             "choices": len(job.choices), **_tenant(job), **({"answers": answers} if texts else {}),
             **({"remark": job.remark} if job.remark else {})}  # fmt: skip
    if not job.metrics:
        seconds = (job.end_s or time.monotonic()) - job.arrival_s
        line = f"{head}  prompt {job.prompt_tokens:>7,}{'':17}  output {job.output_tokens:>6,}  after {seconds:.3f} s"
        line += f", {job.remark}" if job.remark else ""
        return Line(line + said, {**named, "e2e_s": round(seconds, 6)})
    told = figures(job)
    speed = f"{told['decode_tokens_per_s']:>7,.1f}" if told["decode_tokens_per_s"] else f"{'-':>7}"
    line = (
        f"{head}  prompt {job.prompt_tokens:>7,} ({told['cached_tokens']:>7,} cached)  output {job.output_tokens:>6,}  "
        f"ttft {told['ttft_s']:>7.3f} s  {speed} tokens/s{_how(job, told)}"
    )
    return Line(line + said, {**named, **told})


def _head(job: Job, what: str) -> str:
    tenant = f"  {job.tenant.name}" if job.tenant.name else ""
    return f"{short_id(job.request_id):8}  {what:<8}{tenant}"


def _tenant(job: Job) -> dict[str, str]:
    return {"tenant": job.tenant.name} if job.tenant.name else {}


def _how(job: Job, told: dict[str, Any]) -> str:
    """What not every request has to tell."""
    parts = []
    if len(job.choices) > 1:
        parts.append(f"{len(job.choices)} answers")
    if told["queue_s"] >= LONG_QUEUE_S:
        parts.append(f"queued {told['queue_s']:.3f} s")
    if job.restored_tokens:
        parts.append(f"{job.restored_tokens:,} restored")
    if job.restore_reason:
        parts.append(f"restore: {job.restore_reason}")
    if job.reuse is not None and job.reuse.cause not in UNREMARKABLE:
        near = job.reuse.nearest
        parts.append(job.reuse.told if near is None else job.reuse.told_of(short_id(near.seen.request_id)))
    if job.strategy:
        parts.append(f"prefill by {job.strategy} ({job.strategy_reason.removeprefix(job.strategy + ': ')})")
    return f"  {', '.join(parts)}" if parts else ""


class StatusLines:
    """A line per interval in which the engine had work. engine: the one that serves, None while there is none."""

    def __init__(self, engine: Callable[[], ServedEngine | None], stats: Callable[[], EngineStats]) -> None:
        self.engine, self.stats = engine, stats

    async def run(self, interval_s: float) -> None:
        before, at = self.stats().flat(), time.monotonic()
        while True:
            await asyncio.sleep(interval_s)
            now, clock = self.stats().flat(), time.monotonic()
            engine = self.engine()
            if engine is not None and is_busy(before, now, engine.prefills):
                line = status_line(before, now, clock - at, engine.prefills, engine.prefill_rate)
                log.info(line.text, extra=line.extra)
            before, at = now, clock


def is_busy(before: dict[str, float], now: dict[str, float], prefills: Sequence[Prefill]) -> bool:
    """Whether requests are under way, or several came and went: one alone has a line of its own."""
    ended = sum(now[name] - before[name] for name in now if name.startswith("finished."))
    return bool(now["scheduler.running"] or now["scheduler.waiting"] or prefills) or ended > 1


def status_line(
    before: dict[str, float], now: dict[str, float], seconds: float, prefills: Sequence[Prefill] = (), rate: float = 0.0
) -> Line:
    """Rates are those of the interval, levels those of its end. Both are left out where no step ended in it, since the
    engine's counters stand still while a long step runs; what it reads is known from `prefills`."""
    grown = {name: now[name] - before[name] for name in now}
    running = max(int(now["scheduler.running"]), len(prefills))
    held, unshared = now["kv.chunks_used"], now["kv.chunks_unshared"]
    share = min(1.0, grown["tokens.cached"] / grown["tokens.prompt"]) if grown["tokens.prompt"] > 0 else None
    read, written = grown["tokens.prefilled"] / seconds, grown["tokens.generated"] / seconds
    progress = reading(prefills, rate)
    parts = [f"running {running:>3,}  waiting {now['scheduler.waiting']:>3,.0f}"]
    if grown["scheduler.steps"]:
        parts.append(
            f"read {read:>7,.0f}/s  written {written:>7,.1f}/s  "
            f"cached {'-' if share is None else percent(round(share * 1000), 1000):>5}  "
            f"KV {held / max(1, now['kv.chunks_total']):>6.1%}{_sharing(held, unshared)}{_tier_levels(grown, now)}"
        )
    elif not progress:
        parts.append(f"no step ended in the last {seconds:.0f} s")
    return Line("  ".join([*parts, progress] if progress else parts), {
        "event": "status", "seconds": round(seconds, 3), "running": running, "waiting": int(now["scheduler.waiting"]),
        "prefill_tokens_per_s": round(read, 3), "decode_tokens_per_s": round(written, 3),
        "cached_share": None if share is None else round(share, 4), "kv_chunks_used": held,
        "kv_chunks_unshared": unshared, "kv_chunks_total": now["kv.chunks_total"],
        "restored_tokens": grown["restore.loaded_tokens"] + grown["restore.projected_tokens"],
        "unstored_chunks": now["restore.unstored"], "prefills": [each._asdict() for each in prefills],
    })  # fmt: skip


def _sharing(held: float, unshared: float) -> str:
    return f" ({held:,.0f} chunks; {unshared:,.0f} unshared)" if unshared > held else ""


def _tier_levels(grown: dict[str, float], now: dict[str, float]) -> str:
    """Empty where no tier is in use."""
    back = grown["restore.loaded_tokens"] + grown["restore.projected_tokens"]
    if not (back or grown["restore.failures"]):
        return f"  {now['restore.unstored']:,.0f} chunks unstored" if now["restore.unstored"] else ""
    failed = f", {grown['restore.failures']:,.0f} restores failed" if grown["restore.failures"] else ""
    return f"  restored {back:,.0f} tokens{failed}, {now['restore.unstored']:,.0f} chunks to be stored"
