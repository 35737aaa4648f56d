"""POST /v1/messages and its count_tokens: the next turn of a conversation, in Anthropic's shape."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import Request
from starlette.responses import Response

from headrace.server.answering import admitted, check_model
from headrace.server.anthropic.body import CountBody, MessagesBody
from headrace.server.anthropic.errors import error_body
from headrace.server.anthropic.events import PING, Blocks, frame, message, stop_reason, usage
from headrace.server.errors import JsonReply, as_api_error
from headrace.server.job import Event, Job
from headrace.server.protocol import read_body
from headrace.server.replies import figures
from headrace.server.state import ServerState
from headrace.server.stream import unless_gone
from headrace.server.turn import Turn
from headrace.server.turns import Sharing, job_of, made, naming, tokens_of
from headrace.types import CHUNK

log = logging.getLogger("headrace.server")

NAMES: dict[str | None, str] = {
    **dict.fromkeys((None, "prompt", "prompt_token_ids"), "messages"),
    "stop": "stop_sequences",
    "structured": "output_config.format",
}
"""The engine's names of fields -> the client's."""


BILLING = (
    "system texts begin with a billing header that is another in each request, so that no prefix is shared; "
    "--stable-system-prompt keeps it out"
)


class Messages:
    """An Api (server.answering). One for all requests, and one `of` each tenant: what hinders caching is warned of
    once."""

    body = MessagesBody

    def __init__(self, tenant: str = "", warned: list[str] | None = None) -> None:
        self.tenant = tenant
        self._warned: list[str] = [] if warned is None else warned

    def of(self, tenant: str) -> Messages:
        """For a request of this tenant."""
        return Messages(tenant, self._warned)

    async def job(self, state: ServerState, body: MessagesBody, arrival_s: float) -> Job:
        """max_tokens may exceed what the context allows, as Anthropic's may: the answer then ends with the context."""
        with naming(NAMES if body.format is not None else {**NAMES, "structured": "tools"}):
            params = body.to_params()
            sharing = Sharing(body.cache_salt, body.public_prefix_tokens or 0, self.tenant)
            turn = await self._turn(state, body)
            points = partial(body.breakpoints, state.config.server.stable_system_prompt)
            marks = await made(points, len(body.messages))
            job = await job_of(state, turn, replace(params, max_tokens=None), "msg_", arrival_s, sharing, marks)
        job.names = NAMES
        prompt = job.prompts[0]
        prompt.params = replace(prompt.params, max_tokens=min(params.max_tokens or 1, prompt.params.max_tokens or 1))
        prompt.silent = not body.max_tokens
        return job

    def replies(self, state: ServerState, body: MessagesBody, job: Job) -> MessageReplies:
        caching = state.config.cache.prefix_caching
        return MessageReplies(job, body.model or state.model, body.max_tokens, caching, body.omits_thinking)

    async def count(self, state: ServerState, request: Request) -> Response:
        """How many tokens the prompt of such a request has, whether or not it fits."""
        async with admitted(state, request) as raw:
            body = await read_body(CountBody, raw)
            if body.model is not None:
                check_model(state, body.model)
            with naming(NAMES):
                turn = await self._turn(state, body)
                tokens = await unless_gone(request.receive, tokens_of(state, turn))
        return JsonReply({"input_tokens": len(tokens)})

    async def _turn(self, state: ServerState, body: CountBody) -> Turn:
        stable = state.config.server.stable_system_prompt
        if body.has_billing and not stable and not self._warned:
            self._warned.append(BILLING)
            log.warning("%s", BILLING)
        return await made(partial(body.turn, stable), len(body.messages))


class MessageReplies:
    """A message in one piece, or as events. asked: its max_tokens; 0: nothing is told of the answer. caching: whole
    chunks of prompts are kept."""

    def __init__(self, job: Job, model: str, asked: int, caching: bool = True, omit_thinking: bool = False) -> None:
        self.job, self.model, self.asked, self.caching = job, model, asked, caching
        self.blocks = Blocks(omit_thinking)

    def take(self, event: Event) -> None:
        self._add(event)

    def whole(self) -> dict[str, Any]:
        told = message(self.job.request_id, self.model, self.blocks.content, self._usage())
        return {**told, **self._end(), "headrace": figures(self.job)}

    def opening(self) -> list[bytes]:
        """What is cached is known at the end, and told then."""
        counts = usage(self.job.prompt_tokens, 0, 0, 0)
        begun = {"type": "message_start", "message": message(self.job.request_id, self.model, [], counts)}
        return [frame(begun), frame(PING)]

    def frames(self, event: Event) -> list[bytes]:
        return [frame(each) for each in self._add(event)]

    def ending(self) -> list[bytes]:
        last = {
            "type": "message_delta",
            "delta": self._end(),
            "usage": self._usage(),
            "headrace": figures(self.job),
        }
        return [frame(each) for each in [*self.blocks.finish(), last, {"type": "message_stop"}]]

    def failure(self, error: BaseException) -> list[bytes]:
        told = as_api_error(error, self.job.request_id)
        return [frame(error_body(told.status, told.message, self.job.request_id))]

    def _add(self, event: Event) -> list[dict[str, Any]]:
        return self.blocks.add(event.parts) if self.asked else []

    def _end(self) -> dict[str, Any]:
        if not self.asked:
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        choice = self.job.choices[0]
        cut = self.asked > (choice.prompt.params.max_tokens or 0)
        reason = stop_reason(choice.finish_reason, choice.stop_reason, bool(choice.answer.calls), cut)
        sequence = choice.stop_reason if reason == "stop_sequence" else None
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _usage(self) -> dict[str, int]:
        """Whole chunks of the prompt are in the cache afterwards."""
        prompt, cached = self.job.prompt_tokens, self.job.cached_tokens
        written = max(0, prompt // CHUNK * CHUNK - cached) if self.caching else 0
        return usage(prompt, cached, self.job.output_tokens, written)
