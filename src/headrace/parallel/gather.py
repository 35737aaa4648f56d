"""Tensor and sequence parallel prefill as KV-Runahead's baseline has it (arXiv 2405.05329, section 2): all-gather K, V.

Blocking, as published: the rank sends its keys and values to all others, waits for theirs, then attends. `gather` skips
what the causal mask hides; `gather-full` computes the whole rectangle, as softmax(q K^T + mask) does, and throws the
hidden part away.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headrace.parallel.group_context import GroupContext
from headrace.parallel.group_layout import KVPiece
from headrace.parallel.kv_exchange import KVExchange, bytes_of, view
from headrace.parallel.merging import Arriving, Rows
from headrace.parallel.transport import Transfer
from headrace.parallel.workspace import LayerBuffer
from headrace.types import CHUNK


class Gather(KVExchange):
    """One rank. Shards may lie in any order and begin anywhere."""

    def __init__(self, context: GroupContext) -> None:
        self.sides: list[tuple[KVPiece, list[Tensor], list[Transfer]]] = []
        super().__init__(context)

    def receives(self, layer: int, buffer: LayerBuffer) -> list[Arriving]:
        arrivals = self.exchange_cached(layer, buffer)
        for piece in self._new():
            if piece.cut:  # filled by several ranks: each sends what it has, see join_cut
                for x in view(buffer, piece):
                    bytes_of(x).zero_()
            elif piece.holder != self.context.rank:
                arrivals.append(self.receive(layer, buffer, piece, piece.holder, None, 0))
        return arrivals

    def _new(self) -> list[KVPiece]:
        return [piece for piece in self.layout.pieces if not piece.cached]

    def _writers(self, piece: KVPiece) -> dict[int, int]:
        """Ranks that write in a piece, and how many tokens."""
        written: dict[int, int] = {}
        part = self.context.group.parts[0] if len(self.context.group.parts) == 1 else None
        for shard in range(piece.first, piece.last + 1):
            count = piece.filled[shard] - (piece.filled[shard - 1] if shard > piece.first else 0)
            for each in [part] if part else self.context.group.parts:
                if shard < len(each.ranks):
                    written[each.ranks[shard]] = written.get(each.ranks[shard], 0) + count
        return written

    def send_own(self, layer: int, buffer: LayerBuffer) -> None:
        mine = self.context.rank
        for piece in self._new():
            writers = self._writers(piece) if piece.cut else {piece.holder: piece.filled[piece.last]}
            for other in range(self.context.transport.size):
                if other == mine:
                    continue
                if mine in writers:
                    self._send(layer, buffer, piece, other, writers[mine])
                if piece.cut and other in writers:
                    self._expect(layer, buffer, piece, other)

    def _send(self, layer: int, buffer: LayerBuffer, piece: KVPiece, other: int, tokens: int) -> None:
        tensors = view(buffer, piece)
        if piece.cut:
            tensors = [x.clone() for x in tensors]  # others' bits are about to be put in
        buffer.works += self.context.send(tensors, other, layer, piece.index, tokens)

    def _expect(self, layer: int, buffer: LayerBuffer, piece: KVPiece, other: int) -> None:
        side = [torch.empty_like(x) for x in view(buffer, piece)]
        works = self.context.receive(side, other, layer, piece.index)
        self.sides.append((piece, side, works))

    def before_attending(self, layer: int, buffer: LayerBuffer) -> None:
        for arrival in self.arrivals[layer]:
            arrival.wait()
        self.join_cut(buffer)

    def join_cut(self, buffer: LayerBuffer) -> None:
        """Puts the pieces together that several ranks fill; waits for the others' parts of them."""
        for piece, side, works in self.sides:
            for work in works:
                work.wait()
            for x, y in zip(view(buffer, piece), side, strict=True):
                bytes_of(x).bitwise_or_(bytes_of(y))
        self.sides.clear()


class GatherFull(Gather):
    """With the masked half of the rectangle computed: every row meets every key of its sequence."""

    def after_attention(self, layer: int, q: Tensor, buffer: LayerBuffer, rows: Rows) -> None:
        begin = 0
        for run in rows.runs:
            slots = self.context.group.parts[run.part].slots
            chunks = np.arange(run.start // CHUNK + 1, len(slots), dtype=np.int32)
            items = np.zeros((len(chunks), 4), dtype=np.int32)
            items[:, 0] = self.layout.table(np.array(slots, dtype=np.int32)[chunks])
            items[:, 1] = chunks * CHUNK
            items[:, 3] = np.minimum(run.rows, chunks * CHUNK - run.start)  # the rows before a chunk
            everywhere = torch.full((run.rows,), len(slots) * CHUNK - 1, dtype=torch.int64)
            if len(chunks):
                part = q[begin : begin + run.rows]
                self.context.kernels.attend(layer, part, buffer.pool, torch.from_numpy(items), everywhere)
            begin += run.rows
