"""How far long work is: phases of loading, prompts being read, answered prompts, and one sentence for each.

Plain data and text: headrace.console shows it on a terminal, the server logs it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from headrace.types import Delta, Metrics

GIB = 2**30

WEIGHTS = "weights"
"""The phase in which weights are read; the names of the others are free."""


class LoadPhase(NamedTuple):
    """What an engine does while it loads, told when it begins and whenever it gets on. done, total: bytes of weights;
    0 where a phase has no measure."""

    name: str
    done: int = 0
    total: int = 0

    @property
    def share(self) -> float | None:
        """0 to 1; None where there is no measure."""
        return self.done / self.total if self.total else None

    @property
    def text(self) -> str:
        """'weights 1.2 of 3.1 GiB', 'packing'."""
        return f"{self.name} {sizes(self.done, self.total)}" if self.total else self.name


OnPhase = Callable[[LoadPhase], None]
"""Called as loading gets on. The first call with another name ends the phase before."""


def untold(phase: LoadPhase) -> None:
    """An OnPhase for nobody."""


def measured(tell: OnPhase, name: str) -> Callable[[int, int], None]:
    """A function of (bytes done, bytes in all) that tells of the phase of that name."""
    return lambda done, total: tell(LoadPhase(name, done, total))


def both(weights: Callable[[int, int], None] | None, phases: OnPhase | None) -> OnPhase:
    """Tells a function of bytes of weights, and one of all phases; either may be None."""

    def tell(phase: LoadPhase) -> None:
        if phases is not None:
            phases(phase)
        if weights is not None and phase.name == WEIGHTS and phase.total:
            weights(phase.done, phase.total)

    return tell


class PhaseTime(NamedTuple):
    """A phase of loading that has ended. size: bytes, 0 where it has no measure."""

    name: str
    seconds: float
    size: int = 0

    @property
    def text(self) -> str:
        """'weights: 3.1 GiB in 2.4 s', 'packing: 1.2 s'."""
        return f"{self.name}: {f'{sized(self.size)} in ' if self.size else ''}{self.seconds:.1f} s"


class PhaseTimes:
    """An OnPhase that times the phases and hands each to `ended` when it is over. Call `close` after the last.

    `now` is the phase under way, `all` those that have ended.
    """

    def __init__(
        self, ended: Callable[[PhaseTime], None] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.now: LoadPhase | None = None
        self.all: list[PhaseTime] = []
        self._ended, self._clock, self._began = ended, clock, clock()

    def __call__(self, phase: LoadPhase) -> None:
        if self.now is not None and phase.name != self.now.name:
            self.close()
        if self.now is None:
            self._began = self._clock()
        self.now = phase

    @property
    def seconds(self) -> float:
        """Of the phase under way, so far."""
        return self._clock() - self._began

    def close(self) -> None:
        """Ends the phase under way. May be called twice."""
        if self.now is None:
            return
        over = PhaseTime(self.now.name, self.seconds, self.now.total)
        self.now = None
        self.all.append(over)
        if self._ended is not None:
            self._ended(over)


class Prefill(NamedTuple):
    """A prompt that is being read: its request has no token of its answer yet.

    total: its tokens; done: those in the KV cache, `cached` of them found there and not computed. step: how many more
    the step under way computes; 0 between two steps. coming: how many it waits for that are being restored from a tier.
    """

    request_id: str
    done: int
    cached: int
    total: int
    step: int = 0
    coming: int = 0


OnPrefill = Callable[[list[Prefill], float], None]
"""Called as a step begins that computes at least a chunk of prompts, or waits for restored chunks: with all prompts
being read, and the seconds that the step should take (0.0: nobody knows)."""


KNEE = 0.9
"""Of a step so much is believed to go at the rate so far; from there on the estimate creeps towards the step's end."""


