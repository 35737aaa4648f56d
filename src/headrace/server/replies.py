"""Replies in OpenAI's shapes, whole and in chunks, with Headrace's figures beside the usage."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.server.engine import ServedTokenizer
from headrace.server.job import Event, Job, ReplyChoice
from headrace.server.parsers.parts import Call, CallArguments, CallStart, Part, ReasoningPart, TextPart
from headrace.server.stream import DONE, sse, sse_error
from headrace.server.text_offsets import TextOffsets
from headrace.types import Logprob, SamplingParams, TokenLogprobs

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have (as in OpenAI's replies)."""


def usage(job: Job) -> dict[str, Any]:
    return {
        "prompt_tokens": job.prompt_tokens,
        "completion_tokens": job.output_tokens,
        "total_tokens": job.prompt_tokens + job.output_tokens,
        "prompt_tokens_details": {"cached_tokens": job.cached_tokens},
    }


def figures(job: Job) -> dict[str, Any]:
    """The `headrace` object: what the request cost. Rates are null where there is nothing to divide, the strategy where
    there is one rank, the reason of a restore where nothing was stored."""
    ttft = min((m.ttft_s for m in job.metrics), default=0.0)
    queue = max((m.queue_s for m in job.metrics), default=0.0)
    e2e = max((m.e2e_s for m in job.metrics), default=0.0)
    new = job.prompt_tokens - job.cached_tokens
    return {
        "ttft_s": round(ttft, 6),
        "queue_s": round(queue, 6),
        "e2e_s": round(e2e, 6),
        "cached_tokens": job.cached_tokens,
        "new_tokens": new,
        "prompt_tokens_per_s": _rate(job.prompt_tokens, ttft - queue),
        "decode_tokens_per_s": _rate(job.output_tokens - len(job.choices), e2e - ttft),
        "strategy": job.strategy or None,
        "strategy_reason": job.strategy_reason or None,
        "restored_tokens": job.restored_tokens,
        "restore_reason": job.restore_reason or None,
        "reuse": None if job.reuse is None else job.reuse.asdict(),
        "pinned": None if job.pinned is None else job.pinned.asdict(),
    }


def _rate(tokens: int, seconds: float) -> float | None:
    return round(tokens / seconds, 3) if tokens > 0 and seconds > 0 else None


@dataclass(frozen=True, slots=True)
class Shown:
    """What replies need to know beside the job: the model's name as the client knows it, and what was asked for."""

    model: str
    tokenizer: ServedTokenizer | None = None
    token_ids: bool = False
    usage: bool = False
    """Usage is asked for in a chunk of its own behind the others."""
    fingerprint: str = ""
    carry: Callable[[ReplyChoice], list[int] | None] | None = None
    """The tokens that an answer's message has with it, for the next turn's prompt."""


class Replies(Protocol):
    """How a route tells a job: in one piece, or as server-sent events while it runs. `events` come in order of
    generation."""

    def take(self, event: Event) -> None:
        """Every event of a reply in one piece, before `whole`: the order of an answer's parts is in them alone."""
        ...

    def whole(self) -> dict[str, Any]: ...

    def opening(self) -> list[bytes]:
        """Server-sent events before the first event, at once: the prompt is still to be read."""
        ...

    def frames(self, event: Event) -> list[bytes]:
        """Server-sent events for one event: often one, none while its text is held back."""
        ...

    def ending(self) -> list[bytes]:
        """Behind the last event."""
        ...

    def failure(self, error: BaseException) -> list[bytes]:
        """In the midst of a stream, as its end."""
        ...


class InOnePiece(Replies):
    """Those of a route that does not stream."""

    def opening(self) -> list[bytes]:
        return []

    def take(self, event: Event) -> None:
        return None

    def frames(self, event: Event) -> list[bytes]:
        return []

    def ending(self) -> list[bytes]:
        return []

    def failure(self, error: BaseException) -> list[bytes]:
        return []


