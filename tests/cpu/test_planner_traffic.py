"""The cost model books what the strategies send: the same bytes from every rank, the last layer's among them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from headrace.parallel.messages import StepGroup
from headrace.planner.choice import predict, shards_for
from headrace.planner.machine import Machine, ModelShape
from headrace.planner.schedule import BLOCK
from headrace.planner.shards import Prefill
from headrace.strategies import STRATEGIES
from headrace.types import CHUNK
from tests.support.kind_sizes import VOCAB
from tests.support.loopback_ranks import Conversation, LoopbackRanks, zigzag

MACHINE = Machine(
    name="made up", cores=1, isa="none", date="2026-01-01", linear_flops_s=1e9, attention_flops_s=((1, 1e9),),
    memory_bytes_s=1e9, link_bytes_s=1e9,
)  # fmt: skip


def sent_by(loopback: LoopbackRanks) -> list[int]:
    """Once what nobody waited for has gone too: a shard of the last layer that a rank hands on and does not read."""
    for rank in loopback.ranks:
        rank.workspace.drain()
    return [sum(rank.transport.traffic.bytes.values()) for rank in loopback.ranks]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_predicted_bytes_are_sent(strategy: str, cached: bool, size: int, ours_of: Any) -> None:
    """Cached tokens: a block on each rank. New ones belong to the block after, which the first rank keeps."""
    decoder = ours_of("llama_gqa", "float32")
    T, P = 2 * size * CHUNK, size * BLOCK if cached else 0
    tokens = random.Random(5).choices(range(VOCAB), k=P + T)
    loopback = LoopbackRanks(decoder, size)
    talk = Conversation(loopback)
    if P:
        bounds, ranks = zigzag(0, P, size)
        laid = talk.part(tokens[:P], bounds, ranks, lambda chunk: chunk * CHUNK // BLOCK)
        loopback.run([StepGroup("ring-kv", [laid])])
    before = sent_by(loopback)

    shape = ModelShape.of(decoder.config, decoder.dtype.itemsize)
    cut = shards_for(strategy, Prefill(MACHINE, shape, size, T, P))
    keeper = cut.ranks[-1] if STRATEGIES[strategy].keeps_all else 0
    part = talk.part(tokens[P:], list(cut.bounds), list(cut.ranks), lambda chunk: keeper)
    loopback.run([StepGroup(strategy, [part])])
    sent = [after - earlier for after, earlier in zip(sent_by(loopback), before, strict=True)]

    expected = list(predict(strategy, MACHINE, shape, size, cut.bounds, P).bytes_sent)
    if cut.ranks[-1]:
        expected[cut.ranks[-1]] += decoder.config.embed_size * decoder.dtype.itemsize  # the hidden state, to rank 0
    assert sent == expected
    assert (strategy == "single" and not P) or sum(sent) > 0


def test_a_chain_hands_on_to_ranks_without_rows(ours_of: Any) -> None:
    decoder = ours_of("llama_gqa", "float32")
    shape, loopback = ModelShape.of(decoder.config, decoder.dtype.itemsize), LoopbackRanks(decoder, 3)
    tokens = random.Random(5).choices(range(VOCAB), k=2 * CHUNK)
    bounds = [0, CHUNK, 2 * CHUNK, 2 * CHUNK]
    loopback.run([StepGroup("chain", [Conversation(loopback).part(tokens, bounds, [1, 0, 2], lambda chunk: 2)])])
    first, second, third = predict("chain", MACHINE, shape, 3, bounds).bytes_sent
    assert sent_by(loopback) == [second, first, third] and (first, second, third) == (second / 2, second, 0)
