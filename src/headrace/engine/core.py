"""The engine: requests in, steps, deltas out. One thread, no input or output of its own.

A step is: schedule -> run -> sample -> commit. Requests may be added and aborted between any two steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace.engine import parts
from headrace.engine.detokenizer import Detokenizer
from headrace.engine.executor import Computed
from headrace.engine.loader import Loaded
from headrace.engine.output import Active, Output, joined, prefills
from headrace.engine.pooled import Pooled
from headrace.engine.reports import Head, Observer, PromptLogprobs, note_reports, show
from headrace.engine.sampler import BadLogits, History, Sampled, is_plain, needs_history
from headrace.engine.sequence import SequenceState, Slice
from headrace.engine.shares import Shares
from headrace.engine.speculation.verify import confirmed, settle
from headrace.kv.chunk_table import ChunkTable
from headrace.logs import fields, short_id
from headrace.progress import OnPrefill
from headrace.stats import EngineStats, KVStats
from headrace.types import CHUNK, Delta, InvalidRequest, Request

if TYPE_CHECKING:  # llguidance is imported for the first structured request, Triton on a GPU
    from headrace.engine.structured.answers import StructuredAnswers
    from headrace.engine.structured.matcher import SequenceMatcher

log = logging.getLogger(__name__)

_Row = tuple[Output, int]
"""A sequence, and the row of the step's logits that its next token comes from."""


