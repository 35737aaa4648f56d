"""Every strategy gives what one rank gives, bit for bit."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from headrace.bench.shapes import CheckpointShape, write_checkpoint
from headrace.kernels.records import Mask
from headrace.models.decoder import Decoder, load_decoder
from headrace.models.weights import load_weights
from headrace.parallel.merging import Kernels
from headrace.parallel.messages import RankStep, StepGroup
from headrace.strategies import KEEPS_ALL
from headrace.types import BLOCK_CHUNKS, CHUNK
from tests.support.checkpoints import FolderOf
from tests.support.kind_sizes import VOCAB
from tests.support.loopback_ranks import Conversation, Late, LoopbackRanks, even, shard_of, zigzag
from tests.support.naive_attention import batch_of, naive


def tokens_of(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=count)


def cuts(strategy: str, start: int, end: int, size: int, unit: int) -> tuple[list[int], list[int]]:
    if strategy.startswith("ring"):
        return zigzag(start, end, size, unit)
    if strategy == "single":
        return [start, end], [size - 1]
    return even(start, end, size)


def owner_of(strategy: str, bounds: list[int], ranks: list[int]) -> Any:
    """The chain's last rank keeps all; otherwise whoever computes a chunk's first new token."""
    if strategy in KEEPS_ALL:
        return lambda chunk: ranks[-1]
    return lambda chunk: shard_of(bounds, ranks, max(bounds[0], chunk * CHUNK))


def prefill(
    loopback: LoopbackRanks, strategy: str, prompts: dict[Conversation, list[int]], wanted: int = 1, unit: int = CHUNK
) -> list[Tensor]:
    """Hidden states of the last `wanted` tokens of each prompt, in order. Rings cut at multiples of `unit`."""
    parts = []
    for talk, tokens in prompts.items():
        start = len(talk.tokens)
        bounds, ranks = cuts(strategy, start, start + len(tokens), loopback.size, unit)
        parts.append(talk.part(tokens, bounds, ranks, owner_of(strategy, bounds, ranks), wanted))
    found = loopback.run([StepGroup(strategy, parts)])
    assert len(found) == sum(min(wanted, len(part.tokens)) for part in parts)
    return [row for _, row in sorted(found.items())]


STRATEGIES = ("gather", "gather-full", "chain", "ring-kv", "ring-q")
UNEVEN = (300, 64, 1, 130)


def one_rank(decoder: Decoder, prompts: list[list[int]], wanted: int = 1, **settings: Any) -> list[Tensor]:
    loopback = LoopbackRanks(decoder, 1, **settings)
    return prefill(loopback, "single", {Conversation(loopback): p for p in prompts}, wanted)


PROMPTS = [tokens_of(count, count) for count in UNEVEN]
Alone = Callable[..., list[Tensor]]


@pytest.fixture(scope="module")
def alone(ours_of: Any) -> Alone:
    """alone(kind, dtype): the last 70 states of each of PROMPTS on one rank."""
    return lru_cache(None)(lambda kind, dtype, **settings: one_rank(ours_of(kind, dtype), PROMPTS, 70, **settings))


def same(ours: list[Tensor], truth: list[Tensor]) -> None:
    assert len(ours) == len(truth)
    assert all(torch.equal(x, y) for x, y in zip(ours, truth, strict=True))


@pytest.mark.parametrize("strategy", ["single", *STRATEGIES])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "kind",
    [
        "llama",
        "llama_gqa",
        "qwen3",
        "opt",
        "falcon7",
        "falcon_rw",
        "granite",
        "glm4",
        "gemma4",
        "granite_moe_shared",
        "deepseek_v2",
    ],
)
def test_a_batch_of_uneven_prompts(kind: str, size: int, strategy: str, ours_of: Any, alone: Alone) -> None:
    """MHA, GQA and MQA; rotary, learned positions and ALiBi; more in the layer. Gather and chain cut inside chunks."""
    loopback = LoopbackRanks(ours_of(kind, "bfloat16"), size)
    ours = prefill(loopback, strategy, {Conversation(loopback): p for p in PROMPTS}, wanted=70)
    same(ours, alone(kind, "bfloat16"))
    assert loopback.hub.left_over() == 0


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("kind", ["llama_gqa", "opt", "falcon7"])
def test_fp32(kind: str, size: int, strategy: str, ours_of: Any, alone: Alone) -> None:
    loopback = LoopbackRanks(ours_of(kind, "float32"), size)
    ours = prefill(loopback, strategy, {Conversation(loopback): p for p in PROMPTS}, wanted=70)
    same(ours, alone(kind, "float32"))


@pytest.mark.parametrize(
    "cut", [[0, 1, 2, 300], [0, 298, 299, 300], [0, 0, 300, 300], [0, 100, 101, 300], [0, 64, 65, 300]]
)
@pytest.mark.parametrize("strategy", ["gather", "gather-full", "chain"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_absurd_partitions(dtype: str, strategy: str, cut: list[int], ours_of: Any) -> None:
    """One token on a rank, or none; three ranks that write in the same chunk."""
    decoder: Decoder = ours_of("llama_gqa", dtype)
    tokens = tokens_of(300, 1)
    loopback = LoopbackRanks(decoder, 3)
    part = Conversation(loopback).part(tokens, cut, [0, 1, 2], lambda chunk: 2, wanted=300)
    found = loopback.run([StepGroup(strategy, [part])])
    same([row for _, row in sorted(found.items())], one_rank(decoder, [tokens], 300))


@pytest.mark.parametrize("strategy", ["gather", "ring-kv", "ring-q"])
def test_whoever_owns_the_chunks(strategy: str, ours_of: Any) -> None:
    """Owners that have nothing to do with who computes; then a step of decode that reads them all."""
    decoder = ours_of("llama_gqa", "float32")
    tokens = tokens_of(300, 1)
    found = []
    for size in (1, 3):
        loopback = LoopbackRanks(decoder, size)
        talk = Conversation(loopback)
        bounds, ranks = cuts(strategy if size > 1 else "single", 0, 300, size, CHUNK)
        part = talk.part(tokens, bounds, ranks, lambda chunk, size=size: (2 * chunk + 1) % size, wanted=300)
        states = loopback.run([StepGroup(strategy if size > 1 else "single", [part])])
        states |= loopback.run(
            [StepGroup("ring-q", [talk.part([7], [300, 301], [0], lambda chunk, size=size: chunk % size)])]
        )
        found.append([row for _, row in sorted(states.items())])
    same(*found)


BLOCK = CHUNK * BLOCK_CHUNKS


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("seed", range(3))
def test_whatever_arrives_first(seed: int, strategy: str, ours_of: Any) -> None:
    """A prompt of several blocks, transfers that come late and in any order: rows merge ahead and catch up."""
    decoder = ours_of("llama_gqa", "bfloat16")
    tokens = tokens_of(4 * BLOCK + 100, seed)
    loopback = LoopbackRanks(decoder, 2 + seed % 2, slots=150)
    for rank in loopback.ranks:
        rank.transport = Late(rank.transport, seed)
    ours = prefill(loopback, strategy, {Conversation(loopback): tokens}, 3, BLOCK)
    same(ours, one_rank(decoder, [tokens], 3, slots=150))


class Queued(Late):
    """As on a device whose work has not been done yet: `wait` puts what follows behind an arrival, which goes on not to
    be seen."""

    def irecv(self, *args: Any) -> Any:
        work = self.inner.irecv(*args)
        looks = iter(range(100))
        seen = property(lambda each: next(looks) < 0)  # who looks on and on gets StopIteration
        return type("Work", (), {"done": seen, "wait": lambda _: work.wait(), "drain": lambda _: work.drain()})()


@pytest.mark.parametrize("strategy", ["ring-kv", "gather"])
def test_what_is_waited_for_on_a_device_is_not_looked_for_again(strategy: str, ours_of: Any) -> None:
    decoder = ours_of("llama_gqa", "bfloat16")
    loopback = LoopbackRanks(decoder, 3)
    for rank in loopback.ranks:
        rank.transport = Queued(rank.transport, 1)
    ours = prefill(loopback, strategy, {Conversation(loopback): PROMPTS[0]}, 3)
    same(ours, one_rank(decoder, PROMPTS[:1], 3))


@pytest.fixture(scope="module")
def turns_of_one(ours_of: Any) -> Callable[[str], list[Tensor]]:
    """turns_of_one(kind): `turns` on one rank."""
    return lru_cache(None)(lambda kind: turns(LoopbackRanks(ours_of(kind, "float32"), 1), "single", CHUNK))


def turns(loopback: LoopbackRanks, strategy: str, unit: int) -> list[Tensor]:
    """Five turns of two conversations, the second of which begins like the first; three tokens decoded after each."""
    talks, found = [Conversation(loopback), Conversation(loopback)], []
    for turn in range(5):
        new = {talk: talk.rewind() + tokens_of(50 + 16 * turn + 13 * i, 10 * turn + i) for i, talk in enumerate(talks)}
        found += prefill(loopback, strategy, new, 2, unit)
        for step in range(3):
            parts = []
            for i, talk in enumerate(talks):
                home = talk.home()
                at = len(talk.tokens)
                parts.append(talk.part([(7 * step + i) % VOCAB], [at, at + 1], [home], lambda chunk, home=home: home))
            hidden = loopback.run([StepGroup("ring-q" if loopback.size > 1 else "single", parts)])
            found += [row for _, row in sorted(hidden.items())]
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", ["llama_gqa", "falcon_rw", "gemma4_small", "deepseek_v2"])
def test_turns_with_decode_between(
    kind: str, size: int, strategy: str, ours_of: Any, turns_of_one: Callable[[str], list[Tensor]]
) -> None:
    """Cached prefixes of uneven lengths, owned by whoever computed them."""
    ours = turns(LoopbackRanks(ours_of(kind, "float32"), size), strategy, CHUNK)
    same(ours, turns_of_one(kind))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", [torch.int8, None])
@pytest.mark.parametrize(
    "kind",
    [
        "qwen2_window",
        "mistral_window",
        "llama_dynamic",
        "phi4_longrope",
        "smollm3",
        "gemma2",
        "gemma3",
        "gemma4_small",
        "gpt_oss",
        "deepseek_v2",
        "ministral3",
        "hunyuan",
        "olmo3",
        "llama4",
    ],
)
def test_windows_and_int8(kind: str, dtype: Any, strategy: str, ours_of: Any, alone: Alone) -> None:
    loopback = LoopbackRanks(ours_of(kind, "bfloat16"), 3, kv=dtype)
    ours = prefill(loopback, strategy, {Conversation(loopback): p for p in PROMPTS}, 70)
    same(ours, alone(kind, "bfloat16", kv=dtype))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sinks(strategy: str, dtype: str, folder_of: FolderOf, ours_of: Any) -> None:
    """Whoever finishes a row adds its head's sink, once; by plain softmax the same but for rounding."""
    plain: Decoder = ours_of("qwen2_window", dtype)
    config = replace(plain.config, attention=replace(plain.config.attention, sinks=True))
    weights = load_weights(folder_of("qwen2_window"), plain.config, plain.dtype)
    g = torch.Generator().manual_seed(5)
    for layer in range(config.layers):
        weights[f"layers.{layer}.attention.sinks"] = 2 * torch.randn(4, generator=g).to(plain.dtype)
    decoder = Decoder(config, weights)
    loopback, truth = LoopbackRanks(decoder, 3), one_rank(decoder, PROMPTS, 70)
    ours = prefill(loopback, strategy, {Conversation(loopback): p for p in PROMPTS}, 70)
    same(ours, truth)
    if dtype == "float32":
        rows = torch.stack(one_rank(decoder, PROMPTS[:1], 70))
        want = decoder.forward(batch_of(PROMPTS[0], 0, 300), naive(decoder))[-70:]
        torch.testing.assert_close(rows, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_reference_backend(strategy: str, ours_of: Any, alone: Alone) -> None:
    loopback = LoopbackRanks(ours_of("llama_gqa", "float32"), 3, backend="reference")
    ours = prefill(loopback, strategy, {Conversation(loopback): p for p in PROMPTS}, 70)
    same(ours, alone("llama_gqa", "float32", backend="reference"))


def test_layers_share_what_a_backend_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a GPU's tasks are cut once for all layers but the last, which computes fewer rows."""
    masks: list[Mask] = []
    made = Kernels._mask
    monkeypatch.setattr(Kernels, "_mask", lambda *given: masks.append(made(*given)) or masks[-1])
    shape = CheckpointShape(hidden=16, layers=4, heads=1, kv_heads=1, head_dim=16, mlp=16, vocab=VOCAB, context=512)
    loopback = LoopbackRanks(load_decoder(write_checkpoint(shape, tmp_path), "float32"), 2, backend="reference")
    prefill(loopback, "ring-q", {Conversation(loopback): tokens_of(200, 1)})
    assert all(mask.kept is not None for mask in masks)
    calls = Counter((id(mask.kept), id(mask.items), id(mask.positions)) for mask in masks)
    assert set(calls.values()) == {3, 1}, "of three layers, and of the last"
    assert len({kept for kept, _, _ in calls}) == len(calls), "of each items its own"


def test_a_chain_passes_on_half_of_what_a_gather_does(ours_of: Any) -> None:
    """9 tokens on 3 ranks (KV-Runahead, figures 4 and 5): 36 entries of K and V against 22."""
    decoder = ours_of("llama", "float32")
    counted = {}
    for strategy, bounds in (("gather", [0, 3, 6, 9]), ("chain", [0, 4, 7, 9])):
        loopback = LoopbackRanks(decoder, 3)
        part = Conversation(loopback).part(tokens_of(9, 1), bounds, [0, 1, 2], lambda chunk: 2)
        loopback.run([StepGroup(strategy, [part])])
        counted[strategy] = 2 * loopback.traffic()
    assert counted == {"gather": 36, "chain": 22}


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("count", [120, 960])
def test_traffic_is_that_of_the_equations(count: int, size: int, ours_of: Any) -> None:
    """KV-Runahead, equations 4 to 7: (p-1) C for the gather, (p-1) C / 2 for the chain, where p divides C."""
    decoder = ours_of("llama", "float32")
    sent = {}
    for strategy in ("gather", "chain"):
        loopback = LoopbackRanks(decoder, size)
        prefill(loopback, strategy, {Conversation(loopback): tokens_of(count, 1)})
        sent[strategy] = loopback.traffic()
    assert sent == {"gather": (size - 1) * count, "chain": (size - 1) * count // 2}


def test_a_step_of_several_groups(ours_of: Any) -> None:
    """Chains one after another, and decode in the same step; no message is mistaken for another's."""
    decoder = ours_of("llama_gqa", "bfloat16")
    prompts = [tokens_of(count, count) for count in (200, 150, 333)]
    truth = one_rank(decoder, prompts)
    loopback = LoopbackRanks(decoder, 3)
    groups = []
    for prompt in prompts:
        bounds, ranks = even(0, len(prompt), 3)
        groups.append(StepGroup("chain", [Conversation(loopback).part(prompt, bounds, ranks, lambda chunk: 2)]))
    found = loopback.run(groups)
    same([row for _, row in sorted(found.items())], truth)


def test_a_step_that_cannot_be_is_refused(ours_of: Any) -> None:
    loopback = LoopbackRanks(ours_of("llama", "float32"), 2)
    part = Conversation(loopback).part([1, 2, 3], [0, 3], [0], lambda chunk: 0)
    for wrong in ({"bounds": [0, 2]}, {"ranks": [2]}, {"ranks": [0, 1]}, {"slots": []}):
        broken = msgspec.structs.replace(part, **wrong)
        with pytest.raises(ValueError, match=r"bounds|ranks|chunks"):
            loopback.run([StepGroup("chain", [broken])])
    for slots in ((0, 128), (-1, 0)):
        with pytest.raises(ValueError, match=f"copied between slots {re.escape(str(slots))} of 128"):
            loopback.ranks[0].run(RankStep(0, [], copies=[slots]))
