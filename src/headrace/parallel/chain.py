"""KV-Runahead (arXiv 2405.05329, sections 3 and 4): each rank of a chain hands the keys and values so far to the next.

Rank i of the chain computes the i-th block of every sequence. What it receives goes on to rank i+1 at once, before any
local work; its own block follows when it is written. Receives are posted a layer ahead. Blocks may be uneven, and begin
anywhere. In the last layer a rank whose hidden states nobody wants sends its keys and values and takes the next prompt.
"""

from __future__ import annotations

from headrace.parallel.group_context import GroupContext
from headrace.parallel.group_layout import KVPiece
from headrace.parallel.kv_exchange import KVExchange
from headrace.parallel.merging import Arriving
from headrace.parallel.workspace import LayerBuffer
from headrace.planner.schedule import chain_next


class Chain(KVExchange):
    """One rank of the chain. All sequences of the group have the same ranks, in the same order."""

    def __init__(self, context: GroupContext) -> None:
        orders = {tuple(part.ranks) for part in context.group.parts}
        self.order = next(iter(orders))
        if len(orders) > 1 or len(set(self.order)) < len(self.order):
            raise ValueError(f"a chain goes once through the same ranks for all sequences, got {sorted(orders)}")
        self.place = self.order.index(context.rank) if context.rank in self.order else None
        following = None if self.place is None else chain_next(self.place, len(self.order))
        self.after = None if following is None else self.order[following]
        super().__init__(context)

    def _passing(self) -> list[KVPiece]:
        """Pieces that come from the rank before."""
        place = self.place
        return [] if place is None else [p for p in self.layout.pieces if not p.cached and p.first < place]

    def _own(self) -> list[KVPiece]:
        """Pieces that this rank writes in."""
        place = self.place
        return [] if place is None else [p for p in self.layout.pieces if not p.cached and p.first <= place <= p.last]

    def receives(self, layer: int, buffer: LayerBuffer) -> list[Arriving]:
        arrivals = self.exchange_cached(layer, buffer)
        for piece in self._passing():
            assert self.place, "the first rank of a chain receives nothing"
            before = self.order[self.place - 1]
            relay = self.after if piece.last < self.place else None
            tokens = piece.filled[self.place]
            arrivals.append(self.receive(layer, buffer, piece, before, relay, tokens))
        return arrivals

    def before_writing(self, layer: int, buffer: LayerBuffer) -> None:
        """A chunk that the rank before has begun must be there before it is gone on with."""
        cut = {(p.begin, p.end) for p in self._passing() if self.place is not None and p.last >= self.place}
        for arrival in self.arrivals[layer]:
            if (arrival.begin, arrival.end) in cut:
                arrival.wait()

    def send_own(self, layer: int, buffer: LayerBuffer) -> None:
        if self.after is None or self.place is None:
            return
        for piece in self._own():
            self.send(layer, buffer, piece, self.after, piece.filled[self.place])
