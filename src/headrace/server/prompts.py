"""What routes have in common that take many prompts and tell one thing of each: embeddings, classes, relevance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar
from uuid import uuid4

from pydantic import WithJsonSchema

from headrace.engine.embedding import EMBEDS, EmbeddingAborted, Vectors, stacked
from headrace.engine.scoring import at_once
from headrace.pooling import Pooling
from headrace.server.encoding import encoded
from headrace.server.errors import ApiError, invalid
from headrace.server.job import Job, Prompt
from headrace.server.protocol import AskingBody, prompts_of
from headrace.server.shapes import PROMPT
from headrace.server.state import ServerState
from headrace.server.turns import tokenizer_of
from headrace.types import check_sharing

MOST_INPUTS = 2048
"""As OpenAI has it."""

WHOLE = "replies of this route are not streamed; leave it out"


class PromptsBody(AskingBody):
    refused: ClassVar[Mapping[str, str]] = {"stream": WHOLE, "stream_options": WHOLE}
    harmless: ClassVar[Mapping[str, tuple[Any, ...]]] = {"stream": (False,)}

    cache_salt: str | None = None
    public_prefix_tokens: int | None = None

    def check_many(self, count: int, param: str) -> None:
        """Raises for too many prompts, given as `param`, and for what may not be shared so."""
        if count > MOST_INPUTS:
            raise invalid(f"{param}: at most {MOST_INPUTS:,} in one request, got {count:,}", param)
        check_sharing(self.cache_salt, self.public_prefix_tokens or 0)


class InputBody(PromptsBody):
    """`input`: a text, texts, token ids, or lists of them."""

    input: Annotated[Any, WithJsonSchema(PROMPT)]

    def inputs(self) -> list[str | list[int]]:
        given = prompts_of(self.input, "input")
        self.check_many(len(given), "input")
        return given


async def pooled_prompt(state: ServerState, given: str | list[int], param: str) -> Prompt:
    """A prompt whose hidden states are wanted. Raises InvalidRequest."""
    ids = given if isinstance(given, list) else await encoded(state, tokenizer_of(state, param).encode, given, param)
    return Prompt(ids, state.engine.check(ids, EMBEDS, embed=True), embed=True)


def job_of_prompts(
    state: ServerState,
    prefix: str,
    prompts: list[Prompt],
    body: PromptsBody,
    arrival_s: float,
    names: Mapping[str | None, str],
) -> Job:
    """The job of a body; its id begins with `prefix`. Others find a place in the queue beside its prompts."""
    longest = max(len(prompt.ids) for prompt in prompts)
    most = at_once(longest, state.engine.capacity.max_sequences, state.config.server)
    sharing = (body.cache_salt, body.public_prefix_tokens or 0)
    return Job(f"{prefix}{uuid4().hex}", prompts, arrival_s, *sharing, names=names, at_once=most)


def vectors_of(job: Job, pooling: Pooling, dimensions: int | None = None) -> Vectors:
    """What was pooled of each prompt, [prompts, size]. Raises ApiError where one was aborted."""
    try:
        return stacked([choice.embedding for choice in job.choices], pooling, dimensions)
    except EmbeddingAborted as error:
        raise ApiError(500, str(error), None, "aborted") from None


def prompt_usage(job: Job) -> dict[str, Any]:
    """Nothing is generated."""
    told = {"cached_tokens": job.cached_tokens}
    return {"prompt_tokens": job.prompt_tokens, "total_tokens": job.prompt_tokens, "prompt_tokens_details": told}
