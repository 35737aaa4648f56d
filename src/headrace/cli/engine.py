"""An engine for one command: started with progress, shut down whatever happens."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from headrace.config import EngineConfig
from headrace.console import ProgressLine, loading
from headrace.progress import duration, reading, share_read
from headrace.types import Delta, Metrics


@asynccontextmanager
async def engine(config: EngineConfig, quiet: bool) -> AsyncIterator[Any]:
    """Started, for texts. Raises ValueError for a model without a tokenizer."""
    from headrace.engine.async_llm import AsyncLLM

    llm = AsyncLLM(config)
    _check_tokenizer(config)
    with nullcontext() if quiet else loading(config.model.folder) as progress:
        await llm.start(phases=progress)
    try:
        yield llm
    finally:
        with nullcontext() if quiet else ProgressLine(_ending(llm), after_s=ENDING_S):
            await llm.shutdown()


def _check_tokenizer(config: EngineConfig) -> None:
    """Raises ValueError for a model that takes no text, before an engine is started."""
    from headrace.engine.folders import model_folder
    from headrace.engine.tokenizer import has_tokenizer

    model = model_folder(config.model.folder)
    if not has_tokenizer(model):
        place = "beside it" if model.is_file() else "there"
        raise ValueError(f"{model} has no tokenizer, and so takes no text; put the model's tokenizer.json {place}")


def _ending(llm: Any) -> Callable[[], str]:
    """What an engine does that takes long to end."""
    began = time.monotonic()

    def tell() -> str:
        chunks = llm.stats.restore.unstored
        doing = f"storing {chunks:,} chunks" if chunks else "ending the engine"
        return f"{doing}: {duration(time.monotonic() - began)}"

    return tell


READING_S = 2.0
"""A prompt that is read in less is not told of, but on a terminal."""

ENDING_S = 2.0
"""The same for an engine that ends, which may have chunks to store."""


class OneAnswer:
    """A prompt that is read and then answered: what is told of it."""

    def __init__(self, llm: Any) -> None:
        self.llm, self.written = llm, 0
        self.asked_s = self.first_s = time.monotonic()

    def note(self, delta: Delta) -> None:
        if not self.written:
            self.first_s = time.monotonic()
        self.written += len(delta.token_ids)

    def text(self) -> str:
        """How far the prompt is read; '1,024 tokens written, 51.2 tokens/s' from the first token on."""
        if not self.written:
            return reading(self.llm.prefills, self.llm.prefill_rate, time.monotonic() - self.asked_s)
        rate = written_rate(self.written, time.monotonic() - self.first_s)
        return f"{self.written:,} token{'s' * (self.written != 1)} written, {rate}"

    def share(self) -> float | None:
        """Of the prompt, 0 to 1; None where it is not being read."""
        return share_read(self.llm.prefills)


def check_adapter(config: EngineConfig, adapter: str) -> None:
    """Raises ValueError for an adapter that the settings do not name."""
    names = config.adapters.names
    if adapter and adapter not in names:
        known = f"one of {', '.join(names)}" if names else f"an adapter of --lora-modules, as {adapter}=FOLDER"
        raise ValueError(f"--adapter {adapter}: there is none of this name; give {known}")


async def streamed(
    llm: Any, answering: AsyncGenerator[Delta, None], quiet: bool, *, unseen: bool = False
) -> AsyncIterator[Delta]:
    """The deltas of llm.generate, `answering`. A line on stderr tells how far the prompt is read, until the first
    delta; if the answer is not seen as it comes, also how much of it is written, until the last."""
    answer = OneAnswer(llm)
    with nullcontext() if quiet else ProgressLine(answer.text, answer.share, after_s=READING_S) as line:
        async with aclosing(answering) as deltas:
            async for delta in deltas:
                answer.note(delta)
                if line is not None and not unseen:
                    line.close()
                yield delta


def written_rate(tokens: int, seconds: float) -> str:
    """'51.2 tokens/s', of the tokens after the first."""
    return f"{(tokens - 1) / seconds:,.1f} tokens/s" if seconds > 0 else "- tokens/s"


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
