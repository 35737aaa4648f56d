"""Every schedule, the same bits: asked of this machine, with a model and settings.

Some prompts are answered cold and alone; then by every other schedule. Tokens and the log probabilities of the
likeliest must be equal to the last bit. A schedule that did not take place (nobody was preempted, nothing restored)
shows nothing, and is told as such.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from headrace.config import EngineConfig
from headrace.config.fields import settings_of
from headrace.config.offload import LinkSettings, OffloadSettings
from headrace.config.streaming import StreamSettings
from headrace.config.tiers import NO_DISK, TIERS
from headrace.config.together import SETTINGS
from headrace.engine.llm import LLM
from headrace.engine.speculation.model_speculator import ModelSpeculator
from headrace.outputs import RequestOutput
from headrace.types import CHUNK, SamplingParams

PROMPTS, GREEDY, ANSWER, REPORTED = 4, 2, 24, 20
"""Prompts on one prefix, the first so many of them greedy and the others drawn with a seed; tokens of each answer;
alternatives whose log probabilities are compared."""

FEWEST_TOKENS, MOST_TOKENS = 3 * CHUNK, 1024
"""Of the shared prefix; how many is a question of time."""

READS = 24
"""How often the prefix is computed in all, about."""

STORED_S = 30.0
"""Longest wait for chunks on their way to a tier."""

OUTSIDE = tuple(
    item.name for record in (*TIERS, OffloadSettings, LinkSettings, StreamSettings) for item in settings_of(record)
)
"""Settings of KV outside the pool, and of weights: as given where chunks are restored or streamed."""

PLAIN: dict[str, Any] = {name: SETTINGS[name].default for name in OUTSIDE} | {
    "kv_offload_path": NO_DISK, "enable_prefix_caching": True, "speculative": "off",
}  # fmt: skip
"""What schedules set by themselves; all else is as given."""

Told = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Verdict:
    """One schedule. equal: None where it did not take place; note: why, or what was seen of it."""

    schedule: str
    equal: bool | None
    seconds: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """prefix: tokens that the prompts share; fingerprint: of the engine (Capacity.fingerprint)."""

    engine: str
    fingerprint: str
    prefix: int
    verdicts: list[Verdict]

    @property
    def equal(self) -> bool:
        """Whether no schedule gave other bits."""
        return all(each.equal is not False for each in self.verdicts)


class Prompt(NamedTuple):
    tokens: list[int]
    params: SamplingParams


class Asked(NamedTuple):
    """Answers of the first prompts, or of all, and what was seen of the schedule; unseen: why they show nothing."""

    answers: list[RequestOutput]
    seen: str = ""
    unseen: str = ""


class Engine:
    """An engine under examination."""

    def __init__(self, llm: LLM, prompts: Sequence[Prompt], truth: Sequence[RequestOutput]) -> None:
        self.llm, self.prompts, self.truth = llm, prompts, truth

    def alone(self, salt: str) -> list[RequestOutput]:
        """One after another; none finds what another has left, unless asked again."""
        return [
            self.llm.generate([each.tokens], each.params, cache_salt=f"{salt} {number}", progress=False)[0]
            for number, each in enumerate(self.prompts)
        ]

    def together(self, salt: str) -> list[RequestOutput]:
        tokens, params = [each.tokens for each in self.prompts], [each.params for each in self.prompts]
        return self.llm.generate(tokens, params, cache_salt=salt, progress=False)

    def cached(self) -> Asked:
        self.alone("cached")
        answers = self.alone("cached")
        found = min(each.metrics.cached_tokens for each in answers)
        return Asked(answers, f"{found:,} tokens or more from the cache", "" if found else "nothing was cached")

    def batched(self) -> Asked:
        answers = self.together("batched")
        shared = sum(each.metrics.cached_tokens for each in answers)
        return Asked(answers, f"{len(answers)} at once, {shared:,} tokens shared")

    def prefilled(self) -> Asked:
        """Half of each greedy answer belongs to the prompt: what is drawn depends on its place in the answer, too."""
        half = ANSWER // 2
        continued = [
            Prompt(prompt.tokens + answer.token_ids[:half], replace(prompt.params, max_tokens=ANSWER - half))
            for prompt, answer in zip(self.prompts[:GREEDY], self.truth[:GREEDY], strict=True)
        ]
        answers = Engine(self.llm, continued, ()).alone("prefilled")
        return Asked(answers, f"{half} tokens of {GREEDY} answers read as prompt")

    def chunked(self) -> Asked:
        steps = self.llm.engine.stats().scheduler.steps
        answers = self.alone("chunked")
        steps = self.llm.engine.stats().scheduler.steps - steps
        return Asked(answers, f"{steps:,} steps of {self.llm.config.scheduler.max_batch_tokens} tokens at most")

    def preempted(self) -> Asked:
        before = self.llm.stats().preemptions
        answers = self.together("preempted")
        times = self.llm.stats().preemptions - before
        return Asked(answers, f"preempted {times} times", "" if times else "nobody was preempted")

    def speculated(self) -> Asked:
        """Asked twice: the first answers are what the second ones are drafted from. A draft model drafts whatever it
        costs."""
        speculator = self.llm.engine.speculator
        if isinstance(speculator, ModelSpeculator):
            speculator.freely = True
        self.together("speculated")
        answers = self.together("speculated")
        drafts = self.llm.engine.stats().speculation
        right = f"{drafts.accepted:,} of {drafts.drafted:,} drafted tokens right"
        return Asked(answers, right, "" if drafts.drafted else "nothing was drafted")

    def restored(self) -> Asked:
        self.alone("restored")
        self._until_stored()
        answers = self.alone("restored")
        found = sum(each.metrics.restored_tokens for each in answers)
        tiers = self.llm.config.tiers
        places = " and ".join(tier.label for tier in tiers.each) if tiers else "nowhere"
        return Asked(answers, f"{found:,} tokens from {places}", "" if found else "nothing was restored")

    def streamed(self) -> Asked:
        answers = self.together("streamed")
        steps = sum(sum(rank.steps.values()) for rank in self.llm.engine.stats().stream.values())
        return Asked(answers, f"{steps:,} steps on KV outside the pool", "" if steps else "nothing was streamed")

    def _until_stored(self) -> None:
        """Asks something else, since chunks are stored as they leave the pool, and has the others stored as an idle
        engine does."""
        self.together("others")
        until = time.monotonic() + STORED_S
        while self.llm.engine.settle() and time.monotonic() < until:
            time.sleep(0.02)


class Group(NamedTuple):
    """Schedules of one engine. settings: beside PLAIN, by those given and the chunks of the longest prompt with its
    answer."""

    schedules: Sequence[tuple[str, Callable[[Engine], Asked]]]
    settings: Callable[[EngineConfig, int], dict[str, Any]]


def _crowded(given: EngineConfig, chunks: int) -> dict[str, Any]:
    """Room on all context ranks for the prompts on their prefix, and for one of them to go on."""
    each = -(-(chunks + PROMPTS - 1) // given.ranks.context)
    return {"kv_cache_tokens": each * CHUNK, "max_batch_tokens": 2 * CHUNK}


def _drafting(given: EngineConfig, chunks: int) -> dict[str, Any]:
    return {"speculative": given.speculation.method if given.speculation.on else "suffix"}


def _outside(given: EngineConfig, chunks: int) -> dict[str, Any]:
    found = {name: given.flat[name] for name in OUTSIDE}
    lossy = next((name for name, value in found.items() if name.endswith("_format") and value != "raw"), None)
    if lossy is not None:
        raise ValueError(f"{lossy} {found[lossy]} rounds what is kept; raw gives it back")
    return found


def _beside_tiers(given: EngineConfig, chunks: int) -> dict[str, Any]:
    places = _outside(given, chunks) if given.tiers else {"kv_offloading_size": 1.0}
    return places | {"kv_cache_tokens": (chunks + PROMPTS) * CHUNK}


GROUPS = (
    Group((("prompts cut into steps", Engine.chunked), ("preempted", Engine.preempted)), _crowded),
    Group((("speculated", Engine.speculated),), _drafting),
    Group((("restored from a tier", Engine.restored),), _beside_tiers),
)
STREAMED = Group((("streamed", Engine.streamed),), _outside)
FIRST = (("cached", Engine.cached), ("batched", Engine.batched), ("prefilled, not decoded", Engine.prefilled))


def verify(config: EngineConfig, tell: Told = lambda doing: None, seconds: float = 120.0) -> Report:
    """Answers the prompts by each schedule. tell: of what is being done; seconds: about what it may take.

    Raises what LLM raises for settings that cannot work."""
    base = config.replace(**PLAIN)
    tell("loading the model")
    with LLM(**base.flat) as llm:
        prefix = _affordable(llm, seconds)
        prompts = _prompts(llm, prefix)
        tell(f"{PROMPTS} prompts on {prefix:,} shared tokens, cold and alone")
        truth = Engine(llm, prompts, ()).alone("cold")
        verdicts = [_verdict(name, Engine(llm, prompts, truth), ask, tell) for name, ask in FIRST]
        told, fingerprint = llm.capacity.told, llm.capacity.fingerprint
    chunks = -(-(len(prompts[0].tokens) + ANSWER) // CHUNK)
    for group in (*GROUPS, STREAMED) if config.streaming else GROUPS:
        verdicts += _of_group(group, config, base, chunks, prompts, truth, tell)
    return Report(told, fingerprint, prefix, verdicts)


def _of_group(
    group: Group, given: EngineConfig, base: EngineConfig, chunks: int, prompts: list[Prompt],
    truth: list[RequestOutput], tell: Told,
) -> list[Verdict]:  # fmt: skip
    try:
        llm = LLM(**base.replace(**group.settings(given, chunks)).flat)
    except ValueError as error:  # these settings do not go together with those given
        return [Verdict(name, None, 0.0, f"does not go with these settings: {error}") for name, _ in group.schedules]
    with llm:
        return [_verdict(name, Engine(llm, prompts, truth), ask, tell) for name, ask in group.schedules]


def _verdict(name: str, engine: Engine, ask: Callable[[Engine], Asked], tell: Told) -> Verdict:
    tell(name)
    began = time.monotonic()
    asked = ask(engine)
    seconds = time.monotonic() - began
    same = all(_alike(one, other) for one, other in zip(asked.answers, engine.truth, strict=False))
    if same and asked.unseen:
        return Verdict(name, None, seconds, asked.unseen)
    return Verdict(name, same, seconds, asked.seen)


def _alike(answer: RequestOutput, truth: RequestOutput) -> bool:
    """Whether the answer is the end of the true one: tokens, and log probabilities to the bit."""
    count = len(answer.token_ids)
    told, true = _numbers(answer), _numbers(truth)
    return count > 0 and answer.token_ids == truth.token_ids[-count:] and told == true[-count:]


def _numbers(answer: RequestOutput) -> list[dict[int, tuple[float, int]]]:
    return [{token: (info.logprob, info.rank) for token, info in row.items()} for row in answer.logprobs or []]


def _affordable(llm: LLM, seconds: float) -> int:
    """Tokens of the prefix, whole chunks: what the time allows, and the context."""
    tokens = _drawn(llm, FEWEST_TOKENS, "rate")
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    llm.generate([tokens], params, cache_salt="first", progress=False)
    began = time.monotonic()
    llm.generate([tokens], params, cache_salt="second", progress=False)
    rate = FEWEST_TOKENS / (time.monotonic() - began)
    room = min(llm.capacity.max_model_len, llm.capacity.kv_cache_tokens // 2) - 2 * CHUNK - ANSWER
    most = min(MOST_TOKENS, int(rate * seconds / READS), room)
    return max(FEWEST_TOKENS, most // CHUNK * CHUNK)


def _prompts(llm: LLM, prefix: int) -> list[Prompt]:
    """Each answer goes on into another chunk."""
    shared = _drawn(llm, prefix, "prefix")
    params = SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True, logprobs=REPORTED)
    return [
        Prompt(
            shared + _drawn(llm, CHUNK - ANSWER // 2, f"own {number}"),
            params if number < GREEDY else replace(params, temperature=0.8, seed=number),
        )
        for number in range(PROMPTS)
    ]


def _drawn(llm: LLM, count: int, name: str) -> list[int]:
    draw = random.Random(name)
    return [draw.randrange(llm.capacity.vocab_size) for _ in range(count)]
