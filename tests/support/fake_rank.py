"""A rank without a model: the first token of a step says what it does, the second is an argument."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from headrace.config import EngineConfig
from headrace.parallel.group import Group
from headrace.parallel.messages import RankStep, StepGroup, StepPart, encode
from headrace.parallel.transport import Tag

ECHO, RELAY, RAISE, SLEEP, WAIT_FOR, REDUCE = range(6)
MANY = 40


def step(number: int, action: int, argument: int = 0) -> bytes:
    return encode(RankStep(number, [StepGroup("single", [StepPart([action, argument], 0, [0], [0, 2], [0])])]))


def message(number: int, i: int) -> torch.Tensor:
    """Number i of a step: another size and another type each."""
    kinds = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
    drawn = torch.randint(0, 2, (1 + 37 * i, 3), generator=torch.Generator().manual_seed(1000 * number + i))
    return drawn.to(kinds[i % len(kinds)])


class FakeRank:
    def __init__(self, config: EngineConfig, group: Group) -> None:
        self.group, self.links = group, group.context
        asked = f"{config.model.folder}, {config.server.api_key}, {config.ranks.interface}"
        self.report = f"{group.rank} of {group.size}, {asked}".encode()

    def run(self, step: RankStep) -> None:
        action, argument = step.groups[0].parts[0].tokens
        {ECHO: self.echo, RELAY: self.relay, RAISE: self.fail, SLEEP: self.sleep, WAIT_FOR: self.wait_for,
         REDUCE: self.reduce}[action](step.number, argument)  # fmt: skip

    def echo(self, number: int, _: int) -> None:
        """Receives messages in one order and sends them back in another."""
        arrived = [torch.empty_like(message(number, i)) for i in range(MANY)]
        receives = [self.links.irecv(arrived[i], 0, Tag(number, i, 0)) for i in reversed(range(MANY))]
        for receive in receives:
            receive.wait()
        for i in sorted(range(MANY), key=lambda i: (i * 7) % MANY):
            self.links.isend(arrived[i], 0, Tag(number, i, self.links.rank)).wait()

    def relay(self, number: int, _: int) -> None:
        """0 -> 1 -> 2 ... -> 0, relayed by the transport; each rank then sends what it saw."""
        links, after = self.links, (self.links.rank + 1) % self.links.size
        with torch.inference_mode():  # as a model's buffers are made
            seen = [torch.empty_like(message(number, i)) for i in range(MANY)]
        works = [links.irecv(x, links.rank - 1, Tag(number, i, 0), relay=after) for i, x in enumerate(seen)]
        for work in works:
            work.drain()
        for i, x in enumerate(seen):
            links.isend(x, 0, Tag(number, i, links.rank)).wait()

    def fail(self, number: int, rank: int) -> None:
        if rank == self.group.rank:
            raise ValueError("asked to fail")

    def sleep(self, number: int, _: int) -> None:
        time.sleep(600)

    def wait_for(self, number: int, rank: int) -> None:
        """For a message that does not come."""
        if rank != self.links.rank:
            self.links.irecv(torch.empty(1), rank, Tag(number, 0, 0)).wait()

    def reduce(self, number: int, _: int) -> None:
        """The world rank summed over the tensor group, sent to rank 0 by context rank 1, tensor rank 0."""
        x = torch.tensor([float(self.group.rank)])
        dist.all_reduce(x, group=self.group.tensor_group)
        if self.links.rank == 1:
            self.links.isend(x, 0, Tag(number, 0, 0)).wait()