class PrefillClock:
    """Prompts being read, in order of arrival, and how fast. Told of each step's prefills as it begins and of its end.

    It may be read by another thread.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rate, self._measured = 0.0, False
        self._began: float | None = None
        self._prefills: dict[str, Prefill] = {}

    def begin(self, prefills: Iterable[Prefill], expected_s: float = 0.0) -> None:
        """A step begins; these are all the prompts being read. expected_s: seconds that it should take, if known."""
        self._prefills = {each.request_id: each for each in prefills}
        self._began = self._clock()
        if not self._measured and expected_s:
            self._rate = self._step / expected_s

    def end(self, answered: Iterable[str] = ()) -> None:
        """The step has ended, if one was told; of the requests `answered` there is a first token."""
        if not self._prefills:
            return
        if self._began is not None:
            self._note_rate(self._clock() - self._began)
            self._prefills = {name: _ended(each) for name, each in self._prefills.items()}
            self._began = None
        for request_id in answered:
            self._prefills.pop(request_id, None)

    def drop(self, request_id: str) -> None:
        """The request has ended."""
        self._prefills.pop(request_id, None)

    def clear(self) -> None:
        """All have ended."""
        self._prefills = {}

    @property
    def prefills(self) -> list[Prefill]:
        """As they stand now. Of the step under way so much counts as done as the rate promises, and never all of it."""
        part = self._part
        share = part if part < KNEE else 1 - KNEE * (1 - KNEE) / part
        return [_stepped(each, int(each.step * share)) for each in list(self._prefills.values())]

    @property
    def rate(self) -> float:
        """Tokens per second that the last steps computed; less if the step under way is slower. Before the first step
        has ended what was expected of it, or 0.0, as in a step that waits for restored chunks."""
        return 0.0 if self._restoring else self._rate / max(1.0, self._part)

    @property
    def _part(self) -> float:
        """Of the step under way what should have been done by now; above 1 if it takes longer."""
        began, step = self._began, self._step
        if self._restoring:
            return 0.0
        return (self._clock() - began) * self._rate / step if began is not None and step else 0.0

    @property
    def _restoring(self) -> bool:
        return any(each.step and each.coming for each in list(self._prefills.values()))

    @property
    def _step(self) -> int:
        """Tokens that the step under way computes."""
        return sum(each.step for each in list(self._prefills.values()))

    def _note_rate(self, seconds: float) -> None:
        """Later steps count more: attention makes them slower as a prompt gets longer."""
        if self._step and seconds > 0 and not self._restoring:
            rate = self._step / seconds
            self._rate = (self._rate + rate) / 2 if self._measured else rate
            self._measured = True


def _stepped(prefill: Prefill, tokens: int) -> Prefill:
    return prefill._replace(done=prefill.done + tokens, step=prefill.step - tokens)


def _ended(prefill: Prefill) -> Prefill:
    """It after the step that it was in."""
    if not prefill.step:
        return prefill
    return prefill._replace(done=prefill.done + prefill.step + prefill.coming, step=0, coming=0)


def share_read(prefills: Sequence[Prefill]) -> float | None:
    """Of the prompts being read, 0 to 1; None where there is none."""
    return sum(each.done for each in prefills) / sum(each.total for each in prefills) if prefills else None


def reading(prefills: Sequence[Prefill], rate: float, seconds: float = 0.0) -> str:
    """'reading 2,048 of 5,957 tokens (1,024 cached, 512 being restored), 1,570/s, 2 s left'; '' where no prompt is
    being read. While no rate is known, `seconds` that it has taken so far."""
    if not prefills:
        return ""
    done, total = sum(each.done for each in prefills), sum(each.total for each in prefills)
    told = f"reading {done:,} of {total:,} tokens"
    cached, coming = sum(each.cached for each in prefills), sum(each.coming for each in prefills)
    notes = [f"{count:,} {what}" for count, what in ((cached, "cached"), (coming, "being restored")) if count]
    if notes:
        told += f" ({', '.join(notes)})"
    if rate:
        return f"{told}, {rate:,.0f}/s, {duration(max(0.1, (total - done) / rate))} left"
    return f"{told}, {duration(seconds)} so far" if seconds >= 1 else told


class Answering:
    """Prompts being answered, counted from their deltas. `metrics`: of those answered; `failed`: broken off."""

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.total, self.written, self.failed = total, 0, 0
        self.metrics: list[Metrics] = []
        self._clock, self._began = clock, clock()
        self._summed = self._prompt = self._cached = 0

    def note(self, delta: Delta) -> None:
        """Any delta, of any of the prompts."""
        self.written += len(delta.token_ids)
        if delta.metrics is not None and delta.finish_reason == "abort":
            self.failed += 1
        elif delta.metrics is not None:
            self.metrics.append(delta.metrics)

    @property
    def seconds(self) -> float:
        """Since the first was asked."""
        return self._clock() - self._began

    def share(self) -> float:
        """Of the prompts, 0 to 1."""
        return (len(self.metrics) + self.failed) / self.total if self.total else 1.0

    def text(self, prefills: Sequence[Prefill] = (), rate: float = 0.0) -> str:
        """'3 of 20 prompts, input 5,230/s, output 122/s, 94 % cached, reading 2,048 of 5,957 tokens, 1,570/s, 2 s
        left'. Tokens per second since the beginning: of the prompts answered (input) and of all answers (output)."""
        parts = [f"{len(self.metrics) + self.failed:,} of {self.total:,} prompts"]
        if self.metrics:
            self._sum()
            speeds = (count / max(self.seconds, 1e-9) for count in (self._prompt, self.written))
            parts += ["input {:,.0f}/s, output {:,.0f}/s".format(*speeds)]
            parts += [f"{percent(self._cached, self._prompt)} cached"]
        elif self.written:
            parts.append(f"output {self.written / max(self.seconds, 1e-9):,.0f}/s")
        return ", ".join(parts + ([reading(prefills, rate, self.seconds)] if prefills else []))

    def _sum(self) -> None:
        """Adds up those that are new: there may be 100,000 prompts, and a line several times a second."""
        for each in self.metrics[self._summed :]:
            self._summed += 1
            self._prompt += each.prompt_tokens
            self._cached += each.cached_tokens

    def summary(self) -> str:
        """See the function of that name."""
        return summary(self.metrics, self.seconds, self.failed)


