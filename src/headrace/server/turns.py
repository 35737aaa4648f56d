"""From a Turn to a job: the conversation rendered, its parser chosen, its calls constrained."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

from headrace.server.answer_memory import Owner
from headrace.server.answer_places import TOKENS, carried, leads, without_tokens
from headrace.server.breakpoints import AskedPin, Breakpoint, tokens_before
from headrace.server.encoding import COUNTED, check_length, encoded
from headrace.server.errors import invalid
from headrace.server.job import Job, Prompt
from headrace.server.own_tokens import check_tokens
from headrace.server.parsers.constraint import constraint
from headrace.server.parsers.registry import Formats, formats_of, make_parser
from headrace.server.replay import Known, Replay, TokenTexts, replay
from headrace.server.state import ServerState
from headrace.server.tool_prompt import call_shown, knows_tools, told_in_text
from headrace.server.turn import Turn
from headrace.types import InvalidRequest, SamplingParams

T = TypeVar("T")

MANY = 500
"""Messages that are read on a thread."""

THINKING = "message.thinking"
"""Of a chat template that shows earlier reasoning under this name."""

ENDS = ("add_generation_prompt", "continue_final_message")
"""Variables that say how a conversation ends."""

SEEN = 200
"""Characters at the end of a prompt that tell whether the template has begun the reasoning."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """What a request shares of the cache: see Request. tenant: whose answers it may replay, with its cache_salt."""

    cache_salt: str | None = None
    public_prefix_tokens: int = 0
    tenant: str = ""


@contextmanager
def naming(names: Mapping[str | None, str]) -> Iterator[None]:
    """Names the field of a refusal as the client knows it. names: the engine's -> the client's."""
    try:
        yield
    except InvalidRequest as error:
        name, told = names.get(error.param, error.param), str(error)
        if error.param and told.startswith(f"{error.param} must"):
            told = f"{name}{told[len(error.param) :]}"
        raise invalid(told, name, error.code) from None


async def made(turn: Callable[[], T], messages: int) -> T:
    """What `turn` makes of a body, on a thread where it has many messages: other requests go on."""
    return turn() if messages < MANY else await asyncio.to_thread(turn)


async def job_of(
    state: ServerState, turn: Turn, params: SamplingParams, prefix: str, arrival_s: float, sharing: Sharing,
    breakpoints: Sequence[Breakpoint] = (),
) -> Job:  # fmt: skip
    """The job of a turn; its id begins with `prefix`. Raises InvalidRequest."""
    prompts = [await prompt_of(state, turn, params, (sharing.tenant, sharing.cache_salt), breakpoints)]
    return Job(f"{prefix}{uuid4().hex}", prompts, arrival_s, sharing.cache_salt, sharing.public_prefix_tokens)


async def prompt_of(
    state: ServerState, turn: Turn, params: SamplingParams, owner: Owner, breakpoints: Sequence[Breakpoint] = ()
) -> Prompt:
    """The conversation as the model reads it, and the parser of what it answers. owner: whose answers may be replayed.
    Raises InvalidRequest, and ApiError for variables that are none and for token_ids that are not the message's."""
    read = await _render(state, turn)
    remembered = state.answers.find(owner, read.text) if state.answers is not None else []
    replay = await _encode(state, turn, read, remembered)
    text, ids = read.text, replay.ids
    formats, end = state.formats, text[-SEEN:]
    shape = params.structured
    if shape is not None or turn.choice.mode == "required" or turn.reasoning.budget is not None:
        asked = (turn.tools, turn.choice, turn.reasoning, end, shape)
        shape = await asyncio.to_thread(constraint, formats, *asked)  # schemas may be long
    skips = params.skip_special_tokens and not formats.needs_special_tokens
    params = replace(params, structured=shape, skip_special_tokens=skips)
    await state.engine.check_shape(params)
    return Prompt(
        ids, state.engine.check(ids, params), parser=lambda: make_parser(formats, turn.tools, turn.choice, end),
        messages=turn.messages, replay=replay, asked=(owner, text) if state.answers is not None else None,
        pins=await _asked(state, breakpoints, text, ids),
    )  # fmt: skip


async def _asked(state: ServerState, breakpoints: Sequence[Breakpoint], text: str, ids: list[int]) -> list[AskedPin]:
    """What breakpoints keep of a prompt: whole chunks, where any are kept."""
    if not state.prompt_pins.most or not state.config.cache.prefix_caching:
        return []
    tokenizer, asked = tokenizer_of(state, "messages"), []
    for marked, ttl_s in breakpoints:
        other = (await _render(state, marked)).text
        tokens = await state.in_tokenizer(tokens_before, tokenizer, ids, text, other)
        asked.append(AskedPin(tokens, ttl_s))
    return asked


