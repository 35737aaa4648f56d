"""POST /v1/classify: what a classifier's head says of each text, as probabilities of its labels, in vLLM's shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from headrace.engine.embedding import Vector, check_classifies
from headrace.engine.reranking import sigmoid
from headrace.pooling import Pooling
from headrace.server.embeddings import NAMES
from headrace.server.job import Job
from headrace.server.prompts import InputBody, PromptsBody, job_of_prompts, pooled_prompt, prompt_usage, vectors_of
from headrace.server.replies import InOnePiece, figures
from headrace.server.state import ServerState
from headrace.server.turns import naming

ACTIVATION = dict.fromkeys(("activation", "use_activation", "softmax"), "probabilities are what is told; leave it out")


class ClassifyBody(InputBody):
    refused: ClassVar[Mapping[str, str]] = {**PromptsBody.refused, **ACTIVATION}
    harmless: ClassVar[Mapping[str, tuple[Any, ...]]] = {**PromptsBody.harmless, **dict.fromkeys(ACTIVATION, (True,))}


class Classify:
    """An Api (server.answering)."""

    body = ClassifyBody

    async def job(self, state: ServerState, body: ClassifyBody, arrival_s: float) -> Job:
        with naming(NAMES):
            check_classifies(state.engine.capacity.pooling)
            prompts = [await pooled_prompt(state, each, "input") for each in body.inputs()]
        return job_of_prompts(state, "classify-", prompts, body, arrival_s, NAMES)

    def replies(self, state: ServerState, body: ClassifyBody, job: Job) -> ClassifyReplies:
        return ClassifyReplies(job, body.model or state.model, state.engine.capacity.pooling)


class ClassifyReplies(InOnePiece):
    def __init__(self, job: Job, model: str, pooling: Pooling) -> None:
        self.job, self.model, self.pooling = job, model, pooling

    def whole(self) -> dict[str, Any]:
        rows = vectors_of(self.job, self.pooling)
        return {
            "id": self.job.request_id,
            "object": "list",
            "created": self.job.created,
            "model": self.model,
            "data": [self._told(index, probabilities(row)) for index, row in enumerate(rows)],
            "usage": prompt_usage(self.job),
            "headrace": figures(self.job),
        }

    def _told(self, index: int, probs: list[float]) -> dict[str, Any]:
        best = max(range(len(probs)), key=probs.__getitem__)
        return {"index": index, "label": self.pooling.labels[best], "probs": probs, "num_classes": len(probs)}


def probabilities(logits: Vector) -> list[float]:
    """logits [labels]: the sigmoid of one, the softmax of several, in fp64."""
    if len(logits) == 1:
        return [sigmoid(float(logits[0]))]
    powers = np.exp(logits.astype(np.float64) - logits.max())
    found: list[float] = (powers / powers.sum()).tolist()
    return found
