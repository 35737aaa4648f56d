"""POST /v1/embeddings: one vector for each text, in OpenAI's shape."""

from __future__ import annotations

import base64
from typing import Any, Literal

from headrace.engine.embedding import check_dimensions
from headrace.pooling import Pooling
from headrace.server.job import Job
from headrace.server.prompts import InputBody, job_of_prompts, pooled_prompt, prompt_usage, vectors_of
from headrace.server.replies import InOnePiece, figures
from headrace.server.state import ServerState
from headrace.server.turns import naming

NAMES: dict[str | None, str] = {None: "input", "prompt": "input"}
"""The engine's names of fields -> the client's."""


class EmbeddingBody(InputBody):
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None


class Embeddings:
    """An Api (server.answering)."""

    body = EmbeddingBody

    async def job(self, state: ServerState, body: EmbeddingBody, arrival_s: float) -> Job:
        engine = state.engine
        with naming(NAMES):
            check_dimensions(body.dimensions, engine.capacity.embedding_size, engine.capacity.pooling)
            prompts = [await pooled_prompt(state, each, "input") for each in body.inputs()]
        return job_of_prompts(state, "embd-", prompts, body, arrival_s, NAMES)

    def replies(self, state: ServerState, body: EmbeddingBody, job: Job) -> EmbeddingReplies:
        return EmbeddingReplies(job, body.model or state.model, state.engine.capacity.pooling, body)


class EmbeddingReplies(InOnePiece):
    def __init__(self, job: Job, model: str, pooling: Pooling, body: EmbeddingBody) -> None:
        self.job, self.model, self.pooling, self.body = job, model, pooling, body

    def whole(self) -> dict[str, Any]:
        vectors = vectors_of(self.job, self.pooling, self.body.dimensions)
        if self.body.encoding_format == "base64":
            told: list[Any] = [base64.b64encode(each.astype("<f4").tobytes()).decode() for each in vectors]
        else:
            told = vectors.tolist()
        return {
            "object": "list",
            "data": [{"object": "embedding", "index": i, "embedding": each} for i, each in enumerate(told)],
            "model": self.model,
            "usage": prompt_usage(self.job),
            "headrace": figures(self.job),
        }