class OpenAIReplies:
    """What chat and plain completions have in common."""

    object = ""
    chunk_object = ""

    def __init__(self, job: Job, shown: Shown) -> None:
        self.job, self.shown, self.tokenizer = job, shown, shown.tokenizer

    def take(self, event: Event) -> None:
        """The job keeps all that these replies tell."""

    def whole(self) -> dict[str, Any]:
        head = self._head(self.object)
        return {
            **head,
            "choices": [self._choice(choice) for choice in self.job.choices],
            "usage": usage(self.job),
            "headrace": figures(self.job),
        }

    def opening(self) -> list[bytes]:
        return []

    def frames(self, event: Event) -> list[bytes]:
        return [sse(chunk) for chunk in self.chunks(event)]

    def ending(self) -> list[bytes]:
        return [sse(self.usage_chunk()), DONE] if self.shown.usage else [DONE]

    def failure(self, error: BaseException) -> list[bytes]:
        return [sse_error(error, self.job.request_id)]

    def progress(self, told: dict[str, Any]) -> bytes:
        """A chunk without choices that tells how far the prompt is read (server.prompt_progress)."""
        usage = {"usage": None} if self.shown.usage else {}
        return sse({**self._head(self.chunk_object), "choices": [], **usage, "prompt_progress": told})

    def chunks(self, event: Event) -> list[dict[str, Any]]:
        """Chunks for one event."""
        choices = self._deltas(event)
        if self.shown.token_ids and choices:
            choices[-1]["token_ids"] = event.delta.token_ids
        out = [{**self._head(self.chunk_object), "choices": [choice]} for choice in choices]
        if self.shown.usage:
            out = [{**chunk, "usage": None} for chunk in out]
        elif self.job.done and out:
            out[-1]["headrace"] = figures(self.job)
        return out

    def usage_chunk(self) -> dict[str, Any]:
        head = self._head(self.chunk_object)
        return {**head, "choices": [], "usage": usage(self.job), "headrace": figures(self.job)}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.job.request_id, "object": kind, "created": self.job.created, "model": self.shown.model,
                "system_fingerprint": self.shown.fingerprint}  # fmt: skip

    def _choice(self, choice: ReplyChoice) -> dict[str, Any]:
        out = {"index": choice.index, **self._body(choice)}
        out["finish_reason"] = choice.finish_reason
        out["stop_reason"] = choice.stop_reason
        if self.shown.token_ids:
            out["token_ids"], out["prompt_token_ids"] = choice.token_ids, choice.prompt.ids
        return out

    def _body(self, choice: ReplyChoice) -> dict[str, Any]:
        raise NotImplementedError

    def _deltas(self, event: Event) -> list[dict[str, Any]]:
        raise NotImplementedError

    def _text(self, token: int, info: Logprob | None = None) -> str:
        return token_text(self.tokenizer, token, info)

    def prompt_logprobs(self, choice: ReplyChoice) -> list[dict[str, Any] | None] | None:
        """As vLLM gives them: per position, token id -> logprob, rank, decoded_token."""
        if choice.prompt_logprobs is None:
            return None
        return [None if row is None else self._ranked(row) for row in choice.prompt_logprobs]

    def _ranked(self, row: TokenLogprobs) -> dict[str, Any]:
        return {
            str(token): {"logprob": finite(i.logprob), "rank": i.rank, "decoded_token": self._text(token, i)}
            for token, i in row.items()
        }


def token_text(tokenizer: ServedTokenizer | None, token: int, info: Logprob | None = None) -> str:
    """Text of one token; its number where the model has no tokenizer."""
    if info is not None and info.text:
        return info.text
    return str(token) if tokenizer is None else tokenizer.token_text(token)


def token_logprob(
    tokenizer: ServedTokenizer | None, token: int, row: TokenLogprobs, params: SamplingParams
) -> dict[str, Any]:
    """One token in OpenAI's newer format, with the most likely ones in its place, or those that were named."""

    def told(token: int, info: Logprob) -> dict[str, Any]:
        text = token_text(tokenizer, token, info)
        exact = text.encode() if tokenizer is None else tokenizer.token_bytes(token)
        return {"token": text, "logprob": finite(info.logprob), "bytes": list(exact)}

    listed = params.logprob_token_ids
    if listed:
        best = [(other, info) for other, info in row.items() if other in listed]
    else:  # without the chosen one, where it is no top
        best = sorted(row.items(), key=lambda item: item[1].rank)[: params.logprobs or 0]
    return {**told(token, row[token]), "top_logprobs": [told(t, info) for t, info in best]}


def chat_message(choice: ReplyChoice) -> dict[str, Any]:
    answer = choice.answer
    message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["content"] = answer.text or None
        message["tool_calls"] = [_called(call) for call in answer.calls]
    return message


class ChatReplies(OpenAIReplies):
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def whole(self) -> dict[str, Any]:
        out = super().whole()
        if self.job.prompts[0].params.prompt_logprobs is not None:
            out["prompt_logprobs"] = self.prompt_logprobs(self.job.choices[0])
        return out

    def _choice(self, choice: ReplyChoice) -> dict[str, Any]:
        out = super()._choice(choice)
        out["finish_reason"] = _finish(choice)
        return out

    def _body(self, choice: ReplyChoice) -> dict[str, Any]:
        message = chat_message(choice)
        if self.shown.carry is not None and (tokens := self.shown.carry(choice)) is not None:
            message["token_ids"] = tokens
        return {"message": message, "logprobs": self._logprobs(choice, choice.token_ids, choice.logprobs)}

    def _deltas(self, event: Event) -> list[dict[str, Any]]:
        choice, delta = event.choice, event.delta
        out = [self._delta(choice, {"role": "assistant", "content": ""})] if event.first else []
        bodies = [_told_part(part) for part in event.parts]
        if not bodies and (delta.logprobs or delta.finish_reason or (self.shown.token_ids and delta.token_ids)):
            bodies = [{} if delta.finish_reason else {"content": ""}]
        out += [self._delta(choice, body) for body in bodies]
        if bodies:
            out[-1]["logprobs"] = self._logprobs(choice, delta.token_ids, delta.logprobs)
            out[-1]["finish_reason"] = _finish(choice) if delta.finish_reason else None
            if delta.finish_reason:
                out[-1]["stop_reason"] = delta.stop_reason
        return out

    def _delta(self, choice: ReplyChoice, body: dict[str, Any]) -> dict[str, Any]:
        return {"index": choice.index, "delta": body, "logprobs": None, "finish_reason": None}

    def _logprobs(
        self, choice: ReplyChoice, tokens: list[int], rows: list[TokenLogprobs] | None
    ) -> dict[str, Any] | None:
        params = choice.prompt.params
        if params.logprobs is None or not rows:
            return None
        pairs = zip(tokens, rows, strict=True)
        return {"content": [token_logprob(self.tokenizer, t, row, params) for t, row in pairs], "refusal": None}


