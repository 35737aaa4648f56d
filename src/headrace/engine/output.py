"""What the engine keeps of a request under way, and of each of its sequences beside the scheduler's record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.engine.below import Below
from headrace.engine.capacity import Capacity
from headrace.engine.detokenizer import Detokenizer
from headrace.engine.reports import Report
from headrace.engine.sampler import History, SampleInput, forbidden_tokens
from headrace.engine.sequence import SequenceState, Slice
from headrace.engine.stopping import Finish, finish_reason
from headrace.progress import Prefill
from headrace.types import Delta, Metrics, Request

if TYPE_CHECKING:  # it imports Triton
    from headrace.engine.kept_changes import KeptChanges
    from headrace.engine.structured.matcher import SequenceMatcher


@dataclass(slots=True, eq=False)
class Active:
    """A request under way."""

    request: Request
    seed: int
    sequences: list[SequenceState] = field(default_factory=list)
    unfinished: int = 0
    scheduled_s: float | None = None
    first_token_s: float | None = None
    output_tokens: int = 0
    report: Report | None = None

    def metrics(self, now: float) -> Metrics:
        """What it has cost so far."""
        arrival, first = self.request.arrival_s, self.sequences[0]
        return Metrics(
            ttft_s=(self.first_token_s or now) - arrival,
            e2e_s=now - arrival,
            queue_s=(self.scheduled_s or now) - arrival,
            prompt_tokens=len(self.request.prompt_token_ids),
            cached_tokens=first.cached_tokens,
            output_tokens=self.output_tokens,
            strategy=first.strategy,
            strategy_reason=first.strategy_reason,
            restored_tokens=first.restored_tokens,
            restore_reason=first.restore_reason,
        )


@dataclass(slots=True, eq=False)
class Output:
    """One sequence: how its tokens become text, and what they are chosen by. kept: where a GPU keeps some of that."""

    sequence: SequenceState
    active: Active
    detokenizer: Detokenizer | None
    history: History | None
    plain: bool
    matcher: SequenceMatcher | None = None
    kept: KeptChanges | None = None

    def forbids(self, position: int) -> bool:
        """Whether some tokens are forbidden at this place of the answer, but for its grammar."""
        return position < self.sequence.request.params.min_tokens

    def changes(self, position: int) -> bool:
        """Whether the logits are changed before the token of this place is chosen, but for its grammar."""
        return self.history is not None or bool(self.sequence.request.params.logit_bias) or self.forbids(position)

    def add(self, delta: Delta, tokens: list[int], capacity: Capacity) -> None:
        """Adds tokens to the sequence and the delta, up to the one that ends it. None: its grammar lets nothing follow,
        so that it ends."""
        if not tokens:
            self._end(delta, Finish("stop"))
        for token in tokens:
            self.sequence.tokens.append(token)
            delta.token_ids.append(token)
            complete = self.matcher is not None and len(delta.token_ids) == len(tokens) and self.matcher.complete
            self._take(delta, token, complete, capacity)
            if delta.finish_reason is not None:
                return

    def sample_input(self, eos: tuple[int, ...]) -> SampleInput | None:
        """What the next token is drawn by; None where the greatest logit is the answer."""
        sequence, matcher, mask = self.sequence, self.matcher, None
        params = sequence.request.params
        forbidden = forbidden_tokens(params, sequence.n_output, eos)
        if matcher is not None:
            mask, forbidden = matcher.allowed(forbidden, eos if params.ignore_eos else ())
        elif self.plain and not forbidden:
            return None
        return SampleInput(
            params=params,
            prompt=sequence.request.prompt_token_ids,
            output=sequence.output,
            index=sequence.index,
            seed=self.active.seed,
            forbidden=forbidden,
            mask=mask,
            history=self.history,
        )

    def _take(self, delta: Delta, token: int, complete: bool, capacity: Capacity) -> None:
        """Adds a token's text to the delta, and says there whether the sequence ends. complete: the answer has its
        whole shape."""
        sequence, params, eos = self.sequence, self.sequence.request.params, capacity.eos_token_ids
        room = capacity.max_model_len - sequence.prompt_len
        ended, shown = finish_reason(params, token, sequence.n_output, eos, room), True
        if complete:
            shown = ended is not None or token not in eos  # below min_tokens it would count as text
            ended = ended if ended is not None and ended.reason == "stop" else Finish("stop")
        if self.detokenizer is not None and shown:
            piece = self.detokenizer.push(token)
            delta.text += piece.text
            if isinstance(piece.stop, str):
                delta.finish_reason, delta.stop_reason = "stop", piece.stop
                return
        if ended is not None:
            self._end(delta, ended)

    def _end(self, delta: Delta, ended: Finish) -> None:
        if self.detokenizer is not None:
            delta.text += self.detokenizer.flush()
        delta.finish_reason, delta.stop_reason = ended


def prefills(
    slices: Sequence[Slice], running: Sequence[SequenceState], active: Mapping[str, Active], below: Below
) -> list[Prefill]:
    """The first sequence of each request without a token of its answer, in order of arrival."""
    steps = {part.sequence: part.length for part in slices}
    found: dict[str, Prefill] = {}
    for sequence in running:
        if sequence.ended:
            continue
        request_id, step = sequence.request.request_id, steps.get(sequence, 0)
        if active[request_id].first_token_s is None and request_id not in found:
            coming, cached = below.coming(sequence), sequence.cached_tokens
            done = sequence.computed - step - coming
            found[request_id] = Prefill(request_id, done, cached, sequence.prompt_len, step, coming)
    return list(found.values())


def joined(deltas: Sequence[Delta]) -> list[Delta]:
    """With one delta for each sequence."""
    found: dict[tuple[str, int], Delta] = {}
    for delta in deltas:
        first = found.setdefault((delta.request_id, delta.index), delta)
        if first is not delta:
            first.text += delta.text
            first.token_ids += delta.token_ids
            first.logprobs = first.logprobs if delta.logprobs is None else [*(first.logprobs or []), *delta.logprobs]
            first.finish_reason, first.stop_reason = delta.finish_reason, delta.stop_reason
            first.metrics = delta.metrics
    return list(found.values())
