"""The accelerator that an engine computes on: what is asked of it beside tensors, in one place. A test may put a fake
one in its place (`use`), on which the same engine runs with its tensors in memory."""

from __future__ import annotations

import gc
import math
import mmap
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch.cuda import memory as allocator

from headrace import memory

T = TypeVar("T")


class Event(Protocol):
    """A point in the work of a stream."""

    def record(self, stream: Stream | None = None) -> None:
        """Stands behind all that the stream (None: the current one) was given."""

    def synchronize(self) -> None: ...

    def query(self) -> bool: ...

    def elapsed_time(self, later: Event) -> float:
        """Milliseconds from this event to a later one, both recorded and made with `timing`."""


class Stream(Protocol):
    """Work that the device does in order."""

    def wait_event(self, event: Event) -> None: ...

    def record_event(self, event: Event | None = None) -> Event: ...

    def synchronize(self) -> None: ...


class Graph(Protocol):
    """Recorded launches, with the memory that they read and wrote."""

    def replay(self) -> None: ...


class GraphPool:
    """Memory that the graphs of an engine share. What one of them returned is valid until another of them is replayed:
    engines that are called from several threads have one each."""

    def __init__(self) -> None:
        self.handle: Any = None
        self.keeper: Graph | None = None


class Device(Protocol):
    """type: as backends declare it; place: where tensors lie; processors: those that run one program at a time. lost:
    why this process cannot use it any more; nothing waits for it then, or gives its memory back. sharers: ranks that
    compute on it, once they know of each other."""

    type: str
    place: torch.device
    lost: str | None = None
    sharers: int | None = None

    @property
    def name(self) -> str: ...

    @property
    def identity(self) -> str:
        """Names the device itself, whatever its number in this process."""
        return f"{self.type} {self.place.index or 0}"

    @property
    def processors(self) -> int: ...

    @property
    def count(self) -> int:
        """Devices of this kind that this process may use."""
        return 1

    def claim(self, index: int) -> None:
        """Has this process compute on the device of that number. To be called before anything lies on one."""

    def enter(self) -> None:
        """Has the calling thread use the device, which a thread does not by itself once another than the first is
        claimed."""

    def missing(self) -> str | None:
        """Why there is no such device here; None where there is."""

    def holds(self, x: Tensor) -> bool:
        """Whether x lies on the device, and is computed with there."""

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Host memory from which copies run beside the kernels, zeroed."""

    def graph(self, run: Callable[[], T], pool: GraphPool | None = None) -> tuple[Graph, T]:
        """Records what `run` launches on the current stream, which is not computed, and what it returns. pool: what
        the launches allocate lies there; by default in one for all that bring none. Raises what `run` does, and
        RuntimeError for what cannot be recorded; others can be recorded afterwards."""

    def stream(self) -> Stream: ...

    def current_stream(self) -> Stream: ...

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Within it `stream` is the current one."""

    def event(self, timing: bool = False, blocking: bool = False) -> Event:
        """timing: for elapsed_time. blocking: who synchronizes with it sleeps, and leaves the core to others."""

    def synchronize(self) -> None:
        """Waits for all streams."""

    def free_memory(self) -> int:
        """Bytes, those that torch keeps but does not use among them."""

    def peak_memory(self, run: Callable[[], object]) -> int:
        """Bytes that `run` takes at most, beside those in use before it."""

    def timed(self, run: Callable[[], object]) -> tuple[float, float]:
        """Seconds until `run` has launched its work, and until the device has done it."""


class _Registered(mmap.mmap):
    """A mapping part of which the driver has pinned, until it goes."""

    address: int | None = None

    def register(self, address: int, size: int) -> None:
        """Raises RuntimeError."""
        error = torch.cuda.cudart().cudaHostRegister(address, size, 0)
        if int(error):
            raise RuntimeError(f"{size} bytes of host memory cannot be pinned: {error}; ask for less")
        self.address = address

    def __del__(self) -> None:
        if self.address is None or sys.is_finalizing():
            return
        if current().lost is not None:  # the driver would wait for the device, which may yet write here
            _STAYING.append(self)
        else:
            torch.cuda.cudart().cudaHostUnregister(self.address)


_STAYING: list[_Registered] = []


