"""One request's answer, as LLM puts it together."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.outputs import Completion, RequestOutput
from headrace.types import Delta, Metrics, Request, TokenLogprobs


def reported(output: RequestOutput) -> Sequence[TokenLogprobs]:
    """Rows of log probabilities: the prompt's, or the answer's."""
    return [row for row in output.prompt_logprobs or output.logprobs or [] if row is not None]


class Answer:
    """Puts the deltas of one request together."""

    def __init__(self, request: Request) -> None:
        completions = [
            Completion(index, logprobs=[] if request.params.reports_answer else None)
            for index in range(request.params.n)
        ]
        self.output = RequestOutput(request.request_id, request.prompt_token_ids, completions, Metrics())
        self.embedding: bytes | None = None

    def add(self, delta: Delta) -> None:
        """Takes in a delta."""
        completion = self.output.outputs[delta.index]
        completion.text += delta.text
        completion.token_ids.extend(delta.token_ids)
        if completion.logprobs is not None:
            completion.logprobs.extend(delta.logprobs or [])
        completion.finish_reason = delta.finish_reason
        completion.stop_reason = delta.stop_reason
        if delta.prompt_logprobs is not None:
            self.output.prompt_logprobs = delta.prompt_logprobs
        self.embedding = delta.embedding
        if delta.metrics is not None:
            self.output.metrics = delta.metrics
