"""Answers as `headrace.LLM` returns them: of prompts, and likelihoods of options."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.types import FinishReason, Metrics, TokenLogprobs, shortened


@dataclass(slots=True)
class Completion:
    """One of the n sequences of a request."""

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def __repr__(self) -> str:
        """The text, cut, and how many tokens it has."""
        return f"Completion({self.index}, {self._told})"

    @property
    def _told(self) -> str:
        return f"{shortened(self.text)}, {len(self.token_ids):,} tokens, {self.finish_reason or 'unfinished'}"


@dataclass(slots=True)
class RequestOutput:
    """The answer to one prompt. `text`, `token_ids`, `logprobs`, `finish_reason` are those of the first sequence."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[Completion]
    metrics: Metrics
    prompt: str | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    def __repr__(self) -> str:
        """The first text, cut, and counts in place of tokens."""
        others = f" and {len(self.outputs) - 1} more" if self.outputs[1:] else ""
        first = self.outputs[0]._told if self.outputs else "no output"
        cached = f"{self.metrics.cached_tokens:,} of {len(self.prompt_token_ids):,} prompt tokens cached"
        return f"RequestOutput({self.request_id!r}, {first}{others}, {cached})"

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        return self.outputs[0].logprobs

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.outputs[0].finish_reason


@dataclass(frozen=True, slots=True)
class Score:
    """The likelihood of an option after a text. `token_ids`: the option's tokens, from position `start` of text and
    option together; `token_logprobs`: theirs, each after all before it; `logprob` is their sum.

    `greedy`: each token is the most likely one, so that a greedy answer to the text would begin with the option.
    """

    token_ids: list[int]
    token_logprobs: list[float]
    start: int
    greedy: bool

    def __repr__(self) -> str:
        greedy = ", greedy" if self.greedy else ""
        return f"Score({self.logprob:.4f}, {len(self.token_ids):,} tokens{greedy})"

    @property
    def logprob(self) -> float:
        return sum(self.token_logprobs)

    @property
    def mean_logprob(self) -> float:
        """Of a token: compares options of different lengths."""
        return self.logprob / len(self.token_ids)


@dataclass(frozen=True, slots=True)
class SessionReport:
    """What saving or loading a session came to.

    tokens: of the session. saved_tokens: of those, whose keys and values were saved, in whole chunks. restored_tokens:
    whose keys and values a prompt that begins with them now finds. bytes: of the file. why: where not all that was
    saved came back.
    """

    tokens: int
    saved_tokens: int
    restored_tokens: int
    bytes: int
    seconds: float
    why: str = ""
