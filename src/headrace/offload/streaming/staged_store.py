"""KV of one rank of several, outside its fast memory: two staging buffers, each for a layer of a group, take turns.

A pass is one layer of one group. While one is computed, the chunks of the next are on their way in; what it wrote goes
out by the other copy stream, and its buffer is taken again when that is done. On a device streams wait for each other,
and the host goes on: what a pass took is known when the next step begins. With the interfaces of parallel.outside:

    buffer 0 | pass 0: load, compute, write out |           | pass 2: load, compute, write out | ..
    buffer 1             | pass 1: load,          compute, write out |   | pass 3: load,         | ..
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np

from headrace import memory
from headrace.arrival import Arrival
from headrace.config import AttentionSpec
from headrace.device import Device, Event
from headrace.kernels.block import Watch
from headrace.kernels.records import Pool
from headrace.kv.chunk_copies import copy_chunks_alone
from headrace.kv.own_chunks import NONE, OwnChunks, Slots
from headrace.kv.storage import zeros_on
from headrace.offload.copy_streams import CopyStreams
from headrace.offload.stopwatch import Stopwatch
from headrace.offload.streaming.staged_x import PreparedRows, Projected, StagedX
from headrace.offload.streaming.store import OutsideStore
from headrace.offload.streaming_totals import StreamingTotals
from headrace.offload.ticket import Ticket
from headrace.stats import StreamStats

BUFFERS = 2


class StagedStore:
    """A store of `slots` chunks, of which up to `capacity` are staged for a group. One step at a time.

    x: of a store that keeps X, from which some of the chunks are projected. device: whose memory the buffers lie in;
    None: the host's.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        store: OutsideStore,
        capacity: int,
        streams: CopyStreams,
        x: StagedX | None = None,
        device: Device | None = None,
    ) -> None:
        self.spec, self.store, self.capacity, self.streams, self.x = spec, store, capacity, streams, x
        self.slots, self.dtype, self.device = store.slots, store.dtype, device
        fast = memory.zeros if device is None else zeros_on(device.place)
        sizes = spec.kv_heads, spec.head_dim, store.dtype
        self.buffers = [Pool.make(capacity, *sizes, fast, spec.once) for _ in range(BUFFERS)]
        self.totals = StreamingTotals()
        self._step = self._pass = Stopwatch(device)
        self._passes: list[LayerPass] = []
        self._begun = 0
        self._later: list[Callable[[], None]] = []
        self._written: dict[int, Ticket] = {}
        self._under_way: list[Ticket] = []

    def stage(self, groups: Sequence[OwnChunks]) -> list[StagedChunks]:
        """See parallel.outside.OutsideKV."""
        self.settle()
        self.totals.steps += 1
        self._step = self._pass = Stopwatch(self.device)
        self._passes, self._begun = [], 0
        projected = self.x.choose(groups) if self.x is not None else [{} for _ in groups]
        staged = [self._add(own, some) for own, some in zip(groups, projected, strict=True)]
        for _ in range(min(BUFFERS, self.spec.layers)):  # of one layer the next group reads what this one writes
            self.begin_next()
        return staged

    def _add(self, own: OwnChunks, projected: Projected) -> StagedChunks:
        """The passes of a group, none where this rank owns nothing of it."""
        if len(own.slots) > self.capacity:
            raise ValueError(
                f"a group needs {len(own.slots)} chunks of this rank at a time, staging holds {self.capacity}: "
                f"raise offload_staging_mb"
            )
        first, layers = len(self._passes), range(self.spec.layers if len(own.slots) else 0)
        rows: dict[int | None, list[PreparedRows]] = {}
        passes = [LayerPass(self, own, layer, (first + layer) % BUFFERS, projected, rows) for layer in layers]
        self._passes += passes
        return StagedChunks(self, own, passes)

    def begin_next(self) -> None:
        """Has the next pass loaded. Its buffer has been computed on; it is written to when it has left."""
        if self._begun < len(self._passes):
            each = self._passes[self._begun]
            self._begun += 1
            each.begin(self._passes[self._begun - 1 - BUFFERS] if self._begun > BUFFERS else None)

    def load(self, each: LayerPass, after: LayerPass | None) -> Ticket:
        """The chunks of a pass that are loaded into its buffer, which the pass `after` had."""
        own, slots = each.own, each.loaded
        before = [ticket for ticket in (self._written.get(each.layer), after and after.leaving) if ticket is not None]
        size = len(slots) * self.store.chunk_bytes

        def run() -> None:
            for ticket in before:
                ticket.wait()
            copy_chunks_alone(self.store.pools[each.layer], own.slots[slots], self.buffers[each.buffer], slots)

        self.totals.loaded += len(slots)
        return self._in(run, size, "kv")

    def load_x(self, each: LayerPass) -> Ticket | None:
        """What this rank keeps of the X of the chunks that a pass projects; None where that is nothing."""
        assert self.x is not None, "chunks are projected where X is kept"
        slots = each.own.slots[each.projected]
        size = self.x.bytes_of(slots)
        return self._in(partial(self.x.load, each.buffer, each.layer, slots), size, "x") if size else None

    def _in(self, run: Callable[[], None], size: int, stream: str) -> Ticket:
        self.totals.bytes_in += size
        return self._submitted(self.streams.into.submit(run, size, stream))

    def send_x(self, run: Callable[[], None], size: int) -> None:
        """Rows of X, to the store."""
        self.totals.bytes_out += size
        self._submitted(self.streams.out.submit(run, size, "x"))

    def write(self, each: LayerPass) -> Ticket:
        """The chunks that a pass wrote in, back to the store."""
        own, size = each.own, len(each.own.written) * self.store.chunk_bytes
        run = partial(
            copy_chunks_alone, self.buffers[each.buffer], own.written, self.store.pools[each.layer],
            own.slots[own.written],
        )  # fmt: skip
        self.totals.bytes_out += size
        ticket = self._submitted(self.streams.out.submit(run, size, "kv"))
        self._written[each.layer] = ticket
        return ticket

    def _submitted(self, ticket: Ticket) -> Ticket:
        self._under_way.append(ticket)
        return ticket

    def computed(self) -> None:
        """See parallel.outside.OutsideKV."""
        self._step.stop()
        self.once_done(partial(self._note_step, self._step))

    def _note_step(self, watch: Stopwatch) -> None:
        self.totals.seconds += watch.seconds()

    def once_done(self, call: Callable[[], None]) -> None:
        """Has it called when the device has done what it was given, at once where there is none."""
        if self.device is None:
            call()
        else:
            self._later.append(call)

    def told(self) -> StreamStats:
        """What has been streamed so far. On any thread."""
        return self.totals.told("row", self.spec.layers)

    def note(self, each: LayerPass) -> None:
        """Takes the figures of a pass that has been computed."""
        self.totals.projected += len(each.projected)
        self._pass.stop()
        self.once_done(partial(self._note, each, self._pass))
        self._pass = Stopwatch(self.device)

    def _note(self, each: LayerPass, watch: Stopwatch) -> None:
        waited, projecting = (sum(some.seconds() for some in times) for times in (each.waits, each.projecting))
        self.totals.waited_s += waited
        if self.x is not None:
            for ticket in each.tickets:
                self.x.throughput.carried(ticket)
            self.x.throughput.projected(len(each.projected), projecting)
            self.x.throughput.computed(self.x.work(each.own), watch.seconds() - waited - projecting)

    def settle(self) -> None:
        """Until nothing is on its way. Raises what a copy raised, from then on: the store may lack what was written."""
        for ticket in self._under_way:
            ticket.synchronize()
        for call in self._later:
            call()
        self._under_way.clear()
        self._written.clear()
        self._later.clear()

    def close(self) -> None:
        """Ends the copy streams after what is on its way. May be called again."""
        self.streams.close()


