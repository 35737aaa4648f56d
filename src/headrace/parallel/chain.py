"""KV-Runahead (arXiv 2405.05329, sections 3 and 4): each rank of a chain hands the keys and values so far to the next.

Rank i of the chain computes the i-th block of every sequence. What it receives goes on to rank i+1 at once, before any
local work; its own block follows when it is written. Receives are posted a layer ahead. Blocks may be uneven, and begin
anywhere. In the last layer a rank whose hidden states nobody wants sends its keys and values and takes the next prompt.
"""

from __future__ import annotations

from headrace.parallel.context import Context
from headrace.parallel.kv_exchange import KVExchange
from headrace.parallel.layout import Piece
from headrace.parallel.merging import Arrival
from headrace.parallel.workspace import Buffer


class Chain(KVExchange):
    """One rank of the chain. All sequences of the group have the same ranks, in the same order."""

    def __init__(self, context: Context) -> None:
        orders = {tuple(part.ranks) for part in context.group.parts}
        self.order = next(iter(orders))
        if len(orders) > 1 or len(set(self.order)) < len(self.order):
            raise ValueError(f"a chain goes once through the same ranks for all sequences, got {sorted(orders)}")
        self.place = self.order.index(context.rank) if context.rank in self.order else None
        super().__init__(context)

    def _neighbour(self, step: int) -> int | None:
        """The rank before (-1) or after (+1) this one."""
        if self.place is None or not 0 <= self.place + step < len(self.order):
            return None
        return self.order[self.place + step]

    def _passing(self) -> list[Piece]:
        """Pieces that come from the rank before."""
        place = self.place
        return [] if place is None else [p for p in self.layout.pieces if not p.cached and p.first < place]

    def _own(self) -> list[Piece]:
        """Pieces that this rank writes in."""
        place = self.place
        return [] if place is None else [p for p in self.layout.pieces if not p.cached and p.first <= place <= p.last]

    def receives(self, layer: int, buffer: Buffer) -> list[Arrival]:
        arrivals = self.exchange_cached(layer, buffer)
        before, after = self._neighbour(-1), self._neighbour(1)
        for piece in self._passing():
            assert before is not None and self.place is not None
            relay = after if piece.last < self.place else None
            tokens = piece.filled[self.place]
            arrivals.append(self.receive(layer, buffer, piece, before, relay, tokens))
        return arrivals

    def before_writing(self, layer: int, buffer: Buffer) -> None:
        """A chunk that the rank before has begun must be there before it is gone on with."""
        cut = {(p.begin, p.end) for p in self._passing() if self.place is not None and p.last >= self.place}
        for arrival in self.arrivals[layer]:
            if (arrival.begin, arrival.end) in cut:
                arrival.wait()

    def send_own(self, layer: int, buffer: Buffer) -> None:
        after = self._neighbour(1)
        if after is None or self.place is None:
            return
        for piece in self._own():
            self.send(layer, buffer, piece, after, piece.filled[self.place])
