"""Replies in the shape of the Responses API: the response, whole or as events while it comes about."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.server.errors import as_api_error
from headrace.server.job import Event, Job
from headrace.server.replies import Shown, figures, token_logprob
from headrace.server.responses.body import ResponsesBody
from headrace.server.responses.items import Item
from headrace.server.responses.output import Output, OutputEvent, Token
from headrace.server.responses.store import Owner, ResponseStore
from headrace.types import SamplingParams

ABORTED = "the request was aborted at the server"


class Kept:
    """What becomes of the response at its end. given: the items that the model was given."""

    def __init__(self, store: ResponseStore, owner: Owner, given: Sequence[Item], wanted: bool) -> None:
        self.store, self.owner, self.given = store, owner, given
        self.wanted = wanted and store.limit > 0

    def keep(self, response: dict[str, Any], answer: Sequence[int]) -> None:
        """Says in the response whether it is kept. answer: its tokens."""
        if self.wanted:
            response["store"] = self.store.put(self.owner, response, self.given, answer)


class ResponseReplies:
    """A Replies (server.replies). The events of a stream are numbered from 0."""

    def __init__(self, job: Job, body: ResponsesBody, shown: Shown, kept: Kept) -> None:
        self.job, self.shown, self.kept = job, shown, kept
        self.output = Output(body.told())
        self._echo = echo(body, job.prompts[0].params)
        self._number = 0
        self._begun = self.response("in_progress")

    def take(self, event: Event) -> None:
        self.output.take(event.parts, self._tokens(event))

    def whole(self) -> dict[str, Any]:
        self.output.end(self._item_status)
        return self._ended()

    def opening(self) -> list[bytes]:
        return self._framed([])

    def frames(self, event: Event) -> list[bytes]:
        return self._framed(self.output.take(event.parts, self._tokens(event)))

    def ending(self) -> list[bytes]:
        events = self.output.end(self._item_status)
        response = self._ended()
        return self._framed([*events, _lifecycle(response)])

    def failure(self, error: BaseException) -> list[bytes]:
        """An error in both of its shapes: flat as OpenAI documents it, nested as OpenAI sends it. Clients raise at it,
        or read on to response.failed."""
        told = as_api_error(error, self.job.request_id)
        nested = told.body()["error"]
        flat = {"type": "error", "code": told.code, "message": told.message, "param": told.param, "error": nested}
        response = self.response("failed", {"code": "server_error", "message": told.message})
        return self._framed([flat, _lifecycle(response)])

    def response(self, status: str, error: dict[str, str] | None = None) -> dict[str, Any]:
        """The response as it stands."""
        ended = status != "in_progress"
        return {
            "id": self.job.request_id,
            "object": "response",
            "created_at": self.job.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.shown.model,
            "output": list(self.output.items),
            "usage": self._usage() if ended else None,
            **self._echo,
            "store": self.kept.wanted and status != "failed",
            **({"headrace": figures(self.job)} if ended else {}),
        }

    @property
    def _status(self) -> str:
        ends = {"length": "incomplete", "abort": "failed"}
        return ends.get(self.job.choices[0].finish_reason or "", "completed")

    @property
    def _item_status(self) -> Any:
        whole = self._status == "completed" and not self.job.choices[0].cuts_call
        return "completed" if whole else "incomplete"

    def _ended(self) -> dict[str, Any]:
        """Keeps it too."""
        if self._status == "failed":
            return self.response("failed", {"code": "server_error", "message": ABORTED})
        response = self.response(self._status)
        self.kept.keep(response, self.job.choices[0].token_ids)
        return response

    def _framed(self, events: list[OutputEvent]) -> list[bytes]:
        """With the two events that come first of all, if none has come yet."""
        if not self._number:
            begun = self._begun
            events = [{"type": f"response.{each}", "response": begun} for each in ("created", "in_progress")] + events
        return [self._frame(each) for each in events]

    def _frame(self, event: OutputEvent) -> bytes:
        numbered = {**event, "sequence_number": self._number}
        self._number += 1
        return b"event: %s\ndata: %s\n\n" % (event["type"].encode(), msgspec.json.encode(numbered))

    def _tokens(self, event: Event) -> list[Token]:
        params, rows = event.choice.prompt.params, event.delta.logprobs
        if params.logprobs is None or not rows:
            return [Token() for _ in event.delta.token_ids]
        tokenizer = self.shown.tokenizer
        pairs = zip(event.delta.token_ids, rows, strict=True)
        return [Token(token_logprob(tokenizer, token, row, params)) for token, row in pairs]

    def _usage(self) -> dict[str, Any]:
        job = self.job
        return {
            "input_tokens": job.prompt_tokens,
            "input_tokens_details": {"cached_tokens": job.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": job.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self.output.reasoning_tokens},
            "total_tokens": job.prompt_tokens + job.output_tokens,
        }


def _lifecycle(response: dict[str, Any]) -> OutputEvent:
    return {"type": f"response.{response['status']}", "response": response}


def echo(body: ResponsesBody, params: SamplingParams) -> dict[str, Any]:
    """What was asked, as the response repeats it."""
    tools = [tool.model_dump(by_alias=True, exclude_none=True) for tool in body.tools or ()]
    chosen = body.tool_choice or "auto"
    reasoning = body.reasoning
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {
            "effort": reasoning.effort if reasoning is not None else None,
            "summary": (reasoning.summary or reasoning.generate_summary) if reasoning is not None else None,
        },
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "temperature": params.temperature,
        "text": {
            "format": body.form.model_dump(by_alias=True),
            "verbosity": "medium",
        },
        "tool_choice": chosen if isinstance(chosen, str) else chosen.model_dump(),
        "tools": [{"parameters": None, "strict": None, **tool} for tool in tools],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "user": body.user,
    }
