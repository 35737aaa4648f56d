"""Rows that choose their keys (DSA) on several context ranks: the bits of one, by every strategy, wherever chunks lie.

Restored from tiers: test_ranked_tiers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace import LLM, SamplingParams
from headrace.models.decoder import Decoder, load_decoder
from headrace.parallel import fetched_keys
from headrace.parallel.messages import StepGroup
from headrace.parallel.ring_q import RingQ
from headrace.strategies import KEEPS_ALL, STRATEGIES
from headrace.types import CHUNK
from tests.support.checkpoints import FolderOf, OursOf
from tests.support.kind_sizes import VOCAB
from tests.support.loopback_ranks import Conversation, LoopbackRanks, even, shard_of, zigzag
from tests.support.thread_group import ranks_as_threads
from tests.support.traces import run, same

pytestmark = pytest.mark.cpu
KINDS = ("deepseek_v32", "glm_dsa", "hy4", "minimax_m3")
PROMPTS = (300, 64, 1, 130, 38)
"""Rows choose 40 keys, or two blocks of 128: some of these see no more."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def cuts(strategy: str, start: int, end: int, size: int) -> tuple[list[int], list[int]]:
    if strategy == "single":
        return [start, end], [size - 1]
    return zigzag(start, end, size) if strategy.startswith("ring") else even(start, end, size)


def talk(loopback: LoopbackRanks, strategy: str, scattered: bool, steps: int = 3) -> list[Tensor]:
    """Prompts by `strategy`, more of the first one, then tokens of all by ring-q: hidden states in order. scattered:
    each chunk lies anywhere; else where the strategy leaves it."""
    draw = random.Random(1)
    talks = [Conversation(loopback) for _ in PROMPTS]
    found: list[Tensor] = []

    def compute(kind: str, parts: list[Any]) -> None:
        states = loopback.run([StepGroup(kind, parts)])
        found.extend(row for _, row in sorted(states.items()))

    def part(each: Conversation, count: int, kind: str) -> Any:
        start = len(each.tokens)
        bounds, ranks = cuts(kind, start, start + count, loopback.size)
        anywhere = random.Random(start + count)

        def owner(chunk: int) -> int:
            if scattered and kind not in KEEPS_ALL:
                return anywhere.randrange(loopback.size)
            return ranks[-1] if kind in KEEPS_ALL else shard_of(bounds, ranks, chunk * CHUNK)

        return each.part(draw.choices(range(VOCAB), k=count), bounds, ranks, owner, 70)

    compute(strategy, [part(each, count, strategy) for each, count in zip(talks, PROMPTS, strict=True)])
    tail = talks[0].rewind()
    compute("ring-kv", [part(talks[0], len(tail) + 90, "ring-kv")])
    for _ in range(steps):
        homes = [each.home() for each in talks]
        parts = []
        for each, home in zip(talks, homes, strict=True):
            start = len(each.tokens)
            parts.append(
                each.part(draw.choices(range(VOCAB), k=1), [start, start + 1], [home], lambda _, home=home: home)
            )
        compute("ring-q", parts)
    return found


def alike(ours: list[Tensor], truth: list[Tensor]) -> None:
    assert len(ours) == len(truth) > 100
    assert all(torch.equal(x, y) for x, y in zip(ours, truth, strict=True))


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "gather-full"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_strategy_gives_the_bits_of_one_rank(kind: str, strategy: str, ours_of: OursOf) -> None:
    decoder: Decoder = ours_of(kind, "bfloat16")
    truth = talk(LoopbackRanks(decoder, 1), "single", scattered=False)
    for size, scattered in ((2, False), (3, True)):
        alike(talk(LoopbackRanks(decoder, size), strategy, scattered), truth)


@pytest.mark.parametrize("kind", ["hy4", "minimax_m3"])
@pytest.mark.parametrize(
    "settings", [dict(kv=torch.int8), dict(backend="reference"), dict(kv=torch.int8, backend="reference")], ids=str
)
def test_in_other_pools_and_by_the_reference(settings: dict[str, Any], kind: str, ours_of: OursOf) -> None:
    decoder: Decoder = ours_of(kind, "bfloat16")
    truth = talk(LoopbackRanks(decoder, 1, **settings), "single", scattered=False)
    alike(talk(LoopbackRanks(decoder, 2, **settings), "ring-q", scattered=True), truth)


