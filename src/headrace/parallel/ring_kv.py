"""Ring pass-KV (context parallelism, arXiv 2411.01783, section 3.4, algorithm 2): shards of K and V go round the ring.

Each rank has two of 2N shards of the new tokens (zigzag), so that all have equal areas of the causal triangle, and the
cached chunks that it owns. In N-1 transfers the keys and values of every rank pass every other; a rank sends on what it
receives at once and attends meanwhile to what it has. Nothing is padded: the plan tells every rank all lengths.
"""

from __future__ import annotations

from headrace.parallel.group_context import GroupContext
from headrace.parallel.kv_exchange import KVExchange
from headrace.parallel.merging import Arriving
from headrace.parallel.workspace import LayerBuffer
from headrace.planner.schedule import ring_next, ring_origin


class RingKV(KVExchange):
    """One rank of the ring 0 -> 1 -> .. -> N-1 -> 0."""

    def __init__(self, context: GroupContext) -> None:
        super().__init__(context)
        self._refuse_cuts()

    def _refuse_cuts(self) -> None:
        for piece in self.layout.pieces:
            if piece.cut:
                raise ValueError("shards of a ring begin at multiples of 64 tokens")

    @property
    def _next(self) -> int:
        return ring_next(self.context.rank, self.context.transport.size)

    def receives(self, layer: int, buffer: LayerBuffer) -> list[Arriving]:
        """What rank s holds arrives after (rank - s) hops; the last rank before s again keeps it."""
        rank, size = self.context.rank, self.context.transport.size
        arrivals = []
        for hops in range(1, size):
            holder = ring_origin(rank, hops, size)
            relay = self._next if hops < size - 1 else None
            for piece in self.layout.pieces:
                if piece.holder == holder:
                    tokens = piece.filled[max(piece.last, 0)]
                    arrivals.append(self.receive(layer, buffer, piece, ring_origin(rank, 1, size), relay, tokens))
        return arrivals

    def send_own(self, layer: int, buffer: LayerBuffer) -> None:
        if self.context.transport.size == 1:
            return
        for piece in self.layout.pieces:
            if piece.holder == self.context.rank:
                self.send(layer, buffer, piece, self._next, piece.filled[max(piece.last, 0)])
