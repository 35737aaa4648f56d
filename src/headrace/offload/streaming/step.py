"""One step of streamed decoding: its transfers, its operations, and attention over staging. See streaming.streamer.

T: rows of a batch, n: rows whose states are wanted, H: hidden size, Hq, Hkv: query and KV heads, D: head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.attention.execute import items_of
from headrace.attention.plan import Plan
from headrace.device import Device
from headrace.kernels.adapted_rows import AdaptedRows, rows_at
from headrace.kernels.backend import Attend, PreparedStep, in_pieces
from headrace.kernels.records import Mask, Pool, StepInputs
from headrace.models.decoder import Decoder, TokenBatch
from headrace.offload.stopwatch import Stopwatch
from headrace.offload.streaming.projection import project
from headrace.offload.streaming.schedule import Prefetch, Schedule, Stage, StepShape, first_loads, stages
from headrace.offload.streaming.staging import ChunkCounts, StagingPiece, StagingPlan
from headrace.offload.streaming.throughput import Operation, OperationWork
from headrace.offload.streaming.transfers import Transfers
from headrace.offload.ticket import Ticket
from headrace.offload.weights.streamed import WeightPart, WeightSlice
from headrace.types import CHUNK


@dataclass(slots=True)
class StreamBatch:
    """Sequences of a step that are computed together. plan: over slots of the store.

    rows int64 [n]: those whose states are wanted, None for all. prompts int64 [T]: length of each row's prompt, for
    models whose rotation depends on it. adapters int64 [T, 2]: the adapter of each row's sequence (-1: none), and from
    which position on; None: no sequence has one.
    """

    tokens: TokenBatch
    plan: Plan
    rows: Tensor | None = None
    prompts: NDArray[np.int64] | None = None
    adapters: NDArray[np.int64] | None = None


@dataclass(slots=True)
class StreamingOptions:
    """How to stream. share: which part of the whole chunks is projected; None: as link and arithmetic are found to be.

    weights: whether they are loaded too; fine: in which order, see schedule.StepShape.
    """

    schedule: Schedule = "row"
    weights: bool = False
    fine: bool = True
    share: float | None = None

    def with_changes(self, **changes: Any) -> StreamingOptions:
        return replace(self, **changes)


class StreamStep:
    """One step under way."""

    def __init__(
        self, decoder: Decoder, transfers: Transfers, options: StreamingOptions, batches: Sequence[StreamBatch]
    ) -> None:
        self.decoder, self.transfers, self.batches, self.share = decoder, transfers, batches, options.share
        self.spec = decoder.config.attention
        self.shape = StepShape(self.spec.layers, len(batches), options.schedule, options.weights, options.fine)
        self.work = [self._work(batch) for batch in batches]
        numbers = [batch.tokens.adapters for batch in batches]
        self.adapted = [None if each is None else AdaptedRows(each) for each in numbers]
        self._pieces: dict[tuple[int, int | None, bool], list[StagingPiece]] = {}
        for batch in range(len(batches)):
            for layer in range(self.spec.layers):
                self.pieces(layer, batch)
        self.stages = stages(self.shape, lambda layer, batch: len(self.pieces(layer, batch)))
        self.index = {(each.layer, each.batch, each.piece): at for at, each in enumerate(self.stages)}
        self.tickets: dict[tuple[str, int, int, int], Ticket | None] = {}
        self.hidden: list[Tensor] = []
        self.outside: dict[int, tuple[Tensor, Ticket]] = {}
        self.rotations: list[Tensor | None] = []
        self.times = OperationTimes(transfers.device)
        self.later: list[Callable[[], None]] = []
        self.prepared: dict[tuple[int, int | None], PreparedStep] = {}

    def pieces(self, layer: int, batch: int) -> list[StagingPiece]:
        """How the batch meets its chunks in the layer, divided once for all layers alike."""
        window, last = self.spec.windows[layer], layer + 1 == self.spec.layers
        given, work = self.batches[batch], self.work[batch]
        key = (batch, window, last and given.rows is not None)
        if key not in self._pieces:
            items = given.plan.items_within(window)
            if key[2] and given.rows is not None and self.transfers.device is None:
                items = items_of(torch.from_numpy(items), given.rows).numpy()
            staged = StagingPlan(given.plan, items, self.transfers.staging.capacity)
            self._pieces[key] = staged.pieces(self._projected(staged.counts, work))
        return self._pieces[key]

    def _work(self, batch: StreamBatch) -> OperationWork:
        """What an operation of this batch moves and computes beside its chunks."""
        rows, shape = batch.plan.rows, self.shape
        hidden = rows * self.decoder.config.stream_size * self.transfers.store.rows.itemsize
        weights = self.transfers.weight_bytes // shape.slices if shape.weights else 0
        return OperationWork(rows, weights, hidden if shape.moves_hidden else 0)

    def _projected(self, counts: ChunkCounts, work: OperationWork) -> int:
        """How many of the whole chunks are projected."""
        if not self.transfers.store.hidden:
            return 0
        if self.share is not None:
            return round(self.share * counts.whole)
        return self.transfers.throughput.split(counts.stored, counts.whole, work)

    def run(self) -> list[Tensor]:
        """The residual stream of each batch behind the last layer."""
        self.transfers.totals.predicted_s += self._predicted()
        for batch in self.batches:
            x, cos_sin = self.decoder.enter(batch.tokens)
            self.hidden.append(x)
            self.rotations.append(cos_sin)
        self.transfers.layers.start()
        for load in first_loads(self.shape):
            self._issue(load)
        for at, stage in enumerate(self.stages):
            if stage.first:
                self._operation(at, stage)
        return self.hidden

    def note(self) -> None:
        """Takes the times of what a device has done by now."""
        for each in self.later:
            each()

    def _predicted(self) -> float:
        """Seconds that the step should take, by the throughput so far."""
        operations = []
        for layer, batch in self.shape.order():
            pieces = self.pieces(layer, batch)
            loaded, projected = sum(each.loaded for each in pieces), sum(each.projected for each in pieces)
            operations.append(Operation(loaded, projected, self.work[batch]))
        return self.transfers.throughput.seconds(operations)

    def _operation(self, at: int, stage: Stage) -> None:
        """One layer over one batch: all its stages, from `at` on."""
        layers, layer, batch = self.transfers.layers, stage.layer, stage.batch
        self.times = times = OperationTimes(self.transfers.device)
        pieces = self.pieces(layer, batch)
        self._begin(at)
        self._project(at)
        self._wait(self.tickets.pop(("hidden", layer, batch, 0), None))
        self._wait_weights(layer, "kv", "q")
        x = self.hidden[batch]
        kept = x.clone() if self.transfers.store.hidden else None
        rows = self.batches[batch].rows if layer + 1 == self.spec.layers else None
        one = layers.layer(layer).adapted_by(self.adapted[batch])
        x = one(x, self.rotations[batch], _StagedAttend(self, at, len(pieces), kept), rows)
        self.hidden[batch] = x
        if self.stages[at + len(pieces) - 1].stores_hidden:
            before, _ = self.outside.get(batch, (None, None))
            self.outside[batch] = self.transfers.send_hidden(x, before)
        if self.shape.weights and (self.shape.schedule == "row" or batch + 1 == self.shape.batches):
            layers.done(layer)
        times.whole.stop()
        if self.transfers.device is None:
            self._note(batch, pieces, times)
        else:
            self.later.append(partial(self._note, batch, pieces, times))

    def _note(self, batch: int, pieces: list[StagingPiece], times: OperationTimes) -> None:
        """Takes the operation's figures into the totals and the throughput."""
        totals, throughput = self.transfers.totals, self.transfers.throughput
        projected, loaded = sum(p.projected for p in pieces), sum(p.loaded for p in pieces)
        totals.projected, totals.loaded = totals.projected + projected, totals.loaded + loaded
        waited, projecting = (sum(each.seconds() for each in some) for some in (times.waits, times.projecting))
        totals.waited_s += waited
        for ticket in times.carried:
            ticket.synchronize()  # a device's has come, and may not have been ended yet
            throughput.carried(ticket)
        throughput.projected(projected, projecting)
        throughput.computed(self.work[batch], times.whole.seconds() - waited - projecting)

    def _begin(self, at: int) -> None:
        for load in self.stages[at].prefetch:
            self._issue(load)

    def _issue(self, load: Prefetch) -> None:
        """Submits a transfer; nothing for what moves nothing."""
        layer, batch, key = load.layer, load.batch, (load.kind, load.layer, load.batch, load.piece)
        if load.kind in ("weights", "rest"):
            what: WeightSlice = "rest" if load.kind == "rest" else "first" if self.shape.fine else "coarse"
            self.transfers.load_weights(layer, batch, self.shape.slices, what)
        elif load.kind == "hidden":
            outside, written = self.outside[batch]
            self.hidden[batch] = torch.empty_like(outside, device=self.decoder.device)
            self.tickets[key] = self.transfers.load_hidden(self.hidden[batch], outside, written)
        else:
            buffer, piece = self.index[key[1:]] % 2, self.pieces(layer, batch)[load.piece]
            move = self.transfers.load_kv if load.kind == "kv" else self.transfers.load_x
            self.tickets[key] = move(buffer, layer, piece)

    def _project(self, at: int) -> None:
        """K and V of the chunks of a stage that come as X."""
        transfers, stage, buffer = self.transfers, self.stages[at], at % 2
        piece = self.pieces(stage.layer, stage.batch)[stage.piece]
        if not piece.projected:
            return
        transfers.gather_x(buffer, stage.layer, piece)
        self._wait(self.tickets.pop(("x", stage.layer, stage.batch, stage.piece), None))
        self._wait_weights(stage.layer, "kv", *(() if transfers.layers.layer(stage.layer).splits else ("q",)))
        positions = torch.from_numpy((piece.keys[:, None] + np.arange(CHUNK)).reshape(-1))
        lengths = self._lengths(stage, piece, positions)
        transfers.claim(buffer)
        adapted = self._adapters(stage, piece, positions)
        done = project(self.decoder, transfers, stage.layer, buffer, piece.projected, positions, lengths, adapted)
        self.times.projecting.append(done)

    def _lengths(self, stage: Stage, piece: StagingPiece, positions: Tensor) -> Tensor | None:
        """TokenBatch.rope_lengths of the projected rows: as when they were computed first."""
        batch = self.batches[stage.batch]
        if batch.prompts is None:
            return None
        prompts = batch.prompts[self._first_rows(stage, piece)]
        return torch.maximum(torch.from_numpy(prompts).repeat_interleave(CHUNK), positions + 1)

    def _adapters(self, stage: Stage, piece: StagingPiece, positions: Tensor) -> AdaptedRows | None:
        """Those of the projected rows: of any sequence that meets a chunk, since its name is of the adapter too."""
        batch = self.batches[stage.batch]
        if batch.adapters is None:
            return None
        each = torch.from_numpy(batch.adapters[self._first_rows(stage, piece)]).repeat_interleave(CHUNK, 0)
        return rows_at(positions, each[:, 0], each[:, 1])

    def _first_rows(self, stage: Stage, piece: StagingPiece) -> NDArray[np.int64]:
        """A row of the batch that meets each of the projected chunks."""
        batch = self.batches[stage.batch]
        rows = piece.first_rows
        if stage.layer + 1 == self.spec.layers and batch.rows is not None:
            rows = batch.rows.numpy()[rows]
        return rows

    def _wait(self, ticket: Ticket | None) -> None:
        if ticket is not None:
            with self.times.waiting():
                ticket.wait()
            self.times.carried.append(ticket)

    def _wait_weights(self, layer: int, *parts: WeightPart) -> None:
        with self.times.waiting():
            self.transfers.layers.wait(layer, *parts)

    def prepare(self, layer: int, batch: int, piece: StagingPiece) -> PreparedStep:
        """Append and attention over the staged piece that is all of an operation, prepared once for layers alike."""
        key = (batch, self.spec.windows[layer])
        if key not in self.prepared:
            transfers, given = self.transfers, self.batches[batch]
            slots = np.empty_like(piece.row_slots)
            offsets = np.empty_like(piece.row_offsets)
            slots[piece.rows], offsets[piece.rows] = piece.row_slots, piece.row_offsets
            items, positions, rows, at = (
                torch.from_numpy(x) for x in (piece.items, given.plan.positions, slots, offsets)
            )
            prepared = transfers.kernels.prepare(StepInputs(
                {key[1]: items}, positions, rows, at, heads=self.spec.heads, dtype=transfers.store.dtype,
                shape=transfers.staging.kv[0].shape, scale=self.spec.scale, cap=self.spec.score_cap,
                bias=self.decoder.key_bias, once=self.spec.once,
            ))  # fmt: skip
            assert prepared is not None, "kernels of a device prepare steps"
            self.prepared[key] = prepared
        return self.prepared[key]


