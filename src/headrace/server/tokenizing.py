"""/tokenize, /detokenize, /tokenizer_info: between text and token ids, as the engine reads them, in vLLM's shapes."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import Request
from pydantic import Field
from starlette.responses import Response

from headrace.server.answering import admitted, check_model
from headrace.server.chat_body import MAX_MESSAGES, MAX_TOOLS, Message, ToolBody, template_variables, tools_of
from headrace.server.encoding import COUNTED, encoded
from headrace.server.errors import JsonReply, invalid
from headrace.server.protocol import Body, read_body
from headrace.server.state import ServerState
from headrace.server.stream import unless_gone
from headrace.server.turn import Turn
from headrace.server.turns import made, naming, tokenizer_of, tokens_of

PROMPT = dict.fromkeys((None, "prompt", "prompt_token_ids"), "messages")


class TokenizeBody(Body):
    """A prompt, or the messages of a chat."""

    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    tools: list[ToolBody] | None = Field(None, max_length=MAX_TOOLS)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    def check(self) -> None:
        """Raises ApiError for fields that do not go together."""
        if (self.prompt is None) == (self.messages is None):
            raise invalid("give either prompt or messages", "prompt", "missing" if self.prompt is None else None)
        for name in ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
            if self.prompt is not None and getattr(self, name) is not None:
                raise invalid(f"{name} needs messages", name)
        if self.messages is not None and self.add_special_tokens:
            raise invalid("add_special_tokens: the chat template writes them itself", "add_special_tokens")

    def turn(self) -> Turn:
        messages = self.messages or []
        for number, message in enumerate(messages):
            message.check(f"messages[{number}]")
        template = template_variables(self.chat_template_kwargs)
        for name in ("add_generation_prompt", "continue_final_message"):
            if getattr(self, name) is not None:
                template[name] = getattr(self, name)
        told = [message.for_template() for message in messages]
        return Turn(told, tools_of(self.tools), template=template, given_tokens=True)


class DetokenizeBody(Body):
    tokens: list[int]


async def tokenize(state: ServerState, request: Request) -> Response:
    async with admitted(state, request) as raw:
        body = await read_body(TokenizeBody, raw)
        _check_model(state, body)
        body.check()
        tokens = await unless_gone(request.receive, _tokens(state, body))
        texts = None
        if body.return_token_strs:
            tokenizer = tokenizer_of(state, "return_token_strs")
            texts = await state.in_tokenizer(lambda: [tokenizer.token_text(token) for token in tokens])
    longest = state.engine.capacity.max_model_len
    return JsonReply({"count": len(tokens), "max_model_len": longest, "tokens": tokens, "token_strs": texts})


async def detokenize(state: ServerState, request: Request) -> Response:
    """Special tokens are part of the text."""
    async with admitted(state, request) as raw:
        body = await read_body(DetokenizeBody, raw)
        _check_model(state, body)
        size = state.engine.capacity.vocab_size
        ends = (min(body.tokens, default=0), max(body.tokens, default=0))
        wrong = next((token for token in ends if not 0 <= token < size), None)
        if wrong is not None:
            raise invalid(f"tokens: token id {str(wrong)[:20]} is outside the vocabulary of {size}", "tokens")
        tokenizer = tokenizer_of(state, "tokens")
        text = await state.in_tokenizer(lambda: tokenizer.decode(body.tokens, skip_special_tokens=False))
    return JsonReply({"prompt": text})


def tokenizer_info(state: ServerState) -> Response:
    """What clients need that count or build prompts themselves, as lm-eval does with tokenizer_backend=remote."""
    tokenizer = tokenizer_of(state, "tokens")
    longest = state.engine.capacity.max_model_len
    info = {**tokenizer.named_tokens, "chat_template": tokenizer.chat_template or None, "model_max_length": longest}
    return JsonReply(info)


def _check_model(state: ServerState, body: Body) -> None:
    if body.model is not None:
        check_model(state, body.model)


async def _tokens(state: ServerState, body: TokenizeBody) -> list[int]:
    if body.prompt is None:
        with naming(PROMPT):
            return await tokens_of(state, await made(body.turn, len(body.messages or ())))
    tokenizer, special = tokenizer_of(state, "prompt"), body.add_special_tokens is not False
    encode = partial(tokenizer.encode, add_special_tokens=special)
    return await encoded(state, encode, body.prompt, "prompt", COUNTED)