class EngineCore:
    """Continuous batching over one model. `on_logits` may be set to watch rows of logits, `on_prefill` prompts."""

    def __init__(self, loaded: Loaded) -> None:
        self.loaded = loaded
        self.cache = loaded.cache
        self.scheduler = parts.scheduler(loaded, self._open_table)
        self.offload, self.below = loaded.offload, loaded.below
        self.on_logits: Observer | None = None
        self.on_prefill: OnPrefill | None = None
        self.speculator = parts.speculator(loaded)
        self.shares = Shares.of(loaded, self.scheduler, self._open_table)
        self.pins = self.shares.pins
        self._head = Head(loaded.decoder, loaded.tokenizer)
        self._active: dict[str, Active] = {}
        self._outputs: dict[SequenceState, Output] = {}
        self._device_sampler = parts.device_sampler(loaded)
        self.overlap = parts.overlap(loaded, self.scheduler, self._outputs, self._device_sampler)
        self._order = 0
        self._stats = EngineStats(kv=KVStats(chunks_total=self.cache.pool.total))
        self._started: list[str] = []
        self._storing = False
        self._moved: list[SequenceMatcher] = []

    @property
    def structured(self) -> StructuredAnswers:
        """The structured answers of this engine, with the first of which it begins."""
        return self.loaded.structured_answers()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(self, request: Request, *, want_logits: bool = False) -> None:
        """Queues a checked request (see Loaded.check). want_logits computes the logits of every prompt token, for
        `on_logits`. Raises InvalidRequest if the id is in use."""
        if request.request_id in self._active:
            raise InvalidRequest(f"request id {request.request_id!r} is in use", "request_id")
        request = self.shares.admit(request)
        seed = request.params.seed
        active = Active(request, self.loaded.config.scheduler.seed + (self._order << 20) if seed is None else seed)
        if request.embed:
            active.report = Pooled(self.loaded.capacity.pooling, self._head.classify)
        elif request.params.prompt_logprobs is not None:
            active.report = PromptLogprobs(request, self._head)
        for index in range(request.params.n):
            active.sequences.append(self._new_sequence(active, index, want_logits))
        active.unfinished = request.params.n
        self._active[request.request_id] = active
        self._stats.tokens.prompt += len(request.prompt_token_ids)

    def _new_sequence(self, active: Active, index: int, want_logits: bool) -> SequenceState:
        request = active.request
        applied = self.loaded.capacity.applied(request.adapter, request.adapter_start)
        sequence = SequenceState(request, index, self._order, adapter=applied)
        if want_logits:
            sequence.reports_from = 0
        if isinstance(active.report, Pooled):
            active.report.prepare(sequence)
        self._order += 1
        tokenizer, eos = self.loaded.tokenizer, self.loaded.capacity.eos_token_ids
        detokenizer = Detokenizer(tokenizer, request.prompt_token_ids, request.params, eos) if tokenizer else None
        history = History(request.prompt_token_ids) if needs_history(request.params) else None
        matcher = None if request.params.structured is None or not sequence.draws else self.structured.begin(sequence)
        self._outputs[sequence] = Output(sequence, active, detokenizer, history, is_plain(request.params), matcher)
        self.scheduler.add(sequence)
        return sequence

    def _open_table(self, sequence: SequenceState) -> ChunkTable:
        request, model = sequence.request, self.loaded.decoder.config
        return self.cache.open(
            sequence.tokens,
            salt=request.cache_salt,
            public_tokens=request.public_prefix_tokens,
            namespace=model.rope_namespace(sequence.prompt_len),
            shares=self.loaded.config.cache.prefix_caching,
            reusable=sequence.reusable,
            account=self.shares.account(request),
            tenant=request.tenant,
            mark=self.loaded.capacity.adapter_mark(request.adapter, request.adapter_start),
        )

    def abort(self, request_id: str) -> bool:
        """Ends a request at once, wherever it is, and frees its chunks. False if it is not under way."""
        active = self._active.pop(request_id, None)
        if active is None:
            return False
        for sequence in active.sequences:
            if sequence in self._outputs:
                self._drop(sequence)
        if not self._active:
            self.overlap.land()
        self._stats.finished.abort += 1
        self._stats.tokens.cached += active.sequences[0].cached_tokens
        return True

    def abort_all(self) -> None:
        """Ends all requests, between two steps: what they have computed is stored, where there are tiers."""
        for request_id in list(self._active):
            self.abort(request_id)

    def _drop(self, sequence: SequenceState) -> None:
        if self._outputs.pop(sequence).matcher is not None:
            self.structured.drop(sequence)
        if self.speculator is not None:
            self.speculator.end(sequence)
        self.overlap.remove(sequence)

    def step(self) -> list[Delta]:
        """Computes one step; what it added to each sequence."""
        began = time.monotonic()
        self.below.settle()
        self.pins.expire()
        if self.loaded.structured is not None:
            self.structured.release()
        if self.speculator is not None:
            self.speculator.propose(self.scheduler.running)
        begun = self.overlap.begun()
        slices = self.scheduler.schedule() if begun is None else begun
        if not slices:
            if self.has_work:
                self._wait()
            return []
        self._note_start(slices, began)
        new = self.scheduler.note_computed(slices)
        self._stats.tokens.prefilled += new
        if self.on_prefill is not None and self._takes_time(new, slices):
            prompts = prefills(slices, self.scheduler.running, self._active, self.below)
            self.on_prefill(prompts, self.loaded.executor.expected_s(slices))
        computed = self._compute(slices)
        self.cache.commit()
        deltas = self._observe(computed) + self._advance(computed)
        self.loaded.executor.confirm()
        for part in slices if self.speculator is not None else ():
            self._settle(part.sequence)
        self._stats.scheduler.steps += 1
        self._stats.scheduler.step_s += time.monotonic() - began
        return deltas

    def _wait(self) -> None:
        if self.loaded.structured is not None:
            self.structured.wait()
        self.below.wait()

    def _takes_time(self, new: int, slices: list[Slice]) -> bool:
        """Whether a step with so many prompt tokens takes longer than a decode step, or waits for restored chunks."""
        return new >= CHUNK or (new > 0 and any(self.below.coming(part.sequence) for part in slices))

    def _compute(self, slices: list[Slice]) -> Computed:
        """The step's logits; those that a failed restore has spoilt are left out."""
        if self.speculator is not None:
            self.speculator.complete(slices)
        began = time.perf_counter()
        computed = self.overlap.run(slices, watched=self.on_logits is not None)
        seconds = time.perf_counter() - began
        if computed.timed:
            self.below.observe(slices, seconds)
        if self.speculator is not None and all(part.decodes for part in slices):
            self.speculator.cost.note(len(slices), sum(part.length - 1 for part in slices), seconds)
        void = self.below.confirm(slices)
        return computed.without(void) if void else computed

    def _note_start(self, slices: list[Slice], now: float) -> None:
        for part in slices:
            active = self._active[part.sequence.request.request_id]
            if active.scheduled_s is None:
                active.scheduled_s = now
                self._started.append(active.request.request_id)

    def settle(self) -> bool:
        """While there is nothing to do: whether chunks are still being stored, or were when this was last asked."""
        before = self._storing
        self.below.settle()
        idle = not self.has_work and self.below.store_idle()
        self._storing = idle or self.below.pending
        return before or self._storing

    def take_started(self) -> list[str]:
        """Ids of the requests that left the queue since the last call."""
        started, self._started = self._started, []
        return started

    def _observe(self, computed: Computed) -> list[Delta]:
        """Takes in what prompts report. Deltas of requests that end here: with
        broken logits, or with nothing to draw."""
        if self.on_logits is not None:
            show(computed, self._head, self.on_logits)
        found = [(part, hidden) for part, hidden in computed.reported if part.sequence in self._outputs]
        reports = {part.sequence: self._outputs[part.sequence].active.report for part, _ in found}
        noted = [(report, part, hidden) for part, hidden in found if (report := reports[part.sequence]) is not None]
        broken = note_reports(noted, self._head)
        deltas: list[Delta] = []
        for part, _ in found:
            output, report = self._outputs[part.sequence], reports[part.sequence]
            if report is not None and report in broken:
                deltas += self._break_off(output.active.request.request_id, broken[report])
            elif part.samples and not part.sequence.draws:
                deltas.append(self._end_undrawn(output))
        return deltas

    def _end_undrawn(self, output: Output) -> Delta:
        """The end of a prompt that has no answer."""
        delta = Delta(output.active.request.request_id, output.sequence.index, finish_reason="length")
        self._hand_report(output, delta)
        self._finish(output.active, output.sequence, delta, time.monotonic())
        return delta

    @staticmethod
    def _hand_report(output: Output, delta: Delta) -> None:
        """With the first delta of a request's first sequence."""
        if output.active.report is not None and output.sequence.index == 0:
            output.active.report.hand(delta)
            output.active.report = None

    def _advance(self, computed: Computed) -> list[Delta]:
        """Samples the next token of each sequence, and goes on where it is what the sequence's draft says; sees which
        are finished."""
        rows = [(self._outputs[part.sequence], row) for part, row in computed.parts if part.sequence in self._outputs]
        firsts = {output: row for output, row in rows if output.sequence.draft}
        deltas: list[Delta] = []
        while rows:
            if self.loaded.structured is not None:
                rows, ended = self._follow_grammars(rows)
                deltas += ended
            deltas += self._draw(rows, computed)
            if self._moved:
                self.structured.ask(self._moved)
                self._moved = []
            if not firsts:
                return deltas
            going_on = [(output, confirmed(output.sequence)) for output, _ in rows if output.sequence in self._outputs]
            rows = [(output, firsts[output] + right) for output, right in going_on if right]
            if self.on_logits is not None:
                for output, row in rows:
                    sequence = output.sequence
                    self.on_logits(sequence, len(sequence.tokens) - 1, computed.copied(row))
        return joined(deltas)

    def _draw(self, rows: list[_Row], computed: Computed) -> list[Delta]:
        """Samples a token of each."""
        deltas: list[Delta] = []
        while rows:
            try:
                sampled = self._sample([row for _, row in rows], [output for output, _ in rows], computed)
            except BadLogits as error:
                active = rows[error.row][0].active
                rows = [row for row in rows if row[0].active is not active]
                deltas += self._break_off(active.request.request_id, str(error))
                continue
            now = time.monotonic()
            for (output, _), token in zip(rows, sampled, strict=True):
                if output.sequence in self._outputs:  # else broken off with another sequence of its request
                    deltas += self._push(output, token, now)
            break
        return deltas

    def _sample(self, rows: list[int], outputs: list[Output], computed: Computed) -> Sequence[Sampled]:
        if computed.sampled is not None:
            return [computed.sampled[row] for row in rows]
        inputs = [output.sample_input(self.loaded.capacity.eos_token_ids) for output in outputs]
        return computed.sample(rows, inputs, self._device_sampler)

    def _settle(self, sequence: SequenceState) -> None:
        """Ends the draft of a sequence, if it has one."""
        if self.speculator is not None and sequence.draft and sequence.table is not None:
            self.speculator.note(sequence, len(sequence.draft), settle(sequence, self.cache))

    def _follow_grammars(self, rows: list[_Row]) -> tuple[list[_Row], list[Delta]]:
        """The rows to sample from, and the deltas of sequences that are not sampled: their grammar has failed, or
        forces how the answer begins, or lets nothing follow."""
        left: list[_Row] = []
        deltas: list[Delta] = []
        for output, row in rows:
            matcher, request_id = output.matcher, output.active.request.request_id
            if output.sequence not in self._outputs:
                continue  # broken off with another sequence of its request
            if matcher is None:
                left.append((output, row))
            elif fault := self.structured.fault(matcher):
                deltas += self._break_off(request_id, fault)
                left = [each for each in left if each[0].active is not output.active]
            elif matcher.beginning or matcher.over:
                beginning, matcher.beginning = matcher.beginning, []
                deltas.append(self._add(output, Delta(request_id, output.sequence.index), beginning, time.monotonic()))
            else:
                left.append((output, row))
        return left, deltas

    def _break_off(self, request_id: str, reason: str) -> list[Delta]:
        """Aborts a request whose logits nothing can be chosen from; all others go on."""
        log.error("%-8s  aborted: %s", short_id(request_id), reason, extra=fields(request_id=request_id))
        active = self._active[request_id]
        open_ones = [sequence.index for sequence in active.sequences if sequence in self._outputs]
        self.abort(request_id)
        deltas = [Delta(request_id, index, finish_reason="abort", stop_reason=reason) for index in open_ones]
        deltas[-1].metrics = active.metrics(time.monotonic())
        return deltas

    def _push(self, output: Output, sampled: Sampled, now: float) -> list[Delta]:
        """Adds a token to a sequence, and those that its grammar forces after it; the delta. A token that the grammar
        refuses breaks the request off: as an end-of-text token it would pass for a whole answer."""
        delta = Delta(output.active.request.request_id, output.sequence.index)
        if sampled.logprobs is not None:
            delta.logprobs = [self._head.named(sampled.logprobs)]
        if output.matcher is None:
            return [self._add(output, delta, [sampled.token], now)]
        forced = output.matcher.push(sampled.token)
        if output.matcher.refused:
            return self._break_off(delta.request_id, output.matcher.fault)
        return [self._add(output, delta, [sampled.token, *forced], now, forced_from=1)]

    def _add(self, output: Output, delta: Delta, tokens: list[int], now: float, forced_from: int = 0) -> Delta:
        """Adds tokens up to the one that ends the sequence. No tokens: its grammar lets none follow."""
        sequence, active, matcher = output.sequence, output.active, output.matcher
        if active.first_token_s is None:
            active.first_token_s = now
        self._hand_report(output, delta)
        if sequence.index == 0 and not sequence.n_output:
            delta.cached_tokens = sequence.cached_tokens
        output.add(delta, tokens, self.loaded.capacity)
        count = len(delta.token_ids)
        active.output_tokens += count
        self._stats.tokens.generated += count
        if delta.finish_reason is not None:
            self._settle(sequence)
            self._finish(active, sequence, delta, now)
        if matcher is not None:
            sequence.forced = count > 1
            self.structured.stats.forced += count - forced_from
            if delta.finish_reason is None:
                self._moved.append(matcher)
        return delta

    def _finish(self, active: Active, sequence: SequenceState, delta: Delta, now: float) -> None:
        self._drop(sequence)
        active.unfinished -= 1
        if active.unfinished:
            return
        del self._active[active.request.request_id]
        if delta.finish_reason == "stop":
            self._stats.finished.stop += 1
        else:
            self._stats.finished.length += 1
        delta.metrics = active.metrics(now)
        self._stats.tokens.cached += delta.metrics.cached_tokens

    def stats(self) -> EngineStats:
        """Counters and gauges as they stand; the same record each time."""
        stats = self._stats
        self.scheduler.add_stats(stats)
        self.cache.add_stats(stats.kv)
        self.shares.add_stats(stats.kv)
        if self.loaded.decoder.outside is not None:
            stats.experts = self.loaded.decoder.outside.stats()
        self.loaded.executor.add_stats(stats)
        self.below.add_stats(stats)
        if self.loaded.structured is not None:
            stats.structured = self.structured.told()
        if self.speculator is not None:
            stats.speculation = self.speculator.stats
        return stats
