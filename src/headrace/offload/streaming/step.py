"""One step of streamed decoding: its transfers, its operations, and attention over staging. See streaming.streamer.

T: rows of a batch, n: rows whose states are wanted, H: hidden size, Hq, Hkv: query and KV heads, D: head size.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from headrace.attention.execute import items_of
from headrace.kernels.records import Mask, Pool
from headrace.offload.copy_streams import Ticket, copy_alone
from headrace.offload.streaming.schedule import Form, Load, Stage, first_loads, stages
from headrace.offload.streaming.staging import Counts, Cut, Piece, gather
from headrace.offload.streaming.throughput import Operation, Work
from headrace.offload.weights.streamed import What
from headrace.types import CHUNK

if TYPE_CHECKING:
    from headrace.offload.streaming.streamer import Batch, Streamer


class Step:
    """One step under way."""

    def __init__(self, streamer: Streamer, batches: Sequence[Batch]) -> None:
        self.streamer, self.batches, options = streamer, batches, streamer.options
        self.spec = streamer.decoder.config.attention
        self.form = Form(self.spec.layers, len(batches), options.schedule, options.weights, options.fine)
        self.work = [self._work(batch) for batch in batches]
        self._kinds: dict[tuple[int, int | None, bool], list[Piece]] = {}
        for batch in range(len(batches)):
            for layer in range(self.spec.layers):
                self.pieces(layer, batch)
        self.stages = stages(self.form, lambda layer, batch: len(self.pieces(layer, batch)))
        self.index = {(each.layer, each.batch, each.piece): at for at, each in enumerate(self.stages)}
        self.tickets: dict[tuple[str, int, int, int], Ticket] = {}
        self.hidden: list[Tensor] = []
        self.outside: dict[int, tuple[Tensor, Ticket]] = {}
        self.rotations: list[Tensor | None] = []
        self.waited = self.projecting = 0.0

    def pieces(self, layer: int, batch: int) -> list[Piece]:
        """How the batch meets its chunks in the layer, cut once for all layers alike."""
        window, last = self.spec.windows[layer], layer + 1 == self.spec.layers
        given, work = self.batches[batch], self.work[batch]
        key = (batch, window, last and given.rows is not None)
        if key not in self._kinds:
            items = given.plan.items_within(window)
            if key[2] and given.rows is not None:
                items = items_of(torch.from_numpy(items), given.rows).numpy()
            cut = Cut(given.plan, items, self.streamer.staging.capacity)
            self._kinds[key] = cut.pieces(self._projected(cut.counts, work))
        return self._kinds[key]

    def _work(self, batch: Batch) -> Work:
        """What an operation of this batch moves and computes beside its chunks."""
        rows, form = batch.plan.rows, self.form
        hidden = rows * self.streamer.decoder.config.hidden_size * self.streamer.store.rows.itemsize
        weights = self.streamer.weight_bytes // form.slices if form.weights else 0
        return Work(rows, weights, hidden if form.moves_hidden else 0)

    def _projected(self, counts: Counts, work: Work) -> int:
        """How many of the whole chunks are projected."""
        streamer = self.streamer
        if not streamer.store.hidden:
            return 0
        if streamer.options.share is not None:
            return round(streamer.options.share * counts.whole)
        return streamer.pace.split(counts.stored, counts.whole, work)

    def run(self) -> list[Tensor]:
        """The residual stream of each batch behind the last layer."""
        self.streamer.totals.predicted_s += self._predicted()
        for batch in self.batches:
            x, cos_sin = self.streamer.decoder.enter(batch.tokens)
            self.hidden.append(x)
            self.rotations.append(cos_sin)
        self.streamer.layers.start()
        for load in first_loads(self.form):
            self._issue(load)
        for at, stage in enumerate(self.stages):
            if stage.first:
                self._operation(at, stage)
        return self.hidden

    def _predicted(self) -> float:
        """Seconds that the step should take, by the pace so far."""
        operations = []
        for layer, batch in self.form.order():
            pieces = self.pieces(layer, batch)
            loaded, projected = sum(each.loaded for each in pieces), sum(each.projected for each in pieces)
            operations.append(Operation(loaded, projected, self.work[batch]))
        return self.streamer.pace.seconds(operations)

    def _operation(self, at: int, stage: Stage) -> None:
        """One layer over one batch: all its stages, from `at` on."""
        streamer, layers, layer, batch = self.streamer, self.streamer.layers, stage.layer, stage.batch
        began, self.waited, self.projecting = time.perf_counter(), 0.0, 0.0
        pieces = self.pieces(layer, batch)
        self._begin(at)
        self._project(at)
        self._wait(self.tickets.pop(("hidden", layer, batch, 0), None))
        self._wait_weights(layer, "kv", "q")
        x = self.hidden[batch]
        kept = x.clone() if streamer.store.hidden else None
        rows = self.batches[batch].rows if layer + 1 == self.spec.layers else None
        x = layers.layer(layer)(x, self.rotations[batch], _Attend(self, at, len(pieces), kept), rows)
        self.hidden[batch] = x
        if self.stages[at + len(pieces) - 1].stores_hidden:
            self._leave(batch, x)
        if self.form.weights and (self.form.schedule == "row" or batch + 1 == self.form.batches):
            layers.done(layer)
        self._note(batch, pieces, time.perf_counter() - began)

    def _note(self, batch: int, pieces: list[Piece], seconds: float) -> None:
        """Takes the operation's figures into the totals and the pace."""
        totals, pace = self.streamer.totals, self.streamer.pace
        projected, loaded = sum(p.projected for p in pieces), sum(p.loaded for p in pieces)
        totals.projected, totals.loaded = totals.projected + projected, totals.loaded + loaded
        totals.waited_s += self.waited
        pace.projected(projected, self.projecting)
        pace.computed(self.work[batch], seconds - self.waited - self.projecting)

    def _begin(self, at: int) -> None:
        for load in self.stages[at].prefetch:
            self._issue(load)

    def _issue(self, load: Load) -> None:
        """Submits a transfer; nothing for what moves nothing."""
        streamer, layer, key = self.streamer, load.layer, (load.kind, load.layer, load.batch, load.piece)
        if load.kind in ("weights", "rest"):
            what: What = "rest" if load.kind == "rest" else "first" if self.form.fine else "coarse"
            streamer.layers.load(layer, load.batch, self.form.slices, what)
            if load.kind == "weights":
                streamer.totals.bytes_in += streamer.weight_bytes // self.form.slices
            return
        if load.kind == "hidden":
            outside, written = self.outside[load.batch]
            fast = self.hidden[load.batch] = torch.empty_like(outside)
            self.tickets[key] = streamer.lanes.into.submit(
                partial(_after, written, partial(copy_alone, fast, outside)), outside.nbytes, "hidden"
            )
            return
        at = self.index[key[1:]]
        piece = self.pieces(layer, load.batch)[load.piece]
        if load.kind == "kv" and piece.loaded:
            size = piece.loaded * streamer.store.chunk_bytes
            run = partial(streamer.staging.load_kv, at % 2, streamer.store, layer, piece)
        elif load.kind == "x" and piece.projected and not streamer.options.x_resident:
            size = piece.projected * streamer.store.x_bytes
            run = partial(streamer.staging.load_x, at % 2, streamer.store, layer, piece)
        else:
            return
        streamer.totals.bytes_in += size
        self.tickets[key] = streamer.lanes.into.submit(run, size, load.kind)

    def _project(self, at: int) -> None:
        """K and V of the chunks of a stage that come as X."""
        streamer, stage = self.streamer, self.stages[at]
        piece = self.pieces(stage.layer, stage.batch)[stage.piece]
        if not piece.projected:
            return
        if streamer.options.x_resident:
            gather(streamer.staging.x[at % 2], streamer.store.x[stage.layer], piece.to_project)
        self._wait(self.tickets.pop(("x", stage.layer, stage.batch, stage.piece), None))
        self._wait_weights(stage.layer, "kv", *(() if streamer.layers.layer(stage.layer).splits else ("q",)))
        positions = torch.from_numpy((piece.keys[:, None] + np.arange(CHUNK)).reshape(-1))
        self.projecting += streamer.project(
            stage.layer, at % 2, piece.projected, positions, self._lengths(stage, piece, positions)
        )

    def _lengths(self, stage: Stage, piece: Piece, positions: Tensor) -> Tensor | None:
        """TokenBatch.rope_lengths of the projected rows: as when they were computed first."""
        batch = self.batches[stage.batch]
        if batch.prompts is None:
            return None
        rows = piece.first_rows
        if stage.layer + 1 == self.spec.layers and batch.rows is not None:
            rows = batch.rows.numpy()[rows]
        return torch.maximum(torch.from_numpy(batch.prompts[rows]).repeat_interleave(CHUNK), positions + 1)

    def _leave(self, batch: int, x: Tensor) -> None:
        """Hidden states go out until the next layer."""
        outside = torch.empty_like(x)
        ticket = self.streamer.send(partial(copy_alone, outside, x), x.nbytes, "hidden")
        self.outside[batch] = (outside, ticket)

    def _wait(self, ticket: Ticket | None) -> None:
        if ticket is None:
            return
        began = time.perf_counter()
        ticket.wait()
        self.waited += time.perf_counter() - began
        self.streamer.pace.carried(ticket)

    def _wait_weights(self, layer: int, *parts: Any) -> None:
        began = time.perf_counter()
        self.streamer.layers.wait(layer, *parts)
        self.waited += time.perf_counter() - began


