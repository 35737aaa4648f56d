"""What a step is made of when several ranks compute it: plain records, sent as msgpack, the same to every rank.

Slots are global: slot g of the cache lies in the pool of rank g // slots_per_rank, as its slot g % slots_per_rank.
Each rank derives from a RankStep what is its own to do (parallel.group_layout): ranks need to say nothing else.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.strategies import StrategyName


class StateRun(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of a part up to the position `end`, which `rank` computes from the recurrent state in slot `source` (-1:
    that of no tokens), which `origin` has, into slot `target`."""

    end: int
    source: int
    target: int
    rank: int
    origin: int


class StateMove(msgspec.Struct, frozen=True, array_like=True):
    """The state in a slot goes from `origin` to `rank`."""

    slot: int
    origin: int
    rank: int


class WholeState(msgspec.Struct, frozen=True, array_like=True):
    """The state in a slot of the tensor ranks that context rank 0 consists of: all parts of it go to the first of them,
    or, where it was `read` from a tier, from there to the others (parallel.whole_states)."""

    slot: int
    read: bool


class StepPart(msgspec.Struct, frozen=True):
    """New tokens of one sequence: positions start .. start+len(tokens)-1.

    slots: global slots of its chunks from position 0 to the last new token, cached ones and new ones.
    bounds: absolute positions that cut the new tokens into shards, from start to the end; ranks: who computes each
    shard, one fewer. A rank may have several shards or none, and a shard may be empty.
    wanted: of so many last tokens the hidden state is asked for. prompt_len: see TokenBatch.rope_lengths. states: of a
    model with recurrent layers, what covers the new tokens. adapter: the number of what tokens from the position
    adapter_start on have; -1: none.
    """

    tokens: list[int]
    start: int
    slots: list[int]
    bounds: list[int]
    ranks: list[int]
    wanted: int = 1
    prompt_len: int = 0
    states: list[StateRun] = []
    adapter: int = -1
    adapter_start: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class StepGroup(msgspec.Struct, frozen=True):
    """Sequences that are computed together, layer by layer, in one way."""

    strategy: StrategyName
    parts: list[StepPart]


class RankStep(msgspec.Struct, frozen=True):
    """Groups that a rank computes one after another; it does not wait for the others between them. moves: recurrent
    states that change hands before them; whole: then those of tensor ranks. copies: (slot, other slot) of chunks that
    are copied before them, in this order, by ranks each of which has all chunks."""

    number: int
    groups: list[StepGroup]
    moves: list[StateMove] = []
    copies: list[tuple[int, int]] = []
    whole: list[WholeState] = []


_encoder = msgspec.msgpack.Encoder()
_decoder: Any = msgspec.msgpack.Decoder(RankStep)


def encode(step: RankStep) -> bytes:
    return _encoder.encode(step)


def decode(body: bytes) -> RankStep:
    """Raises msgspec.ValidationError (a ValueError) for anything that is no step."""
    step: RankStep = _decoder.decode(body)
    return step
