"""An engine for one command: started with progress, shut down whatever happens."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from headrace.config import EngineConfig
from headrace.console import ProgressLine, loading
from headrace.progress import reading, share_read
from headrace.types import Delta, Metrics, SamplingParams


@asynccontextmanager
async def engine(config: EngineConfig, quiet: bool) -> AsyncIterator[Any]:
    from headrace.engine.async_llm import AsyncLLM

    llm = AsyncLLM(config)
    with nullcontext() if quiet else loading(config.model.folder) as progress:
        await llm.start(phases=progress)
    try:
        yield llm
    finally:
        await llm.shutdown()


READING_S = 2.0
"""A prompt that is read in less is not told of, but on a terminal."""


async def streamed(llm: Any, prompt: str | list[int], params: SamplingParams, quiet: bool) -> AsyncIterator[Delta]:
    """The deltas of llm.generate. Until the first one a line on stderr tells how far the prompt is read."""
    began = time.monotonic()

    def tell() -> str:
        return reading(llm.prefills, llm.prefill_rate, time.monotonic() - began)

    def share() -> float | None:
        return share_read(llm.prefills)

    with nullcontext() if quiet else ProgressLine(tell, share, after_s=READING_S) as line:
        async with aclosing(llm.generate(prompt, params)) as deltas:
            async for delta in deltas:
                if line is not None:
                    line.close()
                yield delta


@dataclass(slots=True)
class CollectedAnswer:
    """One sequence of an answer, put together from its deltas."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    metrics: Metrics | None = None

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.metrics = delta.metrics or self.metrics

    @property
    def text(self) -> str:
        return "".join(self.texts)


def figures(metrics: Metrics) -> str:
    """One line: what was cached, what was new, how fast; which strategy computed it where there are ranks, and how
    stored chunks came back where there are tiers."""
    decode = metrics.decode_tokens_per_s
    speed = "- tokens/s" if decode is None else f"{decode:.1f} tokens/s"
    new = metrics.prompt_tokens - metrics.cached_tokens
    how = f", prefill by {metrics.strategy} ({metrics.strategy_reason})" if metrics.strategy else ""
    how += f", restore: {metrics.restore_reason}" if metrics.restore_reason else ""
    restored = f", of these {metrics.restored_tokens} restored" if metrics.restored_tokens else ""
    return (
        f"prompt {metrics.prompt_tokens} tokens ({metrics.cached_tokens} cached{restored}, {new} new), "
        f"first token after {metrics.ttft_s:.3f} s, {metrics.output_tokens} tokens at {speed}{how}"
    )
