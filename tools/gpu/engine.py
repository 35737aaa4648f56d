"""The engine beside transformers, on one model of drawn weights: first tokens, decoding, prompts beside it, graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import mean, median
from typing import Any

import torch

from headrace import LLM
from headrace.bench.worker import step_bytes
from tools.gpu import sessions, timing
from tools.gpu.models import MODELS, DrawnModel, drawn_model, transformers_model
from tools.gpu.peers import TransformersPeer
from tools.gpu.runner import Case, Goal, LeftOut, Row
from tools.gpu.sessions import answers, drawn_tokens, whole_gaps


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens, unless named otherwise.

    first: prompts whose first token is timed, the longest being judged; contexts: sequences that decode, and the prompt
    of each; decoded: by each of them; sharing: sequences on a prefix of `shared`; many: sequences of different lengths,
    `answer` each; beside: a prompt that comes while others decode; slices: of a step, where it is to be read by slices.
    """

    first: tuple[int, ...] = (8192, 2048, 512)
    contexts: tuple[tuple[int, int], ...] = ((1, 2048), (16, 1024), (64, 512))
    decoded: int = 48
    sharing: int = 16
    shared: int = 8192
    own: int = 64
    many: int = 64
    answer: int = 96
    beside: int = 8192
    slices: int = 512


SIZES = Sizes()
DECODE_GOALS = {1: 0.7}
"""Of bytes over the read rate, by the number of sequences; 0.8 for others."""


def cases_of(name: str, first_token_goal: float, sizes: Sizes = SIZES) -> Iterator[Case]:
    """All cases of a model, the most telling first. first_token_goal: of transformers' best, at the longest prompt."""
    bench = EngineBench(name, drawn_model(MODELS[name], timing.CUDA), sizes)
    try:
        for length in sizes.first:
            goals = (Goal("over_best", first_token_goal, most=True),) if length == sizes.first[0] else ()
            yield Case(f"first token of {length}", partial(bench.first_token, length, goals))
        for count, length in sizes.contexts:
            yield Case(f"decode {count}", partial(bench.decode, count, length))
        yield Case(f"{sizes.sharing} on {sizes.shared} shared", bench.shared)
        yield Case(f"steps of {sizes.many}", bench.steps)
        yield Case("beside a prompt", partial(bench.beside, None))
        yield Case("beside a prompt, by slices", partial(bench.beside, sizes.slices))
        yield Case("decode, sampled", partial(bench.decode, *sizes.contexts[1], sampled=True))
    finally:
        bench.close()


def release() -> None:
    """Gives back memory of the GPU that nothing holds."""
    gc.collect()
    torch.cuda.empty_cache()