@pytest.mark.parametrize("kind", ["glm_dsa", "minimax_m3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_every_instruction_set(isa: str, dtype: Any, kind: str, folder_of: FolderOf) -> None:
    """Of which some store values of neighbours in pairs."""
    decoder = load_decoder(folder_of(kind), dtype)
    truth = talk(LoopbackRanks(decoder, 1), "single", scattered=False, steps=1)
    alike(talk(LoopbackRanks(decoder, 2), "gather", scattered=True, steps=1), truth)


def sent(loopback: LoopbackRanks) -> int:
    """Token entries of all layers, of all ranks so far."""
    return sum(sum(rank.counters.tokens.values()) for rank in loopback.ranks)


def test_what_is_fetched_does_not_grow_with_the_context(ours_of: OursOf) -> None:
    """Of a decoded token each layer fetches 40 keys at most; ranks without rows fetch nothing."""
    decoder: Decoder = ours_of("glm_dsa", "bfloat16")
    most = decoder.config.attention.index
    assert most is not None and most.chosen == 40
    for length in (130, 700):
        loopback = LoopbackRanks(decoder, 2)
        one = Conversation(loopback)
        bounds, ranks = zigzag(0, length, 2)
        draw = random.Random(2)
        tokens = draw.choices(range(VOCAB), k=length)
        loopback.run([StepGroup("ring-kv", [one.part(tokens, bounds, ranks, lambda chunk: chunk % 2)])])
        before = sent(loopback)
        home = one.home()
        step = one.part([7], [length, length + 1], [home], lambda _, home=home: home)
        loopback.run([StepGroup("ring-q", [step])])
        assert 0 < sent(loopback) - before <= most.chosen * decoder.config.layers


def test_rows_that_leave_nothing_out_pass_their_queries(ours_of: OursOf, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[type] = []
    for kind in (RingQ, fetched_keys.FetchedKeys):
        begin = kind.__init__

        def noted(self: Any, context: Any, begin: Any = begin, kind: type = kind) -> None:
            made.append(kind)
            begin(self, context)

        monkeypatch.setattr(kind, "__init__", noted)
    loopback = LoopbackRanks(ours_of("glm_dsa", "bfloat16"), 2)
    one = Conversation(loopback)
    loopback.run([StepGroup("ring-kv", [one.part([5] * 30, [0, 30], [0], lambda chunk: 0)])])
    loopback.run([StepGroup("ring-q", [one.part([5] * 10, [30, 40], [1], lambda chunk: 1)])])
    loopback.run([StepGroup("ring-q", [one.part([5], [40, 41], [1], lambda chunk: 1)])])
    assert set(made[:2]) == {RingQ} and set(made[2:]) == {fetched_keys.FetchedKeys}


def test_places_beyond_a_pool_are_refused(ours_of: OursOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank copies nothing from outside its pool, whatever another one asks for."""
    choose = fetched_keys.FetchedKeys.choose

    def beyond(self: Any, found: Any) -> Any:
        far = {host: 128 * CHUNK for host in self.hosts}
        return {rank: torch.full_like(x, far[rank]) if rank in far else x for rank, x in choose(self, found).items()}

    monkeypatch.setattr(fetched_keys.FetchedKeys, "choose", beyond)
    loopback = LoopbackRanks(ours_of("glm_dsa", "bfloat16"), 2)
    one = Conversation(loopback)
    loopback.run([StepGroup("ring-kv", [one.part([5] * 100, [0, 100], [0], lambda chunk: chunk % 2)])])
    with pytest.raises((ValueError, RuntimeError), match="beyond this one's pool"):
        loopback.run([StepGroup("ring-q", [one.part([5], [100, 101], [1], lambda chunk: 1)])])


ENGINES: list[dict[str, Any]] = [
    {"context_parallel_size": 2},
    {"context_parallel_size": 3, "kv_cache_tokens": 512},
    {"context_parallel_size": 2, "tensor_parallel_size": 2},
    {"context_parallel_size": 2, "kv_cache_dtype": "int8"},
    {"context_parallel_size": 2, "prefill_strategy": "chain", "speculative": "ngram"},
]


@pytest.mark.parametrize("kind", ["hy4", "minimax_m3"])
@pytest.mark.parametrize("settings", ENGINES, ids=str)
def test_engines_of_several_ranks(settings: dict[str, Any], kind: str, folder_of: FolderOf) -> None:
    """Cached, preempted, drafted: the bits of one rank without any of it."""
    prompts = [[(7 * n + seed) % 320 for n in range(length)] for seed, length in enumerate((5, 40, 41, 130, 300))]
    prompts.append([*prompts[4], *range(70)])
    folder: Path = folder_of(kind)
    if kind == "minimax_m3" and "tensor_parallel_size" in settings:
        with pytest.raises(
            ValueError, match="tensor_parallel_size: MiniMaxM3SparseForConditionalGeneration has sparse"
        ):
            LLM(str(folder), **settings)
        return
    with ranks_as_threads(), LLM(str(folder), **{"dtype": "bfloat16", "kv_cache_tokens": 1024, **settings}) as llm:
        together = run(llm, prompts, GREEDY)
        again = run(llm, prompts, GREEDY)
    same(together, again)
    rounded = {name: each for name, each in settings.items() if name == "kv_cache_dtype"}
    with LLM(str(folder), dtype="bfloat16", kv_cache_tokens=2048, enable_prefix_caching=False, **rounded) as llm:
        same([run(llm, [prompt], GREEDY)[0] for prompt in prompts], together)


def test_queries_of_prompts_are_not_passed(folder_of: FolderOf) -> None:
    with pytest.raises(ValueError, match=r"prefill_strategy ring-q: .* use auto, single, gather, chain, ring-kv"):
        LLM(str(folder_of("glm_dsa")), context_parallel_size=2, prefill_strategy="ring-q")