class _Attend:
    """Attention of one operation over staging: see attention.execute.Attend. x: what entered the layer, to be kept."""

    def __init__(self, step: Step, at: int, count: int, x: Tensor | None) -> None:
        self.step, self.at, self.count, self.x = step, at, count, x

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rows: Tensor | None = None) -> Tensor:
        step, streamer = self.step, self.step.streamer
        batch = step.batches[step.stages[self.at].batch]
        positions = torch.from_numpy(batch.plan.positions)
        if rows is not None:
            q, positions = q[rows], positions[rows]
        kernels, window, bias = streamer.kernels, step.spec.windows[layer], streamer.decoder.key_bias
        state, out = None, None
        for index in range(self.count):
            pool, items = self._arrive(index, k, v)
            mask = Mask(items, positions, window=window, bias=bias, scale=step.spec.scale)
            if self.count == 1:
                out = kernels.attend(q, pool, mask)
            else:
                state = kernels.partial(q, pool, mask, state)
        # Each call of a OneLayer has memory of its own for these: nothing is written over them.
        streamer.write(layer, batch.plan, k, v, self.x)
        step._wait_weights(layer, "out", "up", "down")
        if out is not None:
            return out
        assert state is not None, "an operation has pieces"
        return kernels.finish(state, q.dtype)

    def _arrive(self, index: int, k: Tensor, v: Tensor) -> tuple[Pool, Tensor]:
        """The buffer with the chunks of piece `index`, this step's rows among them, and the items over it."""
        step, at = self.step, self.at + index
        stage = step.stages[at]
        piece = step.pieces(stage.layer, stage.batch)[index]
        if index:
            step._begin(at)
            step._project(at)
        step._wait(step.tickets.pop(("kv", stage.layer, stage.batch, index), None))
        pool = step.streamer.staging.kv[at % 2]
        if len(piece.rows):
            every = len(piece.rows) == len(k)
            mine = torch.from_numpy(piece.rows)
            step.streamer.kernels.append(
                pool, k if every else k[mine], v if every else v[mine], torch.from_numpy(piece.row_slots),
                torch.from_numpy(piece.row_offsets),
            )  # fmt: skip
        return pool, torch.from_numpy(piece.items)


def _after(ticket: Ticket, run: Any) -> None:
    ticket.wait()
    run()
