"""Replies in OpenAI's shapes, whole and in chunks, with Headrace's figures beside the usage."""

from __future__ import annotations

import math
from typing import Any

from headrace.server.engine import ServedTokenizer
from headrace.server.job import Event, Job, ReplyChoice
from headrace.types import Logprob, TokenLogprobs

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
    }


def _rate(tokens: int, seconds: float) -> float | None:
    return round(tokens / seconds, 3) if tokens > 0 and seconds > 0 else None


class Replies:
    """What chat and plain completions have in common. `events` of a job come in order of generation."""

    object = ""
    chunk_object = ""

    def __init__(self, job: Job, model: str, tokenizer: ServedTokenizer | None, return_token_ids: bool) -> None:
        self.job, self.model, self.tokenizer, self.return_token_ids = job, model, tokenizer, return_token_ids

    def whole(self) -> dict[str, Any]:
        head = self._head(self.object)
        return {
            **head,
            "choices": [self._choice(choice) for choice in self.job.choices],
            "usage": usage(self.job),
            "headrace": figures(self.job),
        }

    def chunks(self, event: Event, include_usage: bool) -> list[dict[str, Any]]:
        """What goes to the client for one event: often one chunk, none while its text is held back."""
        choices = self._deltas(event)
        if self.return_token_ids and choices:
            choices[-1]["token_ids"] = event.delta.token_ids
        out = [{**self._head(self.chunk_object), "choices": [choice]} for choice in choices]
        if include_usage:
            out = [{**chunk, "usage": None} for chunk in out]
        elif self.job.done and out:
            out[-1]["headrace"] = figures(self.job)
        return out

    def usage_chunk(self) -> dict[str, Any]:
        head = self._head(self.chunk_object)
        return {**head, "choices": [], "usage": usage(self.job), "headrace": figures(self.job)}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.job.request_id, "object": kind, "created": self.job.created, "model": self.model}

    def _choice(self, choice: ReplyChoice) -> dict[str, Any]:
        out = {"index": choice.index, **self._body(choice)}
        out["finish_reason"] = choice.finish_reason
        out["stop_reason"] = choice.stop_reason
        if self.return_token_ids:
            out["token_ids"], out["prompt_token_ids"] = choice.token_ids, choice.prompt.ids
        return out

    def _body(self, choice: ReplyChoice) -> dict[str, Any]:
        raise NotImplementedError

    def _deltas(self, event: Event) -> list[dict[str, Any]]:
        raise NotImplementedError

    def _text(self, token: int, info: Logprob | None = None) -> str:
        """Text of one token; its number where the model has no tokenizer."""
        if info is not None and info.text:
            return info.text
        return str(token) if self.tokenizer is None else self.tokenizer.token_text(token)

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


class ChatReplies(Replies):
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def whole(self) -> dict[str, Any]:
        out = super().whole()
        if self.job.prompts[0].params.prompt_logprobs is not None:
            out["prompt_logprobs"] = self.prompt_logprobs(self.job.choices[0])
        return out

    def _body(self, choice: ReplyChoice) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return {"message": message, "logprobs": self._logprobs(choice, choice.token_ids, choice.logprobs)}

    def _deltas(self, event: Event) -> list[dict[str, Any]]:
        choice, delta = event.choice, event.delta
        out = [self._delta(choice, {"role": "assistant", "content": ""})] if event.first else []
        if delta.text or delta.logprobs or delta.finish_reason or (self.return_token_ids and delta.token_ids):
            body = {"content": delta.text} if delta.text or not delta.finish_reason else {}
            logprobs = self._logprobs(choice, delta.token_ids, delta.logprobs)
            out.append(self._delta(choice, body, logprobs, delta.finish_reason))
        return out

    def _delta(
        self,
        choice: ReplyChoice,
        body: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish: str | None = None,
    ) -> dict[str, Any]:
        return {"index": choice.index, "delta": body, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(
        self, choice: ReplyChoice, tokens: list[int], rows: list[TokenLogprobs] | None
    ) -> dict[str, Any] | None:
        top = choice.prompt.params.logprobs
        if top is None or not rows:
            return None
        return {"content": [self._entry(t, row, top) for t, row in zip(tokens, rows, strict=True)], "refusal": None}

    def _entry(self, token: int, row: TokenLogprobs, top: int) -> dict[str, Any]:
        listed = self.job.prompts[0].params.logprob_token_ids
        if listed:
            best = [(t, info) for t, info in row.items() if t in listed]
        else:
            best = sorted(row.items(), key=lambda item: item[1].rank)[:top]  # without the chosen one, if it is no top
        return {**self._told(token, row[token]), "top_logprobs": [self._told(t, info) for t, info in best]}

    def _told(self, token: int, info: Logprob) -> dict[str, Any]:
        text = self._text(token, info)
        exact = text.encode() if self.tokenizer is None else self.tokenizer.token_bytes(token)
        return {"token": text, "logprob": finite(info.logprob), "bytes": list(exact)}


class CompletionReplies(Replies):
    """The older shape. `echo` repeats the prompt's text, and its log probabilities where they were asked for."""

    object = chunk_object = "text_completion"

    def __init__(
        self, job: Job, model: str, tokenizer: ServedTokenizer | None, return_token_ids: bool, echo: bool
    ) -> None:
        super().__init__(job, model, tokenizer, return_token_ids)
        self.echo = echo
        self.offsets = [0] * len(job.choices)

    def _body(self, choice: ReplyChoice) -> dict[str, Any]:
        self.offsets[choice.index] = 0
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
        if not (text or delta.logprobs or delta.finish_reason or (self.return_token_ids and delta.token_ids)):
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
        for token, row in pairs:
            self._add_token(out, choice, token, row)
        return out

    def _add_token(self, out: dict[str, list[Any]], choice: ReplyChoice, token: int, row: TokenLogprobs | None) -> None:
        text = self._text(token, row[token] if row else None)
        out["tokens"].append(text)
        out["token_logprobs"].append(finite(row[token].logprob) if row else None)
        out["top_logprobs"].append(self._by_text(row) if row else None)
        at = self.offsets[choice.index]
        out["text_offset"].append(at)
        if not self._unseen_start(choice, at, text):
            self.offsets[choice.index] += len(text)

    def _by_text(self, row: TokenLogprobs) -> dict[str, float]:
        """Text -> log probability. Of tokens with one text (parts of characters) all but the likeliest go by their ids,
        in the form of vLLM."""
        found: dict[str, float] = {}
        for token, info in row.items():
            text = self._text(token, info)
            found[f"token_id:{token}" if text in found else text] = finite(info.logprob)
        return found

    def _unseen_start(self, choice: ReplyChoice, at: int, text: str) -> bool:
        """Whether this is the beginning-of-text token that the tokenizer put before an echoed prompt."""
        return self.echo and at == 0 and not choice.prompt.text.startswith(text)


def finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB) if not math.isnan(logprob) else LEAST_LOGPROB