class Cuda(Device):
    """A CUDA device, by torch."""

    type = "cuda"

    def __init__(self, index: int = 0) -> None:
        self.place = torch.device("cuda", index)
        self._recording: torch.cuda.Stream | None = None
        self._pool = GraphPool()
        self._turn = threading.Lock()  # another engine's thread may record: one stream takes one recording at a time

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.place)

    @property
    def identity(self) -> str:
        return str(torch.cuda.get_device_properties(self.place).uuid)

    @property
    def processors(self) -> int:
        return int(torch.cuda.get_device_properties(self.place).multi_processor_count)

    @property
    def count(self) -> int:
        return max(1, torch.cuda.device_count())

    def claim(self, index: int) -> None:
        self.place = torch.device("cuda", index)
        self.enter()

    def enter(self) -> None:
        # A thread begins on the first device, where many a call would make a context of half a GB.
        torch.cuda.set_device(self.place)

    def missing(self) -> str | None:
        return None if torch.cuda.is_available() else "no CUDA device"

    def holds(self, x: Tensor) -> bool:
        return x.is_cuda

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        self.enter()  # any thread may ask
        size = math.prod(shape) * dtype.itemsize
        if size < memory.HUGE:
            return torch.zeros(*shape, dtype=dtype, pin_memory=True)
        # torch would round it up to a power of two, and keep it.
        mapping, begin = memory.mapped(size, _Registered)
        found = torch.frombuffer(mapping, dtype=dtype, count=math.prod(shape), offset=begin).view(*shape)
        mapping.register(found.data_ptr(), size)
        return found

    def graph(self, run: Callable[[], T], pool: GraphPool | None = None) -> tuple[Graph, T]:
        pool = pool or self._pool
        with self._turn:
            if pool.keeper is None:
                pool.handle = torch.cuda.graph_pool_handle()
                # The memory goes with the last graph that has it, and cannot be asked for again: this one stays.
                pool.keeper, _ = self._recorded(lambda: torch.zeros(1, device=self.place), pool.handle)
            return self._recorded(run, pool.handle)

    def _recorded(self, run: Callable[[], T], handle: Any) -> tuple[torch.cuda.CUDAGraph, T]:
        # torch.cuda.graph would empty the allocator, and wait for the device, at each recording.
        graph, side, current = torch.cuda.CUDAGraph(), self._side, torch.cuda.current_stream(self.place)
        side.wait_stream(current)
        with torch.cuda.stream(side), _uncollected(), self._capturing(graph, handle):
            made = run()
        current.wait_stream(side)
        return graph, made

    @contextmanager
    def _capturing(self, graph: torch.cuda.CUDAGraph, handle: Any) -> Iterator[None]:
        """An error ends the capture: otherwise all that the stream is given would be recorded for good."""
        try:
            graph.capture_begin(pool=handle, capture_error_mode="thread_local")
            try:
                yield
            except BaseException:
                with suppress(RuntimeError):  # the first error says why
                    graph.capture_end()
                raise
            graph.capture_end()
        except BaseException:
            # Where it cannot be ended, torch's allocator takes it for under way, and frees nothing from then on.
            with suppress(RuntimeError):  # it was ended
                allocator._cuda_endAllocateToPool(self.place.index, handle)
                allocator._cuda_releasePool(self.place.index, handle)
            raise

    @property
    def _side(self) -> torch.cuda.Stream:
        """The stream that is recorded on."""
        if self._recording is None:
            self._recording = torch.cuda.Stream(self.place)
        return self._recording

    def stream(self) -> Stream:
        side, made = self._side, torch.cuda.Stream(self.place)
        # torch has 32 and gives them out in turn. A copy on the one that is recorded on would become a part of the
        # recording, and not be made.
        return cast(Stream, torch.cuda.Stream(self.place) if made == side else made)

    def current_stream(self) -> Stream:
        return cast(Stream, torch.cuda.current_stream(self.place))

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        return torch.cuda.stream(cast(torch.cuda.Stream, stream))

    def event(self, timing: bool = False, blocking: bool = False) -> Event:
        return cast(Event, torch.cuda.Event(enable_timing=timing, blocking=blocking))

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.place)

    def free_memory(self) -> int:
        kept = torch.cuda.memory_reserved(self.place) - torch.cuda.memory_allocated(self.place)
        return torch.cuda.mem_get_info(self.place)[0] + kept

    def peak_memory(self, run: Callable[[], object]) -> int:
        self.synchronize()
        torch.cuda.reset_peak_memory_stats(self.place)
        before = torch.cuda.memory_allocated(self.place)
        run()
        self.synchronize()
        return torch.cuda.max_memory_allocated(self.place) - before

    def timed(self, run: Callable[[], object]) -> tuple[float, float]:
        self.synchronize()
        began = time.perf_counter()
        run()
        launched = time.perf_counter() - began
        self.synchronize()
        return launched, time.perf_counter() - began


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without the garbage collector: what it finalizes may call the driver as a thread that records must not, by
    unpinning memory or unloading a kernel."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


_current: Device = Cuda()


def current() -> Device:
    """The accelerator of this process."""
    return _current


class use:
    """use(device) puts another in its place until the end of the `with` block, for tests."""

    def __init__(self, device: Device) -> None:
        global _current
        self._before, _current = _current, device

    def __enter__(self) -> use:
        return self

    def __exit__(self, *_: object) -> None:
        global _current
        _current = self._before