class OperationTimes:
    """What an operation takes: all of it, in waiting for what comes in, in projecting; and what came in."""

    def __init__(self, device: Device | None) -> None:
        self._device, self.whole = device, Stopwatch(device)
        self.waits: list[Stopwatch] = []
        self.projecting: list[Stopwatch] = []
        self.carried: list[Ticket] = []

    @contextmanager
    def waiting(self) -> Iterator[None]:
        watch = Stopwatch(self._device)
        yield
        watch.stop()
        self.waits.append(watch)


class _StagedAttend(Attend):
    """Attention of one operation over staging. x: what entered the layer, to be kept."""

    def __init__(self, step: StreamStep, at: int, count: int, x: Tensor | None) -> None:
        self.step, self.at, self.count, self.x = step, at, count, x

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rows: Tensor | None = None) -> Tensor:
        step, transfers = self.step, self.step.transfers
        if transfers.device is not None:
            return self._on_device(layer, q, k, v, rows)
        batch = step.batches[step.stages[self.at].batch]
        positions = torch.from_numpy(batch.plan.positions)
        if rows is not None:
            q, positions = q[rows], positions[rows]
        kernels, window, bias = transfers.kernels, step.spec.windows[layer], step.decoder.key_bias
        sinks = None if step.decoder.sinks is None else step.decoder.sinks[layer]
        state, out = None, None
        for index in range(self.count):
            pool, items = self._arrive(index, k, v)
            mask = Mask(
                items, positions, window=window, bias=bias, cap=step.spec.score_cap, sinks=sinks, scale=step.spec.scale
            )
            if self.count == 1:
                out = kernels.attend(q, pool, mask)
            else:
                state = in_pieces(kernels).partial(q, pool, mask, state)
        # Each call of a OneLayer has memory of its own for these: nothing is written over them.
        transfers.write(layer, batch.plan, k, v, self.x)
        step._wait_weights(layer, "out", "up", "down")
        if out is not None:
            return out
        assert state is not None, "an operation has pieces"
        return in_pieces(kernels).finish(state, q.dtype, sinks)

    def _on_device(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rows: Tensor | None) -> Tensor:
        """Of all rows, over the one piece that an operation is there (streaming.open sees to that)."""
        step, transfers, buffer = self.step, self.step.transfers, self.at % 2
        number = step.stages[self.at].batch
        batch, (piece,) = step.batches[number], step.pieces(layer, number)
        step._wait(step.tickets.pop(("kv", layer, number, 0), None))
        transfers.claim(buffer)
        sinks = None if step.decoder.sinks is None else step.decoder.sinks[layer]
        prepared = step.prepare(layer, number, piece)
        out = prepared(transfers.staging.kv[buffer], q, k, v, step.spec.windows[layer], sinks)
        transfers.write_back(layer, buffer, piece, batch.plan, self.x)
        step._wait_weights(layer, "out", "up", "down")
        return out if rows is None else out[rows.to(out.device)]

    def _arrive(self, index: int, k: Tensor, v: Tensor) -> tuple[Pool, Tensor]:
        """The buffer with the chunks of piece `index`, this step's rows among them, and the items over it."""
        step, at = self.step, self.at + index
        stage = step.stages[at]
        piece = step.pieces(stage.layer, stage.batch)[index]
        if index:
            step._begin(at)
            step._project(at)
        step._wait(step.tickets.pop(("kv", stage.layer, stage.batch, index), None))
        pool = step.transfers.staging.kv[at % 2]
        if len(piece.rows):
            every = len(piece.rows) == len(k)
            mine = torch.from_numpy(piece.rows)
            step.transfers.kernels.append(
                pool, k if every else k[mine], v if every else v[mine], torch.from_numpy(piece.row_slots),
                torch.from_numpy(piece.row_offsets),
            )  # fmt: skip
        return pool, torch.from_numpy(piece.items)
