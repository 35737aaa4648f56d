"""Tensor parallelism: each rank computes a share of every layer's outputs and gathers what the others computed.

M: tensor ranks, T: rows of a step, H: hidden size, I: MLP width, Hq: query heads, D: head size, e: bytes an element.

The bits are those of one rank, since no sum is ever split (models.shards). The price, in elements that the ranks of a
group put together for one token and layer, each rank sending its own to the M-1 others:

                       gathered                     a rank sends                   Llama 3 8B, M = 2, bf16
    here               Hq D + H + I + H             (M-1)/M (Hq D + 2 H + I)       13,312 elements, 26.6 kB
    here, parallel     Hq D + I + H (one sum)       (M-1)/M (Hq D + H + I)
    Megatron-LM        2 all-reduces of H           (M-1)/M 4 H (ring)             8,192 elements: 16.4 kB in bf16,
                                                                                   32.8 kB if sums travel in fp32

So a layer costs (Hq D + 2 H + I) / 4 H times as many elements as Megatron-LM's: 1.6 times for Llama 3 8B, where I =
3.5 H. With experts I is the width of all that a row meets. The wide part is the MLP's activations, which Megatron-LM
keeps at home. There are four exchanges a layer (a parallel block: three), each of one step between all pairs, where
two ring all-reduces take 4 (M-1) steps. The memory of the weights is the same. The head is whole on rank 0 and absent
from the others: no traffic, no share of its work.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.models.shards import shard
from headrace.parallel.transport import LAST, Tag, Transport, all_gather

__all__ = ["TensorGroup", "shard"]


class TensorGroup:
    """A models.shards.Group over a transport that connects the tensor ranks of one context rank, and nobody else.

    For one thread of a rank. Exchanges are numbered alike on all ranks: every rank takes part in each.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.exchanges = 0

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def size(self) -> int:
        return self.transport.size

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """x [T, widths[rank]] -> [T, sum(widths)]: the columns of all ranks, in order. Raises RankLost."""
        if x.dim() != 2 or len(widths) != self.size or x.shape[1] != widths[self.rank]:
            raise ValueError(f"tensor rank {self.rank} of {self.size} cannot gather {list(x.shape)} by {list(widths)}")
        tag = self._next()
        shares = [x.contiguous() if rank == self.rank else x.new_empty(len(x), n) for rank, n in enumerate(widths)]
        works = all_gather(self.transport, [shares[self.rank]], [[share] for share in shares], tag)
        for work in works:
            work.wait()
        return torch.cat(shares, dim=1)

    def scatter(self, parts: Sequence[Tensor] | None, own: Tensor) -> Tensor:
        """parts, on rank 0: a tensor for each rank -> this rank's, of the shape and type of `own`. Raises RankLost."""
        tag = self._next()
        if self.rank > 0 or parts is None:
            mine = torch.empty_like(own)
            self.transport.irecv(mine, 0, tag).wait()
            return mine
        going = [self.transport.isend(parts[rank].contiguous(), rank, tag) for rank in range(1, self.size)]
        for work in going:
            work.drain()
        return parts[0]

    def _next(self) -> Tag:
        """Of the next exchange."""
        group, layer = divmod(self.exchanges, LAST)
        self.exchanges += 1
        return Tag(group, layer, 0)
