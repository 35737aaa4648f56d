"""Ranks as threads over the loopback, and a small driver that gives them whole prompts: for tests of parallel."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from headrace.kv.storage import KVStorage
from headrace.models.decoder import Decoder
from headrace.parallel.messages import RankStep, StepGroup, StepPart
from headrace.parallel.rank import Hidden, Rank
from headrace.parallel.transport import LoopbackHub
from headrace.types import CHUNK, chunks_for

Cuts = Callable[[int, int], tuple[list[int], list[int]]]
"""(first new token, end) -> (bounds, ranks) of a part."""


class LoopbackRanks:
    """`size` ranks with pools of `slots` chunks each."""

    def __init__(self, decoder: Decoder, size: int, *, slots: int = 128, backend: str = "cpu", kv: Any = None) -> None:
        self.decoder, self.size, self.slots = decoder, size, slots
        self.hub = LoopbackHub(size)
        spec, dtype = decoder.config.attention, kv or decoder.dtype
        pools = [KVStorage(spec, slots, dtype, device=decoder.device) for _ in range(size)]
        self.ranks = [Rank(decoder, pool, backend, self.hub.transport(r)) for r, pool in enumerate(pools)]
        self.steps = 0
        self.free = [0] * size

    def take(self, rank: int) -> int:
        """A new global slot on a rank."""
        self.free[rank] += 1
        assert self.free[rank] <= self.slots
        return rank * self.slots + self.free[rank] - 1

    def run(self, groups: list[StepGroup]) -> Hidden:
        step = RankStep(self.steps, groups)
        self.steps += 1
        results: list[Any] = [None] * self.size

        def work(rank: int) -> None:
            torch.set_num_threads(1)
            try:
                results[rank] = self.ranks[rank].run(step)
            except BaseException as error:
                results[rank] = error
                self.hub.fail(f"rank {rank}: {error!r}")

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        errors = [each for each in results if isinstance(each, BaseException)]
        if errors:
            raise errors[0]
        return results[0]

    def traffic(self) -> int:
        """Token entries sent so far by all ranks, per layer."""
        total = sum(sum(rank.counters.tokens.values()) for rank in self.ranks)
        layers = self.decoder.config.attention.layers
        assert total % layers == 0
        return total // layers


class Conversation:
    """One sequence on such ranks: its tokens and slots so far."""

    def __init__(self, loopback: LoopbackRanks) -> None:
        self.loopback, self.tokens, self.slots = loopback, [], []  # type: ignore[var-annotated]

    def part(self, tokens: Sequence[int], bounds: list[int], ranks: list[int], owner: Any, wanted: int = 1) -> StepPart:
        """New tokens; owner(chunk) says where a new chunk lies."""
        start = len(self.tokens)
        self.tokens += tokens
        for chunk in range(len(self.slots), chunks_for(len(self.tokens))):
            self.slots.append(self.loopback.take(owner(chunk)))
        return StepPart(list(tokens), start, list(self.slots), bounds, ranks, wanted, len(self.tokens))

    def rewind(self) -> list[int]:
        """Forgets the tokens of the last chunk if it is not full, and returns them: prefill begins at a chunk."""
        full = len(self.tokens) // CHUNK
        tail = self.tokens[full * CHUNK :]
        del self.tokens[full * CHUNK :], self.slots[full:]
        return tail

    def home(self) -> int:
        """The rank that computes the next token: the owner of its chunk; a new chunk goes round."""
        chunk = len(self.tokens) // CHUNK
        last = self.slots[-1] // self.loopback.slots
        return last if chunk < len(self.slots) else (last + 1) % self.loopback.size


def shard_of(bounds: list[int], ranks: list[int], position: int) -> int:
    """The rank that computes a position."""
    for begin, end, rank in zip(bounds, bounds[1:], ranks, strict=False):
        if begin <= position < end:
            return rank
    raise ValueError(position)


def even(start: int, end: int, size: int, unit: int = 1) -> tuple[list[int], list[int]]:
    """Contiguous shards, as even as multiples of `unit` allow."""
    count = end - start
    bounds = [min(end, start + round(count * i / size / unit) * unit) for i in range(size)] + [end]
    return bounds, list(range(size))


def zigzag(start: int, end: int, size: int, unit: int = CHUNK) -> tuple[list[int], list[int]]:
    count = end - start
    bounds = [min(end, start + round(count * i / (2 * size) / unit) * unit) for i in range(2 * size)] + [end]
    return bounds, [*range(size), *reversed(range(size))]


class Late:
    """A transport whose receives seem to be under way for a while: each arrival is seen at the n-th look only."""

    def __init__(self, inner: Any, seed: int) -> None:
        self.inner, self.rank, self.size, self.traffic = inner, inner.rank, inner.size, inner.traffic
        self.random = random.Random(seed)

    def isend(self, *args: Any) -> Any:
        return self.inner.isend(*args)

    def irecv(self, *args: Any) -> Any:
        return _LateWork(self.inner.irecv(*args), self.random.randint(0, 6))


class _LateWork:
    def __init__(self, work: Any, looks: int) -> None:
        self.work, self.looks = work, looks

    @property
    def done(self) -> bool:
        self.looks -= 1
        if self.looks >= 0:
            return False
        self.work.wait()
        return True

    def wait(self) -> None:
        self.looks = -1
        self.work.wait()

    def drain(self) -> None:
        self.work.drain()