class LayerPass(Arrival):
    """One layer of one group in a buffer: its cached chunks on their way there, from when it is begun."""

    def __init__(
        self,
        store: StagedStore,
        own: OwnChunks,
        layer: int,
        buffer: int,
        projected: Projected,
        rows: dict[int | None, list[PreparedRows]],
    ) -> None:
        """rows: of what is projected, by window; made by the first layer that needs them."""
        super().__init__()
        self.store, self.own, self.layer, self.buffer, self.rows = store, own, layer, buffer, rows
        self.window = window = store.spec.windows[layer]
        self.cached: Slots = own.cached[window]
        self.projected: Slots = projected.get(window, NONE)
        self.loaded: Slots = np.setdiff1d(self.cached, self.projected)
        self.tickets: list[Ticket] = []
        self.waits: list[Stopwatch] = []
        self.projecting: list[Stopwatch] = []
        self.projected_at: Event | None = None
        self.after: LayerPass | None = None
        self.leaving: Ticket | None = None

    def begin(self, after: LayerPass | None) -> None:
        """after: the pass that had the buffer before."""
        self.after = after
        x = self.store.load_x(self) if len(self.projected) else None
        kv = self.store.load(self, after) if len(self.loaded) else None
        self.tickets = [ticket for ticket in (x, kv) if ticket is not None]
        if kv is not None and not len(self.projected):
            kv.handed.then(lambda: self._handed_over(kv))
            kv.then(lambda: self.end(kv.error))

    def _handed_over(self, kv: Ticket) -> None:
        self.error = kv.error

    @property
    def handed(self) -> Arrival:
        """What is projected is handed over by the thread that does it."""
        return self if len(self.projected) else self.tickets[-1].handed

    def follow(self) -> None:
        if not len(self.projected):
            self.tickets[-1].follow()
        elif self.projected_at is not None and self.store.device is not None:
            self.store.device.current_stream().wait_event(self.projected_at)

    def pool(self) -> Pool:
        """The buffer, once what the pass before wrote in it has left."""
        if self.after is not None and self.after.leaving is not None:
            self.after.leaving.wait()
        return self.store.buffers[self.buffer]

    def finish(self) -> None:
        """Raises what went wrong. A rank without rows only passes on what comes, and waits for it here."""
        if len(self.cached):
            self.wait()
        if len(self.own.written):
            self.leaving = self.store.write(self)
        self.store.note(self)
        self.store.begin_next()

    @property
    def awaited(self) -> bool:
        """Whether something must still come, or will not."""
        return bool(len(self.cached)) and not (self.done and self.error is None)

    def wait(self) -> None:
        """The thread that computes projects here what comes as X, once that has come. On a device its stream waits."""
        if len(self.projected) and not self.done:
            self.end(self._take())
        if len(self.projected) or self.store.device is None:
            with self._waiting():
                super().wait()
        else:
            self._await(self.tickets)

    def _take(self) -> BaseException | None:
        """K and V of all of its chunks; what went wrong, for all who wait."""
        try:
            self._await(self.tickets[: -1 if len(self.loaded) else None])
            self._project()
            self._await(self.tickets)
        except BaseException as error:
            return error
        if (device := self.store.device) is not None:
            self.projected_at = device.current_stream().record_event()
        return None

    def _project(self) -> None:
        x, pool, watch = self.store.x, self.pool(), Stopwatch(self.store.device)
        assert x is not None, "chunks are projected where X is kept"
        if self.window not in self.rows:
            self.rows[self.window] = x.prepare(self.own, self.projected)
        x.project(self.layer, self.buffer, pool, self.rows[self.window])
        watch.stop()
        self.projecting.append(watch)

    def _await(self, tickets: Sequence[Ticket]) -> None:
        with self._waiting():
            for ticket in tickets:
                ticket.wait()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        watch = Stopwatch(self.store.device)
        yield
        watch.stop()
        self.waits.append(watch)


class StagedChunks:
    """See parallel.outside.StagedGroup."""

    def __init__(self, store: StagedStore, own: OwnChunks, passes: Sequence[LayerPass]) -> None:
        self.slots, self.dtype = store.capacity, store.dtype
        self._store, self._own, self._passes = store, own, passes

    def __bool__(self) -> bool:
        return bool(self._passes)

    def pool(self, layer: int) -> Pool:
        """A rank that owns nothing reads and writes nothing: any buffer will do."""
        return self._passes[layer].pool() if self._passes else self._store.buffers[0]

    def pending(self, slots: Iterable[int], layer: int) -> list[LayerPass]:
        """All of the group's chunks come together, whichever are asked for."""
        each = self._passes[layer] if self._passes else None
        return [each] if each is not None and each.awaited else []

    def finish(self, layer: int) -> None:
        if self._passes:
            self._passes[layer].finish()

    def keep(self, places: Slots, offsets: Slots) -> Watch | None:
        x = self._store.x
        return None if x is None else x.keep(self._own, places, offsets, self._store.send_x)
