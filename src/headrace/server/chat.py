"""POST /v1/chat/completions: the next turn of a conversation, in OpenAI's shape."""

from __future__ import annotations

from functools import partial

from headrace.server.chat_body import ChatBody, tools_of
from headrace.server.job import Job
from headrace.server.own_tokens import tokens_to_carry
from headrace.server.replay import TokenTexts
from headrace.server.replies import ChatReplies, Shown
from headrace.server.state import ServerState
from headrace.server.turns import Sharing, job_of, made, naming

PROMPT = dict.fromkeys((None, "prompt", "prompt_token_ids"), "messages")
"""The engine's names of the prompt -> the client's."""


class Chat:
    """An Api (server.answering)."""

    body = ChatBody

    def __init__(self, tenant: str = "") -> None:
        self.tenant = tenant

    async def job(self, state: ServerState, body: ChatBody, arrival_s: float) -> Job:
        most = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        shape = body.shape_field or "tools"
        names = {**PROMPT, "logprobs": "top_logprobs", "max_tokens": most, "structured": shape}
        with naming(names):
            sharing = Sharing(body.cache_salt, body.public_prefix_tokens or 0, self.tenant)
            turn, params = await made(body.turn, len(body.messages)), body.to_params()
            marks = await made(body.breakpoints, len(body.messages))
            job = await job_of(state, turn, params, "chatcmpl-", arrival_s, sharing, marks)
        job.names = names
        return job

    def replies(self, state: ServerState, body: ChatBody, job: Job) -> ChatReplies:
        tokenizer, carry = state.engine.tokenizer, None
        if body.return_token_ids:
            carry = partial(tokens_to_carry, TokenTexts(tokenizer), state.formats, tools_of(body.tools))
        shown = Shown(body.model or state.model, tokenizer, bool(body.return_token_ids), body.wants_usage,
                      state.engine.capacity.fingerprint, carry)  # fmt: skip
        return ChatReplies(job, shown)