class CompletionReplies(OpenAIReplies):
    """The older shape. `echo` repeats the prompt's text, and its log probabilities where they were asked for."""

    object = chunk_object = "text_completion"

    def __init__(self, job: Job, shown: Shown, echo: bool = False) -> None:
        super().__init__(job, shown)
        self.echo = echo
        self._offsets: dict[int, TextOffsets] = {}

    def _body(self, choice: ReplyChoice) -> dict[str, Any]:
        text = choice.prompt.text + choice.text if self.echo else choice.text
        logprobs = self._logprobs(choice, choice.token_ids, choice.logprobs, self.echo)
        out: dict[str, Any] = {"text": text, "logprobs": logprobs}
        if choice.prompt.params.prompt_logprobs is not None:
            out["prompt_logprobs"] = self.prompt_logprobs(choice)
        return out

    def _deltas(self, event: Event) -> list[dict[str, Any]]:
        choice, delta = event.choice, event.delta
        echo = self.echo and event.first
        text = choice.prompt.text + delta.text if echo else delta.text
        if not (text or delta.logprobs or delta.finish_reason or (self.shown.token_ids and delta.token_ids)):
            return []
        logprobs = self._logprobs(choice, delta.token_ids, delta.logprobs or [], echo)
        finish, stop = delta.finish_reason, delta.stop_reason
        body = {"text": text, "logprobs": logprobs, "finish_reason": finish, "stop_reason": stop}
        return [{"index": choice.index, **body}]

    def _logprobs(
        self, choice: ReplyChoice, tokens: list[int], rows: list[TokenLogprobs], echo: bool
    ) -> dict[str, Any] | None:
        """OpenAI's older format: parallel lists; offsets count characters of the choice's `text`."""
        if choice.prompt.params.logprobs is None or not (rows or echo):
            return None
        pairs: list[tuple[int, TokenLogprobs | None]] = list(zip(tokens, rows, strict=True))
        if echo:
            first = choice.prompt.ids[: len(choice.prompt_logprobs or [])]
            pairs = list(zip(first, choice.prompt_logprobs or [], strict=True)) + pairs
        out: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for number, (token, row) in enumerate(pairs):
            out["tokens"].append(self._text(token, row[token] if row else None))
            out["token_logprobs"].append(finite(row[token].logprob) if row else None)
            out["top_logprobs"].append(self._by_text(row) if row else None)
            out["text_offset"].append(self._offset(choice, token, number < len(pairs) - len(tokens)))
        return out

    def _offset(self, choice: ReplyChoice, token: int, of_prompt: bool) -> int:
        """Where the choice's next token begins in its text."""
        if self.tokenizer is None:
            return 0
        if choice.index not in self._offsets:
            prompt, echoed = choice.prompt, choice.prompt.text if self.echo else None
            skips = prompt.params.skip_special_tokens
            self._offsets[choice.index] = TextOffsets(self.tokenizer, prompt.ids, echoed, skips)
        return self._offsets[choice.index].next(token, of_prompt)

    def _by_text(self, row: TokenLogprobs) -> dict[str, float]:
        """Text -> log probability. Of tokens with one text (parts of characters) all but the likeliest go by their ids,
        in the form of vLLM."""
        found: dict[str, float] = {}
        for token, info in row.items():
            text = self._text(token, info)
            found[f"token_id:{token}" if text in found else text] = finite(info.logprob)
        return found


def _finish(choice: ReplyChoice) -> str | None:
    """Calls are why an answer that stopped by itself has ended."""
    called = choice.answer.calls and choice.finish_reason == "stop" and not choice.cuts_call
    return "tool_calls" if called else choice.finish_reason


def _called(call: Call) -> dict[str, Any]:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _told_part(part: Part) -> dict[str, Any]:
    """A part as the `delta` of a chunk."""
    if isinstance(part, TextPart):
        return {"content": part.text}
    if isinstance(part, ReasoningPart):
        return {"reasoning_content": part.text}
    if isinstance(part, CallStart):
        call = {**_called(Call(part.call_id, part.name)), "index": part.number}
        return {"tool_calls": [call]}
    assert isinstance(part, CallArguments)
    return {"tool_calls": [{"index": part.number, "function": {"arguments": part.text}}]}


def finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB) if not math.isnan(logprob) else LEAST_LOGPROB
