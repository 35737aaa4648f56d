"""POST /v1/embeddings: one vector for each text, in OpenAI's shape."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal
from uuid import uuid4

from pydantic import WithJsonSchema

from headrace.engine.embedding import EMBEDS, EmbeddingAborted, check_dimensions, stacked
from headrace.engine.scoring import at_once
from headrace.server.encoding import encoded
from headrace.server.errors import ApiError, invalid
from headrace.server.job import Job, Prompt
from headrace.server.protocol import Body, prompts_of
from headrace.server.replies import InOnePiece, figures
from headrace.server.shapes import PROMPT
from headrace.server.state import ServerState
from headrace.server.turns import naming, tokenizer_of
from headrace.types import Pooling, check_sharing

MOST_INPUTS = 2048
"""As OpenAI has it."""
NAMES: dict[str | None, str] = {None: "input", "prompt": "input"}
"""The engine's names of fields -> the client's."""


class EmbeddingBody(Body):
    """`input`: a text, texts, token ids, or lists of them."""

    refused: ClassVar[Mapping[str, str]] = {
        "stream": "embeddings are not streamed; leave it out",
        "stream_options": "embeddings are not streamed; leave it out",
    }
    harmless: ClassVar[Mapping[str, tuple[Any, ...]]] = {"stream": (False,)}

    input: Annotated[Any, WithJsonSchema(PROMPT)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    cache_salt: str | None = None
    public_prefix_tokens: int | None = None

    def inputs(self) -> list[str | list[int]]:
        given = prompts_of(self.input, "input")
        if len(given) > MOST_INPUTS:
            raise invalid(f"at most {MOST_INPUTS:,} inputs in one request, got {len(given):,}", "input")
        check_sharing(self.cache_salt, self.public_prefix_tokens or 0)
        return given


class Embeddings:
    """An Api (server.answering)."""

    body = EmbeddingBody

    async def job(self, state: ServerState, body: EmbeddingBody, arrival_s: float) -> Job:
        engine = state.engine
        with naming(NAMES):
            check_dimensions(body.dimensions, engine.capacity.embedding_size, engine.capacity.pooling)
            prompts = [await _prompt(state, each) for each in body.inputs()]
        longest = max(len(prompt.ids) for prompt in prompts)
        return Job(
            f"embd-{uuid4().hex}", prompts, arrival_s, body.cache_salt, body.public_prefix_tokens or 0,
            names=NAMES, at_once=at_once(longest, engine.capacity.max_sequences, state.config.server),
        )  # fmt: skip

    def replies(self, state: ServerState, body: EmbeddingBody, job: Job) -> EmbeddingReplies:
        return EmbeddingReplies(job, state.model, state.engine.capacity.pooling, body)


async def _prompt(state: ServerState, given: str | list[int]) -> Prompt:
    ids = (
        given if isinstance(given, list) else await encoded(state, tokenizer_of(state, "input").encode, given, "input")
    )
    return Prompt(ids, state.engine.check(ids, EMBEDS, embed=True), embed=True)


class EmbeddingReplies(InOnePiece):
    def __init__(self, job: Job, model: str, pooling: Pooling, body: EmbeddingBody) -> None:
        self.job, self.model, self.pooling, self.body = job, model, pooling, body

    def whole(self) -> dict[str, Any]:
        job = self.job
        try:
            vectors = stacked([choice.embedding for choice in job.choices], self.pooling, self.body.dimensions)
        except EmbeddingAborted as error:
            raise ApiError(500, str(error), None, "aborted") from None
        if self.body.encoding_format == "base64":
            told: list[Any] = [base64.b64encode(each.astype("<f4").tobytes()).decode() for each in vectors]
        else:
            told = vectors.tolist()
        return {
            "object": "list",
            "data": [{"object": "embedding", "index": i, "embedding": each} for i, each in enumerate(told)],
            "model": self.model,
            "usage": {
                "prompt_tokens": job.prompt_tokens,
                "total_tokens": job.prompt_tokens,
                "prompt_tokens_details": {"cached_tokens": job.cached_tokens},
            },
            "headrace": figures(job),
        }
