"""POST /v1/completions: the continuation of a text."""

from __future__ import annotations

from uuid import uuid4

from headrace.server.encoding import encoded
from headrace.server.errors import invalid
from headrace.server.job import Job, Prompt
from headrace.server.protocol import CompletionBody
from headrace.server.replies import CompletionReplies, Shown
from headrace.server.state import ServerState
from headrace.server.text_offsets import whole_text
from headrace.server.turns import naming, tokenizer_of
from headrace.types import SamplingParams

NAMES: dict[str | None, str] = {None: "prompt", "prompt_token_ids": "prompt"}
"""The engine's names of fields -> the client's."""


class Completions:
    """An Api (server.answering)."""

    body = CompletionBody

    async def job(self, state: ServerState, body: CompletionBody, arrival_s: float) -> Job:
        with naming({**NAMES, "structured": body.shape_field or "structured"}):
            params = body.to_params()
            await state.engine.check_shape(params)
            prompts = await _prompts(state, body, params)
        public = body.public_prefix_tokens or 0
        return Job(f"cmpl-{uuid4().hex}", prompts, arrival_s, body.cache_salt, public, names=NAMES)

    def replies(self, state: ServerState, body: CompletionBody, job: Job) -> CompletionReplies:
        shown = Shown(body.model or state.model, state.engine.tokenizer, bool(body.return_token_ids), body.wants_usage,
                      state.engine.capacity.fingerprint)  # fmt: skip
        return CompletionReplies(job, shown, bool(body.echo))


async def _prompts(state: ServerState, body: CompletionBody, params: SamplingParams) -> list[Prompt]:
    given = body.prompts()
    if len(given) > state.config.server.max_queued_requests:
        raise invalid(f"at most {state.config.server.max_queued_requests} prompts in one request", "prompt")
    prompts = [await _prompt(state, prompt, params, bool(body.echo)) for prompt in given]
    for prompt in prompts:
        prompt.left_open = body.max_tokens is None
    return prompts


async def _prompt(state: ServerState, prompt: str | list[int], params: SamplingParams, echo: bool) -> Prompt:
    if isinstance(prompt, str):
        tokenizer = tokenizer_of(state, "prompt")
        ids = await encoded(state, tokenizer.encode, prompt, "prompt")
        return Prompt(ids, state.engine.check(ids, params), prompt)
    checked = state.engine.check(prompt, params)
    text = await state.in_tokenizer(whole_text, tokenizer_of(state, "echo"), prompt) if echo else ""
    return Prompt(prompt, checked, text)
