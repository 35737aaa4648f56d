"""A rank's store and its two staging buffers: what a pass sees and what it leaves, whatever is still on its way."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Semaphore
from typing import Any

import numpy as np
import pytest
import torch

from headrace.config import AttentionSpec
from headrace.kv.own_chunks import OwnChunks
from headrace.offload.copy_streams import open_copy_streams
from headrace.offload.emulated_link import EmulatedLink
from headrace.offload.streaming.staged_store import StagedStore
from headrace.offload.streaming.store import OutsideStore

LAYERS, SLOTS, CAPACITY = 3, 12, 6
CPU = torch.device("cpu")


@pytest.fixture
def store() -> Iterator[StagedStore]:
    spec = AttentionSpec(layers=LAYERS, heads=1, kv_heads=1, head_dim=16, windows=(None, 100, None), scale=1.0)
    outside = OutsideStore(spec, SLOTS, torch.float32, torch.float32)
    for layer, pool in enumerate(outside.pools):
        pool.k[:] = torch.arange(SLOTS).view(-1, 1, 1, 1) + 100 * layer
        pool.v[:] = -pool.k.transpose(2, 3)
    made = StagedStore(spec, outside, CAPACITY, open_copy_streams(None, EmulatedLink(latency_s=0.02)))
    submit = made.streams.out.submit

    def late(run: Callable[[], object], size: int, kind: str) -> Any:
        """What goes out arrives when the next thing could have come in."""
        return submit(lambda: (time.sleep(0.005), run()), size, kind)

    made.streams.out.submit = late  # type: ignore[method-assign]
    yield made
    made.close()


@contextmanager
def held(store: StagedStore) -> Iterator[Semaphore]:
    """Each copy that comes in is on its way until it is let go, or this ends."""
    let, submit = Semaphore(0), store.streams.into.submit

    def late(run: Callable[[], object], size: int, kind: str) -> Any:
        return submit(lambda: (let.acquire(timeout=30), run()), size, kind)

    store.streams.into.submit = late  # type: ignore[method-assign]
    try:
        yield let
    finally:
        let.release(100)
        store.streams.into.submit = submit  # type: ignore[method-assign]


def own(slots: Sequence[int], cached: Sequence[int] = (), written: Sequence[int] = ()) -> OwnChunks:
    """cached, written: slots too."""
    of = np.array(sorted(slots), dtype=np.int32)

    def places(some: Sequence[int]) -> Any:
        return np.searchsorted(of, np.array(sorted(some), dtype=np.int32)).astype(np.int32)

    return OwnChunks(of, {None: places(cached), 100: places(cached[1:])}, places(written))


def test_what_a_pass_sees_and_leaves(store: StagedStore) -> None:
    """Groups of several steps over the same slots, against plain copies; within a step they follow one another."""
    draw = random.Random(3)
    model = torch.stack([pool.k[:, 0, 0, 0] for pool in store.store.pools])
    for _ in range(30):
        groups = []
        for _ in range(draw.randint(1, 3)):
            slots = draw.sample(range(SLOTS), draw.randint(0, CAPACITY))
            groups.append(own(slots, sorted(draw.sample(slots, len(slots) // 2)), draw.sample(slots, len(slots) // 3)))
        for group, staged in zip(groups, store.stage(groups), strict=True):
            for layer in range(LAYERS):
                for each in staged.pending([], layer):
                    each.wait()
                assert not staged.pending([], layer)
                pool = staged.pool(layer)
                seen = group.cached[store.spec.windows[layer]]
                assert torch.equal(pool.k[seen, 0, 0, 0], model[layer, group.slots[seen]])
                for place in group.written.tolist():
                    model[layer, group.slots[place]] = draw.random()
                    pool.k[place] = pool.v[place] = model[layer, group.slots[place]]
                staged.finish(layer)
    store.settle()
    for layer, pool in enumerate(store.store.pools):
        assert torch.equal(pool.k[:, 0, 0, 0], model[layer])
        assert (pool.k == pool.k[:, :, :1, :1]).all()


def test_a_rank_without_rows_passes_on_what_comes(store: StagedStore) -> None:
    """It does not wait for it; the next group, which loads nothing, must not write over it."""
    came = []
    with held(store) as let:
        giving, writing = store.stage([own([1, 4], cached=[1, 4]), own([2, 3], written=[2, 3])])
        for layer in range(LAYERS):
            (each,) = giving.pending([1, 4], layer)
            pool = store.buffers[layer % 2]
            each.then(lambda pool=pool: came.append(pool.k[:2, 0, 0, 0].tolist()))  # type: ignore[misc]
            let.release()
            giving.finish(layer)
    for layer in range(LAYERS):
        writing.pool(layer).k[:] = 7.0
        writing.finish(layer)
    store.settle()
    assert came == [[1.0, 4.0], [0.0, 104.0], [201.0, 204.0]]
    assert store.store.pools[2].k[[1, 2, 3, 4], 0, 0, 0].tolist() == [201.0, 7.0, 7.0, 204.0]


def test_the_layer_after_next_is_on_its_way(store: StagedStore) -> None:
    """Two passes at a time, across groups; nothing moves for a group of which the rank has nothing."""
    with held(store) as let:
        first, nothing, second = store.stage([own([0, 1], cached=[0, 1]), own([]), own([2, 3], cached=[2, 3])])
        assert store.totals.loaded == 2 + 1  # of layer 0, and of layer 1 what its window shows
        nothing.finish(0)
        assert not nothing.pending([], 0) and store.totals.loaded == 3
        for layer in range(LAYERS):
            let.release()
            first.finish(layer)
        assert store.totals.loaded == 2 + 1 + 2 + 2 + 1
        assert second.pending([], 1)
    store.settle()
    assert store.totals.bytes_in == store.totals.loaded * store.store.chunk_bytes and not store.totals.bytes_out


def test_more_than_it_holds(store: StagedStore) -> None:
    with pytest.raises(ValueError, match="7 chunks of this rank at a time, staging holds 6: raise offload_staging_mb"):
        store.stage([own(range(7))])


def test_a_copy_that_fails(store: StagedStore) -> None:
    """Whoever waits for it gets the error, and so does every step after it."""

    def fail(*_: Any) -> None:
        raise OSError("gone")

    (staged,) = store.stage([own([0, 1], cached=[0, 1], written=[1])])
    time.sleep(0.02)
    good, store.streams.into.submit = store.streams.into.submit, lambda run, size, kind: good(fail, size, kind)  # type: ignore[method-assign]
    staged.finish(0)
    (each,) = staged.pending([], 2)
    with pytest.raises(OSError, match="gone"):
        each.wait()
    assert isinstance(each.error, OSError) and staged.pending([], 2)
    for _ in range(2):
        with pytest.raises(OSError, match="gone"):
            store.stage([])
