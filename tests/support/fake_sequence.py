"""One sequence of a request to the fake engine: tokens, text and log probabilities."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from headrace.types import Delta, Logprob, TokenLogprobs

if TYPE_CHECKING:
    from tests.support.fake_engine import FakeRun


class FakeSequence:
    """Text is held back where it may be the beginning of a stop string or of a character."""

    def __init__(self, run: FakeRun, index: int) -> None:
        self.run, self.index = run, index
        self.token_ids: list[int] = []
        self.sent = ""
        self.finish: str | None = None

    def next(self) -> Delta:
        run, params = self.run, self.run.params
        if run.embed:
            self.finish = "length"
            size = len(run.engine.capacity.pooling.labels) or 4
            vector = struct.pack(f"<{size}f", *[len(run.prompt), *run.prompt[:1], 0, 0][:size])
            return Delta(run.request_id, self.index, finish_reason="length", embedding=vector)
        if params.max_tokens == 0:
            self.finish = "length"
            return Delta(run.request_id, self.index, finish_reason="length", prompt_logprobs=self._prompt_logprobs())
        said = run.script or run.prompt
        token = said[(len(self.token_ids) + self.index) % len(said)]
        delta = Delta(run.request_id, self.index, token_ids=[token])
        if not self.index and not self.token_ids:
            delta.cached_tokens = run.found
        if params.logprobs is not None:
            delta.logprobs = [_logprobs(token, params.logprobs, params.logprob_token_ids)]
        if params.prompt_logprobs is not None and self.index == 0 and not self.token_ids:
            delta.prompt_logprobs = self._prompt_logprobs()
        self.token_ids.append(token)
        self._text(delta)
        if len(self.token_ids) == run.engine.abort_after:
            self.finish = "abort"
            return Delta(run.request_id, self.index, finish_reason="abort", stop_reason="the grammar cannot go on")
        return delta

    def _prompt_logprobs(self) -> list[TokenLogprobs | None]:
        run, params = self.run, self.run.params
        first = max(1, params.prompt_logprobs_start)
        found = [_logprobs(t, params.prompt_logprobs or 0, params.logprob_token_ids) for t in run.prompt[first:]]
        return [None] * min(first, len(run.prompt)) + found

    def _text(self, delta: Delta) -> None:
        params = self.run.params
        text = bytes(t for t in self.token_ids if t < 256).decode("utf-8", "ignore")
        found = [(text.find(stop), stop) for stop in params.stop if stop in text]
        if found:
            at, delta.stop_reason = min(found)
            text, delta.finish_reason = text[:at], "stop"
        elif self.run.script is not None and len(self.token_ids) == len(self.run.script):
            delta.finish_reason = "stop"
        elif len(self.token_ids) >= (params.max_tokens or 16):
            delta.finish_reason = "length"
        else:
            text = text[: max(0, len(text) - max((len(stop) - 1 for stop in params.stop), default=0))]
        self.finish = delta.finish_reason
        delta.text, self.sent = text[len(self.sent) :], max(self.sent, text, key=len)


def _logprobs(token: int, top: int, listed: tuple[int, ...] = ()) -> TokenLogprobs:
    """The chosen token is the second most likely: alternatives and the choice must not be mixed up."""
    if listed:
        return {t: Logprob(-0.01 * t, 1 + t, "") for t in sorted({token, *listed})}
    others = [t for t in range(65, 65 + top + 1) if t != token]
    ranked = [*others[:1], token, *others[1:]]
    return {t: Logprob(-0.5 * (i + 1), i + 1, "") for i, t in enumerate(ranked) if i < top or t == token}