@dataclass
class EngineBench:
    """Our engine and transformers, both in this process, with weights of the same sizes."""

    name: str
    model: DrawnModel
    sizes: Sizes = SIZES

    def __post_init__(self) -> None:
        self.llm = self.model.engine()
        self.vocabulary = self.llm.capacity.vocab_size
        theirs = transformers_model(MODELS[self.name], timing.CUDA)
        self.peers = {"dynamic": TransformersPeer(theirs), "static": TransformersPeer(theirs, static=True)}

    def close(self) -> None:
        """Gives both models' memory back."""
        self.llm.close()
        del self.llm, self.model, self.peers
        release()

    def tokens(self, count: int) -> list[int]:
        return drawn_tokens(count, self.vocabulary)

    def prompts(self, count: int, length: int) -> torch.Tensor:
        return torch.tensor([self.tokens(length) for _ in range(count)], device=timing.CUDA)

    def first_token(self, length: int, goals: tuple[Goal, ...], rounds: int = 3) -> Row:
        """Milliseconds to the first token of a prompt of which nothing is cached, the engines in turns, and how many of
        our steps were replayed."""
        runs: dict[str, Callable[[], float]] = {
            "ours": lambda: sessions.first_token_s(self.llm, self.tokens(length)),
            **{name: partial(self._peer_first, peer, length) for name, peer in self.peers.items()},
        }
        found: dict[str, list[float]] = {name: [] for name in runs}
        before = self.llm.engine.stats().graphs.prompts
        for number in range(rounds + 1):
            for name, first in runs.items():
                seconds = first()
                if number:
                    found[name].append(1e3 * seconds)
        figures: dict[str, Any] = {f"{name}_ms": median(times) for name, times in found.items()}
        best = min(ms for name, ms in figures.items() if name != "ours_ms")
        figures["over_best"] = figures["ours_ms"] / best
        figures["replayed_prompts"] = self.llm.engine.stats().graphs.prompts - before
        return Row(f"{self.name} first token of {length:,}", figures, goals)

    def _peer_first(self, peer: TransformersPeer, length: int) -> float:
        return peer.run(self.prompts(1, length), 1)[0][0]

    def decode(self, count: int, length: int, sampled: bool = False) -> Row:
        """Tokens a second of `count` sequences that share nothing, and the bytes they must read over the read rate."""
        decoded = self.sizes.decoded
        for _ in range(2):  # the first one compiles
            steps = sessions.run(self.llm, [self.tokens(length) for _ in range(count)], answers(decoded, sampled))
        figures = self._decoded(steps, count, count * (length + decoded // 2))
        if not sampled:
            for name, peer in self.peers.items():
                figures |= peer_figures(name, count, partial(peer.run, self.prompts(count, length), 16))
        kind = ", sampled" if sampled else ""
        goals = (Goal("of_read", DECODE_GOALS.get(count, 0.8)),)
        return Row(f"{self.name} decode {count} x {length:,}{kind}", figures, goals)

    def shared(self) -> Row:
        """Sequences on one prefix that is cached, some tokens of their own each."""
        sizes, prefix = self.sizes, self.tokens(self.sizes.shared)
        count = sizes.sharing
        sessions.run(self.llm, [prefix], answers(1))
        for _ in range(2):
            steps = sessions.run(
                self.llm, [prefix + self.tokens(sizes.own) for _ in range(count)], answers(sizes.decoded)
            )
        figures = self._decoded(steps, count, sizes.shared + count * (sizes.own + sizes.decoded // 2))
        theirs: dict[str, Any] = {}
        for name, peer in self.peers.items():
            theirs |= peer_figures(name, count, partial(self._peer_shared, peer, prefix))
            release()
        speeds = [value for value in theirs.values() if isinstance(value, float)]
        goals: tuple[Goal, ...] = ()
        if speeds:
            theirs["of_best"], goals = figures["ours_tok_s"] / max(speeds), (Goal("of_best", 5.0),)
        return Row(f"{self.name} {count} on {sizes.shared:,} shared", figures | theirs, goals)

    def _peer_shared(self, peer: TransformersPeer, prefix: list[int]) -> tuple[list[float], Any]:
        sizes = self.sizes
        known = peer.primed(torch.tensor([prefix], device=timing.CUDA), sizes.sharing, sizes.own + sizes.decoded)
        return peer.run(self.prompts(sizes.sharing, sizes.own), 16, known)

    def _decoded(self, steps: list[sessions.Step], count: int, keys: int) -> dict[str, Any]:
        """keys: whose K and V a step reads."""
        gaps = whole_gaps(steps, count)
        read = step_bytes(self.model.decoder) + keys * self.llm.capacity.kv_bytes_per_token
        share = read / mean(gaps) / 1e9 / timing.read_gbps()
        return {"ours_tok_s": count / mean(gaps), "ours_step_ms": 1e3 * median(gaps), "of_read": share}

    def steps(self, apart: int = 7) -> Row:
        """Of steps of many sequences whose lengths are `apart`: how many are replayed, and launched ahead; what the
        host adds, also if it waits for each step."""
        count, overlap = self.sizes.many, self.llm.engine.overlap
        prompts = [self.tokens(128 + apart * number) for number in range(count)]
        ahead, step_ms = overlap.on, {}
        for on in (False, False, ahead, ahead):
            overlap.on = on
            session = all_decoding(self.llm, prompts, self.sizes.answer)
            began, before = len(session.steps), replace(self.llm.engine.stats().graphs)
            while self.llm.engine.has_work and len(session.step().tokens) == count:
                pass
            taken, after = len(session.steps) - began, replace(self.llm.engine.stats().graphs)
            session.drain()
            step_ms[on] = 1e3 * median(whole_gaps(session.steps, count))
        busy = device_ms_a_step(self.llm, prompts, self.sizes.answer)
        figures: dict[str, Any] = {
            "steps": taken,
            "step_ms": step_ms[ahead],
            "device_ms": busy,
            "host_ms": step_ms[ahead] - busy,
            "host_waiting_ms": step_ms[False] - busy,
            "replayed": (after.replayed - before.replayed) / taken,
            "ahead": (after.ahead - before.ahead) / taken,
        }
        goals = (Goal("host_ms", 0.3, most=True), Goal("replayed", 0.95))
        return Row(f"{self.name} steps of {count}", figures, goals)

    def beside(self, max_batch_tokens: int | None, count: int = 8) -> Row:
        """Time per token of 8 sequences while a long prompt is read beside them."""
        llm = (
            self.llm
            if max_batch_tokens is None
            else self.model.engine(max_batch_tokens=max_batch_tokens, max_sequences=16)
        )
        for _ in range(2):
            before = llm.engine.stats().graphs.ahead
            quiet, during = self._interrupted(llm, count)
            ahead = llm.engine.stats().graphs.ahead - before
        if llm is not self.llm:
            llm.close()
        figures = {"alone_ms": median(quiet), "during_ms": median(during), "worst_ms": max(during)}
        figures |= {"during_of_alone": figures["during_ms"] / figures["alone_ms"], "steps": len(during), "ahead": ahead}
        name = "by default" if max_batch_tokens is None else f"steps of {max_batch_tokens}"
        goals = () if max_batch_tokens is None else (Goal("during_of_alone", 2.0, most=True),)
        return Row(f"{self.name} {count} beside {self.sizes.beside:,}, {name}", figures, goals)

    def _interrupted(self, llm: LLM, count: int) -> tuple[list[float], list[float]]:
        """Milliseconds of the steps before the prompt came, and of those that read it."""
        session = all_decoding(llm, [self.tokens(self.sizes.own) for _ in range(count)], 2 * self.sizes.answer)
        for _ in range(self.sizes.answer // 4):
            session.step()
        quiet, came = whole_gaps(session.steps, count), len(session.steps)
        late = session.add(self.tokens(self.sizes.beside), answers(1))
        while late not in session.step().tokens:
            pass
        ends = [step.ended for step in session.steps[came - 1 :]]
        session.drain()
        return [1e3 * gap for gap in quiet], [1e3 * (b - a) for a, b in pairwise(ends)]


def all_decoding(llm: LLM, prompts: list[list[int]], answer: int) -> sessions.Session:
    """A session in whose last step all sequences got a token."""
    session = sessions.Session(llm)
    for prompt in prompts:
        session.add(prompt, answers(answer))
    while not session.steps or len(session.steps[-1].tokens) < len(prompts):
        session.step()
    return session


def device_ms_a_step(llm: LLM, prompts: list[list[int]], answer: int, steps: int = 16) -> float:
    """Milliseconds in which the GPU computes, of a step in which all sequences decode. Raises LeftOut where the
    profiler is told of no kernel."""
    from torch.profiler import ProfilerActivity, profile

    session = all_decoding(llm, prompts, answer)
    for _ in range(4):
        session.step()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            session.step()
        torch.cuda.synchronize()
    session.drain()
    total = float(sum(each.self_device_time_total for each in found.key_averages()))
    if not total:
        raise LeftOut("the profiler sees no kernels here")
    return total / 1e3 / steps


def peer_figures(name: str, count: int, run: Callable[[], tuple[list[float], Any]]) -> dict[str, Any]:
    """Tokens a second of a peer, or why there are none."""
    try:
        run()
        times, _ = run()
    except torch.OutOfMemoryError:
        release()
        return {f"{name}_tok_s": "no memory"}
    gaps = [later - earlier for earlier, later in pairwise(times[1:])]
    return {f"{name}_tok_s": count / median(gaps)}
