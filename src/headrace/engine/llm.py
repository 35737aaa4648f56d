"""The offline interface: prompts in, answers out, in this process."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from os import PathLike
from typing import Any, Self, Unpack
from weakref import finalize

import torch
from torch import Tensor

from headrace.config import EngineConfig, config_from_env
from headrace.config.keywords import SettingKeywords
from headrace.config.signature import PublicNames, public_names, shows_settings
from headrace.engine import preflight
from headrace.engine.answer import Answer, reported
from headrace.engine.call_handlers import CallHandlers
from headrace.engine.calls import LoadSession, SaveSession
from headrace.engine.capacity import check_variables
from headrace.engine.core import EngineCore
from headrace.engine.embedding import EMBEDS, Vectors, check_classifies, check_dimensions, inputs_of, stacked
from headrace.engine.ending import Ending, collect_ended
from headrace.engine.loader import Loaded, load
from headrace.engine.prompt_names import naming
from headrace.engine.prompts import Messages, Prompt, Prompts, conversations, for_each, listed, params_of, token_ids
from headrace.engine.scoring import Text, plan_score
from headrace.engine.session_places import Place, check_saving
from headrace.engine.structured.door import ShapeDoor
from headrace.offload.tiers import own_disk
from headrace.outputs import RequestOutput, Score, SessionReport
from headrace.parallel.transport import RankLost
from headrace.progress import Answering, PrefillClock
from headrace.stats import Summary
from headrace.types import Delta, EngineDead, InvalidRequest, Request, SamplingParams, TokenLogprobs

Note = Callable[[list[Delta]], None]
"""Is told what each step adds."""


@shows_settings
class LLM(metaclass=PublicNames):
    """A model with its KV cache.

        with LLM("tiny") as llm:
            print(llm.generate("The code of Lisbon is 4821. What is the code of Lisbon?")[0].text)

    `model`: a folder in Hugging Face form, or 'tiny', the shipped model. Keywords are the settings of `headrace serve
    --help-all`, each with an environment twin (kv_cache_tokens, HEADRACE_KV_CACHE_TOKENS). Raises TypeError for an
    unknown one, ValueError for settings that cannot work, UnsupportedModel for a model that is not implemented.
    """

    __dir__ = public_names

    def __init__(self, model: str | PathLike[str] = "tiny", **settings: Unpack[SettingKeywords]) -> None:
        self.config = own_disk.resolved(config_from_env(model=str(model), **settings))
        collect_ended()
        preflight.check(self.config)
        self.engine = EngineCore(_load(self.config))
        self.capacity = self.engine.loaded.capacity
        self._ending = Ending(self.engine.loaded)
        finalize(self, self._ending.of_one_that_was_dropped).atexit = False
        self.tokenizer = self.engine.loaded.tokenizer
        self._count = 0
        self._summary: Summary | None = None
        self._turn = threading.RLock()  # calls of several threads step the engine one after another
        self._process, self._closed = os.getpid(), False
        self._shapes = ShapeDoor()
        self._calls = CallHandlers(self.engine)

    def __repr__(self) -> str:
        return f"LLM({self.capacity.told}{', closed' if self._closed else ''})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends other ranks, stores what tiers shall keep and lets go of all memory. Further requests raise EngineDead,
        and those of other threads that are under way do at their next step; `with` closes, too."""
        if os.getpid() != self._process:
            return
        self._closed = True
        with self._turn:
            if not hasattr(self, "engine"):
                return
            with suppress(RankLost):
                self._summary = self.engine.stats().summary()
            self._ending()
            del self.engine, self._calls

    def stats(self) -> Summary:
        """What the engine holds now and has done so far: requests, tokens, share from the cache, KV in use. Of one that
        is closed: as it was. Raises EngineDead where a rank was lost before."""
        engine: EngineCore | None = getattr(self, "engine", None)  # another thread may close it meanwhile
        if engine is not None:
            return engine.stats().summary()
        if self._summary is None:
            raise EngineDead("this LLM is closed, and a rank that knew of its figures was lost before")
        return self._summary

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str | None = None,
        public_prefix_tokens: int = 0,
        tenant: str = "",
        weight: float = 1.0,
        priority: int | Sequence[int] = 0,
        kv_share: float = 0.0,
        kv_limit: float = 1.0,
        tier_quota: float | None = None,
        adapter: str | Sequence[str] = "",
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answers a prompt (a text, or its token ids) or several (a list of such), in order, all computed together.

        cache_salt: requests share cached prefixes only with the same salt, but for the first public_prefix_tokens.
        tenant, weight: whose turns these prompts take, and its share beside others'; priority: within the tenant, lower
        ones are computed first; a list has one for each prompt (docs/fairness.md).
        kv_share, kv_limit: of the pool, that the tenant's chunks keep, and take at most (docs/cache.md); tier_quota: of
        each tier, that they keep; None: kv_tenant_quota (docs/offload.md).
        adapter: the name of one of lora_modules, which answers in the model's place; a list has one for each prompt,
        "" for the model (docs/adapters.md).
        progress: tell on stderr how far it is (prompts, tokens per second, cached share) and what it came to; default:
        for several prompts on a terminal. Raises InvalidRequest naming the parameter.
        """
        texts = listed(prompts, "prompts")
        params = params_of(sampling_params, texts)
        priorities: list[int] = for_each(priority, texts, "priority")
        adapters: list[str] = (
            [adapter] * len(texts) if isinstance(adapter, str) else for_each(adapter, texts, "adapter")
        )
        own: dict[str, Any] = dict(tenant=tenant, weight=weight)
        own |= dict(kv_share=kv_share, kv_limit=kv_limit, tier_quota=tier_quota)
        requests = []
        for index, (prompt, p, place, named) in enumerate(zip(texts, params, priorities, adapters, strict=True)):
            with naming("prompts", index if len(texts) > 1 else None):
                more = dict(priority=place, adapter=named, **own)
                requests.append(self._request(prompt, p, cache_salt, public_prefix_tokens, **more))
        outputs = self._run(requests, sys.stderr.isatty() and len(requests) > 1 if progress is None else progress)
        for output, prompt in zip(outputs, texts, strict=True):
            output.prompt = prompt if isinstance(prompt, str) else None
        return outputs

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str | None = None,
        public_prefix_tokens: int = 0,
        tenant: str = "",
        weight: float = 1.0,
        priority: int | Sequence[int] = 0,
        kv_share: float = 0.0,
        kv_limit: float = 1.0,
        tier_quota: float | None = None,
        adapter: str | Sequence[str] = "",
        progress: bool | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answers a conversation (messages with role and content), or several (a list of such lists).

        Further keywords go to the chat template; the others are those of generate.
        """
        check_variables(template)
        if self.tokenizer is None:
            raise InvalidRequest("the model folder has no tokenizer: pass token ids to generate()", "messages")
        prompts = [self.tokenizer.apply_chat(list(c), **template) for c in conversations(messages)]
        sharing: dict[str, Any] = dict(cache_salt=cache_salt, public_prefix_tokens=public_prefix_tokens)
        sharing |= dict(tenant=tenant, weight=weight, priority=priority)
        sharing |= dict(kv_share=kv_share, kv_limit=kv_limit, tier_quota=tier_quota, adapter=adapter)
        return self.generate(prompts, sampling_params, **sharing, progress=progress)

    def score(
        self,
        text: Text,
        options: Sequence[Text],
        *,
        cache_salt: str | None = None,
        public_prefix_tokens: int = 0,
    ) -> list[Score]:
        """The likelihood of each option (a text or token ids) as what follows the text, which is computed once.

        Strings are tokenized together with the text. The other keywords are those of generate. Raises InvalidRequest.
        """
        self._must_be_open()
        plan = plan_score(text, options, self.tokenizer, self.capacity.alike_tokens)
        plan.check(self.capacity.check)
        sharing = cache_salt, public_prefix_tokens
        answers: list[Sequence[TokenLogprobs]] = []
        for group in plan.groups():
            requests = [self._checked_request(list(each.token_ids), each.params, *sharing) for each in group]
            answers += [reported(output) for output in self._run(requests, progress=False)]
        return plan.scores(answers)

    def embed(
        self,
        inputs: Prompts,
        *,
        dimensions: int | None = None,
        cache_salt: str | None = None,
        public_prefix_tokens: int = 0,
    ) -> Vectors:
        """Embeddings of a text, of texts, or of lists of token ids, all computed together: fp32 [inputs, size].

        Pooled and normalised as the checkpoint says. dimensions: fewer numbers, of checkpoints that allow it. The other
        keywords are those of generate. Raises InvalidRequest.
        """
        check_dimensions(dimensions, self.capacity.embedding_size, self.capacity.pooling)
        return self._pooled(inputs, dimensions, cache_salt, public_prefix_tokens)

    def classify(self, inputs: Prompts, *, cache_salt: str | None = None, public_prefix_tokens: int = 0) -> Vectors:
        """What a classifier's head says of a text, of texts, or of lists of token ids: fp32 [inputs, labels].

        Before any softmax or sigmoid; `capacity.pooling.labels` names the labels. The keywords are those of generate.
        Raises InvalidRequest, also for a model without such a head.
        """
        check_classifies(self.capacity.pooling)
        return self._pooled(inputs, None, cache_salt, public_prefix_tokens)

    def _pooled(self, inputs: Prompts, dimensions: int | None, salt: str | None, public: int) -> Vectors:
        self._must_be_open()
        requests = []
        for index, each in enumerate(inputs_of(inputs)):
            with naming("inputs", index):
                tokens = self._tokens(each)
                self.capacity.check(tokens, EMBEDS, embed=True)
            requests.append(self._checked_request(tokens, EMBEDS, salt, public, embed=True))
        return stacked([answer.embedding for answer in self._answered(requests)], self.capacity.pooling, dimensions)

    def save_session(
        self,
        name: str,
        prompt: str | Sequence[int],
        *,
        cache_salt: str | None = None,
        public_prefix_tokens: int = 0,
        adapter: str = "",
        to: Place = "file",
    ) -> SessionReport:
        """Saves a prompt (text or token ids) under a name, with its keys and values; what is not cached is computed.

        adapter: by which they are computed. to: a file of its own, or the tiers, which several ranks and a GPU store
        in, too. Needs the setting sessions_dir, where servers without keys find it too.
        Raises InvalidRequest.
        """
        with naming("prompt"):
            tokens, sharing = self._tokens(prompt), (cache_salt, public_prefix_tokens)
        check_saving(self.config, name, to)
        with self._in_turn():  # between the two another call might evict what was computed
            params = SamplingParams(max_tokens=1, temperature=0.0)
            self._run([self._request(tokens, params, *sharing, adapter=adapter)], progress=False)
            return SessionReport(**self._calls.ask(SaveSession(name, "", tokens, *sharing, to=to, adapter=adapter)))

    def load_session(self, name: str, *, cache_salt: str | None = None, public_prefix_tokens: int = 0) -> SessionReport:
        """Brings a saved session back into the cache: a prompt that begins with its tokens, of the same adapter, goes
        on from there.

        cache_salt, public_prefix_tokens: as it was saved with. Raises InvalidRequest, also for a damaged file.
        """
        with self._in_turn():
            return SessionReport(**self._calls.ask(LoadSession(name, "", cache_salt, public_prefix_tokens)))

    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """Logits after each token of a prompt, computed without the prefix cache: fp32 [T, V]."""
        with naming("token_ids"):
            request = self._request(token_ids, SamplingParams(max_tokens=1, temperature=0.0), None, 0)
        rows: list[Tensor] = []

        def keep(sequence: Any, position: int, logits: Tensor) -> None:
            if sequence.request is request:
                rows.append(logits)

        with self._in_turn(), self._observed(keep):
            self._drain([request], want_logits=True)
        return torch.cat(rows)

    @contextmanager
    def _observed(self, observer: Any) -> Iterator[None]:
        engine = self.engine
        before, engine.on_logits = engine.on_logits, observer
        try:
            yield
        finally:
            engine.on_logits = before

    def _request(
        self, prompt: str | Sequence[int], params: SamplingParams, salt: str | None, public: int, **own: Any
    ) -> Request:
        self._must_be_open()
        tokens = self._tokens(prompt)
        params = self.capacity.check(tokens, params)
        self._shapes.check(params, self.tokenizer, self.capacity)
        return self._checked_request(tokens, params, salt, public, **own)

    def _tokens(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return token_ids(prompt, "prompts")
        if self.tokenizer is None:
            raise InvalidRequest("the model folder has no tokenizer: pass token ids", "prompts")
        return self.tokenizer.encode(prompt)

    def _checked_request(
        self, tokens: list[int], params: SamplingParams, salt: str | None, public: int, embed: bool = False, **own: Any
    ) -> Request:
        """own: further fields of a Request."""
        own["adapter_start"] = self.capacity.adapter_start(own.get("adapter", ""), tokens)
        with self._in_turn():
            self._count += 1
            name = f"offline-{self._count}"
        return Request(name, tokens, params, salt, public, time.monotonic(), embed, **own)

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        self._must_be_open()
        with self._turn:
            self._must_be_open()
            yield

    def _must_be_open(self) -> None:
        if self._closed:
            raise EngineDead("this LLM is closed: make another")
        if os.getpid() != self._process:
            raise EngineDead("this LLM belongs to the process that this one was forked from: make another")

    def _run(self, requests: list[Request], progress: bool) -> list[RequestOutput]:
        if not progress:
            return self._drain(requests)
        with self._in_turn():
            return self._watched(requests)

    def _watched(self, requests: list[Request]) -> list[RequestOutput]:
        from headrace.console import ProgressLine, err

        answering, prefilling = Answering(len(requests)), PrefillClock()

        def note(deltas: list[Delta]) -> None:
            prefilling.end(delta.request_id for delta in deltas)
            for delta in deltas:
                answering.note(delta)

        engine = self.engine
        engine.on_prefill = prefilling.begin
        try:
            with ProgressLine(lambda: answering.text(prefilling.prefills, prefilling.rate), answering.share):
                outputs = self._drain(requests, note)
        finally:
            engine.on_prefill = None
        err.print(answering.summary(), style="dim")
        return outputs

    def _drain(
        self, requests: list[Request], note: Note | None = None, want_logits: bool = False
    ) -> list[RequestOutput]:
        return [answer.output for answer in self._answered(requests, note, want_logits)]

    def _answered(self, requests: list[Request], note: Note | None = None, want_logits: bool = False) -> list[Answer]:
        """Steps until the requests are answered; an interruption aborts them, so that nothing is left behind."""
        answers = {request.request_id: Answer(request) for request in requests}
        with self._in_turn():
            engine = self.engine  # a signal's handler may close it, in the midst of a step
            try:
                for request in requests:
                    engine.add(request, want_logits=want_logits)
                while engine.has_work:
                    self._must_be_open()
                    deltas = engine.step()
                    for delta in deltas:
                        answers[delta.request_id].add(delta)
                    if note is not None:
                        note(deltas)
            except BaseException:
                for request in requests:
                    engine.abort(request.request_id)
                raise
        return [answers[request.request_id] for request in requests]


def _load(config: EngineConfig) -> Loaded:
    """Loads the engine; on a terminal a line tells how far it is."""
    if not sys.stderr.isatty():
        return load(config)
    from headrace.console import loading

    with loading(config.model.folder) as tell:
        return load(config, tell)
