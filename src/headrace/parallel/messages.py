"""What a step is made of when several ranks compute it: plain records, sent as msgpack, the same to every rank.

Slots are global: slot g of the cache lies in the pool of rank g // slots_per_rank, as its slot g % slots_per_rank.
Each rank derives from a Step what is its own to do (parallel.layout); nothing else needs to be said between ranks.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import msgspec

Strategy = Literal["single", "gather", "gather-full", "chain", "ring-kv", "ring-q"]
STRATEGIES: tuple[str, ...] = get_args(Strategy)


class Part(msgspec.Struct, frozen=True):
    """New tokens of one sequence: positions start .. start+len(tokens)-1.

    slots: global slots of its chunks from position 0 to the last new token, cached ones and new ones.
    bounds: absolute positions that cut the new tokens into shards, from start to the end; ranks: who computes each
    shard, one fewer. A rank may have several shards or none, and a shard may be empty.
    wanted: of so many last tokens the hidden state is asked for. prompt_len: see TokenBatch.rope_lengths.
    """

    tokens: list[int]
    start: int
    slots: list[int]
    bounds: list[int]
    ranks: list[int]
    wanted: int = 1
    prompt_len: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class Group(msgspec.Struct, frozen=True):
    """Sequences that are computed together, layer by layer, in one way."""

    strategy: Strategy
    parts: list[Part]


class Step(msgspec.Struct, frozen=True):
    """Groups that a rank computes one after another; it does not wait for the others between them."""

    number: int
    groups: list[Group]


_encoder = msgspec.msgpack.Encoder()
_decoder: Any = msgspec.msgpack.Decoder(Step)


def encode(step: Step) -> bytes:
    return _encoder.encode(step)


def decode(body: bytes) -> Step:
    """Raises msgspec.ValidationError (a ValueError) for anything that is no step."""
    step: Step = _decoder.decode(body)
    return step
