"""POST /v1/score: the likelihood of many options after one text."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Annotated, Any, ClassVar, Literal
from uuid import uuid4

from pydantic import WithJsonSchema

from headrace.engine.scoring import MOST_OPTIONS, ScoreAborted, ScorePlan, at_once, plan_score
from headrace.outputs import Score
from headrace.server.errors import ApiError, invalid
from headrace.server.job import Event, Job, Prompt
from headrace.server.prompts import prompt_usage
from headrace.server.protocol import IGNORED, AskingBody
from headrace.server.replies import InOnePiece, figures, finite
from headrace.server.state import ServerState
from headrace.server.turns import naming
from headrace.types import check_sharing

TEXT = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
    ]
}
TextOrIds = Annotated[Any, WithJsonSchema(TEXT)]
Options = Annotated[Any, WithJsonSchema({"type": "array", "items": TEXT, "minItems": 1, "maxItems": MOST_OPTIONS})]

CROSS_ENCODER = "documents are ranked by POST /v1/rerank; here give a text, and options that may follow it"


class ScoreBody(AskingBody):
    """`text`, or `prompt`, and `options`: strings or token ids. normalize: what `best` compares."""

    ignored: ClassVar[Set[str]] = IGNORED
    refused: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("text_1", "text_2", "query", "queries", "documents", "data_1", "data_2"), CROSS_ENCODER),
        "stream": "scores are not streamed; leave it out",
        "stream_options": "scores are not streamed; leave it out",
    }
    harmless: ClassVar[Mapping[str, tuple[Any, ...]]] = {"stream": (False,)}

    text: TextOrIds = None
    prompt: TextOrIds = None
    options: Options
    normalize: Literal["none", "tokens"] | None = None
    cache_salt: str | None = None
    public_prefix_tokens: int | None = None

    def given(self) -> tuple[str | list[int], list[str | list[int]]]:
        """The text and the options, checked as far as no tokenizer is needed."""
        if (self.text is None) == (self.prompt is None):
            raise invalid("give a text, as text or as prompt", "text", "missing" if self.text is None else None)
        name, text = ("text", self.text) if self.prompt is None else ("prompt", self.prompt)
        _check_kind(text, name, name)
        if not isinstance(self.options, list) or not 1 <= len(self.options) <= MOST_OPTIONS:
            raise invalid(f"options must be a list of 1 to {MOST_OPTIONS:,} strings or lists of token ids", "options")
        for index, option in enumerate(self.options):
            _check_kind(option, f"options[{index}]", "options")
        check_sharing(self.cache_salt, self.public_prefix_tokens or 0)
        return text, self.options


def _check_kind(value: Any, told: str, param: str) -> None:
    ids = isinstance(value, list) and all(type(item) is int for item in value)
    if not value or not (ids or isinstance(value, str)):
        raise invalid(f"{told} must be a string or a list of token ids, not empty", param)


class ScoreJob(Job):
    """A job that knows what its prompts are for."""

    plan: ScorePlan


class Scoring:
    """An Api (server.answering)."""

    body = ScoreBody

    async def job(self, state: ServerState, body: ScoreBody, arrival_s: float) -> Job:
        engine, renamed = state.engine, "text" if body.prompt is None else "prompt"
        names: dict[str | None, str] = {None: "options", "text": renamed}
        with naming(names):
            text, options = body.given()
            adapter = engine.capacity.adapter_of(state.names.adapter(body.model))
            invocation, alike = () if adapter is None else adapter.invocation, engine.capacity.alike_tokens
            plan = await state.in_tokenizer(plan_score, text, options, engine.tokenizer, alike, invocation)
            await state.in_tokenizer(plan.check, engine.check)
        prompts = [Prompt(each.token_ids, each.params, shared=each.shared, silent=True) for each in plan.requests]
        public = body.public_prefix_tokens or 0
        job = ScoreJob(f"score-{uuid4().hex}", prompts, arrival_s, body.cache_salt, public, names=names)
        longest = max(len(prompt.ids) for prompt in prompts)
        job.at_once = at_once(longest, engine.capacity.max_sequences, state.config.server)
        job.plan = plan
        return job

    def replies(self, state: ServerState, body: ScoreBody, job: Job) -> ScoreReplies:
        assert isinstance(job, ScoreJob)
        model, tokenizer = body.model or state.model, state.engine.tokenizer
        return ScoreReplies(job, model, tokenizer, by_token=body.normalize == "tokens")


class ScoreReplies(InOnePiece):
    def __init__(self, job: ScoreJob, model: str, tokenizer: Any, by_token: bool) -> None:
        self.job, self.model, self.tokenizer, self.by_token = job, model, tokenizer, by_token

    def take(self, event: Event) -> None:
        """Keeps the rows of the option alone: with one for each token of the text they would be many."""
        rows = event.choice.prompt_logprobs
        if rows is not None:
            event.choice.prompt_logprobs = [row for row in rows if row is not None]

    def whole(self) -> dict[str, Any]:
        job = self.job
        try:
            scores = job.plan.scores([each.prompt_logprobs or each.logprobs for each in job.choices])
        except ScoreAborted as error:
            raise ApiError(500, str(error), None, "aborted") from None
        compared = [score.mean_logprob if self.by_token else score.logprob for score in scores]
        return {
            "id": job.request_id,
            "object": "score",
            "created": job.created,
            "model": self.model,
            "data": [self._told(index, score) for index, score in enumerate(scores)],
            "best": max(range(len(scores)), key=compared.__getitem__),
            "usage": self._usage(),
            "headrace": figures(job),
        }

    def _told(self, index: int, score: Score) -> dict[str, Any]:
        return {
            "object": "score.option",
            "index": index,
            "logprob": finite(score.logprob),
            "mean_logprob": finite(score.mean_logprob),
            "greedy": score.greedy,
            "start": score.start,
            "tokens": [self._text(token) for token in score.token_ids],
            "token_ids": score.token_ids,
            "token_logprobs": [finite(each) for each in score.token_logprobs],
        }

    def _text(self, token: int) -> str:
        return str(token) if self.tokenizer is None else self.tokenizer.token_text(token)

    def _usage(self) -> dict[str, Any]:
        """What is computed of each option counts beside the text, which counts once; nothing is generated."""
        return prompt_usage(self.job) | {"completion_tokens": 0}