def summary(metrics: Iterable[Metrics], seconds: float, failed: int = 0) -> str:
    """What many prompts came to, from the metrics of those that were answered: 'answered 32 prompts in 4.2 s: 48,113
    prompt tokens (94 % cached, 2,887 computed), 512 tokens written, 121.9 tokens/s, 7.6 prompts/s'."""
    answered = list(metrics)
    count, rates = len(answered), 1 / max(seconds, 1e-9)
    prompt = sum(each.prompt_tokens for each in answered)
    cached = sum(each.cached_tokens for each in answered)
    written = sum(each.output_tokens for each in answered)
    of = f"{count:,} of {count + failed:,}" if failed else f"{count:,}"
    return (
        f"answered {of} prompt{'s' * (count + failed != 1)} in {seconds:.1f} s: {prompt:,} prompt tokens "
        f"({percent(cached, prompt)} cached, {prompt - cached:,} computed), {written:,} tokens written, "
        f"{written * rates:,.1f} tokens/s, {count * rates:,.1f} prompts/s"
    )


def percent(part: int, whole: int) -> str:
    """'94 %'; '100 %' only where it is all."""
    share = round(100 * part / whole) if whole else 0
    return f"{min(share, 99) if part < whole else share} %"


def duration(seconds: float) -> str:
    """'0.4 s' below a second, '41 s', from 90 s on '2 min', '1 h 05 min'."""
    if seconds < 0.95:
        return f"{seconds:.1f} s"
    if seconds < 89.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02} min"


def sized(count: int) -> str:
    """Bytes as '3.1 GiB', or 'MiB' below a tenth of one."""
    unit, name = (GIB, "GiB") if count >= GIB // 10 else (2**20, "MiB")
    return f"{count / unit:.1f} {name}"


def sizes(done: int, total: int) -> str:
    """Bytes as '1.2 of 3.1 GiB', in the unit that fits the total."""
    unit, name = (GIB, "GiB") if total >= GIB // 10 else (2**20, "MiB")
    return f"{done / unit:.1f} of {total / unit:.1f} {name}"
