"""`headrace bench score`: many options over one text, beside one prefill of as many tokens.

One engine in this process, cold for every run: each draws its own text and options. The two take turns (A B A B), and
the scores of some options are compared with those of whole prompts, to the bit.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.bench.benchmark import MODEL_HELP, Benchmark, Case, a_model, option, token_counts
from headrace.bench.shapes import SHAPES, checkpoint
from headrace.bench.table import Column
from headrace.console import working
from headrace.types import CHUNK, chunks_for

if TYPE_CHECKING:
    from headrace.engine.llm import LLM

GOAL = 1.15
"""Times one prefill, for a text of whole chunks: what is behind the last whole chunk is computed with each option
where rows are not copied (engine.row_copies)."""
COMPARED = 4
"""Options whose scores are compared with whole prompts."""


@dataclass
class ScoreBench(Benchmark):
    """Scores of many options over one text.

    Beside one prefill of as many tokens, in turns.
    """

    name = "score"
    model: str = option(MODEL_HELP, "S1", argument=True, parse=a_model)
    texts: tuple[int, ...] = option("Tokens of the text, by commas.", "4096,4128", parse=token_counts)
    options: int = option("Options over each text.", 64, min=1)
    tokens: int = option("Tokens of each option.", 16, min=1)
    repeats: int = option("Repetitions of each, in turns.", 5, min=1)

    def cases(self) -> Iterator[Case]:
        from headrace.engine.llm import LLM

        folder = str(checkpoint(self.model)) if self.model in SHAPES else self.model
        room = (chunks_for(max(self.texts)) + 2 * self.options * chunks_for(CHUNK + self.tokens)) * CHUNK
        with working("loading"):
            llm = LLM(folder, kv_cache_tokens=2 * room + self.options * self.tokens, kv_cache_prefault=True)
        with llm:
            yield from (self._case(llm, text) for text in self.texts)

    def case_count(self) -> int:
        return len(self.texts)

    def columns(self) -> tuple[Column, ...]:
        return (
            Column("text", "text_tokens", "tokens", ","),
            Column("options", form=",", optional=True),
            Column("each", "option_tokens", "tokens", ",", optional=True),
            Column("prefill", "prefill_s", "s", ",.3f"),
            Column("scores", "score_s", "s", ",.3f"),
            Column("of prefill", "ratio", "times", ".3f", limit="goal", bound="at most"),
            Column("bits", lambda case: "same" if case["same_bits"] else "differ", width=len("differ")),
        )

    def _case(self, llm: LLM, text: int) -> Case:
        rng = random.Random(text)
        prefill: list[float] = []
        score: list[float] = []
        self.progress(f"text of {text:,} tokens")
        _prefill_s(llm, rng, text + self.options * self.tokens)
        _score_s(llm, rng, text, self.options, self.tokens)
        for repeat in range(self.repeats):
            self.progress.detail(f"run {repeat + 1} of {self.repeats}")
            prefill.append(_prefill_s(llm, rng, text + self.options * self.tokens))
            score.append(_score_s(llm, rng, text, self.options, self.tokens))
        medians = statistics.median(prefill), statistics.median(score)
        return {
            "name": f"score_{text}", "model": self.model, "text_tokens": text, "options": self.options,
            "option_tokens": self.tokens, "prefill_s": round(medians[0], 4), "score_s": round(medians[1], 4),
            "ratio": round(medians[1] / medians[0], 4), "goal": None if text % CHUNK else GOAL,
            "same_bits": same_bits(llm, rng, text, self.options, self.tokens),
            "prefill_times": prefill, "score_times": score,
        }  # fmt: skip


def _tokens(llm: LLM, rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(10, llm.capacity.vocab_size) for _ in range(count)]


def _prefill_s(llm: LLM, rng: random.Random, count: int) -> float:
    from headrace.types import SamplingParams

    tokens = _tokens(llm, rng, count)
    began = time.perf_counter()
    llm.generate([tokens], SamplingParams(temperature=0.0, max_tokens=1))
    return time.perf_counter() - began


def _score_s(llm: LLM, rng: random.Random, text: int, options: int, tokens: int) -> float:
    drawn, listed = _tokens(llm, rng, text), [_tokens(llm, rng, tokens) for _ in range(options)]
    began = time.perf_counter()
    llm.score(drawn, listed)
    return time.perf_counter() - began


def same_bits(llm: LLM, rng: random.Random, text: int, options: int, tokens: int) -> bool:
    """Whether scores are those of whole prompts, each computed alone and cold."""
    from headrace.types import SamplingParams

    drawn, listed = _tokens(llm, rng, text), [_tokens(llm, rng, tokens) for _ in range(options)]
    scores = llm.score(drawn, listed)
    whole = SamplingParams(max_tokens=0, prompt_logprobs=0)
    for chosen in range(0, options, max(1, options // COMPARED)):
        llm.engine.cache.tree.clear()
        (output,) = llm.generate([drawn + listed[chosen]], whole)
        rows = (output.prompt_logprobs or [])[text:]
        want = [row[token].logprob for row, token in zip(rows, listed[chosen], strict=True) if row]
        if scores[chosen].token_logprobs != want:
            return False
    return True
