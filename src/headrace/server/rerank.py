"""POST /v1/rerank: how relevant each document is to a query, in the shape of Jina and Cohere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import WithJsonSchema

from headrace.engine.reranking import PLAIN, QWEN3, QWEN3_TOKEN, answers_of, asks_for, joined, sigmoid
from headrace.pooling import Pooling
from headrace.server.encoding import encoded
from headrace.server.engine import ServedTokenizer
from headrace.server.errors import ApiError, invalid
from headrace.server.job import Job, Prompt, ReplyChoice
from headrace.server.prompts import MOST_INPUTS, PromptsBody, job_of_prompts, pooled_prompt, prompt_usage, vectors_of
from headrace.server.replies import InOnePiece, figures, finite
from headrace.server.state import ServerState
from headrace.server.turns import naming, tokenizer_of
from headrace.types import InvalidRequest, SamplingParams

TEXT: dict[str, Any] = {"type": "string", "minLength": 1}
OBJECT = {"type": "object", "properties": {"text": TEXT}, "required": ["text"], "additionalProperties": False}
DOCUMENTS = {"type": "array", "items": {"anyOf": [TEXT, OBJECT]}, "minItems": 1, "maxItems": MOST_INPUTS}

NAMES: dict[str | None, str] = {None: "documents", "prompt": "documents", "max_tokens": "documents"}
"""The engine's names of fields -> the client's."""

CUT = "documents are read whole; cut them before"


class RerankBody(PromptsBody):
    """`documents`: texts, or objects with a `text`. top_n: so many results, the best; None: all. `template`: how a
    query and a document become one text, in place of the checkpoint's own."""

    refused: ClassVar[Mapping[str, str]] = {
        **PromptsBody.refused,
        **dict.fromkeys(("max_tokens_per_doc", "max_chunks_per_doc", "truncate_prompt_tokens"), CUT),
        "rank_fields": "a document is its text; leave it out",
    }

    query: str
    documents: Annotated[Any, WithJsonSchema(DOCUMENTS)]
    top_n: int | None = None
    return_documents: bool | None = None
    template: str | None = None

    def texts(self) -> list[str]:
        """The documents, checked as far as no tokenizer is needed, as the other fields are."""
        if not self.query:
            raise invalid("query must not be empty", "query")
        if self.top_n is not None and self.top_n < 1:
            raise invalid(f"top_n must be at least 1, got {self.top_n}", "top_n")
        if not isinstance(self.documents, list) or not self.documents:
            raise invalid("documents must be a list of texts, with at least one", "documents")
        self.check_many(len(self.documents), "documents")
        return [_text(index, each) for index, each in enumerate(self.documents)]


def _text(index: int, document: Any) -> str:
    text = document["text"] if isinstance(document, dict) and set(document) == {"text"} else document
    if not isinstance(text, str) or not text:
        told = 'must be a text, or {"text": ...}, not empty'
        raise invalid(f"documents[{index}] {told}", "documents")
    return text


class Rerank:
    """An Api (server.answering)."""

    body = RerankBody

    async def job(self, state: ServerState, body: RerankBody, arrival_s: float) -> Job:
        with naming(NAMES):
            pooling = state.engine.capacity.pooling
            if len(pooling.labels) > 1:
                told = f"this model has {len(pooling.labels)} labels, and a reranker has one: ask /v1/classify"
                raise InvalidRequest(told, "model")
            documents, tokenizer = body.texts(), tokenizer_of(state, "documents")
            asked = None if pooling.labels else asks_for(await state.in_tokenizer(answers_of, tokenizer))
            template = template_of(tokenizer, pooling) if body.template is None else body.template
            texts = joined(template, body.query, documents)
            prompts = [await _prompt(state, index, text, asked) for index, text in enumerate(texts)]
        return job_of_prompts(state, "rerank-", prompts, body, arrival_s, NAMES)

    def replies(self, state: ServerState, body: RerankBody, job: Job) -> RerankReplies:
        return RerankReplies(job, body.model or state.model, state.engine.capacity.pooling, body)


def template_of(tokenizer: ServedTokenizer, pooling: Pooling) -> str:
    """The checkpoint's own, else that of its kind. Raises InvalidRequest for a language model that has neither."""
    if tokenizer.rerank_template:
        return tokenizer.rerank_template
    if pooling.labels:
        return PLAIN
    if QWEN3_TOKEN not in tokenizer.added_tokens:
        told = "this language model brings no template of a reranker: give one, with {query} and {document} in it"
        raise InvalidRequest(told, "template")
    return QWEN3


async def _prompt(state: ServerState, index: int, text: str, asked: SamplingParams | None) -> Prompt:
    """asked: of a language model, whose template has all special tokens."""
    try:
        if asked is None:
            return await pooled_prompt(state, text, "documents")
        ids = await encoded(state, tokenizer_of(state, "documents").encode_chat, text, "documents")
        return Prompt(ids, state.engine.check(ids, asked), silent=True)
    except InvalidRequest as error:
        if error.param == "model":
            raise
        raise InvalidRequest(f"documents[{index}] with the query: {error}", None, error.code) from None


class RerankReplies(InOnePiece):
    def __init__(self, job: Job, model: str, pooling: Pooling, body: RerankBody) -> None:
        self.job, self.model, self.pooling, self.body = job, model, pooling, body
        self.texts = body.texts()

    def whole(self) -> dict[str, Any]:
        logits = self._logits()
        order = sorted(range(len(logits)), key=lambda index: -logits[index])[: self.body.top_n]
        return {
            "id": self.job.request_id,
            "model": self.model,
            "results": [self._told(index, logits[index]) for index in order],
            "usage": prompt_usage(self.job),
            "headrace": figures(self.job),
        }

    def _told(self, index: int, logit: float) -> dict[str, Any]:
        document = {} if self.body.return_documents is False else {"document": {"text": self.texts[index]}}
        return {"index": index, **document, "relevance_score": sigmoid(logit)}

    def _logits(self) -> list[float]:
        """By what the documents are sorted: sigmoids of two that are both far from 0 may be the same."""
        if self.pooling.labels:
            found: list[float] = vectors_of(self.job, self.pooling)[:, 0].tolist()
            return found
        if not all(choice.logprobs for choice in self.job.choices):
            raise ApiError(500, "a judgement was aborted: the model's output is broken", None, "aborted")
        return [_judged(choice) for choice in self.job.choices]


def _judged(choice: ReplyChoice) -> float:
    """The logit of yes against no."""
    yes, no = (finite(choice.logprobs[0][token].logprob) for token in choice.prompt.params.logprob_token_ids)
    return yes - no