async def tokens_of(state: ServerState, turn: Turn) -> list[int]:
    """The tokens of a conversation, also of one that is too long. Raises as prompt_of does."""
    return (await _encode(state, turn, await _render(state, turn), contexts=COUNTED)).ids


class Rendered(NamedTuple):
    """A conversation as the model reads it. carried: earlier answers whose messages hold their tokens, by their places;
    lost: how many more of these there are, whose places are not seen."""

    text: str
    carried: Sequence[Known] = ()
    lost: int = 0


async def _render(state: ServerState, turn: Turn) -> Rendered:
    return await state.in_renderer(rendered, tokenizer_of(state, "messages"), turn, state.formats)


def rendered(tokenizer: Any, turn: Turn, formats: Formats | None = None) -> Rendered:
    """formats: how the model writes calls; None: as its template and vocabulary say. Raises InvalidRequest, and
    ApiError for variables that are none."""
    messages, variables = turn.messages, _variables(turn)
    if THINKING in tokenizer.chat_template:
        messages = [with_thinking(message) for message in messages]
    if not knows_tools(tokenizer.chat_template):
        found = formats or formats_of(tokenizer.chat_template, tokens=tokenizer.added_tokens)
        messages = told_in_text(messages, turn.tools, call_shown(tokenizer.chat_template, found.tools))
        variables.pop("tools", None)
    text = _written(tokenizer, messages, variables)
    if not any(message.get(TOKENS) for message in messages):
        return Rendered(text)
    begins = {name: value for name, value in variables.items() if name not in ENDS}
    lead_of = leads(messages, lambda beginning: _written(tokenizer, beginning, begins))
    return Rendered(text, *carried(text, messages, lead_of))


def _written(tokenizer: Any, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    try:
        return str(tokenizer.render_chat(without_tokens(messages), **variables))
    except TypeError as error:
        raise invalid(f"chat_template_kwargs: {error}", "chat_template_kwargs") from None


def with_thinking(message: dict[str, Any]) -> dict[str, Any]:
    """Reasoning under the name that gpt-oss's template has for it. That shows one text before a call: the reasoning,
    with what the model has said behind it."""
    thought, text = message.get("reasoning_content"), message.get("content")
    if not thought:
        return message
    if not message.get("tool_calls") or not text:
        return {**message, "thinking": thought}
    return {name: value for name, value in message.items() if name != "content"} | {"thinking": f"{thought}\n\n{text}"}


async def _encode(
    state: ServerState, turn: Turn, read: Rendered, remembered: Sequence[Known] = (), contexts: int = 1
) -> Replay:
    """The prompt's tokens, with those of earlier answers in their places. Tokens that a request brings go before
    remembered ones."""
    tokenizer, capacity = tokenizer_of(state, "messages"), state.engine.capacity
    if not (read.carried or read.lost or remembered):
        return Replay(await encoded(state, tokenizer.encode_chat, read.text, "messages", contexts))

    def work() -> Replay:
        check_length(tokenizer.encode_chat, read.text, contexts * capacity.max_model_len, "messages")
        texts = TokenTexts(tokenizer)
        if turn.given_tokens:
            check_tokens(texts, state.formats, turn, capacity.vocab_size)
        found = replay(texts, read.text, (*read.carried, *remembered))
        return found._replace(rewritten=found.rewritten + read.lost)

    return await state.in_tokenizer(work)


def _variables(turn: Turn) -> dict[str, Any]:
    """Variables of the template. Tools are shown whichever may be called, so that the prompt's beginning stays the
    same, and cached, from turn to turn."""
    variables = dict(turn.template)
    if turn.tools:
        variables["tools"] = [tool.for_template() for tool in turn.tools]
    if turn.documents:
        variables["documents"] = list(turn.documents)
    if turn.reasoning.enabled is not None:
        variables.setdefault("enable_thinking", turn.reasoning.enabled)
        variables.setdefault("thinking", turn.reasoning.enabled)
    if turn.reasoning.effort is not None:
        variables.setdefault("reasoning_effort", turn.reasoning.effort)
    return variables


def tokenizer_of(state: ServerState, param: str) -> Any:
    tokenizer = state.engine.tokenizer
    if tokenizer is None:
        raise invalid("the model folder has no tokenizer: send token ids to /v1/completions", param)
    return tokenizer
